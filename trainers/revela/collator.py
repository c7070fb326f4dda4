"""Collator of Revela: groups of chunks to the tensors of a training step.

The retriever and the language model may have different tokenizers, so each chunk is tokenized twice.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.internals import fingerprint
from revela_hub.trainers.base.callbacks import SharedEpoch

Tokens: TypeAlias = NDArray[np.int64]
SPAN = "similarity_span"
"""Column of rows whose span is not that of the run, in mixtures of prose and code."""
_CALL_SETTINGS = ("truncation", "padding")  # keys of a tokenizer.json that only describe its last call
LM_TOKENS, PASSAGE_TOKENS, QUERY_TOKENS = "lm_tokens", "retriever_tokens", "retriever_query_tokens"


class RevelaCollator(SharedEpoch):
    r"""Make batches of rows of `build_groups`: chunks shuffled within their group and tokenized for both models.

    The order within a group depends only on `(seed, epoch, group)`: it differs between epochs, but not between processes or
    workers, or after a run is resumed. The trainer sets `epoch` before each epoch; it is kept in shared memory, so that
    persistent workers see it, too.

    For the language model, a chunk consists of its tokens, after the BOS token if the tokenizer adds one, and without EOS. For
    the retriever, it consists of a prompt and the chunk, with the special tokens that the tokenizer adds; an EOS added by its
    post-processor is kept when a chunk is cut. All are cut at `max_length` tokens and padded on the right.

    With `similarity_sides="query_passage"`, the retriever gets each chunk twice: as a query, `query_prompt` and the
    `similarity_span` of the chunk, and as a passage, `passage_prompt` and the whole chunk. In the symmetric form it gets
    `passage_prompt` and the `similarity_span` only.

    The span `"first_half"` is the first half of the chunk's tokens, rounded up, between the prompt and the special tokens: it
    cannot find chunks by the text that is to be predicted.

    A text of `""` is an absent row of a group that is not full: its attention masks are zero, its labels -100, its document -1.

    Example: a group of three rows, the last of them absent. The word ids are `[PAD]` 0, `[EOS]` 1, passage: 2, a 3, b 4, c 5,
    d 6, query: 7; the permutation of epoch 0 is (2, 0, 1).

    >>> from tokenizers import Tokenizer, models, pre_tokenizers, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> def tokenizer(eos):
    ...     words = ["[PAD]", "[EOS]", "passage:", "a", "b", "c", "d", "query:"]
    ...     model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[PAD]"))
    ...     model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ...     if eos:
    ...         model.post_processor = processors.TemplateProcessing("$A [EOS]", special_tokens=[("[EOS]", 1)])
    ...     return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]")
    >>> collator = RevelaCollator(tokenizer(eos=True), tokenizer(eos=False), max_length=5, passage_prompt="passage: ")
    >>> batch = collator([{"group": 0, "document": ["x", "y", ""], "text": ["a b c d", "d c", ""]}])
    >>> for name, tensor in batch.items():
    ...     print(name, tensor.tolist())
    input_ids [[0, 0, 0, 0], [3, 4, 5, 6], [6, 5, 0, 0]]
    attention_mask [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    labels [[-100, -100, -100, -100], [3, 4, 5, 6], [6, 5, -100, -100]]
    retriever_input_ids [[0, 0, 0, 0, 0], [2, 3, 4, 5, 1], [2, 6, 5, 1, 0]]
    retriever_attention_mask [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    document [-1, 0, 1]

    The same group in the form of the paper, whose queries are the first halves; the other tensors do not change:

    >>> collator = RevelaCollator(
    ...     tokenizer(eos=True), tokenizer(eos=False), max_length=5, passage_prompt="passage: ", query_prompt="query: ",
    ...     similarity_sides="query_passage", similarity_span="first_half",
    ... )
    >>> batch = collator([{"group": 0, "document": ["x", "y", ""], "text": ["a b c d", "d c", ""]}])
    >>> for name in [name for name in batch if name.startswith("retriever")]:
    ...     print(name, batch[name].tolist())
    retriever_input_ids [[0, 0, 0, 0, 0], [2, 3, 4, 5, 1], [2, 6, 5, 1, 0]]
    retriever_attention_mask [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    retriever_query_input_ids [[0, 0, 0, 0], [7, 3, 4, 1], [7, 6, 1, 0]]
    retriever_query_attention_mask [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]

    All are int64 of shape (rows, tokens), and `document` is (rows,). There are groups x group_size rows, and the rows of a group
    are consecutive. `document` numbers the documents of the batch.
    """

    def __init__(
        self,
        retriever_tokenizer: PreTrainedTokenizerBase,
        lm_tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int = 160,
        passage_prompt: str = "Passage: ",
        query_prompt: str = "Query: ",
        similarity_sides: Literal["query_passage", "symmetric"] = "symmetric",
        similarity_span: Literal["full", "first_half"] = "full",
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        """Check that the tokenizers are suitable.

        Args:
            retriever_tokenizer: tokenizer of the retriever, whose post-processor adds the special tokens.
            lm_tokenizer: tokenizer of the language model.
            max_length: maximum tokens per row, for both models.
            passage_prompt: text put before each passage for the retriever.
            query_prompt: text put before each query for the retriever.
            similarity_sides: whether the retriever gets each chunk as a query and as a passage, or only as a passage.
            similarity_span: part of a chunk that is its query; in the symmetric form, its passage. Rows may have their own, in a
                column of this name.
            pad_to_multiple_of: widths are rounded up to a multiple of this (8 suits tensor cores).
            seed: seed of the order of the chunks.
            epoch: epoch of the order of the chunks.

        Raises:
            UserError: a prompt leaves no room for a chunk; the retriever's tokenizer drops its end token when it cuts a text;
                or half chunks are requested from a tokenizer without offsets.
        """
        super().__init__(epoch)
        self.retriever_tokenizer = retriever_tokenizer
        self.lm_tokenizer = lm_tokenizer
        self.max_length = max_length
        # Columns of the tokenized rows that the retriever reads: prompt and span; None is the span of the row or of the run.
        self.similarity_span: str = similarity_span
        self.sides: dict[str, tuple[str, str | None]] = {PASSAGE_TOKENS: (passage_prompt, None)}
        if similarity_sides == "query_passage":
            self.sides = {PASSAGE_TOKENS: (passage_prompt, "full"), QUERY_TOKENS: (query_prompt, None)}
        self.pad_to_multiple_of = pad_to_multiple_of
        self.seed = seed
        empty = lm_tokenizer("")["input_ids"]
        self._bos = [lm_tokenizer.bos_token_id] if empty[:1] == [lm_tokenizer.bos_token_id] else []
        self._check_retriever_tokenizer()

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of whole groups; the class describes its tensors.

        Args:
            features: rows of `build_groups` or of `tokenize_groups`, which give the same batch.
        """
        rows = features if LM_TOKENS in features[0] else self.tokenize(features)
        chunks = [(row, index) for row in rows for index in self._order(row)]
        lm_tokens = [row[LM_TOKENS][i] for row, i in chunks]
        input_ids, attention_mask = self._pad(lm_tokens, self.lm_tokenizer)
        retriever: dict[str, Tokens] = {}
        for name in self.sides:
            ids, mask = self._pad([row[name][i] for row, i in chunks], self.retriever_tokenizer)
            side = name.removesuffix("tokens")
            retriever |= {f"{side}input_ids": ids, f"{side}attention_mask": mask}
        numbers: dict[str, int] = {}
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": np.where(attention_mask == 1, input_ids, -100),
            **retriever,
            "document": np.array(
                [
                    numbers.setdefault(row["document"][i], len(numbers)) if tokens else -1
                    for (row, i), tokens in zip(chunks, lm_tokens, strict=True)
                ]
            ),
        }
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def tokenize(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the tokens of each chunk for both models instead of the text; `[]` for absent chunks.

        A text without tokens for the language model is absent for both models.
        """
        present = [text for row in rows for text in row["text"] if text]
        spans = [row.get(SPAN) or self.similarity_span for row in rows for text in row["text"] if text]
        made = {LM_TOKENS: self._lm_tokens(present)}
        for name, (prompt, span) in self.sides.items():
            halve = [(span or own) == "first_half" for own in spans]
            made[name] = self._retriever_tokens(present, prompt, halve)
        columns = zip(*made.values(), strict=True)
        absent: tuple[list[int], ...] = tuple([] for _ in made)
        tokenized = []
        for row in rows:
            chunks = [next(columns) if text else absent for text in row["text"]]
            kept = [chunk if len(chunk[0]) > len(self._bos) else absent for chunk in chunks]
            tokens = {name: [chunk[place] for chunk in kept] for place, name in enumerate(made)}
            tokenized.append({"group": row["group"], "document": row["document"]} | tokens)
        return tokenized

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the result of `tokenize`."""
        made_with: list[Any] = [self.max_length, self.similarity_span, self.sides]
        for tokenizer in (self.retriever_tokenizer, self.lm_tokenizer):
            with TemporaryDirectory() as folder:  # all that determines a tokenizer is in its saved files
                tokenizer.save_pretrained(folder)
                for file in sorted(Path(folder).iterdir()):
                    text = file.read_text("utf-8")
                    made_with.append(
                        {k: v for k, v in json.loads(text).items() if k not in _CALL_SETTINGS}
                        if file.suffix == ".json"
                        else text
                    )
        return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()

    def _order(self, row: dict[str, Any]) -> Tokens:
        generator = np.random.default_rng((self.seed, self.epoch, row["group"]))
        return generator.permutation(len(row["document"]))

    def _lm_tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:  # tokenizers reject an empty list
            return []
        encoded = self.lm_tokenizer(
            texts,
            add_special_tokens=False,
            truncation=True,
            max_length=self.max_length - len(self._bos),
            return_attention_mask=False,
        )
        return [self._bos + tokens for tokens in encoded["input_ids"]]

    def _retriever_tokens(self, texts: list[str], prompt: str, halve: list[bool]) -> list[list[int]]:
        if not texts:
            return []
        some = any(halve)
        encoded = self.retriever_tokenizer(
            [prompt + text for text in texts],
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_offsets_mapping=some,
            return_special_tokens_mask=some,
        )
        rows: list[list[int]] = encoded["input_ids"]
        if not some:
            return rows
        columns = zip(rows, encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
        return [
            _first_half(len(prompt), *column) if half else column[0]
            for half, column in zip(halve, columns, strict=True)
        ]

    def _pad(self, rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, Tokens]:
        """Return ids and attention mask, both (rows, width)."""
        lengths = np.array([len(row) for row in rows])
        width = max(int(lengths.max()), 1)
        width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        # Padding is masked, so any token will do; decoders often have no padding token.
        padding = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        real = np.arange(width) < lengths[:, None]
        ids = np.full((len(rows), width), padding, dtype=np.int64)
        ids[real] = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return ids, real.astype(np.int64)

    def _check_retriever_tokenizer(self) -> None:
        tokenizer = self.retriever_tokenizer
        if self.similarity_span == "first_half" and not tokenizer.is_fast:
            raise UserError(
                "similarity_span=first_half needs a retriever with a fast tokenizer (tokenizer.json): use full"
            )
        for prompt, _ in self.sides.values():
            tokens = tokenizer(prompt)["input_ids"]
            if len(tokens) >= self.max_length:
                raise UserError(
                    f"max_length is {self.max_length}, but the retriever's prompt alone has {len(tokens)} tokens: raise it"
                )
            long = tokenizer(prompt * self.max_length + "a", truncation=True, max_length=self.max_length)
            end = tokens[-1] if tokens else None
            if end in tokenizer.all_special_ids and long["input_ids"][-1] != end:
                raise UserError(
                    "the retriever's tokenizer drops its end token when it cuts a text: add the token with a post-processor"
                )


def _first_half(start: int, ids: list[int], offsets: list[tuple[int, int]], special: list[int]) -> list[int]:
    """Drop the second half of the chunk's tokens, which start at a character; prompt and special tokens are kept."""
    of_chunk = [not mark and end > start for mark, (_, end) in zip(special, offsets, strict=True)]
    kept = (sum(of_chunk) + 1) // 2
    counts = itertools.accumulate(of_chunk)
    return [token for token, own, count in zip(ids, of_chunk, counts, strict=True) if not own or count <= kept]


def tokenize_groups(groups: Dataset, collator: RevelaCollator, num_proc: int | None = None) -> Dataset:
    """Tokenize all groups once, into the cache of `datasets`.

    Args:
        groups: data set of `build_groups`.
        collator: collator that makes batches of the result.
        num_proc: number of processes; by default one for each CPU, with at least 1,000 groups each.

    Returns:
        A data set with `group` and `document`, and for each chunk its `lm_tokens`, `retriever_tokens` and, in the form with
        queries, `retriever_query_tokens` (lists of lists of int32), which are empty for absent chunks.
    """
    import datasets

    if num_proc is None:
        num_proc = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(groups) // 1000)
    tokens = datasets.List(datasets.List(datasets.Value("int32")))
    kept = {name: groups.features[name] for name in ("group", "document")}

    def columns(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        made = collator.tokenize(rows)
        return {name: [row[name] for row in made] for name in made[0]}

    return groups.map(
        columns,
        batched=True,
        batch_size=64,
        remove_columns=[name for name in groups.column_names if name not in kept],
        features=datasets.Features(kept | dict.fromkeys((LM_TOKENS, *collator.sides), tokens)),
        new_fingerprint=hashlib.sha256((fingerprint(groups) + collator.fingerprint()).encode()).hexdigest()[:16],
        desc="Tokenizing groups",
        num_proc=num_proc if num_proc > 1 else None,
    )
