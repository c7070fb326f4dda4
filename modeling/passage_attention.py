"""Attention to retrieved passages (ImpRAG, arXiv 2506.02279): one softmax over [passage states; own tokens so far].

It is one attention function, registered with transformers under the names `imprag_sdpa` and `imprag_eager`, so no decoder
is copied: a model set to one of these names behaves as usual until `imprag=Reading(...)` reaches its forward. What a
family does in its own attention (grouped queries, soft caps, dropout) holds for the passages as well, because the family's
own function is called with the passages' keys and values in front.

Sliding windows (Gemma 2 and 3, Mistral) hold among the tokens of a passage set and among those of the prompt; the passages
are read whole by every layer that reads, as the equations have it.

Shapes: B passage sets, R = n * B rows of a prompt (n beams or candidates share a set), L tokens, S passage tokens,
T = L + cached tokens, H heads, K key/value heads, D head dimension, E that of the values (D in most families).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .backbones import eager_attention


@dataclass(frozen=True)
class PassageStates:
    """Keys (after rotary embedding) and values of passages, for the layers that read them.

    Attributes:
        keys: (B, K, S, D) for each of the layers b..t, layer b first.
        values: (B, K, S, E), as `keys`.
        mask: (B, S), True where there is a passage token.
        first_layer: b.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    first_layer: int

    def __len__(self) -> int:
        """The number of passage sets, B."""
        return len(self.mask)

    def to(self, *args: Any, **kwargs: Any) -> "PassageStates":
        """Moves, or casts, keys and values, as `Tensor.to`."""
        keys = tuple(key.to(*args, **kwargs) for key in self.keys)
        values = tuple(value.to(*args, **kwargs) for value in self.values)
        return replace(self, keys=keys, values=values, mask=self.mask.to(keys[0].device))

    def select(self, rows: Tensor) -> "PassageStates":
        """The states of some sets, in any order."""
        keys, values = tuple(key[rows] for key in self.keys), tuple(value[rows] for value in self.values)
        return replace(self, keys=keys, values=values, mask=self.mask[rows])


@dataclass
class LayerStates:
    """What a layer's attention was given: queries (R, H, L, D), keys (R, K, L, D) and values (R, K, L, E)."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass
class Reading:
    """What reaches the attention of every layer.

    Attributes:
        states: the passages to read, in the layers that they have states for.
        record: the layers whose states are wanted; they are put into `recorded`.
        before_rotary: whether layer b leaves out the rotary embedding (its own output is then of no use).
        repeats: candidates for each row: from layer b on, each row stands for that many.
    """

    states: PassageStates | None = None
    record: range = range(0)
    recorded: dict[int, LayerStates] = field(default_factory=dict)
    before_rotary: bool = False
    repeats: int = 1

    def at_layer_b(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Changes the inputs of layer b, as a pre-hook of the layer."""
        if self.before_rotary and kwargs.get("position_embeddings") is not None:
            # A rotation by nothing, whatever the family's layout: what the attention gets is what the projections gave.
            rotation = kwargs["position_embeddings"]
            if isinstance(rotation, Tensor):  # complex numbers (Llama 4, DeepSeek V2)
                kwargs["position_embeddings"] = torch.ones_like(rotation)
            else:
                kwargs["position_embeddings"] = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        if self.repeats > 1:
            args = (args[0].repeat_interleave(self.repeats, 0), *args[1:])
        return args, kwargs


def imprag_sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function `imprag_sdpa`; arguments and result as every function of `AttentionInterface`."""
    return _attention(sdpa_attention_forward, module, query, key, value, attention_mask, **kwargs)


def imprag_eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function `imprag_eager`: the model's own eager attention."""
    return _attention(eager_attention(module), module, query, key, value, attention_mask, **kwargs)


