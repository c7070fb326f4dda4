"""Attention to retrieved passages (ImpRAG, arXiv 2506.02279): one softmax over [passage states; own tokens so far].

It is an attention function, registered with transformers under the names `imprag_sdpa` and `imprag_eager`, so that no decoder
has to be copied: a model set to one of these names behaves as usual unless its forward gets `imprag=Reading(...)`. Features of
a family's attention (grouped queries, soft caps, dropout) also apply to passages, because the family's own function is called
with the keys and values of the passages in front.

Sliding windows (Gemma 2 and 3, Mistral) apply within a passage set and within the prompt. The prompt attends to whole passages
in every reading layer, as in the equations.

Shapes: B passage sets, R = n * B rows of a prompt (n beams or candidates share a set), L tokens, S passage tokens,
T = L + cached tokens, H heads, K key/value heads, D head dimension, E that of the values (D in most families).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .backbones import DECODER_ADVICE, additive, eager_attention


@dataclass(frozen=True)
class PassageStates:
    """Keys (after rotary embedding) and values of passages, for the layers that read them.

    Attributes:
        keys: (B, K, S, D) for each of the layers b..t.
        values: (B, K, S, E) for each of these layers.
        mask: (B, S), True on passage tokens.
        first_layer: index b of the first of these layers.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    first_layer: int

    def __len__(self) -> int:
        """Return the number of passage sets, B."""
        return len(self.mask)

    def select(self, rows: Tensor) -> "PassageStates":
        """Return the states of some sets, in any order."""
        return self._mapped(lambda part: part[rows], self.mask[rows])

    def among(self, reads_B: Tensor) -> "PassageStates":
        """Return B sets: these states where `reads_B` is True, in order, and sets without passages elsewhere."""
        states = self.select((reads_B.long().cumsum(0) - 1).clamp(min=0))  # of any other set, but masked
        return replace(states, mask=states.mask & reads_B[:, None])

    def side_by_side(self, sets: int) -> "PassageStates":
        """Join the states of single passages (B * k, K, P, D) into those of sets (B, K, S, D), without padding between."""
        mask_BS = self.mask.reshape(sets, -1)
        order = mask_BS.long().argsort(dim=-1, descending=True, stable=True)[:, : int(mask_BS.sum(-1).max())]

        def joined(part: Tensor) -> Tensor:
            _, heads, length, dim = part.shape
            part_BSKD = part.view(sets, -1, heads, length, dim).transpose(2, 3).reshape(sets, -1, heads, dim)
            return part_BSKD.gather(1, order[:, :, None, None].expand(-1, -1, heads, dim)).transpose(1, 2)

        return self._mapped(joined, mask_BS.gather(-1, order))

    def _mapped(self, change: Callable[[Tensor], Tensor], mask: Tensor) -> "PassageStates":
        return replace(self, keys=tuple(map(change, self.keys)), values=tuple(map(change, self.values)), mask=mask)


@dataclass
class Reading:
    """Argument of a decoder's forward that the attention of every layer receives.

    Attributes:
        states: passages to read, in the layers that they have states for.
        record: layers whose states are recorded.
        recorded: queries (R, H, L, D), keys (R, K, L, D) and values (R, K, L, E) by layer.
        layer_b: layer b of the running model, which the next two change; the backbone may belong to several models.
        before_rotary: whether layer b skips the rotary embedding; its output is then not meaningful.
        repeats: candidates per row: from layer b on, each row is repeated this many times.
        calls: layers among these whose attention was called, for `check`.
    """

    states: PassageStates | None = None
    record: range = range(0)
    recorded: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    layer_b: nn.Module | None = None
    before_rotary: bool = False
    repeats: int = 1
    calls: list[int] = field(default_factory=list)

    def check(self) -> None:
        """Check, after a forward pass, that each layer that reads or is recorded called the attention function once.

        Otherwise the model would ignore passages, or read them twice, without an error.
        """
        states = self.states
        first, last = (0, 0) if states is None else (states.first_layer, states.first_layer + len(states.keys))
        wrong = [layer for layer in (*self.record, *range(first, last)) if self.calls.count(layer) != 1]
        self.calls.clear()
        if wrong:
            raise ValueError(
                f"layer {wrong[0]} does not call transformers' attention interface exactly once, so it cannot read passages;"
                f" {DECODER_ADVICE}"
            )

    def at_layer_b(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change the inputs of layer b, as a pre-hook of the layer."""
        if self.before_rotary and kwargs.get("position_embeddings") is not None:
            # Rotate by an angle of 0, whatever the family's layout, so that the attention gets unrotated projections.
            rotation = kwargs["position_embeddings"]
            if isinstance(rotation, Tensor):  # complex numbers (Llama 4, DeepSeek V2)
                kwargs["position_embeddings"] = torch.ones_like(rotation)
            else:
                kwargs["position_embeddings"] = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        if self.repeats > 1:
            args = (args[0].repeat_interleave(self.repeats, 0), *args[1:])
        return args, kwargs


def _attention(
    sdpa: Callable[..., tuple[Tensor, Tensor | None]] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    imprag: Reading | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call the family's own attention, with passages in front if there are any for this layer.

    An attention function like those of `AttentionInterface`, after its first argument: None for the family's own eager attention.
    """
    own = eager_attention(module) if sdpa is None else sdpa
    if imprag is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]  # an int in every decoder with a cache
    states = imprag.states
    if layer in imprag.record:
        imprag.calls.append(layer)
        # Recorded once: gradient checkpointing calls this function again in the backward pass.
        imprag.recorded.setdefault(layer, (query, key, value))
    if states is not None and 0 <= layer - states.first_layer < len(states.keys):
        imprag.calls.append(layer)
        times = len(query) // len(states)
        passage_key, passage_value = (
            _for_each_row(part[layer - states.first_layer].to(key.dtype), times)
            for part in (states.keys, states.values)
        )
        attention_mask = _mask_over_both(attention_mask, _for_each_row(states.mask, times), query, key)
        key, value = torch.cat([passage_key, key], dim=2), torch.cat([passage_value, value], dim=2)
    return own(module, query, key, value, attention_mask, **kwargs)


def right_padded(ids_NL: Tensor, mask_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Move the tokens of each row to its beginning, in order, and drop columns that are padding in all rows."""
    order = mask_NL.long().argsort(dim=-1, descending=True, stable=True)
    longest = max(1, int(mask_NL.sum(-1).max()))
    return ids_NL.gather(-1, order)[:, :longest], mask_NL.gather(-1, order)[:, :longest]


def _for_each_row(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, 0)


def _mask_over_both(own: Tensor | None, passages_RS: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return an (R, 1, L, S + T) mask of the kind that the model uses: boolean, or added to the scores."""
    rows, _, length, _ = query.shape
    total = key.shape[2]
    if own is None:
        # transformers passes no mask for a single token, which attends to everything, or if the cache is empty.
        own = torch.ones(1, 1, length, total, dtype=torch.bool, device=key.device)
        own = own if length == 1 else own.tril()
    own = own[..., :total].expand(rows, -1, length, total)
    passages = passages_RS[:, None, None, :].expand(rows, own.shape[1], length, -1)
    if own.dtype != torch.bool:
        passages = additive(passages, own.dtype)
    return torch.cat([passages, own], dim=-1)


AttentionInterface.register("imprag_sdpa", partial(_attention, sdpa_attention_forward))
AttentionInterface.register("imprag_eager", partial(_attention, None))
AttentionMaskInterface.register("imprag_sdpa", sdpa_mask)
AttentionMaskInterface.register("imprag_eager", eager_mask)
