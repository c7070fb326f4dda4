"""The parts of BERT-like masked language models that pre-training uses, which each family names differently.

Shapes: B texts, L tokens, D hidden size, V vocabulary, P positions of the batch.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .backbones import can_run, check_weights, checking, evaluating, some_tokens, tolerance
from .linear_cross_entropy import head_cross_entropy

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


def load_masked_lm(name: str, *, fresh_head: bool, **options: Any) -> PreTrainedModel:
    """Load a pre-trained masked language model.

    Args:
        name: Hub id or folder.
        fresh_head: initialise missing weights of the masked-LM head, with a warning, instead of raising an error.
        **options: arguments of `from_pretrained`; those that are None are left out.

    Raises:
        ValueError: it is not a masked language model, or weights are missing.
    """
    fields, _ = PreTrainedConfig.get_config_dict(name)
    kind = ", ".join(fields.get("architectures") or [str(fields.get("model_type"))])
    if "ForPreTraining" in kind and "auto_map" in fields:
        remedy = "" if fresh_head else " with fresh_head=True, because it was exported without its masked-LM head"
        raise ValueError(
            f"{name} is a {kind} checkpoint, which holds an encoder and a decoder: give its encoder{remedy}"
        )
    if "auto_map" not in fields and fields.get("model_type") not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(f"{name} ({kind}) is not an encoder with a masked-LM head, such as BERT or RoBERTa")
    options = {option: value for option, value in options.items() if value is not None}
    loaded: Any = AutoModelForMaskedLM.from_pretrained(name, output_loading_info=True, use_safetensors=True, **options)
    lm: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        check_weights(name, lm, (key for key in missing if key.startswith(f"{lm.base_model_prefix}.")))
        if not fresh_head:
            raise ValueError(
                f"{name} has no masked-LM head (no weights for {', '.join(missing)}), which computes sparse vectors: choose a"
                " checkpoint that has one, or set fresh_head=True to train a new one"
            )
        warnings.warn(f"{name} has no weights for {', '.join(missing)}: they are initialised at random", stacklevel=3)
    return lm


def check_masked_lm(lm: PreTrainedModel) -> None:
    """Check that a decoder can share the embeddings and the head of a model.

    Raises:
        ValueError: the model has no masked-LM head, is not BERT-like, or has embeddings narrower than its hidden states.
    """
    name, body = type(lm).__name__, lm.base_model
    embeddings: Any = getattr(body, "embeddings", None)
    if lm.get_output_embeddings() is None or body is lm:
        raise ValueError(f"{name} has no masked-LM head: load it with AutoModelForMaskedLM")
    if lm.config.is_encoder_decoder or not isinstance(embeddings, nn.Module) or isinstance(embeddings, nn.Embedding):
        raise ValueError(f"{name} is not a BERT-like encoder; {_CHOOSE}")
    table: Any = lm.get_input_embeddings()
    width = table.weight.shape[-1]
    if width != lm.config.hidden_size:
        raise ValueError(
            f"{name} has embeddings of {width} dimensions and hidden states of {lm.config.hidden_size}: they must be equal,"
            f" because the decoder reads both; {_CHOOSE}"
        )


@torch.no_grad()
def check_encoder(lm: PreTrainedModel, method: str) -> None:
    """Run a model on a few tokens to check that its family works as the methods assume.

    Args:
        lm: masked language model. The check is skipped if its weights have no values here.
        method: name of the method, for the message.

    Raises:
        ValueError: padding changes the states of a text, the first token does not attend to the last, the head needs more
            than the encoder's states, or the embeddings need more than token ids.
    """
    check_masked_lm(lm)
    if not can_run(lm):
        return
    encoder: Any = lm.base_model
    with checking(lm, method, _CHOOSE), evaluating(lm):
        bert_layer_config(lm.config)
        ids_3L = some_tokens(lm, 1, 6).repeat(3, 1)
        ids_3L[1, -1] = ids_3L[1, 1]
        mask_3L = torch.ones_like(ids_3L)
        ids_3L[2, 4:], mask_3L[2, 4:] = lm.config.pad_token_id or 0, 0
        states_3LD = encoder(input_ids=ids_3L, attention_mask=mask_3L).last_hidden_state
        if not torch.isfinite(states_3LD).all():
            return  # the trainer names the weight that is not finite
        alone_1LD = encoder(input_ids=ids_3L[2:, :4], attention_mask=mask_3L[2:, :4]).last_hidden_state
        if not _close(states_3LD[2:, :4], alone_1LD):
            raise ValueError("the states of a text depend on the padding after it")
        if torch.equal(states_3LD[0, 0], states_3LD[1, 0]):
            raise ValueError("the first token does not attend to the last one")
        logits_3LV = lm(input_ids=ids_3L, attention_mask=mask_3L).logits
        if not _close(score(lm, states_3LD.flatten(0, 1)), logits_3LV.flatten(0, 1)):
            raise ValueError("its head does not depend on the encoder's states alone")
        longest_1L = ids_3L[:1, :1].expand(1, max_tokens(encoder))
        if encoder.embeddings(input_ids=longest_1L).shape != (*longest_1L.shape, states_3LD.shape[-1]):
            raise ValueError("its embeddings do not have the shape of its hidden states")


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and float((got - want).abs().max()) <= tolerance(want)


def position_table(encoder: Any) -> nn.Embedding | None:
    """Return the encoder's absolute position embeddings; None if positions are rotary or relative."""
    table = getattr(encoder.embeddings, "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """Return the index of the first position: 0, but after the padding row in RoBERTa and its variants."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def max_tokens(encoder: Any) -> int:
    """Return the maximum number of tokens of a text, special tokens included."""
    table = position_table(encoder)
    if table is None:
        return int(encoder.config.max_position_embeddings)
    return table.num_embeddings - first_position(table)


class _Identity(nn.Module):
    """Replacement for an encoder that returns the states it is given."""

    def forward(self, *_args: object, inputs_embeds: Tensor, **_kwargs: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def score(lm: PreTrainedModel, states_PD: Tensor) -> Tensor:
    """Return the (P, V) logits of the masked LM's head, whose layers and their order depend on the family."""
    logits_PV: Tensor = _head(lm, states_PD)().logits[0]
    return logits_PV


def masked_lm_loss(lm: PreTrainedModel, states_PD: Tensor, labels_P: Tensor) -> Tensor:
    """Return the summed cross-entropy of `score` in nats, in float32 or wider, without holding all logits where possible."""
    return head_cross_entropy(lm.get_output_embeddings(), _head(lm, states_PD), labels_P[None])[0]


def _head(lm: PreTrainedModel, states_PD: Tensor) -> Callable[[], Any]:
    """Return a call of the family's own `forward`, on a copy of the model without its encoder."""
    head = copy.copy(lm)
    head.__dict__["_modules"] = lm._modules | {lm.base_model_prefix: _Identity()}
    return lambda: head(inputs_embeds=states_PD[None])


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to attention scores: 0 where visible, else the lowest finite number.

    The number is finite so that a row that sees nothing gets the mean of the values instead of NaN.
    """
    device = like.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
    bias = torch.zeros(visible.shape, dtype=dtype, device=like.device)
    return bias.masked_fill(~visible, torch.finfo(dtype).min)