def _attention(
    own: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    imprag: Reading | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The family's own attention, over the passages too where there are some for this layer."""
    if imprag is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]  # an int in every decoder that can cache
    # Kept once: gradient checkpointing comes here again in the backward pass.
    if layer in imprag.record and layer not in imprag.recorded:
        imprag.recorded[layer] = LayerStates(query, key, value)
    states = imprag.states
    if states is not None and 0 <= layer - states.first_layer < len(states.keys):
        plain = own is sdpa_attention_forward and kwargs.get("position_bias") is None and not kwargs.get("dropout")
        plain = plain and (attention_mask is None or attention_mask.dtype == torch.bool)
        if plain and query.shape[2] == 1:
            return _one_token(states, layer, query, key, value, attention_mask, kwargs.get("scaling")), None
        times = len(query) // len(states)
        passage_key, passage_value = (
            _for_each_row(part[layer - states.first_layer].to(key.dtype), times)
            for part in (states.keys, states.values)
        )
        attention_mask = _mask_over_both(attention_mask, _for_each_row(states.mask, times), query, key)
        key, value = torch.cat([passage_key, key], dim=2), torch.cat([passage_value, value], dim=2)
    return own(module, query, key, value, attention_mask, **kwargs)


def _one_token(
    states: PassageStates,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """(R, 1, H, E) for a step of decoding: one softmax over two products, which copies no passage's keys or values.

    Queries of heads, and of rows, that share keys become more queries of those keys.
    """
    passage_key, passage_value = (
        part[layer - states.first_layer].to(key.dtype) for part in (states.keys, states.values)
    )
    sets, kv_heads, _, dim = passage_key.shape
    rows, heads = query.shape[:2]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim) * (dim**-0.5 if scaling is None else scaling)

    def by_set(tensor: Tensor) -> Tensor:
        """(R, K, G, X) to (B, K, n * G, X)."""
        grouped_by_set: Tensor = tensor.unflatten(0, (sets, -1)).transpose(1, 2).flatten(2, 3)
        return grouped_by_set

    def by_row(tensor: Tensor) -> Tensor:
        grouped_by_row: Tensor = tensor.unflatten(2, (rows // sets, -1)).transpose(1, 2).flatten(0, 1)
        return grouped_by_row

    lowest = torch.finfo(grouped.dtype).min
    to_passages = (by_set(grouped) @ passage_key.transpose(-1, -2)).masked_fill(~states.mask[:, None, None], lowest)
    to_own = grouped @ key.transpose(-1, -2)
    if attention_mask is not None:
        to_own = to_own.masked_fill(~attention_mask[..., : key.shape[2]], lowest)
    scores = torch.cat([by_row(to_passages), to_own], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    passages, own = weights.split([passage_key.shape[2], key.shape[2]], dim=-1)
    output: Tensor = by_row(by_set(passages) @ passage_value) + own @ value
    return output.reshape(rows, 1, heads, -1)


def _for_each_row(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, 0)


def _mask_over_both(own: Tensor | None, passages_RS: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(R, 1, L, S + T), of the kind that the model's own mask has: boolean, or added to the scores."""
    rows, _, length, _ = query.shape
    total = key.shape[2]
    if own is None:
        # Transformers leaves the mask out for a single token, which sees all, and where the cache is empty.
        own = torch.ones(1, 1, length, total, dtype=torch.bool, device=key.device)
        own = own if length == 1 else own.tril()
    own = own[..., :total].expand(rows, -1, length, total)
    passages = passages_RS[:, None, None, :].expand(rows, own.shape[1], length, -1)
    if own.dtype != torch.bool:
        passages = torch.zeros(passages.shape, dtype=own.dtype, device=own.device).masked_fill(
            ~passages, torch.finfo(own.dtype).min
        )
    return torch.cat([passages, own], dim=-1)


AttentionInterface.register("imprag_sdpa", imprag_sdpa_attention)
AttentionInterface.register("imprag_eager", imprag_eager_attention)
AttentionMaskInterface.register("imprag_sdpa", sdpa_mask)
AttentionMaskInterface.register("imprag_eager", eager_mask)
