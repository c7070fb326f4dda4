"""Queries for passages that have none: extracted without a model, or written by a seq2seq or a language model.

All are called with passages and give some queries for each; the same passages in the same order give the same ones.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

from revela_hub.data.synthesis.backends import Backend, Request
from revela_hub.errors import UserError, first_line
from revela_hub.pickles import pretrained

WORD = re.compile(r"\w+(?:['’-]\w+)*")
SENTENCE_END = re.compile(r"[.!?;:\n]")
PROMPT = (
    "Write one short search query that the following passage answers, in the passage's language. Reply with the query"
    " alone.\n\nPassage: {passage}"
)


class PseudoQueries(Protocol):
    """What writes queries."""

    @property
    def description(self) -> str:
        """How the queries come about, for the cache of the rows and for the model card."""

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        """The queries of each passage; none where nothing can be asked of it."""


class ExtractiveQueries:
    """The words in a row that say most about a passage, of those it is called with: no model is needed.

    A query is at most `words` words of one sentence, with the largest sum of log(N / n) over its distinct words, where n
    of the N passages have the word; a second one shares no word position with the first. Case and punctuation go.

    Args:
        queries: for each passage, at most.
        words: of a query, at most.

    Raises:
        UserError: if one is not at least 1.
    """

    def __init__(self, queries: int = 1, words: int = 8) -> None:
        _at_least_one(queries=queries, words=words)
        self.queries, self.words = queries, words

    @property
    def description(self) -> str:
        """For the cache and the card."""
        return f"extracted: the {self.words} words in a row that tell a passage most from the others"

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        """The queries of each passage, weighed against all of them."""
        found = [_words(passage) for passage in passages]
        documents = Counter(word for words, _ in found for word in dict.fromkeys(words))
        weight = {word: math.log((1 + len(passages)) / number) for word, number in documents.items()}
        return [self._of(words, sentences, weight) for words, sentences in found]

    def _of(self, words: list[str], sentences: list[int], weight: dict[str, float]) -> list[str]:
        windows = []
        for start in range(len(words)):
            end = start + 1
            while end < min(start + self.words, len(words)) and sentences[end] == sentences[start]:
                end += 1
            told = math.fsum(weight[word] for word in set(words[start:end]))  # exact: no order of the words breaks ties
            windows.append((-told, end - start, start))
        chosen: list[tuple[int, int]] = []
        for _, length, start in sorted(windows):
            if len(chosen) == self.queries:
                break
            if all(start >= other_end or start + length <= other for other, other_end in chosen):
                chosen.append((start, start + length))
        return [" ".join(words[start:end]) for start, end in chosen]


class Seq2SeqQueries:
    """Queries of a generator such as docT5query, sampled.

    Args:
        name: Hub id or folder of a seq2seq model (`doc2query/msmarco-t5-base-v1`).
        queries: for each passage.
        prefix: put before a passage, where the generator was trained with one (`text2query: `).
        batch_size: passages at once.
        seed: of the sampling.
        max_new_tokens: of a query.
        top_k: terms that are sampled from; docT5query's is 10.

    Raises:
        UserError: if a number is not at least 1; at the first call, if the model cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        queries: int = 1,
        *,
        prefix: str = "",
        batch_size: int = 16,
        seed: int = 0,
        max_new_tokens: int = 64,
        top_k: int = 10,
    ) -> None:
        _at_least_one(queries=queries, batch_size=batch_size, max_new_tokens=max_new_tokens, top_k=top_k)
        self.name, self.queries, self.prefix, self.batch_size = name, queries, prefix, batch_size
        self.seed, self.max_new_tokens, self.top_k = seed, max_new_tokens, top_k
        self._loaded: tuple[Any, Any] | None = None

    @property
    def description(self) -> str:
        """For the cache and the card."""
        prefix = f", prefix {self.prefix!r}" if self.prefix else ""
        return f"written by {self.name} (sampled from the top {self.top_k}, seed {self.seed}{prefix})"

    def _model(self) -> tuple[Any, Any]:
        """The tokenizer and the model, loaded when they are first needed."""
        if self._loaded is None:
            from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(self.name)
                model = pretrained(AutoModelForSeq2SeqLM, self.name)
            except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
                raise UserError(f"cannot load the query generator {self.name!r}: {first_line(error)}") from error
            import torch

            self._loaded = tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        return self._loaded

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        """The queries of each passage."""
        import torch
        from transformers import set_seed

        tokenizer, model = self._model()
        found: list[list[str]] = []
        state = torch.get_rng_state()
        for first in range(0, len(passages), self.batch_size):
            texts = [self.prefix + passage for passage in passages[first : first + self.batch_size]]
            inputs = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt").to(
                model.device
            )
            set_seed(self.seed + first)
            with torch.no_grad():
                tokens = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    do_sample=True,
                    top_k=self.top_k,
                    num_return_sequences=self.queries,
                    max_new_tokens=self.max_new_tokens,
                )
            written = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
            ends = range(0, len(written) + 1, self.queries)
            found += [[query for query in written[a:b] if query] for a, b in pairwise(ends)]
        torch.set_rng_state(state)
        return found


class LanguageModelQueries:
    """Queries of a language model, asked as `revela-hub synthesize` asks one: on this machine, or behind an endpoint.

    Args:
        backend: the model.
        name: what the card calls it.
        queries: for each passage.
        seed: of the sampling.

    Raises:
        UserError: if `queries` is not at least 1.
    """

    def __init__(self, backend: Backend, name: str, queries: int = 1, *, seed: int = 0) -> None:
        _at_least_one(queries=queries)
        self.backend, self.name, self.queries, self.seed = backend, name, queries, seed

    @property
    def description(self) -> str:
        """For the cache and the card."""
        return f"written by the language model {self.name} (seed {self.seed})"

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        """The queries of each passage; the first line of what the model says."""
        requests = (
            Request(PROMPT.format(passage=passage), self.seed + self.queries * number + again)
            for number, passage in enumerate(passages)
            for again in range(self.queries)
        )
        replies = [reply.text.strip() for _, reply in self.backend.replies(requests)]
        written = [reply.splitlines()[0].strip(' "“”') if reply else "" for reply in replies]
        ends = range(0, len(written) + 1, self.queries)
        return [[query for query in written[a:b] if query] for a, b in pairwise(ends)]


def _words(text: str) -> tuple[list[str], list[int]]:
    """The words, in lower case, and the number of the sentence that each is in."""
    words, sentences, sentence, end = [], [], 0, 0
    for match in WORD.finditer(text):
        sentence += SENTENCE_END.search(text, end, match.start()) is not None
        words.append(match[0].lower())
        sentences.append(sentence)
        end = match.end()
    return words, sentences


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, got {number}")
