"""Configuration of CoT-MoTE: the settings that rebuild a checkpoint, without those of a training run."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import AutoConfig

from .configuration_base import ComposedConfig

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

    encoder: Any = None  # PreTrainedConfig, or its fields
    variant: Variant = "experts"
    decoder: Decoding = "ar"
    decoder_layers: int = 1
    attention_window: int | None = None
    bottlenecks: Sequence[Bottleneck] | Bottleneck = ("dense", "sparse")
    max_seq_length: int = 144
    special_token_ids: Sequence[int] = ()
    # transformers ties no weights without this; here, the experts share the modules around them.
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields, and build the encoder's configuration."""
        self.bottlenecks = [self.bottlenecks] if isinstance(self.bottlenecks, str) else list(self.bottlenecks)
        if unknown := set(self.bottlenecks) - set(get_args(Bottleneck)):
            raise ValueError(f"bottlenecks are dense and sparse, got {unknown}")
        self.special_token_ids = list(self.special_token_ids)
        # AutoModelForPreTraining is added when a pre-training model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_cot_mote.CoTMoTEModel"})
        super().__post_init__(**kwargs)


CoTMoTEConfig.register_for_auto_class()
