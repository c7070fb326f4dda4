"""Streamed answers of a model that reads passages."""

import copy
from collections.abc import Iterator
from threading import Thread
from typing import Any

from transformers import TextIteratorStreamer

from revela_hub.data.prompts.rows import render
from revela_hub.demo.search import source_of

Passage = tuple[str, str, float]
"""Text, source and score."""


class Seen:
    """A collection that remembers the passages of the last search."""

    def __init__(self, collection: Any) -> None:
        """Wraps a collection."""
        self.collection = collection
        self.passages: list[Passage] = []

    def __len__(self) -> int:
        return len(self.collection)

    def search(self, vectors: Any, k: int) -> Any:
        """Search the collection."""
        return self.collection.search(vectors, k)

    def found(self, hits: Any) -> Any:
        """Return the passages of search results, and remember those of the first query."""
        found = self.collection.found(hits)
        self.passages = [(hit.text, source_of(hit), hit.score) for hit in found[0]]
        return found


def stream(answerer: Any, question: str, max_new_tokens: int = 64) -> Iterator[tuple[str, list[Passage]]]:
    """Yield the growing answer of a `Method.answerer` to a question, with the passages that it reads."""
    one = copy.copy(answerer)
    one.collection = seen = Seen(answerer.collection)
    streamer = TextIteratorStreamer(one.tokenizer, skip_prompt=True, skip_special_tokens=True)
    errors: list[Exception] = []
    prompt = render("question_answering", "--task", input=question)

    def generate() -> None:
        try:
            list(one.answer([prompt], max_new_tokens=max_new_tokens, places=["the question"], streamer=streamer))
        except Exception as error:  # raised again below, in the thread of the page
            errors.append(error)
        finally:
            streamer.end()

    thread = Thread(target=generate, daemon=True)
    thread.start()
    text = ""
    for piece in streamer:
        text += piece
        yield text.strip(), seen.passages
    thread.join()
    if errors:
        raise errors[0]
