"""Prompts to answers: the tokens of a trained ImpRAG model, its vectors, and batches of `generate` over an index."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.trainers.common.passages import tokenize_passages
from revela_hub.trainers.imprag.inference.encoder import on_device

if TYPE_CHECKING:
    from revela_hub.trainers.imprag.inference.stored_states import StoredStates


@dataclass(frozen=True)
class PassageRead:
    """A passage that a prompt retrieved: its number in the index, its score (dot product), its text and where it stands."""

    number: int
    score: float
    text: str
    place: str


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered, and what was read for it, best first."""

    text: str
    passages: tuple[PassageRead, ...]

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return {"answer": self.text, "passages": [asdict(passage) for passage in self.passages]}


class Found(Protocol):
    """A passage as a collection gives it back."""

    @property
    def score(self) -> float:
        """How near it is."""
        ...

    @property
    def text(self) -> str:
        """All of it."""
        ...

    @property
    def location(self) -> str:
        """Where it stands."""
        ...


class Collection(Protocol):
    """Passages that can be searched: `revela_hub.retrieval.PassageStore`, or anything with these methods."""

    def __len__(self) -> int:
        """How many passages there are."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int, /) -> Any:
        """Scores and numbers, (B, k) each, of the passages nearest to (B, E) vectors, best first: `Hits`."""
        ...

    def found(self, hits: Any, /) -> Sequence[Sequence[Found]]:
        """The passages of hits."""
        ...


class Answerer:
    """Answers prompts with a model and a collection of passages.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        collection: what to retrieve from; None answers without passages.
        k: passages for a prompt; by default the model's.
        states: keys and values of the passages (`stored_states.StoredStates`), read instead of the texts.

    Raises:
        UserError: k is more than the model reads, or than the collection has.
    """

    def __init__(
        self,
        model: ImpRAGForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        collection: Collection | None,
        k: int | None = None,
        states: "StoredStates | None" = None,
    ) -> None:
        self.model, self.tokenizer, self.collection, self.states = model, tokenizer, collection, states
        self.k = model.config.k if k is None else k
        if self.k > model.config.k:
            raise UserError(f"k={self.k} passages were asked for, but the model reads at most {model.config.k}")
        if collection is not None and self.k > len(collection):
            raise UserError(f"k={self.k} passages were asked for, but the index holds {len(collection)}: lower k")

    def answer(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 32,
        batch_size: int = 8,
        places: Sequence[str] | None = None,
        **generation: Any,
    ) -> Iterator[Answer]:
        """Answers prompts in their order, greedily by default.

        Args:
            prompts: the texts, each ended where the answer begins.
            max_new_tokens: of an answer, at most.
            batch_size: prompts at a time.
            places: where the prompts stand, for messages; by default "prompt 1", ...
            **generation: of `generate`: `do_sample`, `num_beams`, ...

        Raises:
            UserError: a prompt is empty, or too long for the model.
        """
        rows = self.tokenizer([without_surrogates(prompt) for prompt in prompts])["input_ids"]
        self._check(rows, max_new_tokens, places or [f"prompt {n}" for n in range(1, len(rows) + 1)])
        for start in range(0, len(rows), batch_size):
            ids, mask = left_padded(rows[start : start + batch_size])
            ids, mask = ids.to(self.model.device), mask.to(self.model.device)
            read, passages = self._retrieve(ids, mask)
            ended = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                **passages,
                **({"do_sample": False} | generation),
            )
            texts = self.tokenizer.batch_decode(ended[:, ids.shape[1] :], skip_special_tokens=True)
            for text, found in zip(texts, read, strict=True):
                yield Answer(str(text).strip(), found)

    def _retrieve(self, ids: Tensor, mask: Tensor) -> tuple[list[tuple[PassageRead, ...]], dict[str, Any]]:
        """What is read for each prompt, and as what `generate` takes it."""
        if self.collection is None:
            return [()] * len(ids), {}
        vectors = self.model.embed_queries(ids, mask).detach().float().cpu().numpy()
        hits = self.collection.search(vectors, self.k)
        rows_Bk = np.asarray(hits[1])
        if rows_Bk.shape[1] < self.k or (rows_Bk < 0).any():
            raise UserError(f"the index found fewer than k={self.k} passages: lower k, or make an exact index")
        read = [
            tuple(PassageRead(n, hit.score, hit.text, hit.location) for n, hit in zip(row, found, strict=True))
            for row, found in zip(rows_Bk.tolist(), self.collection.found(hits), strict=True)
        ]
        device = ids.device
        if self.states is not None:
            return read, {"passage_states": self.states.read(rows_Bk).to(device)}
        flat = [passage.text for found in read for passage in found]
        tokens = tokenize_passages(self.tokenizer, flat, self.model.config.l_max)
        passage_ids, passage_mask = tokens.batch(np.arange(len(flat)).reshape(rows_Bk.shape))
        return read, {
            "passage_input_ids": passage_ids.to(device),
            "passage_attention_mask": passage_mask.to(device),
        }

    def _check(self, rows: list[list[int]], max_new_tokens: int, places: Sequence[str]) -> None:
        config = self.model.config
        positions = getattr(config.backbone, "max_position_embeddings", None)
        room = None if positions is None else positions - max_new_tokens
        if room is not None and self.collection is not None:
            room -= config.k * config.l_max
        for place, row in zip(places, rows, strict=True):
            if not row:
                raise UserError(f"{place} is empty")
            if room is not None and room < 1:
                raise UserError(
                    f"an answer of {max_new_tokens} tokens, with the passages, is more than the model's {positions} positions:"
                    " lower --max_new_tokens"
                )
            if room is not None and len(row) > room:
                raise UserError(
                    f"{place} has {len(row)} tokens, but with its passages and an answer of {max_new_tokens}"
                    f" there is room for {room}: shorten it"
                )


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of prompts to be continued.

    >>> left_padded([[5, 6, 7], [8]])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def open_answerer(name: str, index: str, *, k: int | None = None, device: str | None = None) -> Answerer:
    """A model with the index that was made by it.

    Args:
        name: the model's folder or Hub id.
        index: what `revela-hub index` wrote; stored states that lie in it are read instead of the passages' texts.
        k: passages for a prompt.
        device: by default the fastest there is.

    Raises:
        UserError: one of the two cannot be read, the index is of another model, or holds fewer than k passages.
    """
    from revela_hub.retrieval.encoder import model_identity
    from revela_hub.retrieval.store import PassageStore
    from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint
    from revela_hub.trainers.imprag.inference.stored_states import FOLDER, StoredStates

    loaded = load_imprag_checkpoint(name, dtype="auto")
    store = PassageStore(index, model_identity(name), name)
    states = None
    if (store.folder / FOLDER).is_dir():
        fingerprint = store.facts.fingerprint + store.facts.texts
        states = StoredStates(store.folder / FOLDER, loaded.model.config.b, fingerprint)
    return Answerer(on_device(loaded.model, device), loaded.tokenizer, store, k, states)
