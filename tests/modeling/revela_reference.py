"""Revela written as the paper's equations, one chunk, layer, head and token at a time, in float64; for a Llama LM."""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head vector at one position (the half-split form that Llama uses)."""
    half = x.shape[-1] // 2
    angle = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def _heads(x: Tensor, projection: Tensor, heads: int, rotary: float | None) -> list[list[Tensor]]:
    """[head][token] vectors of a chunk's (tokens, hidden) states."""
    y = x @ projection.T
    dim = y.shape[-1] // heads
    vectors = [[y[t, k * dim : (k + 1) * dim] for t in range(len(x))] for k in range(heads)]
    if rotary is None:
        return vectors
    return [[_rotate(v, t, rotary) for t, v in enumerate(head)] for head in vectors]


def _read(query: Tensor, keys: list[Tensor], values: list[Tensor], v_normalization: bool, eps: float) -> Tensor:
    """softmax(q K^T / sqrt(d)) V, divided by softmax(.) @ ||V||_2 + eps with V-normalisation."""
    scores = torch.stack([(query * key).sum() / math.sqrt(len(query)) for key in keys])
    weights = scores.softmax(0)
    result = sum(w * v for w, v in zip(weights, values, strict=True))
    if v_normalization:
        result = result / (sum(w * v.norm() for w, v in zip(weights, values, strict=True)) + eps)
    return result


def _joint_read(
    query: Tensor,
    own: tuple[list[Tensor], list[Tensor]],
    others: list[tuple[list[Tensor], list[Tensor], Tensor]],
    bias: Tensor,
) -> Tensor:
    """One softmax over the own tokens and those of the other chunks, whose scores get log Sim + bias."""
    scores = [(query * key).sum() / math.sqrt(len(query)) for key in own[0]]
    values = list(own[1])
    for keys, more, weight in others:
        scores += [(query * key).sum() / math.sqrt(len(query)) + weight.log() + bias for key in keys]
        values += more
    return sum(w * v for w, v in zip(torch.stack(scores).softmax(0), values, strict=True))


def reference_similarity(embeddings: Tensor, size: int, temperature: float, queries: Tensor | None = None) -> Tensor:
    """Sim of each group, from the definition; the symmetric form without queries."""
    queries = embeddings if queries is None else queries
    result = torch.zeros(len(embeddings) // size, size, size, dtype=embeddings.dtype)
    rows = []
    for group in range(len(embeddings) // size):
        for i in range(size):
            e = [embeddings[group * size + j] for j in range(size)]
            q = queries[group * size + i]
            scores = [(q @ e[j]) / (q.norm() * e[j].norm()) / temperature for j in range(size) if j != i]
            weights = torch.stack(scores).softmax(0)
            row = [torch.zeros((), dtype=embeddings.dtype)] * size
            for place, j in enumerate(j for j in range(size) if j != i):
                row[j] = weights[place]
            rows.append(torch.stack(row))
    return torch.stack(rows).view_as(result)


def reference_logits(
    lm: LlamaForCausalLM,
    chunks: list[Tensor],
    similarity: Tensor,
    *,
    v_normalization: bool = False,
    eps: float = 1e-6,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Logits (tokens, vocabulary) of stream h of each chunk; `chunks` are token ids without padding.

    With a bias of each layer, the other chunks are read jointly with the own tokens instead of being added.
    """
    config = lm.config
    size = similarity.shape[-1]
    theta = config.rope_parameters["rope_theta"]
    repeats = config.num_attention_heads // config.num_key_value_heads
    stream_e = [lm.model.embed_tokens.weight[ids] for ids in chunks]
    stream_h = list(stream_e)
    for number, layer in enumerate(lm.model.layers):
        attention = layer.self_attn
        projected = {}
        for name, stream in (("e", stream_e), ("h", stream_h)):
            normed = [_rms(x, layer.input_layernorm.weight, config.rms_norm_eps) for x in stream]
            projected[name] = [
                (
                    _heads(x, attention.q_proj.weight, config.num_attention_heads, theta),
                    _heads(x, attention.k_proj.weight, config.num_key_value_heads, theta),
                    _heads(x, attention.v_proj.weight, config.num_key_value_heads, None),
                )
                for x in normed
            ]
        results: dict[str, list[Tensor]] = {"e": [], "h": []}
        for name, stream in (("e", stream_e), ("h", stream_h)):
            for i, x in enumerate(stream):
                q, k, v = projected[name][i]
                tokens = []
                for t in range(len(x)):
                    heads = []
                    for head in range(config.num_attention_heads):
                        group = head // repeats
                        own = k[group][: t + 1], v[group][: t + 1]
                        first = i // size * size
                        others = [
                            (
                                projected["e"][j][1][group],
                                projected["e"][j][2][group],
                                similarity[i // size, i % size, j % size],
                            )
                            for j in range(first, first + size)
                            if j != i and name == "h"
                        ]
                        if bias is not None:
                            heads.append(_joint_read(q[head][t], own, others, bias[number]))
                            continue
                        out = _read(q[head][t], *own, False, 0.0)
                        for keys, values, weight in others:
                            out = out + weight * _read(q[head][t], keys, values, v_normalization, eps)
                        heads.append(out)
                    tokens.append(torch.cat(heads))
                results[name].append(_feed_forward(layer, x + torch.stack(tokens) @ attention.o_proj.weight.T, config))
        stream_e, stream_h = results["e"], results["h"]
    normed = [_rms(x, lm.model.norm.weight, config.rms_norm_eps) for x in stream_h]
    return [x @ lm.lm_head.weight.T for x in normed]


def _feed_forward(layer: torch.nn.Module, x: Tensor, config: object) -> Tensor:
    normed = _rms(x, layer.post_attention_layernorm.weight, config.rms_norm_eps)
    gate = normed @ layer.mlp.gate_proj.weight.T
    return x + (gate * torch.sigmoid(gate) * (normed @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T


def reference_loss(logits: list[Tensor], chunks: list[Tensor]) -> Tensor:
    """Mean next-token cross-entropy over all tokens of all chunks."""
    losses = [
        -row[t].log_softmax(-1)[ids[t + 1]]
        for row, ids in zip(logits, chunks, strict=True)
        for t in range(len(ids) - 1)
    ]
    return torch.stack(losses).mean()
