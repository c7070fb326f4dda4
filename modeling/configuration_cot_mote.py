"""Configuration of CoT-MoTE: the settings that rebuild a checkpoint, without those of a training run."""

from collections.abc import Sequence
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from .configuration_base import ComposedConfig, check_choices

Variant = Literal["experts", "separate", "siamese"]
Decoding = Literal["ar", "ae", "none"]
Bottleneck = Literal["dense", "sparse"]


class CoTMoTEConfig(ComposedConfig):
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
        ValueError: a field has an unknown value.
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
        check_choices(variant=(variant, Variant), decoder=(decoder, Decoding))
        for bottleneck in bottlenecks:
            check_choices(bottlenecks=(bottleneck, Bottleneck))
        # AutoModelForPreTraining is added when a pre-training model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_cot_mote.CoTMoTEModel"})
        # transformers ties no weights without this; here, the experts share the modules around them.
        super().__init__(encoder=encoder, **kwargs | {"tie_word_embeddings": True})
        self.variant = variant
        self.decoder = decoder
        self.decoder_layers = decoder_layers
        self.attention_window = attention_window
        self.bottlenecks = bottlenecks
        self.max_seq_length = max_seq_length
        self.special_token_ids = list(special_token_ids)


CoTMoTEConfig.register_for_auto_class()
