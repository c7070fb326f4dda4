"""Latent attention (NV-Embed, arXiv 2405.17428, section 3.2, equation 1), and the self-attention it is compared with.

Every token attends to a trainable set of latents and then passes through a feed-forward network:

    O = softmax(Q K^T / sqrt(K)) V        Q = W_q LayerNorm(hidden)      K, V = W_k, W_v LayerNorm(latents)
    hidden = hidden + W_o O               the residual adds the hidden state before the norm
    hidden = hidden + FF(LayerNorm(hidden))         FF = GEGLU with exact GELU, four times as wide

Parameters are named as in the official checkpoints. Unlike the official code, which repeats the latents for every row, we treat
all tokens of a batch as one sequence of queries, so keys and values are computed once.

Shapes: B rows, L tokens, D hidden size, R latents, H heads, K width of a head, T queries, S keys.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_nvembed import LatentAttentionConfig


class Attention(nn.Module):
    """Multi-head attention of one sequence to another, without biases."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, query_BTD: Tensor, context_BSD: Tensor, key_mask_BS: Tensor | None = None) -> Tensor:
        """Return (B, T, D); the mask is True on keys to attend to."""
        key, value = self.to_kv(context_BSD).chunk(2, dim=-1)
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (self.to_q(query_BTD), key, value)
        )
        mask = None if key_mask_BS is None else key_mask_BS[:, None, None, :]
        read_BHTK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output: Tensor = self.to_out(read_BHTK.transpose(1, 2).flatten(-2))
        return output


class GEGLU(nn.Module):
    """Gated activation: one half of the input times the GELU of the other half."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., 2 * n) to (..., n)."""
        hidden, gate = hidden.chunk(2, dim=-1)
        return hidden * F.gelu(gate)


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, dim: int, multiplier: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 2 * multiplier * dim), GEGLU(), nn.Linear(multiplier * dim, dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return self.net(hidden)  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    """A layer with the norms of its inputs, grouped as in the official checkpoints."""

    def __init__(self, fn: nn.Module, dim: int, context_norm: bool = False) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(dim) if context_norm else None

    def forward(self, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the layer's output, without the residual."""
        inputs = [self.norm(hidden)]
        if self.norm_context is not None:
            inputs.append(self.norm_context(context))
        output: Tensor = self.fn(*inputs)
        return output


class LatentAttention(nn.Module):
    """Map token states (B, L, D) to token states (B, L, D), each computed from its token and the latents."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        dim = config.hidden_dim
        attention = Attention(dim, config.num_cross_heads, config.cross_dim_head)
        self.cross_attend_blocks = nn.ModuleList(
            [PreNorm(attention, dim, context_norm=True), PreNorm(FeedForward(dim), dim)]
        )
        self.latents = nn.Parameter(torch.randn(config.num_latents_value, dim))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return (B, L, D)."""
        attend, feed_forward = self.cross_attend_blocks
        hidden_1TD = hidden_BLD.flatten(0, 1)[None]
        hidden_1TD = hidden_1TD + attend(hidden_1TD, self.latents[None])
        output_1TD: Tensor = hidden_1TD + feed_forward(hidden_1TD)
        return output_1TD.view_as(hidden_BLD)


class SelfAttention(nn.Module):
    """The same layer with the text's own tokens as keys and values, and heads that divide the width."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        dim, heads = config.hidden_dim, config.num_cross_heads
        if dim % heads:
            raise ValueError(f"self-attention pooling divides the hidden size {dim} by num_cross_heads={heads}")
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dim // heads)
        self.feed_forward = PreNorm(FeedForward(dim), dim)

    def forward(self, hidden_BLD: Tensor, key_mask_BL: Tensor) -> Tensor:
        """Return (B, L, D)."""
        normed_BLD = self.norm(hidden_BLD)
        hidden_BLD = hidden_BLD + self.attention(normed_BLD, normed_BLD, key_mask_BL)
        output: Tensor = hidden_BLD + self.feed_forward(hidden_BLD)
        return output
