"""ImpRAG for Llama in plain loops and float64, written from the equations and not from the model's code.

One prompt at a time; a token's vector at a layer is a row of a list. Weights come by their official Llama names.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Reference:
    """Weights and sizes of a Llama, and where ImpRAG cuts its layers."""

    weights: dict[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    b: int
    t: int
    k: int
    l_max: int
    theta: float = 10000.0
    eps: float = 1e-6
    encoding: str = "full"
    trace: dict[str, list[Tensor]] = field(default_factory=dict)

    def weight(self, name: str) -> Tensor:
        return self.weights[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + self.eps) * self.weight(name)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Llama's rotary embedding: coordinate i goes with coordinate i + D / 2."""
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def project(self, x: Tensor, layer: int, part: str, heads: int) -> list[Tensor]:
        """A projection's vector, cut into heads, before rotary embedding."""
        return list((self.weight(f"model.layers.{layer}.self_attn.{part}_proj.weight") @ x).chunk(heads))

    def layer(
        self,
        hidden: list[Tensor],
        layer: int,
        positions: list[int],
        read: list[tuple[list[Tensor], list[Tensor]]],
    ) -> tuple[list[Tensor], list[tuple[list[Tensor], list[Tensor]]]]:
        """One layer: each token reads `read`, then the tokens up to itself. Returns hidden states and own states."""
        name = f"model.layers.{layer}"
        normed = [self.norm(x, f"{name}.input_layernorm.weight") for x in hidden]
        own = []
        for x, position in zip(normed, positions, strict=True):
            keys = [self.rotate(key, position) for key in self.project(x, layer, "k", self.kv_heads)]
            own.append((keys, self.project(x, layer, "v", self.kv_heads)))
        out = []
        for i, x in enumerate(normed):
            visible = read + own[: i + 1]
            heads = []
            for h, query in enumerate(self.project(x, layer, "q", self.heads)):
                query = self.rotate(query, positions[i])
                group = h // (self.heads // self.kv_heads)
                scores = [float(query @ keys[group]) / math.sqrt(len(query)) for keys, _ in visible]
                top = max(scores)
                total = sum(math.exp(s - top) for s in scores)
                heads.append(
                    sum(math.exp(s - top) / total * v[group] for s, (_, v) in zip(scores, visible, strict=True))
                )
            y = hidden[i] + self.weight(f"{name}.self_attn.o_proj.weight") @ torch.cat(heads)
            z = self.norm(y, f"{name}.post_attention_layernorm.weight")
            gate = self.weight(f"{name}.mlp.gate_proj.weight") @ z
            up = self.weight(f"{name}.mlp.up_proj.weight") @ z
            out.append(y + self.weight(f"{name}.mlp.down_proj.weight") @ (gate / (1 + (-gate).exp()) * up))
        return out, own

    def embed(self, ids: list[int]) -> list[Tensor]:
        return [self.weight("model.embed_tokens.weight")[i] for i in ids]

    def last_at_b(self, ids: list[int]) -> Tensor:
        hidden = self.embed(ids)
        for layer in range(self.b):
            hidden, _ = self.layer(hidden, layer, list(range(len(ids))), [])
        return self.norm(hidden[-1], f"model.layers.{self.b}.input_layernorm.weight")

    def query_vector(self, ids: list[int]) -> Tensor:
        heads = self.project(self.last_at_b(ids), self.b, "q", self.heads)
        size = self.heads // self.kv_heads
        return torch.cat([sum(heads[g * size : (g + 1) * size]) / size for g in range(self.kv_heads)])

    def passage_vector(self, ids: list[int]) -> Tensor:
        return torch.cat(self.project(self.last_at_b(ids), self.b, "k", self.kv_heads))

    def passage_states(self, passages: list[list[int]]) -> dict[int, list[tuple[list[Tensor], list[Tensor]]]]:
        """Keys and values of all passage tokens, for the layers b..t."""
        states: dict[int, list] = {layer: [] for layer in range(self.b, self.t + 1)}
        texts = [[i for passage in passages for i in passage]] if self.encoding == "full" else passages
        start = 0
        for ids in texts:
            positions = [start + i for i in range(len(ids))] if self.encoding == "segmented" else list(range(len(ids)))
            start += len(ids)
            hidden = self.embed(ids)
            for layer in range(self.t + 1):
                hidden, own = self.layer(hidden, layer, positions, [])
                if layer >= self.b:
                    states[layer] += own
        return states

    def logits(self, ids: list[int], passages: list[list[int]]) -> Tensor:
        """(L, V) for one prompt."""
        states = self.passage_states(passages)
        shift = self.k * self.l_max if any(passages) else 0
        hidden = self.embed(ids)
        for layer in range(self.layers):
            read = states.get(layer, [])
            hidden, _ = self.layer(hidden, layer, [shift + i for i in range(len(ids))], read)
        head = self.weight("lm_head.weight")
        return torch.stack([head @ self.norm(x, "model.norm.weight") for x in hidden])
