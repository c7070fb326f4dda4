"""Configuration of NV-Embed: what a checkpoint needs to be rebuilt, in the fields of the official checkpoints and a few more.

An official config.json leaves out what equals the class's defaults, so the defaults here are the official ones.
"""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

Pooling = Literal["latent", "mean", "eos", "self_attention"]
Mask = Literal["bidirectional", "causal"]


class LatentAttentionConfig(PreTrainedConfig):
    """The layer between the decoder and the mean over its tokens (NV-Embed, arXiv 2405.17428, section 3.2).

    Args:
        num_latents_value: number R of trainable latents, the keys and values.
        num_cross_heads: number H of heads; also of the self-attention that the paper compares with.
        output_normalize: whether the pooled vector is scaled to length 1.
        hidden_dim: width D of the decoder's hidden states.
        latent_dim: width of a latent, which has to be D as well.
        cross_dim_head: width K of one head; the official one is as wide as the whole hidden state.
    """

    model_type = "latent_attention"

    def __init__(
        self,
        num_latents_value: int = 512,
        num_cross_heads: int = 8,
        output_normalize: bool = True,
        hidden_dim: int = 4096,
        latent_dim: int = 4096,
        cross_dim_head: int = 4096,
        **kwargs: Any,
    ) -> None:
        if latent_dim != hidden_dim:
            raise ValueError(f"latents attend to hidden states of their own width: {latent_dim=} is not {hidden_dim=}")
        if min(num_latents_value, num_cross_heads, cross_dim_head) < 1:
            raise ValueError(f"at least one latent and one head: got {num_latents_value=}, {num_cross_heads=}")
        super().__init__(**kwargs)
        self.num_latents_value = num_latents_value
        self.num_cross_heads = num_cross_heads
        self.output_normalize = output_normalize
        self.hidden_dim = hidden_dim
        self.latent_dim = latent_dim
        self.cross_dim_head = cross_dim_head


class NVEmbedConfig(PreTrainedConfig):
    """A decoder whose token states become one vector (NV-Embed, arXiv 2405.17428).

    Args:
        text_config: of the decoder; the official `bidir_mistral` is read as `mistral`. With a bidirectional mask its
            `is_causal` is set to False and its sliding window lifted, here and in every model built from it.
        latent_attention_config: of the layer after it; by default as wide as the decoder.
        pooling: `"latent"` attention then mean, `"mean"`, `"eos"` (last token), or `"self_attention"` then mean.
        mask: `"bidirectional"` or `"causal"` attention in the decoder.
        official_instruction_mask: whether `NVEmbedModel.encode` leaves out of the mean as many leading tokens as the
            official code does, which does not count BOS. The default is for official checkpoints, whose config does not
            have this field; `NVEmbedModel.from_backbone` sets it to False.
        max_seq_length: tokens of a text that are kept, instruction and EOS included; None where it is not known.
        add_eos: whether `encode` ends every text with EOS.
        add_pad_token: an official field that changes nothing: padding is masked, and EOS where the tokenizer has none.
        is_mask_instruction: whether `encode` leaves the instruction's tokens out of the mean.
        padding_side: of `encode`.
        mask_type: the official name of `mask`, where `"b"` stands for bidirectional.
        hidden_size: accepted because official configs have it; it is the decoder's.
    """

    model_type = "nvembed"
    # Not the latent attention's: it has no choice of an attention implementation.
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        latent_attention_config: LatentAttentionConfig | dict[str, Any] | None = None,
        pooling: Pooling = "latent",
        mask: Mask = "bidirectional",
        official_instruction_mask: bool = True,
        max_seq_length: int | None = None,
        add_eos: bool = True,
        add_pad_token: bool = True,
        is_mask_instruction: bool = True,
        padding_side: Literal["left", "right"] = "right",
        mask_type: str | None = None,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if mask_type is not None:
            mask = "bidirectional" if mask_type == "b" else mask_type  # type: ignore[assignment]
        if pooling not in ("latent", "mean", "eos", "self_attention"):
            raise ValueError(f'pooling must be "latent", "mean", "eos" or "self_attention", got {pooling!r}')
        if mask not in ("bidirectional", "causal"):
            raise ValueError(f'mask must be "bidirectional" or "causal", got {mask!r}')
        attn_implementation = kwargs.get("attn_implementation")
        # First, because it would set the attention of the decoder to None.
        super().__init__(**kwargs)
        self.text_config = _decoder_config(text_config)
        self.latent_attention_config = _latent_config(latent_attention_config, self.text_config)
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation
        self.pooling = pooling
        self.mask = mask
        self.official_instruction_mask = official_instruction_mask
        self.max_seq_length = max_seq_length
        self.add_eos = add_eos
        self.add_pad_token = add_pad_token
        self.is_mask_instruction = is_mask_instruction
        self.padding_side = padding_side
        if self.text_config is not None:
            self.hidden_size = self.text_config.hidden_size
            _set_mask(self.text_config, mask)


def _decoder_config(config: PreTrainedConfig | dict[str, Any] | None) -> Any:
    """The configuration, or None where transformers wants one with the defaults alone; every model has one."""
    if not isinstance(config, dict):
        return config
    fields = dict(config)
    model_type = fields.pop("model_type", "llama")  # the official default
    return AutoConfig.for_model("mistral" if model_type == "bidir_mistral" else model_type, **fields)


def _latent_config(
    config: LatentAttentionConfig | dict[str, Any] | None, text_config: PreTrainedConfig | None
) -> LatentAttentionConfig:
    if isinstance(config, LatentAttentionConfig):
        return config
    if config is None:
        width = 4096 if text_config is None else text_config.hidden_size
        return LatentAttentionConfig(hidden_dim=width, latent_dim=width, cross_dim_head=width)
    fields = dict(config)
    fields.pop("model_type", None)
    return LatentAttentionConfig(**fields)


def _set_mask(config: PreTrainedConfig, mask: Mask) -> None:
    """Sets what transformers' mask functions read: `is_causal`, and a window that no text is longer than."""
    config.is_causal = mask == "causal"
    if mask == "causal":
        return
    kinds = getattr(config, "layer_types", None)
    if kinds and "chunked_attention" in kinds:  # a mask that is always causal (Llama 4)
        config.layer_types = ["full_attention" if kind == "chunked_attention" else kind for kind in kinds]
    if getattr(config, "sliding_window", None) is not None:
        wide = getattr(config, "max_position_embeddings", None) or 2**31 - 1
        try:  # None spares the mask; where layers are named by their kind of attention, transformers refuses it
            config.sliding_window = wide if kinds else None
        except Exception:  # so do the configurations in which it is declared as a number (Moshi)
            config.sliding_window = wide


NVEmbedConfig.register_for_auto_class()
