"""Configuration of RetroMAE: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from .configuration_base import ComposedConfig, check_choices

Decoding = Literal["enhanced", "basic", "none"]


class RetroMAEConfig(ComposedConfig):
    """An encoder pre-trained with a weak decoder to represent a passage as one vector (RetroMAE, arXiv 2205.12035).

    Args:
        encoder: configuration of the masked language model, any BERT-like one that `AutoModelForMaskedLM` builds.
        decoder: `"enhanced"` (section 3.3), `"basic"` (section 3.2, the ablation) or `"none"` (masked language modelling
            only, as in BERT).
        decoder_layers: 1 with enhanced decoding; 1 to 3 in the paper's ablation of basic decoding.
        bag_of_words: also predict the set of the input's tokens from their logits (DupMAE, arXiv 2211.08769); needs
            enhanced decoding.
        bag_of_words_weight: weight of that loss.
        max_seq_length: maximum tokens per text in training and in the published encoder.

    Raises:
        ValueError: the fields contradict each other.
    """

    model_type = "retromae"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        decoder: Decoding = "enhanced",
        decoder_layers: int = 1,
        bag_of_words: bool = False,
        bag_of_words_weight: float = 1.0,
        max_seq_length: int = 512,
        **kwargs: Any,
    ) -> None:
        check_choices(decoder=(decoder, Decoding))
        if decoder == "enhanced" and decoder_layers != 1:
            raise ValueError(f"decoder_layers must be exactly 1 with enhanced decoding, got {decoder_layers}")
        if bag_of_words and decoder != "enhanced":
            raise ValueError(f"bag_of_words needs enhanced decoding, got decoder={decoder!r}")
        # AutoModelForPreTraining is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_retromae.RetroMAEForPreTraining"})
        super().__init__(encoder=encoder, **kwargs)
        self.decoder = decoder
        self.decoder_layers = decoder_layers
        self.bag_of_words = bag_of_words
        self.bag_of_words_weight = bag_of_words_weight
        self.max_seq_length = max_seq_length


RetroMAEConfig.register_for_auto_class()
