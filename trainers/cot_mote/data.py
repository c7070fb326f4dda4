"""Arguments, rows and collator of CoT-MoTE, with the paper's defaults for both stages (arXiv 2304.10195, section 4; masks as in CoT-MAE, 2208.07670)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import PreTrainedTokenizerBase

from revela_hub.data.mixture.labelled import read_labelled_pairs
from revela_hub.data.row_cache import Types, cached_rows, rows_fingerprint
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import parse_sources
from revela_hub.data.text.contexts import CONTEXTS, build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.data.text.same_text import text_hash
from revela_hub.data.text.spans import MIN_TOKENS, SpanSettings, tokenized_runs
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, values_of
from revela_hub.ranges import NonNegativeInt, PositiveInt, Share, TextLength
from revela_hub.trainers.base.arguments import WARMUP, WEIGHT_DECAY, RunArguments, StreamedTextArguments, text_rows
from revela_hub.trainers.base.masked import SPECIAL_TOKENS, MaskedCollator


class CoTMoTECollator(MaskedCollator):
    """Make batches of rows of `build_contexts`: masked texts, and the contextual spans that the decoder generates.

    Text: whole words are masked, `encoder_mask_ratio` of the tokens. Of the masked tokens, 80% become `[MASK]`, 10% a random
    token that is not special, and 10% stay. Labels are the masked tokens. Span: unchanged for an `"ar"` decoder; masked in the
    same way, with `decoder_mask_ratio`, for `"ae"`; not in the batch for `"none"`.

    The trainer sets `epoch` before each epoch.

    Example: a passage with a neighbouring span, and a query with its passage; `[PAD]` is 0, `[CLS]` 1, `[SEP]` 2, `[MASK]` 3,
    then `a` 4, `b` 5, ... The word `b c` is either masked as a whole or visible.

    >>> from tokenizers import Tokenizer, models, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    >>> model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[MASK]"))
    >>> ends = [("[CLS]", 1), ("[SEP]", 2)]
    >>> model.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    >>> special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    >>> collator = CoTMoTECollator(PreTrainedTokenizerFast(tokenizer_object=model, **special))
    >>> batch = collator([
    ...     {"row": 0, "expert": 1, "input_ids": [4, 5, 6, 7], "word_starts": [1, 1, 0, 1],
    ...      "context_ids": [8, 9], "context_word_starts": [1, 1]},
    ...     {"row": 1, "expert": 0, "input_ids": [8], "word_starts": [1],
    ...      "context_ids": [4, 5, 6], "context_word_starts": [1, 1, 0]},
    ... ])
    >>> for name, tensor in batch.items():
    ...     print(name, tensor.tolist())
    input_ids [[1, 3, 5, 6, 7, 2], [1, 3, 2, 0, 0, 0]]
    attention_mask [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    labels [[-100, 4, -100, -100, 7, -100], [-100, 8, -100, -100, -100, -100]]
    decoder_input_ids [[1, 8, 9, 2, 0], [1, 4, 5, 6, 2]]
    decoder_attention_mask [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    expert [1, 0]

    All are int64; `expert` is 0 for a query, 1 for a passage. With `switch_experts`, an ablation, it is the other way round.

    Of a row with a `text` and its `queries`, each epoch draws one of the queries, and which of the two the encoder reads; the other
    is its context.
    """

    columns = ("row", "expert", "input_ids", "word_starts", "context_ids", "context_word_starts")
    text_columns = ("text", "queries")
    decoders = ("ar", "ae", "none")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        decoder_mask_ratio: float = 0.45,
        switch_experts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, decoder_mask_ratio=decoder_mask_ratio, **options)
        self.tokenizer, self.switch_experts = tokenizer, switch_experts

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of rows of `build_contexts`, or of texts with their queries; the class describes its tensors."""
        features = self._drawn(features) if "queries" in features[0] else features
        batch = self.padding(len(features), self.width(features, "input_ids"), "")
        if self.decoder != "none":
            width = self.width(features, "context_ids")
            batch |= self.padding(len(features), width, "decoder_", labels=self.decoder == "ae")
        for number, row in enumerate(features):
            generator = np.random.default_rng((self.seed, self.epoch, row["row"]))
            own = {name: tensor[number] for name, tensor in batch.items()}
            tokens_L = self.tokens(row["input_ids"])
            self._fill(own, "", tokens_L, row["word_starts"], self.encoder_mask_ratio, generator)
            if self.decoder != "none":
                ratio = self.decoder_mask_ratio if self.decoder == "ae" else None
                tokens_L = self.tokens(row["context_ids"])
                self._fill(own, "decoder_", tokens_L, row["context_word_starts"], ratio, generator)
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        expert_B = torch.tensor([row["expert"] for row in features], dtype=torch.long)
        tensors["expert"] = 1 - expert_B if self.switch_experts else expert_B
        return tensors

    def _drawn(self, features: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a row as of `build_contexts` for each text with queries."""
        rows: list[dict[str, Any]] = []
        pairs: list[list[str]] = []
        for row in features:
            number = text_hash(row["text"])
            generator = np.random.default_rng((self.seed, self.epoch, number, 1))
            pair = [row["queries"][generator.integers(len(row["queries"]))], row["text"]]
            expert = int(generator.integers(2))
            rows.append({"row": number, "expert": expert})
            pairs += [[pair[expert]], [pair[1 - expert]]]
        tokens = list(tokenized_runs(pairs, self.tokenizer))
        end = None if self.text_length is None else self.text_length - SPECIAL_TOKENS
        for row, text, context in zip(rows, tokens[::2], tokens[1::2], strict=True):
            row["input_ids"], row["word_starts"] = text.span(0, end)
            row["context_ids"], row["context_word_starts"] = context.span(0, end)
        return rows

    def _fill(
        self,
        own: dict[str, Any],
        prefix: str,
        tokens_L: np.ndarray,
        word_starts: Sequence[int],
        ratio: float | None,
        generator: np.random.Generator,
    ) -> None:
        """Write a text to the left of its row of the tensors with a prefix, masked if there is a ratio."""
        length = len(tokens_L)
        own[f"{prefix}attention_mask"][:length] = 1
        if ratio is None:
            own[f"{prefix}input_ids"][:length] = tokens_L
            return
        masked_L, (mask_L,) = self.mask_words(tokens_L, word_starts, [ratio], generator)
        own[f"{prefix}input_ids"][:length] = masked_L
        own[f"{prefix}labels"][:length][mask_L] = tokens_L[mask_L]


# Defaults of each stage. A step of pre-training has 2k rows: 32 per device x 64 accumulation steps.
STAGES: dict[str, dict[str, Any]] = {
    "pretrain": {
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 64,
        "max_steps": 80_000,
    },
    "finetune": {
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
    },
}
EPOCHS = 3.0


@dataclass
class CoTMoTETrainingArguments(RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for both stages.

    In pre-training, a row is a text and a contextual span of it. A step has 64 batches of 32 rows, and a run 80,000 steps.
    In fine-tuning, a row is a query, its passage and hard negatives. A step has 8 rows, and a run 3 epochs.
    """

    stage: Literal["pretrain", "finetune"] = option(
        "pretrain", "pretrain on raw text, or finetune on queries with passages and hard negatives."
    )
    learning_rate: float | None = option(  # type: ignore[assignment]
        None, "Peak learning rate (default: 3e-4, or 2e-5 in finetune)."
    )
    per_device_train_batch_size: int | None = option(  # type: ignore[assignment]
        None, "Number of rows per device and forward pass (default: 32, or 8 in finetune)."
    )
    gradient_accumulation_steps: int | None = option(  # type: ignore[assignment]
        None, "Number of batches per training step (default: 64, or 1 in finetune)."
    )
    max_steps: int | None = option(  # type: ignore[assignment]
        None, "Number of training steps (default: 80000 in pretrain)."
    )
    num_train_epochs: float | None = option(  # type: ignore[assignment]
        None, "Number of epochs, instead of --max_steps (default in finetune: 3)."
    )
    warmup_steps: float = option(0.1, WARMUP)
    weight_decay: float = option(0.01, WEIGHT_DECAY)
    switch_experts: bool = option(
        False, "Encode queries with the passage expert and passages with the query expert (a control)."
    )
    scores: Literal["hybrid", "dense", "sparse"] = option(
        "hybrid", "finetune: Score to train: the sum of dense and sparse (as in the paper), or one of them."
    )

    def __post_init__(self) -> None:
        """Set the defaults of the stage; raise a `ValueError` if a value is out of range or options conflict."""
        if self.max_steps is None and self.num_train_epochs is not None:
            self.max_steps = -1
        self.num_train_epochs = EPOCHS if self.num_train_epochs is None else self.num_train_epochs
        for name, value in STAGES[self.stage].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.ddp_find_unused_parameters is None:
            # In pre-training, a batch may contain texts of one expert only. In fine-tuning, columns are encoded one after another:
            # each of them uses one expert, but all together use all weights.
            self.ddp_find_unused_parameters = self.stage == "pretrain"
        super().__post_init__()
        if self.prompts:
            raise ValueError("prompts would be missing in the exported model, which has experts instead of prompts")


@dataclass
class CoTMoTEDataArguments(StreamedTextArguments):
    """Data of a CoT-MoTE run. The defaults are the paper's, as far as it gives them."""

    option_group = "data"

    contexts: list[str] = option(
        list(CONTEXTS), "pretrain: Contextual spans of a text: neighbour or query (a pseudo-query)."
    )
    queries_per_span: PositiveInt = option(1, "pretrain: Number of extracted pseudo-queries per span.")
    pseudo_queries: list[str] = option(
        [],
        "pretrain: Spans with generated queries, as written by `revela-hub pseudo-queries`: folders, JSON lines, parquet, or data"
        " sets (hf:owner/name) with the columns text and queries; instead of --data.",
        metavar="PATH",
    )
    max_length: TextLength = option(144, "Maximum number of tokens per span or passage, including [CLS] and [SEP].")
    query_max_length: PositiveInt = option(32, "finetune: Maximum number of tokens per query.")
    min_tokens: PositiveInt = option(MIN_TOKENS, "Skip spans with fewer tokens, such as the ends of documents.")
    encoder_mask_ratio: Share = option(
        0.3, "Fraction of tokens that the encoder has to predict, masked as whole words."
    )
    decoder_mask_ratio: Share = option(0.45, "Fraction of tokens that an ae decoder has to predict.")
    max_spans: PositiveInt | None = option(None, "pretrain: Maximum number of rows, each a span with a context.")
    pairs: str | None = option(
        None,
        "finetune: Rows with anchor, positive, negative_1, ..., as written by `revela-hub mine`: JSON lines, parquet, CSV, or a"
        " data set (hf:owner/name).",
    )
    num_negatives: NonNegativeInt = option(15, "finetune: Number of hard negatives per row.")


def load_contexts(
    arguments: CoTMoTEDataArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset | IterableDataset, str]:
    """Read the sources; return rows with the columns of `build_contexts`, or text and queries, and a summary of the sources."""
    if bool(arguments.data) == bool(arguments.pseudo_queries):
        raise UserError("give either --data (text to pre-train on) or --pseudo_queries (spans with generated queries)")
    if arguments.pseudo_queries:
        return _load_queries(arguments)
    queries = ExtractiveQueries(arguments.queries_per_span) if "query" in arguments.contexts else None
    settings: dict[str, Any] = {"tokenizer": tokenizer, "contexts": arguments.contexts, "queries": queries}
    rows, report = text_rows(arguments, build_contexts, **settings, **values_of(SpanSettings, arguments))
    return rows, str(report) + (f"; pseudo-queries {queries.description}" if queries else "")


def _load_queries(arguments: CoTMoTEDataArguments) -> tuple[Dataset, str]:
    """Read the spans with their queries."""
    sources = parse_sources(arguments.pseudo_queries)
    for source in sources:
        names = [file.name for file in local_path(source.path).glob("*-of-*.jsonl*")]
        shards = [found for name in names if (found := re.fullmatch(r"\d{5}-of-(\d{5})\.jsonl(\.part)?", name))]
        if shards and (complete := sum(not shard[2] for shard in shards)) < int(shards[0][1]):
            raise UserError(
                f"{source.path}: {complete} of {int(shards[0][1])} shards are complete: generate the others"
            )
    counts = {"queries": 0, "without": 0}

    def read() -> Iterator[dict[str, Any]]:
        for row in (row for source in sources for row in read_rows(source)):
            text, queries = row.text("text"), [query for query in row.texts("queries") if query.strip()]
            if text.strip() and queries:
                counts["queries"] += len(queries)
                yield {"text": text, "queries": queries}
            else:
                counts["without"] += 1

    name = f"span-queries-{rows_fingerprint({'spans': arguments.max_spans}, sources)}"
    types: Types = {"text": "string", "queries": ["string"]}
    rows, counts = cached_rows(
        name, types, lambda: islice(read(), arguments.max_spans), lambda: counts, arguments.cache_dir
    )
    if not len(rows):
        raise UserError(f"{', '.join(arguments.pseudo_queries)}: no row has a text and queries")
    skipped = f"; skipped: {counts['without']:,} without both" if counts["without"] else ""
    return rows, f"{counted(len(rows), 'span')} with {counts['queries']:,} generated queries{skipped}"


def load_pairs(arguments: CoTMoTEDataArguments) -> tuple[Dataset, str]:
    """Read the columns anchor, positive, negative_1 to negative_N; return them with a summary of the sources."""
    if arguments.pairs is None:
        raise UserError("no pairs to fine-tune on: give --pairs FILE, as revela-hub mine writes it")
    pairs, report = read_labelled_pairs(arguments.pairs, cache_dir=arguments.cache_dir)
    wanted = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(arguments.num_negatives))]
    if not {*wanted} <= {*pairs.column_names}:
        raise UserError(
            f"{arguments.pairs} has {report}: mine it with --num_negatives {arguments.num_negatives}, or lower --num_negatives"
        )
    return pairs.select_columns(wanted), report
