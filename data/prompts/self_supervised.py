"""Prompts made from raw text: a phrase to fill in, the next or the previous sentence, and plain text.

They preserve the reader's language modelling, and provide training for retrieval when no questions are available.
"""

import random
import re
from collections.abc import Iterable
from typing import Any

from datasets import Dataset, concatenate_datasets

from revela_hub.data.prompts.rows import render, retrieves
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.words import LETTER
from revela_hub.errors import UserError

KINDS = ("phrase_denoising", "next_sentence", "previous_sentence", "plain_text")
# A phrase to hide: consecutive words that begin with capitals or digits, not at the start of the sentence.
_PHRASE = re.compile(rf"(?<={LETTER} )(?:[A-Z0-9](?:{LETTER}|['’.-])*)(?: (?:[A-Z0-9](?:{LETTER}|['’-])*)){{0,4}}")
_SENTENCE_END = re.compile("(?<=[.!?\u061f\u06d4\u0964\u17d4\u104b])\\s|(?<=[\u3002\uff01\uff1f])(?=.)")


def text_prompts(documents: Iterable[Document], kind: str, count: int, *, words: int = 60, seed: int = 0) -> Dataset:
    """Make `count` prompts of a kind, or fewer if the text is too short.

    Args:
        documents: Raw text.
        kind: One of `KINDS`.
        count: The number of rows.
        words: Maximum number of words in the text of a prompt.
        seed: The seed for the choice of chunks and phrases.

    Returns:
        A data set with the columns of `read_prompts`.
    """
    rng = random.Random(f"{seed} {kind}")
    rows = []
    for document in documents:
        sentences = [chunk.text for chunk in chunk_document(document, words)]
        for number in range(len(sentences)):
            pair = _pair(kind, sentences, number, rng)
            if pair is not None:
                rows.append(_row(kind, *pair, f"{document.id}#{number}"))
    if not rows:
        raise UserError(f"no prompts of the kind {kind.replace('_', ' ')} can be made: use longer documents")
    chosen = rng.sample(rows, min(count, len(rows)))
    return Dataset.from_list(chosen)


def mix(prompts: Dataset, parts: list[Dataset], seed: int = 0) -> Dataset:
    """Concatenate and shuffle data sets."""
    return concatenate_datasets([prompts, *parts]).shuffle(seed=seed)


def _pair(kind: str, chunks: list[str], number: int, rng: random.Random) -> tuple[str, str] | None:
    """Return the input and the answer made from a chunk, or None."""
    text = " ".join(chunks[number].split())
    if kind == "plain_text":
        return "", text
    if kind == "phrase_denoising":
        phrases = [match for match in _PHRASE.finditer(text) if len(match[0]) > 3]
        if not phrases:
            return None
        match = rng.choice(phrases)
        return f"{text[: match.start()]}[BLANK]{text[match.end() :]}", match[0]
    if number + 1 == len(chunks):
        return None
    following = " ".join(chunks[number + 1].split())
    if kind == "next_sentence":
        return text, _SENTENCE_END.split(following, maxsplit=1)[0]
    return following, _SENTENCE_END.split(text)[-1]


def _row(kind: str, text: str, answer: str, where: str) -> dict[str, Any]:
    return {
        "id": f"{kind} {where}",
        "task": kind,
        "prompt": render(kind, where, input=text),
        "input": text,
        "answers": [answer],
        "retrieve": retrieves(kind),
        "where": where,
    }
