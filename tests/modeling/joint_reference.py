"""Revela with joint reading, one chunk, layer, head and token at a time, in float64; for a Llama LM."""

import math

import torch
from revela_reference import _feed_forward, _heads, _rms
from torch import Tensor
from transformers import LlamaForCausalLM


def joint_logits(lm: LlamaForCausalLM, chunks: list[Tensor], similarity: Tensor, bias: Tensor) -> list[Tensor]:
    """Logits (tokens, vocabulary) of stream h of each chunk; `chunks` are token ids without padding."""
    config, size = lm.config, similarity.shape[-1]
    theta, repeats = config.rope_parameters["rope_theta"], config.num_attention_heads // config.num_key_value_heads
    stream_e = [lm.model.embed_tokens.weight[ids] for ids in chunks]
    stream_h = list(stream_e)
    for number, layer in enumerate(lm.model.layers):
        attention, projected = layer.self_attn, {}
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
                        query = q[head][t] / math.sqrt(len(q[head][t]))
                        logits = [query @ key for key in k[group][: t + 1]]
                        values = list(v[group][: t + 1])
                        if name == "h":
                            first = i // size * size
                            for j in range(first, first + size):
                                if j != i:
                                    _, k_j, v_j = projected["e"][j]
                                    more = similarity[i // size, i % size, j % size].log() + bias[number]
                                    logits += [query @ key + more for key in k_j[group]]
                                    values += list(v_j[group])
                        weights = torch.stack(logits).softmax(0)
                        heads.append(sum(w * value for w, value in zip(weights, values, strict=True)))
                    tokens.append(torch.cat(heads))
                results[name].append(_feed_forward(layer, x + torch.stack(tokens) @ attention.o_proj.weight.T, config))
        stream_e, stream_h = results["e"], results["h"]
    normed = [_rms(x, lm.model.norm.weight, config.rms_norm_eps) for x in stream_h]
    return [x @ lm.lm_head.weight.T for x in normed]
