"""What the methods that pre-train a BERT-like masked language model need of it, whatever its family calls its parts.

Shapes: B texts, L tokens, D hidden size, V vocabulary, P positions of the batch.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .linear_cross_entropy import HeadLoss, linear_cross_entropy

# What the families call the settings that a BERT layer has; the first that a configuration knows is taken.
_NAMES = {
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation"),
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout", "mlp_dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
    "layer_norm_eps": ("layer_norm_eps", "norm_eps"),
    "initializer_range": ("initializer_range",),
}


def bert_layer_config(encoder: PreTrainedConfig) -> BertConfig:
    """The configuration of a layer beside an encoder: BERT's layer in its sizes, BERT's defaults for the rest."""
    settings: dict[str, Any] = {"intermediate_size": 4 * encoder.hidden_size}
    for name, candidates in _NAMES.items():
        known = [getattr(encoder, candidate) for candidate in candidates if hasattr(encoder, candidate)]
        if known:
            settings[name] = known[0]
    settings |= {"hidden_size": encoder.hidden_size, "num_attention_heads": encoder.num_attention_heads}
    settings["attn_implementation"] = "sdpa"  # the encoder's may be one that takes no mask per query
    return BertConfig(**settings)


def check_masked_lm(lm: PreTrainedModel) -> None:
    """Refuses models whose embeddings or head a decoder cannot share.

    Raises:
        ValueError: for a model without masked-LM head, of another family than BERT's, or with narrower embeddings.
    """
    body: Any = lm.base_model
    if lm.get_output_embeddings() is None or body is lm:
        raise ValueError(f"{type(lm).__name__} has no masked-LM head: load it with AutoModelForMaskedLM")
    if lm.config.is_encoder_decoder or not isinstance(getattr(body, "embeddings", None), nn.Module):
        raise ValueError(f"{type(lm).__name__} is not a BERT-like encoder (BERT, RoBERTa, DistilBERT, ModernBERT, ...)")
    width = body.get_input_embeddings().embedding_dim
    if width != lm.config.hidden_size:
        raise ValueError(
            f"{type(lm).__name__} has embeddings of {width} dimensions and states of {lm.config.hidden_size}: the"
            " decoder reads both in one stream"
        )


def position_table(encoder: Any) -> nn.Embedding | None:
    """The encoder's absolute position embeddings; None where it has others (rotary, relative)."""
    table = getattr(encoder.embeddings, "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """0, but RoBERTa and its kin count from behind the row that padding gets."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def max_tokens(encoder: Any) -> int:
    """The tokens that a text may have, special ones included."""
    table = position_table(encoder)
    if table is None:
        return int(encoder.config.max_position_embeddings)
    return table.num_embeddings - first_position(table)


class _Echo(nn.Module):
    """In the place of an encoder: its states are the ones given."""

    def forward(self, *_args: object, inputs_embeds: Tensor, **_kwargs: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def score(lm: PreTrainedModel, states_PD: Tensor) -> Tensor:
    """(P, V) logits of the masked LM's own head, whose layers each family names and orders in its own way.

    The head is run as the family's own `forward` does, on a view of the model with nothing where the encoder is.
    """
    return _head(lm, states_PD)[0]


def summed_cross_entropy(lm: PreTrainedModel, states_PD: Tensor, labels_P: Tensor) -> Tensor:
    """That of `score`, in nats, at least float32, by blocks of positions if `watch_head` has seen the model's projection."""
    projection = lm.get_output_embeddings()
    assert projection is not None  # check_masked_lm has seen to it
    asked = HeadLoss(lambda hidden_1PD, weight, bias: linear_cross_entropy(hidden_1PD[0], weight, bias, labels_P))
    asked.ask(projection)
    logits_1PV = _head(lm, states_PD)
    if asked.result is not None and logits_1PV is asked.output:
        result: Tensor = asked.result
        return result
    if asked.result is not None:  # a family that changes its logits behind the projection
        logits_1PV = _head(lm, states_PD)
    logits_PV = logits_1PV[0].to(torch.promote_types(logits_1PV.dtype, torch.float32))
    return F.cross_entropy(logits_PV, labels_P, reduction="sum")


def _head(lm: PreTrainedModel, states_PD: Tensor) -> Tensor:
    head = copy.copy(lm)
    head.__dict__["_modules"] = lm._modules | {lm.base_model_prefix: _Echo()}
    logits_1PV: Tensor = head(inputs_embeds=states_PD[None]).logits
    return logits_1PV


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """0 where visible, elsewhere the lowest finite number: a row that sees nothing gets the mean, and not NaN."""
    device = like.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
    bias = torch.zeros(visible.shape, dtype=dtype, device=like.device)
    return bias.masked_fill(~visible, torch.finfo(dtype).min)
