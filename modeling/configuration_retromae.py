"""Configuration of RetroMAE: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig

from .configuration_base import ComposedConfig

Decoding = Literal["enhanced", "basic", "none"]


class RetroMAEConfig(ComposedConfig):
    """An encoder pre-trained with a weak decoder to represent a passage as one vector (RetroMAE, arXiv 2205.12035).

    Args:
        encoder: configuration of the masked language model, any BERT-like one that `AutoModelForMaskedLM` builds.
        decoder: `"enhanced"` (section 3.3), `"basic"` (section 3.2, the ablation) or `"none"` (masked language modelling
            only, as in BERT).
        decoder_layers: 1 with enhanced decoding; 1 to 3 in the paper's ablation of basic decoding.
        max_seq_length: maximum tokens per text in training and in the published encoder.

    Raises:
        ValueError: the fields contradict each other.
    """

    model_type = "retromae"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    encoder: Any = None  # PreTrainedConfig, or its fields
    decoder: Decoding = "enhanced"
    decoder_layers: int = 1
    max_seq_length: int = 512

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields, and build the encoder's configuration."""
        if self.decoder == "enhanced" and self.decoder_layers != 1:
            raise ValueError(f"decoder_layers must be exactly 1 with enhanced decoding, got {self.decoder_layers}")
        # AutoModelForPreTraining is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_retromae.RetroMAEForPreTraining"})
        super().__post_init__(**kwargs)


RetroMAEConfig.register_for_auto_class()
