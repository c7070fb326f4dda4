"""Questions of a mixture that are not trained on, to measure by: its own labels, as a retrieval task in BEIR's form.

Of the retrieval rows' questions one in ten at most is held out, with every row that asks it. Which ones depends on the
questions alone, so that both stages of a training hold out the same. The corpus has their passages, then the hard negatives
of those rows, then passages of the rows that are left.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from revela_hub.data.sources.beir import RetrievalTask

if TYPE_CHECKING:
    from datasets import Dataset

MIN_QUERIES = 20
ONE_IN = 10


class HeldOut(NamedTuple):
    """What is left to train on, and what is measured on: None where the rows ask too few questions."""

    rows: "Dataset"
    task: RetrievalTask | None


def hold_out(rows: "Dataset", queries: int = 200, passages: int = 500) -> HeldOut:
    """Holds questions out of a mixture.

    Args:
        rows: Those of `revela_hub.data.Mixture.dataset`.
        queries: To hold out at most; one in ten of the retrieval rows' questions if those are fewer.
        passages: In the corpus, at most, unless the questions have more themselves.
    """
    asked = {key for _, key in _retrieval_keys(rows)}
    number = min(queries, len(asked) // ONE_IN)
    if number < MIN_QUERIES:
        return HeldOut(rows, None)
    chosen = set(heapq.nsmallest(number, asked))
    held = [index for index, key in _retrieval_keys(rows) if key in chosen]
    left = without_rows(rows, held)
    return HeldOut(left, _task(rows.select(held), left, passages))


def without_queries(rows: "Dataset", queries: Iterable[str]) -> "Dataset":
    """The rows that ask none of these."""
    asked = {_key(text) for text in queries}
    return without_rows(rows, [index for index, key in _retrieval_keys(rows) if key in asked])


def without_rows(rows: "Dataset", places: list[int]) -> "Dataset":
    """The rows but those at these places."""
    out = set(places)
    return rows.select([index for index in range(len(rows)) if index not in out]) if out else rows


def _retrieval_keys(rows: "Dataset") -> Iterator[tuple[int, int]]:
    """The place of each retrieval row, and a number that stands for its question."""
    index = 0
    for batch in rows.select_columns(["anchor", "kind"]).iter(batch_size=4096):
        for anchor, kind in zip(batch["anchor"], batch["kind"], strict=True):
            if kind == "retrieval":
                yield index, _key(anchor)
            index += 1


def _key(text: str) -> int:
    """Of a question, whatever its case and spaces; their order has nothing to do with the text's."""
    return int.from_bytes(hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()[:8], "big")


def _task(held: "Dataset", left: "Dataset", passages: int) -> RetrievalTask:
    corpus: dict[str, str] = {}  # text to id
    queries: dict[int, str] = {}
    answers: dict[int, set[str]] = {}
    for row in held:
        key = _key(row["anchor"])
        queries.setdefault(key, row["anchor"])
        answers.setdefault(key, set()).add(corpus.setdefault(row["positive"], f"p{len(corpus)}"))
    for text in _others(held, left):
        if len(corpus) >= passages:
            break
        corpus.setdefault(text, f"p{len(corpus)}")
    ids = {key: f"q{place}" for place, key in enumerate(queries)}
    return RetrievalTask(
        corpus={id_: text for text, id_ in corpus.items()},
        queries={ids[key]: text for key, text in queries.items()},
        qrels={ids[key]: dict.fromkeys(sorted(found), 1) for key, found in answers.items()},
        name="held-out questions",
    )


def _others(held: "Dataset", left: "Dataset") -> Iterator[str]:
    negatives = [name for name in held.column_names if name.startswith("negative_")]
    for row in held:
        yield from (row[name] for name in negatives)
    for batch in left.select_columns(["positive", "kind"]).iter(batch_size=256):
        yield from (text for text, kind in zip(batch["positive"], batch["kind"], strict=True) if kind == "retrieval")
