"""Store the keys and values of a collection's passages on disk, so that they need not be computed for every answer.

This needs a model with `passage_encoding="independent"`, for which the states of a passage depend only on the passage. Each number
of the keys and values in layers b..t takes 2 bytes (float16). Compressed states (OPQ/PQ, heavy-hitter tokens) were removed,
because they raised the perplexity of answers from 14 to between 21 and 78.

    states.json     fingerprint of the model and the passages
    starts.npy      (M + 1,) first token of each passage
    states.npy      (tokens, layers, 2, K, D) keys and values, float16

Shapes: M passages, N passages of a batch, P tokens, K key/value heads, D head dimension.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.files import atomic, local_path
from revela_hub.modeling import ImpRAGModel, PassageStates
from revela_hub.retrieval.index import PassageStore
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder
from revela_hub.trainers.imprag.data import PassageTokens, tokenize_passages

STATES_FOLDER = "states"
METADATA = "states.json"


class StoredStates:
    """Stored states of a collection.

    Args:
        folder: folder that `store_states` wrote.
        first_layer: index b of the first layer.
        fingerprint: fingerprint of the model and its passages; None to skip the comparison.

    Raises:
        UserError: the folder holds no states, or damaged ones, or those of another model or other passages.
    """

    def __init__(self, folder: str | Path, first_layer: int, fingerprint: str | None = None) -> None:
        self.folder, self.first_layer = local_path(folder), first_layer
        try:
            metadata = json.loads((self.folder / METADATA).read_text(encoding="utf-8"))
            self.starts = np.load(self.folder / "starts.npy", allow_pickle=False)
            self.states = np.load(self.folder / "states.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} holds no stored states ({error}): run `index --states float16` again") from error
        if fingerprint is not None and metadata.get("fingerprint") != fingerprint:
            raise UserError(f"{folder} holds the states of another model or other passages: run `index` again")
        if self.states.ndim != 5 or self.starts[-1] != len(self.states):
            raise UserError(f"{folder} is damaged: run `index --states float16` again")

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in sorted(self.folder.iterdir()) if file.is_file())

    def read(self, rows_Bk: NDArray[np.integer]) -> PassageStates:
        """Return the states of k passages for each of B prompts, concatenated."""
        sets = [
            np.concatenate([self.states[self.starts[row] : self.starts[row + 1]] for row in rows]) for rows in rows_Bk
        ]
        longest = max(map(len, sets))
        joined = np.zeros((len(sets), longest, *self.states.shape[1:]), np.float32)
        mask = np.zeros((len(sets), longest), bool)
        for number, states in enumerate(sets):
            joined[number, : len(states)], mask[number, : len(states)] = states, True
        parts = torch.from_numpy(joined).permute(2, 3, 0, 4, 1, 5)  # (layers, 2, B, K, S, D)
        keys, values = tuple(parts[:, 0].unbind(0)), tuple(parts[:, 1].unbind(0))
        return PassageStates(keys, values, torch.from_numpy(mask), self.first_layer)


def store_states(
    model: ImpRAGModel,
    passages: PassageTokens,
    folder: str | Path,
    *,
    fingerprint: str,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> StoredStates:
    """Encode all passages and write their states, with the fingerprint of the model and the passages.

    Raises:
        UserError: the model does not encode passages independently, or the disk is full.
    """
    _check_independent(model)
    folder = local_path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    starts = passages.starts - passages.starts[0]
    batches = range(0, len(passages), batch_size)
    with atomic(folder) as temporary:
        temporary.mkdir()
        # Not written through a memory map, which ends the process if the disk is full.
        with (temporary / "states.npy").open("wb") as stream:
            for first in tqdm(batches, desc="Storing states", unit=" batches", disable=not show_progress_bar):
                rows = np.arange(first, min(first + batch_size, len(passages)))
                for states in passage_states(model, *passages.batch(rows)):
                    if not stream.tell():
                        shape = (int(starts[-1]), *states.shape[1:])
                        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
                        np.lib.format.write_array_header_1_0(stream, header)
                    stream.write(states.tobytes())
        np.save(temporary / "starts.npy", starts)
        (temporary / METADATA).write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
    return StoredStates(folder, model.config.b, fingerprint)


def check_states(encoder: ImpRAGEncoder) -> None:
    """Raise a `UserError` if the model does not encode passages independently, before anything is encoded."""
    _check_independent(encoder.model)


def _check_independent(model: ImpRAGModel) -> None:
    if model.config.passage_encoding != "independent":
        raise UserError(
            "states can only be stored with passage_encoding independent, but this model has"
            f" {model.config.passage_encoding}, where they depend on the previous passages"
        )


def store_index_states(
    encoder: ImpRAGEncoder, store: PassageStore, *, batch_size: int = 32, show_progress_bar: bool = False
) -> StoredStates:
    """Store the states of an index's passages in its folder; see `store_states`."""
    return store_states(
        encoder.model,
        tokenize_passages(encoder.tokenizer, store.texts(range(len(store))), encoder.model.config.l_max),
        store.folder / STATES_FOLDER,
        fingerprint=store.metadata.fingerprint + store.metadata.texts,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
    )


@torch.no_grad()
def passage_states(model: ImpRAGModel, ids_NP: Tensor, mask_NP: Tensor) -> Iterator[NDArray[np.float16]]:
    """Yield the (tokens, layers, 2, K, D) states of each passage."""
    layers = model.layer_states(ids_NP.to(model.device), range(model.config.b, model.config.t + 1))
    # (N, P, layers, 2, K, D)
    both = torch.stack([torch.stack([layer.key, layer.value]) for layer in layers]).permute(2, 4, 0, 1, 3, 5)
    for states, mask in zip(both, mask_NP.bool(), strict=True):
        yield states[: int(mask.sum())].to(torch.float16).cpu().numpy()
