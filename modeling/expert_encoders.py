"""Base class of the CoT-MoTE models (arXiv 2304.10195): two encoders that share everything but their feed-forwards.

The weights are held by two masked language models of transformers, `.lm` for passages and `.query_lm` for queries, which share
the modules around the experts. Each of them is thus a stock model, and no layer has to switch between experts. Shared weights
are stored once in a checkpoint.

Shapes: B texts, L tokens, V vocabulary.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedModel

from .configuration_cot_mote import CoTMoTEConfig
from .masked_lm import MaskedLMPreTrainedModel, masked_lm

EXPERTS = ("query", "passage")

# The modules that make up the feed-forward of a layer in BERT and RoBERTa, in DistilBERT, and in ModernBERT.
_FEED_FORWARD = (("intermediate", "output"), ("ffn", "output_layer_norm"), ("mlp_norm", "mlp"))


class CoTMoTEPreTrainedModel(MaskedLMPreTrainedModel):
    """Two masked language models with shared modules, as the variant of the configuration says."""

    config_class = CoTMoTEConfig
    config: CoTMoTEConfig
    _trains_head: bool = False

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        """Build the masked language models from `config`, or use the given ones, whose configuration `config` contains.

        Without a query model, it is a copy of the passage model that shares modules with it according to the variant.
        """
        super().__init__(config)
        self.lm = AutoModelForMaskedLM.from_config(config.encoder) if lm is None else lm
        self.query_lm: PreTrainedModel | None = None
        if config.variant != "siamese":
            self.query_lm = copy.deepcopy(self.lm) if query_lm is None else query_lm
        if config.variant == "experts":
            assert self.query_lm is not None
            name, experts = type(self.lm).__name__, set(_feed_forwards(self.lm))
            if not experts:
                raise ValueError(
                    f"cannot find the feed-forwards of {name}: use BERT, RoBERTa, DistilBERT or ModernBERT"
                )
            if buffers := self.lm.state_dict().keys() - dict(self.lm.named_parameters(remove_duplicate=False)):
                stored = ", ".join(sorted(buffers))
                raise ValueError(
                    f'{name} stores buffers ({stored}), which experts cannot share: use variant="separate"'
                )
            _share(self.lm, self.query_lm, experts)

    def post_init(self) -> None:
        """Finish the initialisation, and tell transformers which names are the same tensor, so that it is stored once."""
        super().post_init()
        tied = self.all_tied_weights_keys  # within each of the two models
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

    @classmethod
    def from_backbone(
        cls,
        backbone: str | PreTrainedModel,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> Any:
        """Create a model from a pre-trained encoder: both experts start from its feed-forwards, the decoder is new.

        Args:
            backbone: Hub id, folder or loaded model (anything `AutoModelForMaskedLM` loads). Pre-training initialises missing
                weights of the masked-LM head at random, with a warning; an encoder, which is not pre-trained, needs them.
            trust_remote_code: whether to run model code from the repositories.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: of the encoder; None for the default of transformers.
            **config: other fields of `CoTMoTEConfig`.

        Raises:
            ValueError: it is not a BERT-like encoder with a masked-LM head.
        """
        load = {"trust_remote_code": trust_remote_code, "dtype": dtype, "attn_implementation": attn_implementation}
        lm = masked_lm(backbone, new_head=cls._trains_head, **load)
        return cls._made_of(CoTMoTEConfig(encoder=lm.config, **config), lm)

    def route(self, expert: str) -> PreTrainedModel:
        """Return the masked language model for `"query"` or `"passage"` texts, a stock model."""
        if expert not in EXPERTS:
            raise ValueError(f'expert must be "query" or "passage", got {expert!r}')
        return self.query_lm if expert == "query" and self.query_lm is not None else self.lm

    def _routes(self, expert: Any, rows: int) -> Iterator[tuple[PreTrainedModel, Tensor | None]]:
        """Yield the models that a batch needs, each with the indices of its rows; None for all rows."""
        if isinstance(expert, str):
            yield self.route(expert), None
        elif expert is None and self.config.variant != "siamese":
            raise ValueError(
                'no expert given: pass expert="query" or expert="passage", or a list with one of them per row'
            )
        elif expert is None:
            yield self.lm, None
        else:
            if len(expert) != rows:
                raise ValueError(f"expert has {len(expert)} entries for {rows} rows: give one expert per row")
            if not isinstance(expert, Tensor):
                for name in expert:
                    self.route(name)
                expert = torch.tensor([EXPERTS.index(name) for name in expert], device=self.device)
            for number, name in enumerate(EXPERTS):
                indices = (expert == number).nonzero().flatten()
                if len(indices):
                    yield self.route(name), indices

    def _sparse(self, logits_BLV: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, V): the maximum over the tokens of log(1 + relu(logits)) (equation 4); 0 for a text without tokens.

        The first and the last token, other special tokens and padding, which is on the right, are left out.
        """
        places_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        visible_BL = attention_mask.bool() & (places_L > 0) & (places_L != attention_mask.sum(1, keepdim=True) - 1)
        for number in self.config.special_token_ids:
            visible_BL = visible_BL & (input_ids != number)
        # The maximum comes first, because both functions are monotonic.
        return logits_BLV.masked_fill(~visible_BL[..., None], 0.0).amax(1).relu().log1p()


def _feed_forwards(lm: nn.Module) -> Iterator[str]:
    """Yield the names of the modules that become experts."""
    for name, module in lm.named_modules():
        for parts in _FEED_FORWARD:
            if all(part in module._modules for part in parts):
                yield from (f"{name}.{part}" for part in parts)


def _share(source: nn.Module, target: nn.Module, own: set[str], prefix: str = "") -> None:
    """Replace the modules and parameters of `target` with those of `source`, except the modules in `own`.

    Modules are shared and not only parameters, because loading replaces the parameters of a module.
    """
    target._parameters.update(source._parameters)
    for name, child in source.named_children():
        path = f"{prefix}{name}"
        if any(other.startswith(f"{path}.") for other in own):
            _share(child, target.get_submodule(name), own, f"{path}.")
        elif path not in own:
            target._modules[name] = child
