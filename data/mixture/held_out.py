"""Holding out questions of a mixture for evaluation, as a retrieval task in BEIR's form.

At most one in ten questions of the retrieval rows is held out, with all its rows. They are chosen among all rows of the
mixture (`Mixture.retrieval`), so both training stages hold out the same ones. The corpus contains their passages, then the
hard negatives of their rows, then passages of the remaining rows.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.text.ngram_overlap import MIN_CONTAINED_WORDS
from revela_hub.data.text.same_text import letters, text_hash, text_key, without_part
from revela_hub.data.text.words import words

if TYPE_CHECKING:
    from datasets import Dataset

HELD_OUT = "held-out pairs"
"""Name of the task."""
MIN_QUERIES = MIN_PASSAGES = 20
HELD_OUT_DIVISOR = 10


class HeldOut(NamedTuple):
    """The remaining rows to train on, and the evaluation task; None if there are too few questions or passages."""

    rows: "Dataset"
    task: RetrievalTask | None


def hold_out(rows: "Dataset", queries: int = 200, passages: int = 500, among: "Dataset | None" = None) -> HeldOut:
    """Hold out questions of the rows of a mixture, chosen `among` the rows of `Mixture.retrieval`, or of pairs.

    They are at most `queries` many, and one in ten of the retrieval rows. The corpus has at most `passages` many, unless the questions have
    more.
    """
    among = rows if among is None else among
    asked = {text_hash(anchor) for _, anchor in _of_retrieval(among, "anchor")}
    number = min(queries, len(asked) // HELD_OUT_DIVISOR)
    if number < MIN_QUERIES:
        return HeldOut(rows, None)
    chosen = set(heapq.nsmallest(number, asked))
    held = among.select([index for index, text in _of_retrieval(among, "anchor") if text_hash(text) in chosen])
    left = without_queries(rows, held["anchor"])
    task = _task(held, left, passages)
    # Among ten passages, nDCG@10 finds every passage.
    return HeldOut(rows, None) if len(task.corpus) < MIN_PASSAGES else HeldOut(left, task)


def without_queries(rows: "Dataset", queries: Iterable[str]) -> "Dataset":
    """Return the rows without these questions, which are also the passages of reversed pairs, as paraphrases have them."""
    texts = list(queries)
    keys, longest = {text_hash(text) for text in texts}, 2 * max(map(len, texts), default=0) + 20  # in another form
    out = {
        index
        for column in ("anchor", "positive")
        for index, text in _of_retrieval(rows, column)
        if len(text) <= longest and text_hash(text) in keys
    }
    return rows.select([index for index in range(len(rows)) if index not in out]) if out else rows


def without_texts(rows: "Dataset", texts: Iterable[str]) -> tuple["Dataset", int]:
    """Remove texts from the passages, in any form that is the same text; return the rows, and the number of removals.

    Texts of fewer than five words stay, because they are in unrelated passages, too. Rows with an empty passage are dropped.
    Questions are not changed (`without_queries`), but the anchors of rows of another kind are passages.
    """
    from datasets import Dataset, concatenate_datasets

    held = {letters(text): text for text in texts if len(words(text)) >= MIN_CONTAINED_WORDS}
    passages = [name for name in rows.column_names if name.startswith(("positive", "negative"))]
    changed: list[dict[str, str]] = []
    order, removed = [], 0
    for index, row in enumerate(rows):
        columns = passages if row.get("kind", "retrieval") == "retrieval" else ["anchor", *passages]
        before = removed
        for name in columns:
            found = letters(row[name])
            for part in [part for part in held if part in found]:
                row[name], number = without_part(row[name], held[part])
                removed += number
        if removed == before:
            order.append(index)
        elif all(row[name].strip() for name in columns):
            order.append(len(rows) + len(changed))
            changed.append(row)
    if changed:
        rows = concatenate_datasets([rows, Dataset.from_list(changed, features=rows.features)])
    return (rows.select(order) if removed else rows), removed


def _of_retrieval(rows: "Dataset", column: str) -> Iterator[tuple[int, str]]:
    """Yield the position and a text of each retrieval row: every row, unless a column `kind` says something else."""
    columns, index = [column, "kind"] if "kind" in rows.column_names else [column], 0
    for batch in rows.select_columns(columns).iter(batch_size=1024):
        for text, kind in zip(batch[column], batch.get("kind") or repeat("retrieval")):  # noqa: B905 (repeat is endless)
            if kind == "retrieval":
                yield index, text
            index += 1


def _task(held: "Dataset", left: "Dataset", passages: int) -> RetrievalTask:
    corpus: dict[str, str] = {}  # key to the first text of each passage
    queries: dict[str, str] = {}
    answers: dict[str, dict[str, int]] = {}
    for row in held:
        asked, answer = text_key(row["anchor"]), text_key(row["positive"])
        queries.setdefault(asked, row["anchor"])
        corpus.setdefault(answer, row["positive"])
        answers.setdefault(asked, {})[answer] = 1
    negatives = [name for name in held.column_names if name.startswith("negative_")]
    others = (row[name] for row in held for name in negatives)
    for text in chain(others, (text for _, text in _of_retrieval(left, "positive"))):
        if len(corpus) >= passages:
            break
        corpus.setdefault(text_key(text), text)
    names = {key: f"p{place}" for place, key in enumerate(corpus)}
    ids = {key: f"q{place}" for place, key in enumerate(queries)}
    return RetrievalTask(
        corpus={names[key]: text for key, text in corpus.items()},
        queries={ids[key]: text for key, text in queries.items()},
        qrels={ids[key]: {names[answer]: 1 for answer in found} for key, found in answers.items()},
        name=HELD_OUT,
    )
