"""NV-Embed written as the official code computes it, one text, layer, head and token at a time, in float64.

It reads an official checkpoint's tensors by their names there, and knows nothing of our classes. The decoder is Mistral's
(and Llama's), every token attending to every token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Settings that the tensors do not determine."""

    heads: int
    kv_heads: int
    latent_heads: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    causal: bool = False


def reference_vector(weights: dict[str, Tensor], sizes: Sizes, ids: list[int], left_out: int) -> Tensor:
    """The unit vector of one text without padding; the first `left_out` tokens are not pooled."""
    states = latent_attention(weights, sizes, decoder_states(weights, sizes, ids))
    pooled = [state for place, state in enumerate(states) if place >= left_out]
    mean = sum(pooled[1:], pooled[0]) / len(pooled)
    return mean / torch.sqrt((mean * mean).sum())


def decoder_states(weights: dict[str, Tensor], sizes: Sizes, ids: list[int]) -> list[Tensor]:
    """The decoder's last hidden state of every token."""
    prefix = "embedding_model."
    states = [weights[prefix + "embed_tokens.weight"][token] for token in ids]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith(prefix + "layers."))
    for number in range(layers):
        layer = {
            name.removeprefix(f"{prefix}layers.{number}."): value
            for name, value in weights.items()
            if name.startswith(f"{prefix}layers.{number}.")
        }
        states = _layer(layer, sizes, states)
    return [_rms(state, weights[prefix + "norm.weight"], sizes.rms_norm_eps) for state in states]


def _layer(layer: dict[str, Tensor], sizes: Sizes, states: list[Tensor]) -> list[Tensor]:
    normed = [_rms(state, layer["input_layernorm.weight"], sizes.rms_norm_eps) for state in states]
    query, key, value = (
        [layer[f"self_attn.{name}_proj.weight"] @ state for state in normed] for name in ("q", "k", "v")
    )
    width = len(query[0]) // sizes.heads
    keys = [_rotated_heads(key, head, width, sizes.rope_theta) for head in range(sizes.kv_heads)]
    queries = [_rotated_heads(query, head, width, sizes.rope_theta) for head in range(sizes.heads)]
    values = [torch.stack(value)[:, head * width : (head + 1) * width] for head in range(sizes.kv_heads)]
    results = []
    for place, state in enumerate(states):
        heads = []
        for head in range(sizes.heads):
            shared = head // (sizes.heads // sizes.kv_heads)
            read = slice(place + 1 if sizes.causal else None)
            heads.append(_read(queries[head][place], keys[shared][read], values[shared][read]))
        state = state + layer["self_attn.o_proj.weight"] @ torch.cat(heads)
        normed_state = _rms(state, layer["post_attention_layernorm.weight"], sizes.rms_norm_eps)
        gate = layer["mlp.gate_proj.weight"] @ normed_state
        up = layer["mlp.up_proj.weight"] @ normed_state
        results.append(state + layer["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
    return results


def latent_attention(weights: dict[str, Tensor], sizes: Sizes, states: list[Tensor]) -> list[Tensor]:
    """Every token reads the latents; then the gated feed-forward."""
    blocks = "latent_attention_model.cross_attend_blocks."
    latents = [
        _layer_norm(latent, weights, blocks + "0.norm_context") for latent in weights["latent_attention_model.latents"]
    ]
    both = torch.stack([weights[blocks + "0.fn.to_kv.weight"] @ latent for latent in latents])
    inner = both.shape[1] // 2
    width = inner // sizes.latent_heads
    results = []
    for state in states:
        query = weights[blocks + "0.fn.to_q.weight"] @ _layer_norm(state, weights, blocks + "0.norm")
        heads = []
        for head in range(sizes.latent_heads):
            mine = slice(head * width, (head + 1) * width)
            heads.append(_read(query[mine], both[:, :inner][:, mine], both[:, inner:][:, mine]))
        state = state + weights[blocks + "0.fn.to_out.weight"] @ torch.cat(heads)
        results.append(state + gated_feed_forward(weights, blocks + "1.", state))
    return results


def gated_feed_forward(weights: dict[str, Tensor], prefix: str, state: Tensor) -> Tensor:
    """The pre-norm GEGLU network, without its residual."""
    normed = _layer_norm(state, weights, prefix + "norm")
    wide = weights[prefix + "fn.net.0.weight"] @ normed + weights[prefix + "fn.net.0.bias"]
    value, gate = wide[: len(wide) // 2], wide[len(wide) // 2 :]
    gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return weights[prefix + "fn.net.2.weight"] @ (value * gelu) + weights[prefix + "fn.net.2.bias"]


def self_attention(weights: dict[str, Tensor], sizes: Sizes, states: list[Tensor]) -> list[Tensor]:
    """The layer that the paper compares with: the text's own tokens in the place of the latents."""
    prefix = "self_attention_model."
    normed = [_layer_norm(state, weights, prefix + "norm") for state in states]
    query = [weights[prefix + "attention.to_q.weight"] @ state for state in normed]
    both = torch.stack([weights[prefix + "attention.to_kv.weight"] @ state for state in normed])
    inner = len(query[0])
    width = inner // sizes.latent_heads
    results = []
    for place, state in enumerate(states):
        heads = []
        for head in range(sizes.latent_heads):
            mine = slice(head * width, (head + 1) * width)
            heads.append(_read(query[place][mine], both[:, :inner][:, mine], both[:, inner:][:, mine]))
        state = state + weights[prefix + "attention.to_out.weight"] @ torch.cat(heads)
        results.append(state + gated_feed_forward(weights, prefix + "feed_forward.", state))
    return results


def _read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q K^T / sqrt(width)) V for one query."""
    weights = (keys @ query / math.sqrt(len(query))).softmax(0)
    return weights @ values


def _rotated_heads(states: list[Tensor], head: int, width: int, theta: float) -> Tensor:
    """One head's vectors of all tokens, each turned by its place."""
    mine = slice(head * width, (head + 1) * width)
    return torch.stack([_rotate(state[mine], place, theta) for place, state in enumerate(states)])


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def _layer_norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + 1e-5) * weights[name + ".weight"] + weights[name + ".bias"]


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    angle = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])
