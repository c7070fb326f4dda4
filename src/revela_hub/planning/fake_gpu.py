"""Models and tensors without a GPU and without weights, and a meter of the memory and arithmetic of a step with them.

Tensors of floats are on torch's meta device: they have a shape, but no values. Tensors of integers are real, because code branches on
them; where the value of a float would decide (`nonzero`), everything is selected, so the memory is an upper bound. Autocast and fused
attention are imitated, because the meta device has neither; CUDA's fake tensors would need a build of torch with CUDA. Fragments of
the allocator's blocks and the kernels' work space are not counted.
"""

import string
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from revela_hub.trainers.base.weights import is_encoder

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")


class Meter(TorchDispatchMode):
    """Computes with floats on the meta device and real integers.

    It counts the bytes of all tensors, `now` and at most (`peak`), and the `flops` of matrix products and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(tensor.is_meta for tensor in given):
            out = self._without_values(func, args, kwargs | ({"device": META} if "device" in kwargs else {}))
        elif given or all(each.name != "device" for each in func._schema.arguments):
            out = func(*args, **kwargs | ({"device": CPU} if "device" in kwargs else {}))
        else:  # a new tensor
            out = func(*args, **kwargs | {"device": META})
            out = out if out.is_floating_point() else func(*args, **kwargs | {"device": CPU})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=first.dtype).item()
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return torch.ones(first.shape, dtype=torch.bool).nonzero()
        if func is aten.index.Tensor:
            args = (first, [part for index in args[1] for part in _places(index)])
        if func._schema.is_mutable:  # in place, or into `out`
            named = zip(func._schema.arguments, args, strict=False)
            changed = [value for each, value in named if each.is_write] + [v for k, v in kwargs.items() if k == "out"]
            return changed[0] if len(func._schema.returns) == 1 else None
        # A tensor without values is itself in this, so that a view of it shares its storage.
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        out = func(*args, **kwargs)
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _count(self, storage: Any) -> None:
        if storage not in self._known:
            self._known[storage] = True
            size = -(-storage.nbytes() // 512) * 512  # as torch's allocator
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return an index without booleans; of those without values, all are true."""
    if index is None or index.dtype != torch.bool:
        return (index,)
    return (torch.ones(index.shape, dtype=torch.bool) if index.is_meta else index).nonzero(as_tuple=True)


