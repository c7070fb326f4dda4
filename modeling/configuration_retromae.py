"""Configuration of RetroMAE: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

Decoding = Literal["enhanced", "basic", "none"]


class RetroMAEConfig(PreTrainedConfig):
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
        ValueError: a field is out of range.
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
        if decoder not in ("enhanced", "basic", "none"):
            raise ValueError(f'decoder must be "enhanced", "basic" or "none", got {decoder!r}')
        if decoder_layers < 1 or (decoder == "enhanced" and decoder_layers != 1):
            needed = "exactly 1 with enhanced decoding" if decoder == "enhanced" else "at least 1"
            raise ValueError(f"decoder_layers must be {needed}, got {decoder_layers}")
        if bag_of_words and decoder != "enhanced":
            raise ValueError(f"bag_of_words needs enhanced decoding, got decoder={decoder!r}")
        if bag_of_words_weight < 0:
            raise ValueError(f"bag_of_words_weight must not be negative, got {bag_of_words_weight}")
        if max_seq_length < 1:
            raise ValueError(f"max_seq_length must be at least 1, got {max_seq_length}")
        # AutoModelForPreTraining is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_retromae.RetroMAEForPreTraining"})
        attn_implementation = kwargs.get("attn_implementation")
        # Called before the sub-configuration is set, because it would reset the attention of that.
        super().__init__(**kwargs)
        if isinstance(encoder, dict):
            encoder = AutoConfig.for_model(**encoder)
        self.encoder: Any = encoder  # None in the default configuration that transformers builds to compare with
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation
        self.decoder = decoder
        self.decoder_layers = decoder_layers
        self.bag_of_words = bag_of_words
        self.bag_of_words_weight = bag_of_words_weight
        self.max_seq_length = max_seq_length

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the encoder's configuration; transformers would look for one in the field `decoder`."""
        inner: PreTrainedConfig | None = getattr(
            self, "encoder", None
        )  # not set yet while the base class is initialised
        return self if inner is None else inner


RetroMAEConfig.register_for_auto_class()
