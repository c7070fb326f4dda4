"""Keys and values of a collection's passages on disk, for models with independent passage encoding: read, not computed.

Heavy hitters: of each passage the tokens are kept that the tokens after them look at most, as H2O (arXiv 2306.14048)
chooses what stays in a cache: the attention that a token receives within its passage, summed over the queries after it,
over heads and over the layers that read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGModel, PassageStates
from revela_hub.retrieval.states import StatesFacts, TokenStates, write_states
from revela_hub.retrieval.store import PassageStore
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages

FOLDER = "states"
SAMPLE_PASSAGES = 256


class StoredStates:
    """The states of a collection, as a model reads them."""

    def __init__(self, folder: str | Path, first_layer: int, key: str | None = None) -> None:
        self.tokens, self.first_layer = TokenStates(folder, key), first_layer

    def read(self, rows_Bk: NDArray[np.integer]) -> PassageStates:
        """The states of k passages for each of B prompts, side by side."""
        sets = [np.concatenate([self.tokens.read(int(row)) for row in rows]) for rows in rows_Bk]
        longest, (_, vectors, dimension) = max(map(len, sets)), sets[0].shape
        joined = np.zeros((len(sets), longest, vectors, dimension), np.float32)
        mask = np.zeros((len(sets), longest), bool)
        for number, states in enumerate(sets):
            joined[number, : len(states)], mask[number, : len(states)] = states, True
        # Vectors of a token: layer by layer the heads of the keys, then those of the values.
        layers = self._layers(vectors)
        parts = torch.from_numpy(joined).unflatten(2, (layers, 2, -1)).permute(2, 3, 0, 4, 1, 5)
        keys, values = tuple(parts[:, 0].unbind(0)), tuple(parts[:, 1].unbind(0))
        return PassageStates(keys, values, torch.from_numpy(mask), self.first_layer)

    def _layers(self, vectors: int) -> int:
        layers = int(self.tokens.facts.key.rpartition(" layers=")[2])
        if vectors % (2 * layers):
            raise UserError(f"{self.tokens.folder} is damaged: make the index again")
        return layers


def states_key(model: ImpRAGModel, fingerprint: str) -> str:
    """What stored states belong to: the model and its passages, and how many layers read."""
    return f"{fingerprint} layers={model.config.t - model.config.b + 1}"


def store_states(
    model: ImpRAGModel,
    passages: PassageTokens,
    folder: str | Path,
    *,
    fingerprint: str,
    compression: Literal["float16", "pq"] = "pq",
    pq: int = 8,
    kept: float = 1.0,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> StoredStates:
    """Encodes all passages and writes their states.

    Args:
        model: with `passage_encoding="independent"`.
        passages: the collection's tokens.
        folder: where to.
        fingerprint: of the model and the passages.
        compression: as float16, or by OPQ and PQ.
        pq: bytes of a compressed vector.
        kept: the share of each passage's tokens to keep, the heaviest hitters; at least one.
        batch_size: passages per forward pass.
        show_progress_bar: whether to show one on standard error.

    Raises:
        UserError: the model's passages are not encoded independently, or what `write_states` raises.
    """
    check_states(model, pq if compression == "pq" else None)
    if not 0 < kept <= 1:
        raise UserError(f"the share of tokens to keep must be above 0 and at most 1, not {kept}")
    rows = np.arange(len(passages))

    def encoded(numbers: NDArray[np.int64], bar: bool) -> Iterator[NDArray[np.float32]]:
        starts = range(0, len(numbers), batch_size)
        for start in tqdm(starts, desc="Storing states", unit=" batches", disable=not bar):
            yield from passage_states(model, *passages.batch(numbers[start : start + batch_size]), kept=kept)

    sample = None
    if compression == "pq":
        drawn = np.random.default_rng(0).permutation(rows)[:SAMPLE_PASSAGES]
        sample = np.concatenate(list(encoded(drawn, False)))
    first = next(encoded(rows[:1], False))
    key = states_key(model, fingerprint)
    facts = StatesFacts(key, first.shape[1], first.shape[2], pq if compression == "pq" else 0, kept)
    write_states(encoded(rows, show_progress_bar), folder, facts, sample, show_progress_bar=show_progress_bar)
    return StoredStates(folder, model.config.b, key)


def check_states(model: ImpRAGModel, pq: int | None) -> None:
    """Looks at what can be known before anything is encoded.

    Raises:
        UserError: the model's passages are not encoded independently, or its vectors cannot be cut into `pq` parts.
    """
    if model.config.passage_encoding != "independent":
        raise UserError(
            f"states can be stored for passage_encoding independent only, and this model's is"
            f" {model.config.passage_encoding}: there they depend on the passages before"
        )
    backbone: Any = model.config.backbone
    dimension = getattr(backbone, "head_dim", None) or backbone.hidden_size // backbone.num_attention_heads
    if pq is not None and dimension % pq:
        raise UserError(f"vectors of {dimension} numbers cannot be cut into {pq} parts: choose a divisor")


def store_index_states(
    model: ImpRAGModel,
    tokenizer: PreTrainedTokenizerBase,
    store: PassageStore,
    *,
    compression: Literal["float16", "pq"],
    pq: int = 8,
    kept: float = 1.0,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> StoredStates:
    """Stores the states of an index's passages in its folder; see `store_states`."""
    texts = store.texts(range(len(store)))
    tokens = tokenize_passages(tokenizer, texts, model.config.l_max)
    return store_states(
        model,
        tokens,
        store.folder / FOLDER,
        fingerprint=store.facts.fingerprint + store.facts.texts,
        compression=compression,
        pq=pq,
        kept=kept,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
    )


@torch.no_grad()
def passage_states(
    model: ImpRAGModel, ids_NP: Tensor, mask_NP: Tensor, kept: float = 1.0
) -> Iterator[NDArray[np.float32]]:
    """The (tokens, vectors, dimension) states of each passage, of its heaviest hitters only if so asked."""
    device = model.device
    layers = model.layer_states(ids_NP.to(device), range(model.config.b, model.config.t + 1))
    # (N, P, layers, 2, K, D)
    both = torch.stack([torch.stack([layer.key, layer.value]) for layer in layers]).permute(2, 4, 0, 1, 3, 5)
    received_NP = sum(attention_received(layer.query, layer.key, mask_NP.to(device), layer.scaling) for layer in layers)
    assert isinstance(received_NP, Tensor)
    for states, received, mask in zip(both, received_NP, mask_NP.to(device).bool(), strict=True):
        count = int(mask.sum())
        chosen = torch.arange(count, device=device)
        if kept < 1:
            chosen = received[:count].topk(max(1, round(kept * count))).indices.sort().values
        yield states[chosen].flatten(1, 3).float().cpu().numpy()


def attention_received(query_NHPD: Tensor, key_NKPD: Tensor, mask_NP: Tensor, scaling: float) -> Tensor:
    """(N, P) attention that each token receives from itself and those after it, summed over heads; padding gives none."""
    heads, length = query_NHPD.shape[1:3]
    key_NHPD = key_NKPD.repeat_interleave(heads // key_NKPD.shape[1], 1)
    scores = (query_NHPD @ key_NHPD.transpose(-1, -2)) * scaling
    causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return (weights * mask_NP[:, None, :, None]).sum((1, 2))
