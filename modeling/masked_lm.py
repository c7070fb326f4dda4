"""The parts of BERT-like masked language models that pre-training uses, which each family names differently.

Shapes: B texts, L tokens, D hidden size, V vocabulary, P positions of the batch.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .backbones import ComposedModel, additive, can_run, evaluating, load_backbone, some_tokens, tolerance
from .linear_cross_entropy import IGNORED, head_cross_entropy

# The names that families use for the settings of a BERT layer; the first one that a configuration has is taken.
_NAMES = {
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation"),
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout", "mlp_dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
    "layer_norm_eps": ("layer_norm_eps", "norm_eps"),
    "initializer_range": ("initializer_range",),
}
_CHOOSE = "choose another encoder (BERT, RoBERTa, DistilBERT, ModernBERT, ...)"


class MaskedLMPreTrainedModel(ComposedModel):
    """Base class of models made of a masked language model, `.lm`, and a decoder that shares its embeddings and head."""

    _init_weights = PreTrainedModel._init_weights
    accepts_loss_kwargs = False  # each loss is a mean over the labels of its micro-batch, as in the original code

    lm: PreTrainedModel

    @classmethod
    def _made_of(cls, config: PreTrainedConfig, *lms: PreTrainedModel | None) -> Any:
        """Return a new model of loaded ones, in the dtype of the first: its decoder is built in the default dtype."""
        model: Any = cls(config, *lms)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.lm.dtype)
        model.config.dtype = model.lm.dtype
        return model

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.lm.get_input_embeddings()

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a text, special tokens included."""
        encoder: Any = self.lm.base_model
        table = position_table(encoder)
        if table is None:
            return int(encoder.config.max_position_embeddings)
        return table.num_embeddings - first_position(table)


def bert_layer_config(encoder: PreTrainedConfig) -> BertConfig:
    """Return the configuration of a BERT layer with the sizes of an encoder, and BERT's defaults for the rest."""
    settings: dict[str, Any] = {"intermediate_size": 4 * encoder.hidden_size}
    for name, candidates in _NAMES.items():
        known = [getattr(encoder, candidate) for candidate in candidates if hasattr(encoder, candidate)]
        if known:
            settings[name] = known[0]
    settings |= {"hidden_size": encoder.hidden_size, "num_attention_heads": encoder.num_attention_heads}
    settings["attn_implementation"] = "sdpa"  # the encoder's implementation may not accept a mask per query
    return BertConfig(**settings)


def masked_lm(given: str | PreTrainedModel, *, new_head: bool, **options: Any) -> PreTrainedModel:
    """Return a masked language model that a decoder can share embeddings and head with; if it is a name, load it (`load_backbone`).

    A `ValueError` is raised if it is not a BERT-like encoder with a masked-LM head.
    """
    lm = given
    if isinstance(lm, str):
        lm = load_backbone(AutoModelForMaskedLM, lm, new_head=new_head, **options)
    name, body = type(lm).__name__, lm.base_model
    embeddings: Any = getattr(body, "embeddings", None)
    if lm.get_output_embeddings() is None or body is lm:
        raise ValueError(f"{name} has no masked-LM head: load it with AutoModelForMaskedLM")
    if lm.config.is_encoder_decoder or not isinstance(embeddings, nn.Module) or isinstance(embeddings, nn.Embedding):
        raise ValueError(f"{name} is not a BERT-like encoder; {_CHOOSE}")
    table: Any = lm.get_input_embeddings()
    if table.weight.shape[-1] != lm.config.hidden_size:
        raise ValueError(
            f"{name} has embeddings of {table.weight.shape[-1]} dimensions and hidden states of {lm.config.hidden_size}: they"
            f" must be equal, because the decoder reads both; {_CHOOSE}"
        )
    if can_run(lm):
        _check_head(lm)
    return lm


@torch.no_grad()
def _check_head(lm: PreTrainedModel) -> None:
    """Run a model on a few tokens: the decoder uses its head alone, and [CLS] must represent a text without its padding."""
    ids_2L = some_tokens(lm, 1, 6).repeat(2, 1)
    mask_2L = torch.ones_like(ids_2L)
    ids_2L[1, 4:], mask_2L[1, 4:] = lm.config.pad_token_id or 0, 0
    with evaluating(lm):
        states_2LD = lm.base_model(input_ids=ids_2L, attention_mask=mask_2L)[0]
        logits_PV = score(lm, states_2LD[1, :4])
        alone_PV = lm(input_ids=ids_2L[1:, :4], attention_mask=mask_2L[1:, :4]).logits[0]
    if not torch.isfinite(states_2LD).all():
        return  # the trainer names the weight that is not finite
    name = type(lm).__name__
    if torch.equal(states_2LD[0, 0], states_2LD[1, 0]):
        raise ValueError(f"the first token of {name} does not attend to the last one; {_CHOOSE}")
    if logits_PV.shape != alone_PV.shape or float((logits_PV - alone_PV).abs().max()) > tolerance(alone_PV):
        raise ValueError(f"the logits of {name} depend on padding, or on more than the encoder's states; {_CHOOSE}")


def position_table(encoder: Any) -> nn.Embedding | None:
    """Return the encoder's absolute position embeddings; None if positions are rotary or relative."""
    table = getattr(encoder.embeddings, "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """Return the index of the first position: 0, but after the padding row in RoBERTa and its variants."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


class _Identity(nn.Module):
    """Replacement for an encoder that returns the states it is given."""

    def forward(self, *_args: object, inputs_embeds: Tensor, **_kwargs: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def score(lm: PreTrainedModel, states_PD: Tensor) -> Tensor:
    """Return the (P, V) logits of the masked LM's head, whose layers and their order depend on the family."""
    logits_PV: Tensor = _head(lm, states_PD)().logits[0]
    return logits_PV


def masked_lm_loss(lm: PreTrainedModel, states: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the summed cross-entropy in nats of the states with a label, in float32 or wider, and their number.

    All logits are never in memory together where that is possible.
    """
    labelled = labels != IGNORED
    labels_P = labels[labelled]
    return head_cross_entropy(lm.get_output_embeddings(), _head(lm, states[labelled]), labels_P[None])[0], len(labels_P)


def _head(lm: PreTrainedModel, states_PD: Tensor) -> Callable[[], Any]:
    """Return a call of the family's own `forward`, on a copy of the model without its encoder."""
    head = copy.copy(lm)
    head.__dict__["_modules"] = lm._modules | {lm.base_model_prefix: _Identity()}
    return lambda: head(inputs_embeds=states_PD[None])


def attention_bias(visible: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to the attention scores of states, in the dtype in which they are computed."""
    device = like.device.type
    return additive(visible, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype)
