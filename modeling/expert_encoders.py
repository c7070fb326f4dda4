"""One encoder of transformers with two sets of feed-forwards: what of CoT-MoTE (arXiv 2304.10195) is in every class of it.

Two masked language models of transformers, `.lm` for passages and `.query_lm` for queries, hold the weights, and share
the modules around the experts. So each route is a stock checkpoint, and nothing switches inside a layer. A checkpoint
stores what is shared once.

Shapes: B texts, L tokens, V vocabulary.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .configuration_cot_mote import CoTMoTEConfig
from .masked_lm import check_masked_lm, max_tokens

EXPERTS = ("query", "passage")

# The modules of a layer that make up its feed-forward, in BERT and RoBERTa, DistilBERT, ModernBERT.
_FEED_FORWARD = (("intermediate", "output"), ("ffn", "output_layer_norm"), ("mlp_norm", "mlp"))


class CoTMoTEPreTrainedModel(PreTrainedModel):
    """The two masked language models and who shares what."""

    config_class = CoTMoTEConfig
    config: CoTMoTEConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        """Builds the masked language models from `config`, or takes those given, whose configuration `config` holds.

        Args:
            config: with that of the encoder in it.
            lm: of the passages, and of the queries too in a siamese model.
            query_lm: of the queries; None for a copy of `lm`, with the variant's sharing.

        Raises:
            ValueError: if the model is not BERT-like or has no masked-LM head.
        """
        super().__init__(config)
        if config.encoder is None:
            raise ValueError("CoTMoTEConfig needs `encoder`, the configuration of a BERT-like model")
        self.lm: PreTrainedModel = AutoModelForMaskedLM.from_config(config.encoder) if lm is None else lm
        check_masked_lm(self.lm)
        self.query_lm: PreTrainedModel | None = None
        if config.variant != "siamese":
            self.query_lm = copy.deepcopy(self.lm) if query_lm is None else query_lm
        if config.variant == "experts":
            assert self.query_lm is not None
            experts = set(_feed_forwards(self.lm))
            if not experts:
                raise ValueError(
                    f"{type(self.lm).__name__}: its layers have no feed-forward of a kind that is known here"
                )
            _share(self.lm, self.query_lm, experts)

    def post_init(self) -> None:
        """Also tells transformers which names of the state dict are one tensor, so that it is stored once."""
        super().post_init()
        tied = self.all_tied_weights_keys  # within each of the two
        names: dict[int, str] = {}
        for name, tensor in self.named_parameters(remove_duplicate=False):
            if name not in tied:
                names.setdefault(id(tensor), name)
        pairs = {n: names.get(id(t), n) for n, t in self.named_parameters(remove_duplicate=False)}
        shared = {name: first for name, first in pairs.items() if first != name}
        for name, first in tied.items():
            shared[name] = shared.get(first, first)
        self._tied_weights_keys = shared
        self.all_tied_weights_keys = dict(shared)

    @property
    def max_length(self) -> int:
        """The tokens that a text may have, special ones included."""
        return max_tokens(self.lm.base_model)

    @classmethod
    def from_backbone(
        cls,
        backbone: str | PreTrainedModel,
        *,
        query_backbone: str | PreTrainedModel | None = None,
        fresh_head: bool = False,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> Any:
        """Starts from a pre-trained encoder, both experts from its feed-forward, and a fresh decoder if there is one.

        Args:
            backbone: Hub id, folder or loaded model (anything `AutoModelForMaskedLM` loads).
            query_backbone: another one for the queries, of the same sizes and vocabulary; for `variant="separate"`.
            fresh_head: whether a checkpoint without the weights of a masked-LM head will do: pre-training trains it.
            trust_remote_code: for models whose code lies in their repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: of the encoder; None for transformers' choice.
            **config: the other fields of `CoTMoTEConfig`.

        Raises:
            ValueError: if it is not a BERT-like encoder with a masked-LM head, or the two do not go together.
        """
        load = {"trust_remote_code": trust_remote_code, "dtype": dtype}
        if attn_implementation is not None:
            load["attn_implementation"] = attn_implementation
        lm = _load_backbone(backbone, fresh_head, load)
        query_lm = None
        if query_backbone is not None:
            if config.get("variant") != "separate":
                raise ValueError('query_backbone goes with variant="separate": experts start from one backbone')
            query_lm = _load_backbone(query_backbone, fresh_head, load)
            _check_same_sizes(lm, query_lm)
        model: Any = cls(CoTMoTEConfig(encoder=lm.config, **config), lm, query_lm)
        model.to(lm.dtype)  # a decoder is built in the default one
        model.config.dtype = lm.dtype
        return model

    def route(self, expert: str) -> PreTrainedModel:
        """The masked language model of `"query"` or `"passage"` texts, a stock one.

        Raises:
            ValueError: for another name.
        """
        if expert not in EXPERTS:
            raise ValueError(f'expert must be "query" or "passage", got {expert!r}')
        return self.query_lm if expert == "query" and self.query_lm is not None else self.lm

    def _routes(self, expert: Any, rows: int) -> Iterator[tuple[PreTrainedModel, Tensor | None]]:
        """The models that the batch needs, each with the indices of its rows, None for all of them."""
        if isinstance(expert, str):
            yield self.route(expert), None
        elif expert is None and self.config.variant != "siamese":
            raise ValueError(
                'no expert named: give expert="query" or expert="passage", or a list with one of them per row'
            )
        elif expert is None:
            yield self.lm, None
        else:
            if len(expert) != rows:
                raise ValueError(
                    f"expert names {len(expert)} kinds for {rows} rows: a mixed batch needs one for each row"
                )
            if not isinstance(expert, Tensor):
                for name in expert:
                    self.route(name)
                expert = torch.tensor([EXPERTS.index(name) for name in expert], device=self.device)
            for number, name in enumerate(EXPERTS):
                rows_of_it = (expert == number).nonzero().flatten()
                if len(rows_of_it):
                    yield self.route(name), rows_of_it

    def _sparse(self, logits_BLV: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, V), the sparse vectors; the tokens that are not the text's own have no part in them."""
        numbers = self.config.special_token_ids
        if numbers is None:
            return sparse_vectors(logits_BLV, attention_mask)
        places_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        special_BL = places_L == attention_mask.sum(1, keepdim=True) - 1  # the last token, as padding is on the right
        for number in numbers:
            special_BL = special_BL | (input_ids == number)
        return sparse_vectors(logits_BLV, attention_mask, special_BL)

    def _check_inputs(self, prefix: str, input_ids: Tensor, **others: Tensor | None) -> None:
        """Says what is wrong with the shapes before an index error or a silent broadcast does."""
        shape = tuple(input_ids.shape)
        if len(shape) != 2:
            raise ValueError(f"{prefix}input_ids must be (texts, tokens), got {shape}")
        if shape[1] > self.max_length:
            raise ValueError(
                f"{prefix}input_ids has {shape[1]} tokens in a row, the encoder {self.max_length} positions: cut the texts"
            )
        for name, tensor in others.items():
            if tensor is None:
                raise ValueError(f"{prefix}{name} is missing")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{prefix}{name} must be {shape} as {prefix}input_ids, got {tuple(tensor.shape)}")


