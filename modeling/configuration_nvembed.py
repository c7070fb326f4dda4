"""Configuration of NV-Embed, with the fields of the official checkpoints and a few more.

An official config.json omits fields that equal the defaults, so the defaults here are the official ones.
"""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from .configuration_base import ComposedConfig

Pooling = Literal["latent", "mean", "eos", "self_attention"]
Mask = Literal["bidirectional", "causal"]


class LatentAttentionConfig(PreTrainedConfig):
    """The layer between the decoder and the mean over its tokens (NV-Embed, arXiv 2405.17428, section 3.2).

    Args:
        num_latents_value: number R of trainable latents, which are the keys and values.
        num_cross_heads: number H of heads, also of the self-attention that the paper compares with.
        output_normalize: whether to scale the pooled vector to length 1.
        hidden_dim: width D of the decoder's hidden states.
        latent_dim: width of a latent, which must also be D.
        cross_dim_head: width K of a head; in official checkpoints as wide as the hidden state.

    Raises:
        ValueError: `latent_dim` differs from `hidden_dim`.
    """

    model_type = "latent_attention"

    num_latents_value: int = 512
    num_cross_heads: int = 8
    output_normalize: bool = True
    hidden_dim: int = 4096
    latent_dim: int = 4096
    cross_dim_head: int = 4096

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the widths."""
        if self.latent_dim != self.hidden_dim:
            raise ValueError(f"latents of {self.latent_dim=} must be as wide as hidden states of {self.hidden_dim=}")
        super().__post_init__(**kwargs)


class NVEmbedConfig(ComposedConfig):
    """A decoder whose token states are pooled into one vector (NV-Embed, arXiv 2405.17428).

    Args:
        text_config: configuration of the decoder; the official `bidir_mistral` is read as `mistral`. With a bidirectional
            mask, its `is_causal` is set to False and its sliding window is removed.
        latent_attention_config: configuration of the layer after the decoder; by default as wide as the decoder.
        pooling: `"latent"` attention then mean, `"mean"`, `"eos"` (last token), or `"self_attention"` then mean.
        mask: `"bidirectional"` or `"causal"` attention in the decoder.
        official_instruction_mask: whether `NVEmbedModel.encode` excludes as many leading tokens from the mean as the
            official code, which does not count BOS. True is for official checkpoints, whose config lacks this field;
            `NVEmbedModel.from_backbone` sets it to False.
        max_seq_length: maximum tokens per text, instruction and EOS included; None if unknown.
        add_eos: whether `encode` appends EOS to every text.
        add_pad_token: official field without effect: padding is masked, and is EOS if the tokenizer has no padding token.
        is_mask_instruction: whether `encode` excludes the tokens of the instruction from the mean.
        padding_side: padding side of `encode`.
        mask_type: official name of `mask`, with `"b"` for bidirectional.
        hidden_size: accepted because official configs have it; always that of the decoder.

    Raises:
        ValueError: `pooling` or `mask` has an unknown value.
    """

    model_type = "nvembed"
    # Without the latent attention, which has no attention implementation to choose.
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    text_config: Any = None  # PreTrainedConfig, or its fields
    latent_attention_config: Any = None  # LatentAttentionConfig, or its fields; set below
    pooling: Pooling = "latent"
    mask: Mask = "bidirectional"
    official_instruction_mask: bool = True
    max_seq_length: int | None = None
    add_eos: bool = True
    add_pad_token: bool = True
    is_mask_instruction: bool = True
    padding_side: Literal["left", "right"] = "right"

    def __post_init__(self, mask_type: str | None = None, hidden_size: int | None = None, **kwargs: Any) -> None:
        """Read the official fields, and build the configurations of the decoder and of the layer after it."""
        if mask_type is not None:
            self.mask = "bidirectional" if mask_type == "b" else mask_type  # type: ignore[assignment]
        if isinstance(self.text_config, dict):
            kind = self.text_config.get("model_type", "llama")  # the official default
            self.text_config = self.text_config | {"model_type": "mistral" if kind == "bidir_mistral" else kind}
        super().__post_init__(**kwargs)
        width = 4096 if self.text_config is None else self.text_config.hidden_size
        if self.latent_attention_config is None:
            self.latent_attention_config = {"hidden_dim": width, "latent_dim": width, "cross_dim_head": width}
        if isinstance(self.latent_attention_config, dict):
            self.latent_attention_config = LatentAttentionConfig.from_dict(self.latent_attention_config)
        if self.text_config is not None:
            self.hidden_size = self.text_config.hidden_size
            _set_mask(self.text_config, self.mask)


def _set_mask(config: PreTrainedConfig, mask: Mask) -> None:
    """Set the fields that transformers' mask functions read: `is_causal`, and a window that is as long as any text."""
    config.is_causal = mask == "causal"
    if mask == "causal":
        return
    kinds = getattr(config, "layer_types", None)
    if kinds and "chunked_attention" in kinds:  # its mask is always causal (Llama 4)
        config.layer_types = ["full_attention" if kind == "chunked_attention" else kind for kind in kinds]
    if getattr(config, "sliding_window", None) is not None:
        wide = getattr(config, "max_position_embeddings", None) or 2**31 - 1
        # None avoids the mask, but transformers rejects it for configurations with `layer_types`.
        config.sliding_window = wide if kinds else None


NVEmbedConfig.register_for_auto_class()
