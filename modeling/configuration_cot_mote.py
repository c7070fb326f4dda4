"""Configuration of CoT-MoTE: what a checkpoint needs to be rebuilt, nothing about a training run."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import AutoConfig, PreTrainedConfig

Expert = Literal["query", "passage"]
Variant = Literal["experts", "separate", "siamese"]
Decoding = Literal["ar", "ae", "none"]
Bottleneck = Literal["dense", "sparse"]


class CoTMoTEConfig(PreTrainedConfig):
    """An encoder with a query and a passage expert, and the decoder of its pre-training (CoT-MoTE, arXiv 2304.10195).

    Args:
        encoder: configuration of the masked language model, any BERT-like one that `AutoModelForMaskedLM` builds.
        variant: `"experts"`, one self-attention and two feed-forwards per layer; `"separate"`, two encoders;
            `"siamese"`, one encoder for both kinds of text.
        decoder: of the contextual span, in pre-training only: `"ar"`, causal, predicting the next token (CoT-MoTE);
            `"ae"`, bidirectional, predicting masked tokens (CoT-MAE, arXiv 2208.07670); `"none"`, masked language
            modelling alone.
        decoder_layers: the paper has 1, CoT-MAE 1 or 2.
        attention_window: a position of the causal decoder sees itself and the `attention_window - 1` before it, and the
            text's vector always; None for all before it.
        bottlenecks: the vectors that the span is written from, one pass of the decoder for each: `"dense"`, the state
            of [CLS]; `"sparse"`, the sparse vector times the matrix of word embeddings.
        max_seq_length: tokens of a text that the published model reads.
        special_token_ids: tokens that add nothing to the sparse vector wherever they stand, [CLS] and [SEP]; the first
            and the last token of a text add nothing in any case. None: the first token alone adds nothing, which is the
            rule of models trained before this field; a config.json without it means None.

    Raises:
        ValueError: for a name or number that is none of these.
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
        special_token_ids: Sequence[int] | None = (),
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
                f'attention_window must be at least 1, and goes with decoder="ar", got {attention_window} and {decoder!r}'
            )
        # AutoModelForPreTraining is added when such a model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_cot_mote.CoTMoTEModel"})
        # transformers ties nothing without; here it is the experts that share what is around them.
        kwargs["tie_word_embeddings"] = True
        attn_implementation = kwargs.get("attn_implementation")
        # First, because it would set the attention of the sub-configuration to None.
        super().__init__(**kwargs)
        if isinstance(encoder, dict):
            fields = dict(encoder)
            encoder = AutoConfig.for_model(fields.pop("model_type"), **fields)
        self.encoder: Any = encoder  # None in the empty configuration that transformers builds to compare with
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation
        self.variant = variant
        self.decoder = decoder
        self.decoder_layers = decoder_layers
        self.attention_window = attention_window
        self.bottlenecks = bottlenecks
        self.max_seq_length = max_seq_length
        self.special_token_ids = None if special_token_ids is None else list(special_token_ids)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class; what a checkpoint does not say is as it was before it could be said."""
        return super().from_dict({"special_token_ids": None} | config_dict, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The encoder's configuration: transformers would take the field `decoder` for one."""
        inner: PreTrainedConfig | None = getattr(self, "encoder", None)  # not there yet while the base class is set up
        return self if inner is None else inner


def _check_name(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


CoTMoTEConfig.register_for_auto_class()