def sparse_vectors(logits_BLV: Tensor, attention_mask_BL: Tensor, special_BL: Tensor | None = None) -> Tensor:
    """(B, V): max over the text's own tokens of log(1 + relu(logits)) (equation 4); 0 for a text without any.

    Args:
        logits_BLV: of the masked-LM head.
        attention_mask_BL: zero on padding.
        special_BL: what is left out besides the first token and padding; None for nothing.
    """
    visible_BL = attention_mask_BL.bool().clone()
    visible_BL[:, 0] = False
    if special_BL is not None:
        visible_BL &= ~special_BL
    # The maximum first: both functions keep the order.
    return logits_BLV.masked_fill(~visible_BL[..., None], 0.0).amax(1).relu().log1p()


def keep_top_k(sparse_BV: Tensor, k: int) -> Tensor:
    """The k largest terms of each row, and those that equal the k-th; the others become 0.

    Raises:
        ValueError: if k is not at least 1.
    """
    if k < 1:
        raise ValueError(f"top_k must be at least 1, got {k}")
    if k >= sparse_BV.shape[-1]:
        return sparse_BV
    least_B1 = sparse_BV.topk(k, dim=-1).values[..., -1:]
    return sparse_BV.masked_fill(sparse_BV < least_B1, 0.0)


