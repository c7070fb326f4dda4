"""The data options of `revela-hub train retromae`, and what they load."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import parse_sources
from revela_hub.data.text.masking import check_mask_ratio
from revela_hub.data.text.spans import MIN_TOKENS, build_spans

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass
class RetroMAEDataArguments:
    """What RetroMAE is pre-trained on. The defaults are those of the paper where it names them."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "What to train on, one or more of: folders or files of text, glob patterns, JSON lines (.jsonl, "
            ".jsonl.gz), data sets as hf:owner/name[:configuration][:split] (of the Hub, or a folder). In a YAML file "
            "also mappings with a path and more: see revela_hub.data.sources.source."
        },
    )
    text_column: str = field(
        default="text", metadata={"help": "The field of JSON lines, or the column of data sets, that holds the text."}
    )
    exclude: list[str] = field(
        default_factory=list,
        metadata={"help": "Patterns of file and folder names not to read, for example '*.min.js' tests."},
    )
    language: str = field(
        default="en", metadata={"help": "Language of the text (ISO 639-1), by which the ends of sentences are found."}
    )
    max_length: int = field(
        default=512,
        metadata={"help": "Tokens of a span at most, with [CLS] and [SEP]: whole sentences of one document, packed."},
    )
    min_tokens: int = field(
        default=MIN_TOKENS, metadata={"help": "Spans of fewer tokens, the rests of documents, are left out."}
    )
    encoder_mask_ratio: float = field(
        default=0.3, metadata={"help": "Share of a span's tokens, in whole words, that the encoder has to predict."}
    )
    decoder_mask_ratio: float = field(
        default=0.5,
        metadata={
            "help": "Share of a span's tokens, in whole words, that are hidden from the decoder: from each position "
            "anew with enhanced decoding, once with basic decoding (the paper's ablation: 0.5 to 0.9)."
        },
    )
    max_spans: int | None = field(default=None, metadata={"help": "Spans to make at most."})
    max_documents: int | None = field(default=None, metadata={"help": "Documents to read from each source at most."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where the spans are kept between runs. Default: in the cache of datasets."}
    )


def load_spans(arguments: RetroMAEDataArguments, tokenizer: "PreTrainedTokenizerBase") -> "tuple[Dataset, ReadReport]":
    """Reads, tokenises and packs what the arguments name; see `build_spans` for the columns.

    Returns:
        The spans, and the report to show.

    Raises:
        UserError: Mask ratios outside (0, 1), or anything that `build_spans` raises.
    """
    check_mask_ratio("encoder_mask_ratio", arguments.encoder_mask_ratio)
    check_mask_ratio("decoder_mask_ratio", arguments.decoder_mask_ratio)
    defaults: dict[str, Any] = {
        "text_column": arguments.text_column,
        "exclude": tuple(arguments.exclude),
        "max_documents": arguments.max_documents,
    }
    report = ReadReport()
    spans = build_spans(
        parse_sources(arguments.data, **defaults),
        tokenizer,
        max_length=arguments.max_length,
        min_tokens=arguments.min_tokens,
        language=arguments.language,
        max_spans=arguments.max_spans,
        cache_dir=arguments.cache_dir,
        report=report,
    )
    return spans, report