class Attention(torch.autograd.Function):
    """Fused attention, which keeps its inputs, its output and one number per query."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output."""
        rows, heads, length, _ = query.shape  # kernels write (rows, length, heads, dim)
        output = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        if mask is not None and mask.dtype == torch.bool:  # kernels add the mask to the scores
            mask = query.new_empty(mask.shape)
        ctx.meter, ctx.flops = meter, 2 * key.shape[-2] * (query.numel() + output.numel())
        meter.flops += ctx.flops
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; the scores are computed again."""
        ctx.meter.flops += 5 * ctx.flops // 2
        inputs = zip(ctx.saved_tensors[:4], ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(each) if needed else None for each, needed in inputs)


class Autocast(torch.autocast):
    """Sets the state of autocast on the CPU, whichever device is named; `GpuSemantics` casts as on a GPU."""

    copies = WeakIdKeyDictionary()
    """The weights in half precision, until the outermost context ends."""

    def __init__(self, device_type: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


_autocast_enabled, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype


def _narrow(tensor: Tensor) -> Tensor:
    dtype = _autocast_dtype("cpu")
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    if not (tensor.requires_grad and tensor.is_leaf):
        return tensor.to(dtype)
    if tensor not in Autocast.copies:
        with torch.enable_grad():
            Autocast.copies[tensor] = tensor.to(dtype)
    half: Tensor = Autocast.copies[tensor]
    return half


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


# Names of the functions that autocast computes in half precision, in float32, and with sums in float32.
NARROW = set("linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm mv einsum conv1d conv2d".split())
WIDE = set(
    "layer_norm group_norm rms_norm norm exp expm1 log log2 log1p pow __pow__ rsqrt reciprocal softplus logsumexp "
    "cross_entropy nll_loss kl_div mse_loss cosine_similarity cdist".split()
)
SUMS = set("softmax log_softmax sum cumsum prod vector_norm".split())


class GpuSemantics(TorchFunctionMode):
    """Autocast and fused attention, as on a GPU."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in (torch.tensor, torch.as_tensor, torch.asarray):  # would lose their values
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        if func is Tensor.backward:  # which recomputes parts of the forward pass
            gradient = torch.ones_like(args[0]) if kwargs["gradient"] is None else kwargs["gradient"]
            rest = {"allow_unreachable": True, "accumulate_grad": True}
            with self:
                return _engine_run_backward(args[:1], (gradient,), bool(kwargs["retain_graph"]), False, (), **rest)
        if func is Tensor.numpy and args[0].is_meta:
            return np.zeros(args[0].shape, np.float32)
        if name == "scaled_dot_product_attention":
            named = [kwargs.get(name) for name in ("query", "key", "value", "attn_mask")[len(args) :]]
            *states, mask = [*args, *named][:4]
            return Attention.apply(self.meter, *(map(_narrow, states) if _autocast_enabled("cpu") else states), mask)
        if func is functional.dropout and kwargs["training"] and kwargs["p"]:  # GPUs keep one byte per number
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if _autocast_enabled("cpu") and "out" not in kwargs:
            if name in NARROW:
                args, kwargs = tree_map_only(Tensor, _narrow, (args, kwargs))
            elif name in WIDE:
                args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
            elif name in SUMS and isinstance(args[0], Tensor) and args[0].dtype == _autocast_dtype("cpu"):
                kwargs = {"dtype": torch.float32} | kwargs
        return func(*args, **kwargs)


def _from_config(cls: Any, name: str, *_: Any, config: Any = None, dtype: Any = None, **options: Any) -> Any:
    """Replace `PreTrainedModel.from_pretrained`: the model has no weights."""
    config = cls.config_class.from_pretrained(name) if config is None else config
    config.name_or_path = str(name)
    chosen = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    attention = {key: options[key] for key in ("attn_implementation",) if options.get(key)}
    model = cls._from_config(config, dtype=config.dtype if chosen in (None, "auto") else chosen, **attention).eval()
    nothing = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"), ())
    return (model, nothing) if options.get("output_loading_info") else model


_load_tokenizer = AutoTokenizer.from_pretrained


def _tokenizer(name: str, **options: Any) -> Any:
    """Return a tokenizer of characters, or the one that was saved to a folder without a model."""
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        return _load_tokenizer(name, **options)
    special = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *string.printable])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = " </s>" if is_encoder(str(name)) else ""
    tokenizer.post_processor = processors.TemplateProcessing(f"<s> $A{end}", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "mask", "unk")}
    names |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=str(name), **names)


@contextmanager
def fake_gpu() -> Iterator[Meter]:
    """Load models from their config.json and compute without values inside the context."""
    meter = Meter()
    stand_ins = {
        "transformers.PreTrainedModel.from_pretrained": classmethod(_from_config),  # type: ignore[arg-type]
        "transformers.AutoTokenizer.from_pretrained": staticmethod(_tokenizer),
        "torch.autocast": Autocast,
        "torch.amp.autocast": Autocast,
        "torch.is_autocast_enabled": lambda *_: _autocast_enabled("cpu"),
        "torch.get_autocast_dtype": lambda *_: _autocast_dtype("cpu"),
        "torch.clear_autocast_cache": Autocast.copies.clear,
        "torch.optim.optimizer._get_fused_kernels_supported_devices": lambda: ["meta"],
    }
    with ExitStack() as stack:
        for target, stand_in in stand_ins.items():
            stack.enter_context(mock.patch(target, stand_in))
        stack.enter_context(meter)
        stack.enter_context(GpuSemantics(meter))
        yield meter