def _load_backbone(backbone: str | PreTrainedModel, fresh_head: bool, load: dict[str, Any]) -> PreTrainedModel:
    """A masked language model with the weights of its head, if it need not be fresh."""
    if not isinstance(backbone, str):
        if isinstance(backbone, CoTMoTEPreTrainedModel):
            raise ValueError(
                f"{type(backbone).__name__} is no backbone: give the encoder that it started from, or its .lm"
            )
        check_masked_lm(backbone)
        return backbone
    fields, _ = PreTrainedConfig.get_config_dict(backbone)
    kind = ", ".join(fields.get("architectures") or [str(fields.get("model_type"))])
    if "ForPreTraining" in kind and "auto_map" in fields:
        raise ValueError(f"{backbone} is a {kind} checkpoint, encoder and decoder in one: give its encoder")
    if "auto_map" not in fields and fields.get("model_type") not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(
            f"{backbone} ({kind}) is not an encoder with a masked-LM head, as BERT, RoBERTa or DistilBERT are"
        )
    lm, info = AutoModelForMaskedLM.from_pretrained(backbone, output_loading_info=True, use_safetensors=True, **load)
    check_masked_lm(lm)
    if missing := sorted(info["missing_keys"]):
        names = ", ".join(missing)
        body = [key for key in missing if key.startswith(f"{lm.base_model_prefix}.") and "pooler" not in key.split(".")]
        if body:
            raise ValueError(f"{backbone} has no weights for {', '.join(body)}: the encoder would start at random")
        if not fresh_head:
            raise ValueError(
                f"{backbone} has no masked-LM head (no weights for {names}), from which sparse vectors come: give one that"
                " has, or fresh_head=True to start one in pre-training"
            )
        warnings.warn(f"{backbone} has no weights for {names}: they start fresh", stacklevel=3)
    model: PreTrainedModel = lm
    return model


def _check_same_sizes(lm: PreTrainedModel, query_lm: PreTrainedModel) -> None:
    """The two routes are compared term by term and state by state, and rebuilt from one configuration."""
    for name in ("vocab_size", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        ours, theirs = getattr(lm.config, name), getattr(query_lm.config, name)
        if ours != theirs:
            raise ValueError(f"query and passage encoder differ in {name}: {theirs} and {ours}; the two must be alike")


def _feed_forwards(lm: nn.Module) -> Iterator[str]:
    """The names of the modules that become experts."""
    for name, module in lm.named_modules():
        for parts in _FEED_FORWARD:
            if all(part in module._modules for part in parts):
                yield from (f"{name}.{part}" for part in parts)


def _share(source: nn.Module, target: nn.Module, own: set[str], prefix: str = "") -> None:
    """Gives `target` the modules and parameters of `source`, all but `own`.

    Modules and not only parameters, because loading exchanges the parameters of a module.
    """
    target._parameters.update(source._parameters)
    for name, child in source.named_children():
        path = f"{prefix}{name}"
        if any(other.startswith(f"{path}.") for other in own):
            _share(child, target.get_submodule(name), own, f"{path}.")
        elif path not in own:
            target._modules[name] = child
