"""Labelled queries of `adapt`: with enough of them, a half replaces the queries that were made from the text."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.text.ngram_overlap import hash_words, ngram_hashes
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
    rows: "Dataset",
    corpus: dict[str, str],
    most: int,
    passages: int,
    left: Path,
    log: Callable[[str], None] = lambda line: None,
) -> RetrievalTask | None:
    """Return a task of labelled queries, and write the pairs of the other queries; None if there are too few queries.

    Texts with the same `text_key` are the same.

    Args:
        rows: pairs with the columns `anchor` and `positive`.
        corpus: passages of the text; those that are not a part of a relevant passage, or the reverse, are searched, too.
        most: maximum number of queries to hold out.
        passages: number of passages to search, if the relevant ones are not more.
        left: file for the pairs that are left to train on.
        log: called with the reason if there are too few queries.
    """
    spelling: dict[str, str] = {}  # the first one of each query and passage
    positives: dict[str, list[str]] = {}
    for row in rows:
        query, passage = (spelling.setdefault(text_key(text), text) for text in (row["anchor"], row["positive"]))
        positives.setdefault(query, []).append(passage)
    # Queries that share a passage are on the same side, so that no passage is both trained on and asked for.
    of_group: dict[str, list[str]] = {}
    for query, group in connected(positives).items():
        of_group.setdefault(group, []).append(query)
    if len(positives) < MIN_LABELLED or len(of_group) < MIN_GROUPS:
        number = f"{len(positives):,}, fewer than {MIN_LABELLED}"
        if len(positives) >= MIN_LABELLED:
            number = (
                f"{len(positives):,}, in {len(of_group):,} groups without a common passage, fewer than {MIN_GROUPS}"
            )
        log(f"labelled queries: {number}; they are trained on, and the verdict is on queries made from the text")
        return None
    held: list[str] = []
    for group in sorted(of_group, key=_digest):
        if len(held) + len(of_group[group]) <= min(most, len(positives) // 2):
            held += of_group[group]
    asked = set(held)
    kept = [row for row in rows if spelling[text_key(row["anchor"])] not in asked]
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    asked_for = dict.fromkeys(text for query in held for text in positives[query])
    relevant = {text_key(text) for text in asked_for}
    labelled, is_copy = {row["positive"] for row in kept}, _copies_of(list(asked_for))
    candidates = {text_key(text): text for text in (*corpus.values(), *sorted(labelled))}  # a labelled text wins
    ordered = sorted((text for key, text in candidates.items() if key not in relevant), key=_digest)
    # A chunk of the text that contains an answer, or a part of it, is no wrong answer.
    others = (text for text in ordered if text in labelled or not is_copy(text))
    names = {
        text: f"l{place}" for place, text in enumerate([*asked_for, *islice(others, max(0, passages - len(asked_for)))])
    }
    queries = {f"labelled-{place}": query for place, query in enumerate(held)}
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


def _copies_of(passages: list[str]) -> Callable[[str], bool]:
    """Return a function: whether a text has most n-grams of one of these passages, or one of these most of the text's."""
    sizes: list[int] = []
    having: dict[int, list[int]] = defaultdict(list)  # n-gram to the numbers of passages
    for number, passage in enumerate(passages):
        grams = _ngrams(passage)
        sizes.append(len(grams))
        for gram in grams:
            having[gram].append(number)

    def is_copy(text: str) -> bool:
        grams = _ngrams(text)
        shared = Counter(number for gram in grams for number in having.get(gram, ()))
        return any(count > COPIED * min(len(grams), sizes[number]) for number, count in shared.items())

    return is_copy


def _ngrams(text: str) -> list[int]:
    return list(dict.fromkeys(ngram_hashes(hash_words(words(text)), NGRAM).tolist()))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
