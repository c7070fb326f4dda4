"""Collator of Revela: groups of chunks to the tensors of a training step.

The retriever and the language model may have different tokenizers, so each chunk is tokenized twice.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.trainers.base.callbacks import SharedEpoch

Tokens: TypeAlias = NDArray[np.int64]
SPAN = "similarity_span"
"""Column of rows whose span is not that of the run, in mixtures of prose and code."""


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
            seed: seed of the order of the chunks.
            epoch: epoch of the order of the chunks.

        Raises:
            UserError: a prompt leaves no room for a chunk; the retriever's tokenizer drops its end token when it cuts a text.
        """
        super().__init__(epoch)
        self.retriever_tokenizer = retriever_tokenizer
        self.lm_tokenizer = lm_tokenizer
        self.max_length = max_length
        # Inputs of the retriever: prefix of the tensors -> prompt and span; None is the span of the row or of the run.
        self.similarity_span: str = similarity_span
        self.sides: dict[str, tuple[str, str | None]] = {"retriever_": (passage_prompt, None)}
        if similarity_sides == "query_passage":
            self.sides = {"retriever_": (passage_prompt, "full"), "retriever_query_": (query_prompt, None)}
        self.seed = seed
        empty = lm_tokenizer("")["input_ids"]
        self._bos = [lm_tokenizer.bos_token_id] if empty[:1] == [lm_tokenizer.bos_token_id] else []
        self._check_retriever_tokenizer()

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of whole groups, rows of `build_groups`; the class describes its tensors.

        A text without tokens for the language model is absent for both models.
        """
        chunks = [(row, index) for row in features for index in self._order(row)]
        texts = [row["text"][index] for row, index in chunks]
        spans = [row.get(SPAN) or self.similarity_span for row, _ in chunks]
        lm_tokens = self._lm_tokens(texts)
        present = [len(tokens) > len(self._bos) for tokens in lm_tokens]
        input_ids, attention_mask = self._pad(lm_tokens, present, self.lm_tokenizer)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        batch["labels"] = np.where(attention_mask == 1, input_ids, -100)
        for side, (prompt, span) in self.sides.items():
            halve = [(span or own) == "first_half" for own in spans]
            ids, mask = self._pad(self._retriever_tokens(texts, prompt, halve), present, self.retriever_tokenizer)
            batch |= {f"{side}input_ids": ids, f"{side}attention_mask": mask}
        numbers: dict[str, int] = {}
        documents = [row["document"][index] for row, index in chunks]
        rows = zip(documents, present, strict=True)
        batch["document"] = np.array([numbers.setdefault(name, len(numbers)) if there else -1 for name, there in rows])
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _order(self, row: dict[str, Any]) -> Tokens:
        generator = np.random.default_rng((self.seed, self.epoch, row["group"]))
        return generator.permutation(len(row["document"]))

    def _lm_tokens(self, texts: list[str]) -> list[list[int]]:
        encoded = self.lm_tokenizer(
            texts,
            add_special_tokens=False,
            truncation=True,
            max_length=self.max_length - len(self._bos),
            return_attention_mask=False,
        )
        return [self._bos + tokens for tokens in encoded["input_ids"]]

    def _retriever_tokens(self, texts: list[str], prompt: str, halve: list[bool]) -> list[list[int]]:
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

    def _pad(
        self, rows: Sequence[Sequence[int]], present: Sequence[bool], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Tokens, Tokens]:
        """Return ids and attention mask, both (rows, width); absent rows are all padding."""
        kept = [row if there else [] for row, there in zip(rows, present, strict=True)]
        lengths = np.array([len(row) for row in kept])
        width = max(int(lengths.max()), 1)
        # Padding is masked, so any token will do; decoders often have no padding token.
        padding = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
        real = np.arange(width) < lengths[:, None]
        ids = np.full((len(kept), width), padding, dtype=np.int64)
        ids[real] = np.fromiter(itertools.chain.from_iterable(kept), dtype=np.int64, count=int(lengths.sum()))
        return ids, real.astype(np.int64)

    def _check_retriever_tokenizer(self) -> None:
        tokenizer = self.retriever_tokenizer
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
