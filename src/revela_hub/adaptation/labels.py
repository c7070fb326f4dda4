"""Labelled queries of `adapt`: with enough of them, a half replaces the queries that were made from the text."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.text.same_text import text_key
from revela_hub.data.text.words import words

if TYPE_CHECKING:
    from datasets import Dataset

MIN_LABELLED = 200
"""Labelled queries from which a half is held out. With fewer, they are trained on: a quarter of them could not prove anything."""
MIN_GROUPS = MIN_LABELLED // 2
"""Groups of queries from which a half is held out; queries that share a passage are in the same group, which is not split."""

NGRAM, COPIED = 5, 0.7
"""Words of the n-grams by which chunks of the text are compared with labelled passages; the part from which they are the same text.
Short n-grams: a chunk lacks the sentence that became its query, and with it all n-grams across that place."""


def hold_out_labels(
    rows: "Dataset", corpus: dict[str, str], most: int, passages: int, left: Path, log: Callable[[str], None]
) -> RetrievalTask | None:
    """Return a task of at most `most` labelled queries, and write the other pairs to the file `left`; None if there are too few queries.

    Texts with the same `text_key` are the same. The task has `passages` passages, or the relevant ones if they are more. The others are
    labelled, or from the text's `corpus`, unless they contain a relevant passage or are contained in one.
    """
    spelling: dict[str, str] = {}  # the first one of each query and passage
    positives: dict[str, list[str]] = {}
    for row in rows:
        query, passage = (spelling.setdefault(text_key(text), text) for text in (row["anchor"], row["positive"]))
        positives.setdefault(query, []).append(passage)
    # Queries that share a passage are on the same side, so that no passage is both trained on and asked for.
    groups: dict[str, list[str]] = {}
    for query, group in connected(positives).items():
        groups.setdefault(group, []).append(query)
    if len(positives) < MIN_LABELLED or len(groups) < MIN_GROUPS:
        log(
            f"labelled queries: {len(positives):,} in {len(groups):,} groups without a common passage, fewer than {MIN_LABELLED} or"
            f" {MIN_GROUPS}; they are trained on, and the verdict is on queries made from the text"
        )
        return None
    asked: list[str] = []
    for group in sorted(groups, key=_digest):
        if len(asked) + len(groups[group]) <= min(most, len(positives) // 2):
            asked += groups[group]
    kept = [row for row in rows if spelling[text_key(row["anchor"])] not in set(asked)]
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")

    relevant = list(dict.fromkeys(text for query in asked for text in positives[query]))
    answers, labelled = [_ngrams(text) for text in relevant], {row["positive"] for row in kept}

    def is_copy(text: str) -> bool:
        """Whether a text has most n-grams of an answer, or the reverse: a chunk with an answer, or a part of it, is no wrong answer."""
        grams = _ngrams(text)
        return any(len(grams & answer) > COPIED * min(len(grams), len(answer)) for answer in answers)

    others = {text_key(text): text for text in (*corpus.values(), *sorted(labelled))}  # a labelled text wins
    for text in relevant:
        others.pop(text_key(text), None)
    searched = list(relevant)
    for text in sorted(others.values(), key=_digest):
        if len(searched) < passages and (text in labelled or not is_copy(text)):
            searched.append(text)
    names = {text: f"l{place}" for place, text in enumerate(searched)}
    queries = {f"labelled-{place}": query for place, query in enumerate(asked)}
    qrels = {name: {names[text]: 1 for text in positives[query]} for name, query in queries.items()}
    return RetrievalTask({name: text for text, name in names.items()}, queries, qrels, "labels")


def connected(positives: dict[str, list[str]]) -> dict[str, str]:
    """Return a passage by query, the same one for queries that are connected by common passages."""
    joined: dict[str, str] = {}

    def first(passage: str) -> str:
        while joined.setdefault(passage, passage) != passage:
            joined[passage] = passage = joined[joined[passage]]
        return passage

    for texts in positives.values():
        for text in texts:
            joined[first(text)] = first(texts[0])
    return {query: first(texts[0]) for query, texts in positives.items()}


def _ngrams(text: str) -> set[tuple[str, ...]]:
    tokens = words(text)
    return {tuple(tokens[place : place + NGRAM]) for place in range(len(tokens) - NGRAM + 1)}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
