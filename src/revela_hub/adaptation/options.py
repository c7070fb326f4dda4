"""The options of `revela-hub adapt`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.sources.text_options import TextOptions
from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.ranges import PositiveFloat, Seed, TextLength

if TYPE_CHECKING:
    from revela_hub.data.sources.source import Source

SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


@dataclass(kw_only=True)
class AdaptOptions(TextOptions):
    """The options of `revela-hub adapt`."""

    data: list[str] = required("Your text: folders, files, glob patterns, JSON lines or data sets (hf:owner/name).")
    retriever: str = option("sentence-transformers/all-MiniLM-L6-v2", "Retriever to adapt: Hub id or folder.")
    lm: str | None = option(
        None,
        "Language model (a decoder) that writes queries for distillation and can train the retriever: Hub id or folder.",
    )
    labels: str | None = option(
        None, "Labelled pairs: JSON lines with anchor and positive, or a BEIR folder with qrels/train.tsv."
    )
    example_queries: str | None = option(
        None, "Some real queries, which need no labels: the queries made from the text are shortened to resemble them."
    )
    budget: str = option("10m", "Total time, e.g. 90s, 30m or 2h; a CPU needs 10m to try it, a slow one 30m or more.")
    output_dir: str = option("outputs/adapted", "Output folder.")
    dry_run: bool = option(False, "Print the plan, and do not train.")
    learning_rate: PositiveFloat | None = option(
        None,
        "Learning rate for training on pairs (default: 5e-5, or 1e-2 for static embeddings); small or weak retrievers need"
        " more, e.g. 1e-3.",
    )
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text (default: the retriever's own limit)."
    )
    bm25_stemmer: str = option("english", "Stemmer of BM25 for the language of the text, e.g. german, or none.")
    bm25_stopwords: str = option("en", "Language of BM25's stop words, e.g. de, or none.")
    cache_dir: str | None = option(None, "Cache folder for prepared data (default: the cache of datasets).")
    seed: Seed = option(0, "Random seed.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    @property
    def output(self) -> Path:
        """Output folder."""
        return Path(self.output_dir)

    @property
    def seconds(self) -> float:
        """The budget in seconds.

        >>> AdaptOptions(data=[], budget="1.5h").seconds
        5400.0
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", self.budget.strip().lower())
        if not found or not (seconds := float(found[1]) * SECONDS_PER_UNIT[found[2]]):
            raise UserError(f"--budget {self.budget!r} is not a duration: write a number with s, m or h, e.g. 30m")
        return seconds

    def sources(self) -> "list[Source]":
        """Return the sources of the text."""
        from revela_hub.data.sources.source import parse_sources

        return parse_sources(self.data, **self.text_options())
