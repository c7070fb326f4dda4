"""Answer prompts with a trained ImpRAG model over a collection of passages."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.loading import varying_shapes
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder, on_device
from revela_hub.trainers.imprag.data import tokenize_passages

if TYPE_CHECKING:
    from revela_hub.retrieval.passages import Hit
    from revela_hub.retrieval.rerank import Reranker


@dataclass(frozen=True)
class PassageRead:
    """A retrieved passage: its number in the index, its score (dot product), its text and its location."""

    number: int
    score: float
    text: str
    place: str


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt, and the passages that were read for it, best first."""

    text: str
    passages: tuple[PassageRead, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return {"answer": self.text, "passages": [asdict(passage) for passage in self.passages]}


class PassageIndex(Protocol):
    """A searchable collection of passages: `revela_hub.retrieval.PassageStore`, or any object with these methods."""

    def __len__(self) -> int:
        """Return the number of passages."""
        ...

    def search(self, vectors: NDArray[np.float32], k: int, /) -> Any:
        """Return the scores and numbers, (B, k) each, of the passages nearest to (B, E) vectors, best first."""
        ...

    def found(self, hits: Any, /) -> "Sequence[Sequence[Hit]]":
        """Return the passages of search results."""
        ...


class Answerer:
    """Answer prompts with a model and a collection of passages.

    Args:
        model: model in eval mode.
        tokenizer: its tokenizer.
        collection: collection to retrieve from; None to answer without passages.
        num_passages: passages per prompt; by default the model's.

    Attributes:
        k: passages per prompt.
        reranker: scores prompts with passages (`revela_hub.retrieval.rerank.Reranker`) to choose the k that are read.
        rerank_depth: passages per prompt to choose from.

    Raises:
        UserError: `num_passages` is more than the model reads, or than the collection holds.
    """

    def __init__(
        self,
        model: ImpRAGForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        collection: PassageIndex | None,
        num_passages: int | None = None,
        *,
        k: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.collection = model, tokenizer, collection
        self.reranker: Reranker | None = None
        self.rerank_depth = 50
        num_passages = k if num_passages is None else num_passages  # its earlier name
        self.k = model.config.k if num_passages is None else num_passages
        asked = f"--num_passages {self.k} is more than the"
        if self.k > model.config.k:
            raise UserError(f"{asked} {counted(model.config.k, 'passage')} that the model reads: lower it")
        if collection is not None and self.k > len(collection):
            raise UserError(f"{asked} {counted(len(collection), 'passage')} of the index: lower it")

    def answer(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 32,
        batch_size: int = 8,
        places: Sequence[str] | None = None,
        **generation: Any,
    ) -> Iterator[Answer]:
        """Answer prompts in order, with greedy decoding by default.

        Args:
            prompts: texts that end where the answer begins.
            max_new_tokens: maximum tokens of an answer.
            batch_size: prompts per batch.
            places: locations of the prompts, for messages; by default "prompt 1", ...
            **generation: arguments of `generate`: `do_sample`, `num_beams`, ...

        Raises:
            UserError: a prompt is empty, or too long for the model.
        """
        rows = self.tokenizer([without_surrogates(prompt) for prompt in prompts])["input_ids"]
        self._check(rows, max_new_tokens, places or [f"prompt {n}" for n in range(1, len(rows) + 1)])
        for start in range(0, len(rows), batch_size):
            ids, mask = left_padded(rows[start : start + batch_size])
            ids, mask = ids.to(self.model.device), mask.to(self.model.device)
            with varying_shapes():
                read, passages = self._retrieve(ids, mask, prompts[start : start + batch_size])
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

    def _retrieve(
        self, ids: Tensor, mask: Tensor, prompts: Sequence[str]
    ) -> tuple[list[tuple[PassageRead, ...]], dict[str, Any]]:
        """Return the passages that each prompt reads, and the arguments of `generate` for them."""
        if self.collection is None:
            return [()] * len(ids), {}
        vectors = self.model.embed_queries(ids, mask).detach().float().cpu().numpy()
        hits = self._search(vectors, prompts)
        rows_Bk = np.asarray(hits[1])
        if rows_Bk.shape[1] < self.k or (rows_Bk < 0).any():
            raise UserError(
                f"the index found fewer than {counted(self.k, 'passage')}: lower --num_passages, or make an exact index"
            )
        read = [
            tuple(PassageRead(n, hit.score, hit.text, hit.location) for n, hit in zip(row, found, strict=True))
            for row, found in zip(rows_Bk.tolist(), self.collection.found(hits), strict=True)
        ]
        device = ids.device
        flat = [passage.text for found in read for passage in found]
        tokens = tokenize_passages(self.tokenizer, flat, self.model.config.l_max)
        passage_ids, passage_mask = tokens.batch(np.arange(len(flat)).reshape(rows_Bk.shape))
        return read, {
            "passage_input_ids": passage_ids.to(device),
            "passage_attention_mask": passage_mask.to(device),
        }

    def _search(self, vectors: NDArray[np.float32], prompts: Sequence[str]) -> Any:
        """Return the k best passages of each prompt: by the model's vectors, or by the reranker among more of these."""
        assert self.collection is not None
        if self.reranker is None:
            return self.collection.search(vectors, self.k)
        hits = self.collection.search(vectors, min(max(self.k, self.rerank_depth), len(self.collection)))
        rows_BK = np.asarray(hits[1])
        scores_BK = np.full(rows_BK.shape, -np.inf, dtype=np.float32)
        for prompt, scores_K, found in zip(prompts, scores_BK, self.collection.found(hits), strict=True):
            scores_K[: len(found)] = self.reranker.scores([(prompt, hit.text) for hit in found])
        order_Bk = np.argsort(-scores_BK, axis=1, kind="stable")[:, : self.k]
        return type(hits)(np.take_along_axis(scores_BK, order_Bk, 1), np.take_along_axis(rows_BK, order_Bk, 1))

    def _check(self, rows: list[list[int]], max_new_tokens: int, places: Sequence[str]) -> None:
        config = self.model.config
        positions = text_positions(config.backbone)
        room = None if positions is None else positions - max_new_tokens
        if room is not None and self.collection is not None:
            room -= config.k * config.l_max
        for place, row in zip(places, rows, strict=True):
            if not row:
                raise UserError(f"{place} is empty: leave it out")
            if room is not None and room < 1:
                raise UserError(
                    f"an answer of {max_new_tokens} tokens and the passages exceed the model's {positions} positions: lower"
                    " --max_new_tokens"
                )
            if room is not None and len(row) > room:
                raise UserError(
                    f"{place} has {len(row)} tokens, but with its passages and an answer of {max_new_tokens} tokens"
                    f" there is room for {room}: shorten it"
                )


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of prompts to continue, padded on the left.

    >>> left_padded([[5, 6, 7], [8]])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def open_answerer(
    name: str, index: str, *, num_passages: int | None = None, device: str | None = None, k: int | None = None
) -> Answerer:
    """Open a model and an index that was made with it.

    Args:
        name: folder or Hub id of the model.
        index: folder written by `revela-hub index`, or `hf:owner/name` on the Hub.
        num_passages: passages per prompt; by default the model's.
        device: by default the fastest device.
        k: earlier name of `num_passages`.

    Raises:
        UserError: the model or the index cannot be read, the index belongs to another model, its vectors are no longer those of
            the model (`PassageStore.check_vectors`), or it holds fewer than `num_passages`.
    """
    from revela_hub.hub_cards.hub_index import open_store
    from revela_hub.retrieval.encoder import model_identity
    from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint

    loaded = load_imprag_checkpoint(name, dtype="auto")
    model = on_device(loaded.model, device)
    store = open_store(index, ImpRAGEncoder(model, loaded.tokenizer), model_identity(name), name)
    return Answerer(model, loaded.tokenizer, store, num_passages, k=k)
