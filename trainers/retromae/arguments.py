"""Training and data arguments of RetroMAE, with the defaults of the paper (arXiv 2205.12035, section 4.1.3)."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.text.spans import MIN_TOKENS, SpanSettings, build_spans
from revela_hub.options import option, values_of
from revela_hub.ranges import PositiveInt, Share
from revela_hub.trainers.base.arguments import WARMUP, WEIGHT_DECAY, RunArguments, StreamedTextArguments, text_rows


@dataclass
class RetroMAETrainingArguments(RunArguments):
    """`TrainingArguments` with the paper's defaults; a row of the data set is a span of text."""

    learning_rate: float = option(1e-4, "Peak learning rate.")
    per_device_train_batch_size: int = option(32, "Number of spans per device and forward pass.")
    num_train_epochs: float = option(8.0, "Number of epochs; spans are masked again in each.")
    warmup_steps: float = option(0.1, WARMUP)
    weight_decay: float = option(0.01, WEIGHT_DECAY)


@dataclass
class RetroMAEDataArguments(StreamedTextArguments):
    """Data of a RetroMAE run. The defaults are the paper's, as far as it gives them."""

    option_group = "data"

    max_length: PositiveInt = option(512, "Maximum number of tokens per span, including [CLS] and [SEP].")
    min_tokens: PositiveInt = option(MIN_TOKENS, "Skip spans with fewer tokens, such as the ends of documents.")
    encoder_mask_ratio: Share = option(
        0.3, "Fraction of tokens that the encoder has to predict, masked as whole words."
    )
    decoder_mask_ratio: Share = option(0.5, "Fraction of tokens that are hidden from the decoder, as whole words.")
    max_spans: PositiveInt | None = option(None, "Maximum number of spans.")


def load_spans(
    arguments: RetroMAEDataArguments, tokenizer: PreTrainedTokenizerBase, held_out: Path | None = None
) -> tuple[Dataset | IterableDataset, ReadReport]:
    """Read the sources, and tokenize and pack them into spans; see `build_spans` for the columns.

    Returns:
        The spans, and a report on the sources.

    Raises:
        UserError: `build_spans` raises an error.
    """
    return text_rows(arguments, build_spans, held_out, tokenizer=tokenizer, **values_of(SpanSettings, arguments))
