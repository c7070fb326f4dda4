"""Configuration of CoT-MoTE: the settings that rebuild a checkpoint, without those of a training run."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import AutoConfig, PreTrainedConfig

Variant = Literal["experts", "separate", "siamese"]
Decoding = Literal["ar", "ae", "none"]
Bottleneck = Literal["dense", "sparse"]


class CoTMoTEConfig(PreTrainedConfig):
    """An encoder with a query and a passage expert, and the decoder of its pre-training (CoT-MoTE, arXiv 2304.10195).

    Args:
        encoder: configuration of the masked language model, any BERT-like one that `AutoModelForMaskedLM` builds.
        variant: `"experts"`, one self-attention and two feed-forwards per layer; `"separate"`, two encoders;
            `"siamese"`, one encoder for both kinds of text.
        decoder: decoder of the contextual span, for pre-training only: `"ar"`, causal, predicts the next token (CoT-MoTE);
            `"ae"`, bidirectional, predicts masked tokens (CoT-MAE, arXiv 2208.07670); `"none"`, masked language modelling
            only.
        decoder_layers: 1 in the paper, 1 or 2 in CoT-MAE.
        attention_window: a position of the causal decoder attends to itself, the `attention_window - 1` positions before it,
            and the text's vector; None for all positions before it.
        bottlenecks: vectors that the span is generated from, each in its own pass of the decoder: `"dense"`, the state of
            [CLS]; `"sparse"`, the sparse vector times the word embeddings.
        max_seq_length: maximum tokens per text in the published model.
        special_token_ids: tokens that never contribute to the sparse vector, such as [CLS] and [SEP]; the first and the last
            token of a text never contribute.

    Raises:
        ValueError: a field has an unknown name or is out of range.
    """

    model_type = "cot_mote"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        variant: Variant = "experts",
        decoder: Decoding = "ar",
        decoder_layers: int = 1,
        attention_window: int | None = None,
        bottlenecks: Sequence[Bottleneck] | Bottleneck = ("dense", "sparse"),
        max_seq_length: int = 144,
        special_token_ids: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        bottlenecks = [bottlenecks] if isinstance(bottlenecks, str) else list(bottlenecks)
        _check_name("variant", variant, get_args(Variant))
        _check_name("decoder", decoder, get_args(Decoding))
        for bottleneck in bottlenecks:
            _check_name("bottlenecks", bottleneck, get_args(Bottleneck))
        if not bottlenecks or len(set(bottlenecks)) < len(bottlenecks):
            raise ValueError(f'bottlenecks must be "dense", "sparse" or both, got {bottlenecks}')
        for name, number in (("decoder_layers", decoder_layers), ("max_seq_length", max_seq_length)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if attention_window is not None and (attention_window < 1 or decoder != "ar"):
            raise ValueError(
                f'attention_window must be at least 1, and needs decoder="ar", got {attention_window} and {decoder!r}'
            )
        # AutoModelForPreTraining is added when a pre-training model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_cot_mote.CoTMoTEModel"})
        # transformers ties no weights without this; here, the experts share the modules around them.
        kwargs["tie_word_embeddings"] = True
        attn_implementation = kwargs.get("attn_implementation")
        # Called before the sub-configuration is set, because it would reset the attention of that.
        super().__init__(**kwargs)
        if isinstance(encoder, dict):
            encoder = AutoConfig.for_model(**encoder)
        self.encoder: Any = encoder  # None in the default configuration that transformers builds to compare with
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation
        self.variant = variant
        self.decoder = decoder
        self.decoder_layers = decoder_layers
        self.attention_window = attention_window
        self.bottlenecks = bottlenecks
        self.max_seq_length = max_seq_length
        self.special_token_ids = list(special_token_ids)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the encoder's configuration; transformers would look for one in the field `decoder`."""
        inner: PreTrainedConfig | None = getattr(
            self, "encoder", None
        )  # not set yet while the base class is initialised
        return self if inner is None else inner


def _check_name(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


CoTMoTEConfig.register_for_auto_class()
