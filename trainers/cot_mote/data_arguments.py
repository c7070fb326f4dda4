"""Data options of `revela-hub train cot-mote`, and functions that load the data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.mixture.pairs import KnownPairs
from revela_hub.data.row_cache import cache_folder
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.text.contexts import CONTEXTS, build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries, LanguageModelQueries, PseudoQueries, Seq2SeqQueries
from revela_hub.data.text.spans import MIN_TOKENS
from revela_hub.errors import UserError, first_line
from revela_hub.ranges import NonNegativeInt, PositiveInt, Share
from revela_hub.trainers.common.arguments import StreamedTextArguments

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


@dataclass
class CoTMoTEDataArguments(StreamedTextArguments):
    """Data of a CoT-MoTE run. The defaults are the paper's, as far as it gives them."""

    _argument_group_name = "data"

    contexts: list[str] = field(
        default_factory=lambda: list(CONTEXTS),
        metadata={"help": "pretrain: Contextual spans of a text: neighbour, overlap or query (a pseudo-query)."},
    )
    query_generator: str = field(
        default="extractive",
        metadata={
            "help": "pretrain: Generator of pseudo-queries: extractive (no model), lm:MODEL, or a doc2query model."
        },
    )
    query_prefix: str = field(
        default="",
        metadata={"help": "pretrain: Text that a doc2query model expects before a passage, e.g. 'text2query: '."},
    )
    queries_per_span: PositiveInt = field(default=1, metadata={"help": "pretrain: Number of pseudo-queries per span."})
    max_length: PositiveInt = field(
        default=144, metadata={"help": "Maximum number of tokens per span or passage, including [CLS] and [SEP]."}
    )
    query_max_length: PositiveInt = field(
        default=32, metadata={"help": "finetune: Maximum number of tokens per query."}
    )
    min_tokens: PositiveInt = field(
        default=MIN_TOKENS, metadata={"help": "Skip spans with fewer tokens, such as the ends of documents."}
    )
    encoder_mask_ratio: Share = field(
        default=0.3, metadata={"help": "Fraction of tokens that the encoder has to predict, masked as whole words."}
    )
    decoder_mask_ratio: Share = field(
        default=0.45, metadata={"help": "Fraction of tokens that an ae decoder has to predict."}
    )
    max_spans: PositiveInt | None = field(default=None, metadata={"help": "Maximum number of spans."})
    pairs: str | None = field(
        default=None,
        metadata={
            "help": "finetune: JSON lines with anchor, positive, negative_1, ..., as written by `revela-hub mine`."
        },
    )
    num_negatives: NonNegativeInt = field(default=15, metadata={"help": "finetune: Number of hard negatives per row."})


def query_generator(arguments: CoTMoTEDataArguments, seed: int) -> PseudoQueries | None:
    """Return the generator of pseudo-queries; None without pseudo-queries. Models are loaded on first use.

    Raises:
        UserError: a number is out of range, or a language model cannot be loaded.
    """
    if "query" not in arguments.contexts:
        return None
    name, number = arguments.query_generator, arguments.queries_per_span
    if name == "extractive":
        return ExtractiveQueries(number)
    if name.startswith("lm:"):
        from revela_hub.data.synthesis.backends import LocalModel, Sampling

        model = name.removeprefix("lm:")
        return LanguageModelQueries(LocalModel(model, Sampling(max_new_tokens=32)), Path(model).name, number, seed=seed)
    return Seq2SeqQueries(name, number, prefix=arguments.query_prefix, seed=seed)


def load_contexts(
    arguments: CoTMoTEDataArguments, tokenizer: "PreTrainedTokenizerBase", seed: int
) -> "tuple[Dataset | IterableDataset, str]":
    """Read and tokenize the sources; see `build_contexts` for the columns.

    Returns:
        The rows, and a summary of the sources.

    Raises:
        UserError: there are no data, or `query_generator` or `build_contexts` raise an error.
    """
    queries = query_generator(arguments, seed)
    if not arguments.data:
        raise UserError("no data to pre-train on: give --data with folders, files or data sets of text")
    report = ReadReport()
    rows = build_contexts(
        arguments.sources(),
        tokenizer,
        contexts=arguments.contexts,
        queries=queries,
        max_length=arguments.max_length,
        min_tokens=arguments.min_tokens,
        language=arguments.language,
        max_spans=arguments.max_spans,
        cache_dir=arguments.cache_dir,
        report=report,
        streaming=arguments.streaming,
    )
    return rows, str(report) + (f"; pseudo-queries {queries.description}" if queries else "")


def load_pairs(arguments: CoTMoTEDataArguments) -> "tuple[Dataset, str]":
    """Read the pairs with their negatives.

    Returns:
        Columns anchor, positive, negative_1 to negative_N, and a summary of the sources.

    Raises:
        UserError: the file is missing or cannot be read, a column is missing, or no row has all texts and negatives that
            differ from the positives of its anchor.
    """
    import datasets

    if arguments.pairs is None:
        raise UserError("no pairs to fine-tune on: give --pairs FILE, as revela-hub mine writes it")
    if not Path(arguments.pairs).is_file():
        raise UserError(f"{arguments.pairs} does not exist: write it with revela-hub mine bm25 --num_negatives 15 ...")
    try:
        # `cache_folder` marks the folder as written by this program; text rows are cached there, too.
        kept = str(cache_folder(arguments.cache_dir)) if arguments.cache_dir else None
        rows = datasets.load_dataset("json", data_files=arguments.pairs, split="train", cache_dir=kept)
    except StopIteration as error:
        raise UserError(f"{arguments.pairs} is empty: mine the pairs again") from error
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise UserError(
            f"{arguments.pairs} cannot be read as JSON lines: {first_line(error.__cause__ or error)}"
        ) from error
    wanted = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(arguments.num_negatives))]
    if missing := [name for name in wanted if name not in rows.column_names]:
        raise UserError(
            f"{arguments.pairs} has no column {missing[0]!r}: mine it with --num_negatives {arguments.num_negatives}, or"
            " lower --num_negatives"
        )
    rows = rows.select_columns(wanted)
    whole = rows.filter(lambda row: all(isinstance(text, str) and text.strip() for text in row.values()))
    if not len(whole):
        raise UserError(f"{arguments.pairs} has no row with texts in all of {', '.join(wanted)}")
    known = KnownPairs()
    for anchor, positive in zip(whole["anchor"], whole["positive"], strict=True):
        known.add(anchor, positive)
    right = (not any((row["anchor"], row[name]) in known for name in wanted[2:]) for row in whole)
    pairs = whole.select([index for index, kept in enumerate(right) if kept])
    if not len(pairs):
        raise UserError(f"{arguments.pairs}: in every row a negative equals a positive: mine the negatives again")
    skipped = {"without all texts": len(rows) - len(whole), "with a positive as a negative": len(whole) - len(pairs)}
    counts = ", ".join(f"{number:,} {why}" for why, number in skipped.items() if number)
    summary = f"{len(pairs):,} pairs with {arguments.num_negatives} negatives each"
    return pairs, f"{summary}; skipped: {counts}" if counts else summary
