r"""Mine hard negatives: passages a retriever ranks highly but that are not relevant.

For each pair of a query (anchor) and a positive passage, the model searches the corpus. Passages that score at most
95% of the positive's score become negatives; those above are often unlabelled positives. The report lists how many
passages each limit removed. Known positives of a query, the query itself and their duplicates are never negatives.

Pairs are JSON lines, a data set (hf:owner/name) or a BEIR folder (--beir). Without --corpus, the positives of all
pairs are searched. Vectors are cached on disk (dimension x 4 bytes per passage), so a repeated or interrupted command
reuses them, and the corpus can be larger than memory.

Writes anchor, positive, negative_1, negative_2, ..., which sentence-transformers' losses read directly, as JSON
lines (.jsonl or .jsonl.gz).

Examples:
  revela-hub mine my-retriever --beir data/beir/scifact --split train --output mined.jsonl
  revela-hub mine bm25 --pairs pairs.jsonl --corpus corpus.jsonl.gz --num_negatives 4 --output mined.jsonl
  revela-hub mine my-retriever --pairs hf:sentence-transformers/natural-questions --anchor_column query \
      --positive_column answer --range_min 10 --range_max 100 --sampling random --output mined.jsonl
  revela-hub mine org/embedder --trust_remote_code --pairs pairs.jsonl --output mined.jsonl \
      --query_prompt $'Instruct: Retrieve passages that answer the question\nQuery: '
  revela-hub mine bm25 --pairs pairs.jsonl --positive_aware false --output mined.jsonl
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, required, values_of
from revela_hub.output import note
from revela_hub.search.models import load_models
from revela_hub.search.options import Mode, RankOptions

if TYPE_CHECKING:
    pass

POSITIONALS = ("model",)

RowT = TypeVar("RowT")


@dataclass(kw_only=True)
class Arguments(RankOptions):
    """Arguments of `revela-hub mine`."""

    model: str = required("Sentence-transformers folder or Hub id, or bm25.")
    output: str = required("Output file: JSON lines (.jsonl or .jsonl.gz).")
    mode: Mode | None = option(None, "How to rank (default: dense, or bm25 if that is the model).")
    pairs: str | None = option(None, "Pairs: JSON lines or a data set (hf:owner/name).")
    anchor_column: str = option("anchor", "Column of the pairs that holds the query.")
    positive_column: str = option("positive", "Column of the pairs that holds the passage, or a list of passages.")
    beir: str | None = option(None, "BEIR folder to use instead of --pairs and --corpus.")
    split: str = option("train", "Split of the BEIR folder to mine for.")
    corpus: str | None = option(
        None, "Passages to search: JSON lines, a data set or a BEIR folder (default: the positives of all pairs)."
    )
    text_column: str = option("text", "Column of the corpus that holds the passage.")
    num_negatives: int = option(1, "Number of negatives per pair.")
    positive_aware: bool = option(True, "Apply --relative_margin.")
    relative_margin: float = option(
        0.05, "Minimum distance of a negative's score below the positive's, as a fraction of that score."
    )
    max_score: float | None = option(None, "Maximum score of a negative.")
    range_min: int = option(0, "Skip the N best passages that are within the score limits.")
    range_max: int | None = option(
        None, "Number of top passages to consider (default: ten per negative, after --range_min)."
    )
    sampling: Literal["top", "random"] = option("top", "Take the top passages that remain, or a random sample of them.")
    fewer: Literal["drop", "keep"] = option(
        "drop", "What to do with pairs that have too few negatives: drop them, or keep them with nulls."
    )
    scores: bool = option(False, "Also write the scores.")
    seed: int = option(0, "Random seed for --sampling random.")
    overwrite: bool = option(False, "Replace an existing output file.")


def run(arguments: Arguments) -> None:
    """Mine, write the output and print the report."""
    from revela_hub.files import cache_folder, claim
    from revela_hub.retrieval.mining.mining import MiningSettings, mine

    settings = MiningSettings(**values_of(MiningSettings, arguments))
    if not arguments.positive_aware:
        settings = replace(settings, relative_margin=None)
    output = local_path(arguments.output)
    _check_output(arguments, output)
    folder = local_path(arguments.cache_dir or cache_folder("mining"))
    claim(folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    pairs, corpus = _input(arguments)
    models = load_models(arguments, arguments.model, arguments.mode, rerank=arguments.rerank is not None)
    mined = mine(
        pairs,
        corpus,
        models.dense,
        settings,
        models.settings,
        folder=folder,
        sparse=models.sparse,
        reranker=models.reranker,
    )
    _write(mined.rows, output)
    print(mined.report)
    note(f"cache: {folder}")


def _check_output(arguments: Arguments, output: Path) -> None:
    from revela_hub.data.sources.beir import is_beir

    if output.exists() and not output.is_file():
        raise UserError(f"--output {output} is a folder or a device: choose another name")
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"--output {output}: the name must end in .jsonl or .jsonl.gz")
    if output.exists() and not arguments.overwrite:
        raise UserError(f"{output} already exists; choose another --output, or replace it with --overwrite")
    for name, source in (("--pairs", arguments.pairs), ("--corpus", arguments.corpus), ("--beir", arguments.beir)):
        path = local_path(source or "").resolve()
        if source and not source.startswith("hf:") and output.resolve().is_relative_to(path):
            if output.exists() or not is_beir(path):  # of a BEIR folder, only its three files are read
                raise UserError(f"--output {output} is one of the files that {name} reads: choose another")


def _input(arguments: Arguments) -> tuple[Iterator[tuple[str, str]], Iterator[str] | None]:
    """Return the pairs and the corpus as iterators; None means the positives of all pairs."""
    from revela_hub.data.sources.beir import read_beir_pairs
    from revela_hub.retrieval.mining.sources import read_corpus, read_pairs

    if bool(arguments.pairs) == bool(arguments.beir):
        raise UserError("give either --pairs FILE or --beir FOLDER (see revela-hub mine --help)")
    if arguments.pairs and arguments.anchor_column == arguments.positive_column:
        raise UserError(
            f"--anchor_column and --positive_column are both {arguments.anchor_column!r}: choose different columns"
        )
    corpus = arguments.corpus or arguments.beir
    documents = read_corpus(corpus, arguments.text_column) if corpus else None
    if arguments.beir:
        pairs = read_beir_pairs(arguments.beir, arguments.split)
    else:
        assert arguments.pairs is not None
        pairs = read_pairs(arguments.pairs, arguments.anchor_column, arguments.positive_column)
    return pairs, documents


def _write(rows: Iterator[dict[str, Any]], output: Path) -> None:
    from revela_hub.files import atomic

    with (
        atomic(output.resolve()) as temporary,
        temporary.open("wb") as stream,
    ):  # resolved: not to replace a link by a file
        with gzip.open(stream, "wb") if output.suffix == ".gz" else nullcontext(stream) as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
