r"""Mine hard negatives: passages a retriever ranks highly but that are not relevant.

For each pair of a query (anchor) and a positive passage, the model searches the corpus. Passages that score at most
95% of the positive's score become negatives; those above are often unlabelled positives. The report lists how many
passages each limit removed. Known positives of a query, the query itself and their duplicates are never negatives.

Pairs are JSON lines, a data set (hf:owner/name) or a BEIR folder (--beir). Without --corpus, the positives of all
pairs are searched. Vectors are cached on disk (dimension x 4 bytes per passage), so a repeated or interrupted command
reuses them, and the corpus can be larger than memory.

Writes anchor, positive, negative_1, negative_2, ..., which sentence-transformers' losses read directly, as JSON
lines (.jsonl or .jsonl.gz).

With --mixture, every retrieval and sts task of a mixture is mined in its own corpus. The folder --output then holds
the pairs and mixture.yaml for `revela-hub train nvembed`. {instruction} in --query_prompt is the task's instruction.
Tasks that are finished are skipped when the command is repeated.

Examples:
  revela-hub mine my-retriever --beir data/beir/scifact --split train --output mined.jsonl
  revela-hub mine bm25 --pairs pairs.jsonl --corpus corpus.jsonl.gz --num_negatives 4 --output mined.jsonl
  revela-hub mine my-retriever --pairs hf:sentence-transformers/natural-questions --anchor_column query \
      --positive_column answer --range_min 10 --range_max 100 --sampling random --output mined.jsonl
  revela-hub mine my-retriever --mixture mixture.yaml --num_negatives 7 --output outputs/mined
"""

import gzip
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, required, values_of
from revela_hub.ranges import NonNegativeInt, PositiveInt
from revela_hub.search.models import load_models
from revela_hub.search.options import Mode, RankOptions

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(RankOptions):
    """Arguments of `revela-hub mine`."""

    model: str = required("Sentence-transformers folder or Hub id, or bm25.")
    output: str = required("Output file: JSON lines (.jsonl or .jsonl.gz); with --mixture, a folder.")
    mode: Mode | None = option(None, "How to rank (default: dense, or bm25 if that is the model).")
    pairs: str | None = option(None, "Pairs: JSON lines or a data set (hf:owner/name).")
    anchor_column: str = option("anchor", "Column of the pairs that holds the query.")
    positive_column: str = option("positive", "Column of the pairs that holds the passage, or a list of passages.")
    beir: str | None = option(None, "BEIR folder to use instead of --pairs and --corpus.")
    split: str = option("train", "Split of the BEIR folder to mine for.")
    mixture: str | None = option(None, "YAML file of a mixture, instead of --pairs: mines every task.")
    corpus: str | None = option(
        None, "Passages to search: JSON lines, a data set or a BEIR folder (default: the positives of all pairs)."
    )
    text_column: str = option("text", "Column of the corpus that holds the passage.")
    num_negatives: PositiveInt = option(1, "Number of negatives per pair.")
    positive_aware: bool = option(True, "Apply --relative_margin.")
    relative_margin: float = option(
        0.05, "Minimum distance of a negative's score below the positive's, as a fraction of that score."
    )
    range_min: NonNegativeInt = option(0, "Skip the N best passages that are within the score limits.")
    range_max: PositiveInt | None = option(
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
    from revela_hub.data.sources.beir import read_beir_pairs
    from revela_hub.files import atomic, cache_folder, claim
    from revela_hub.retrieval.mining import MiningReport, MiningSettings, mine
    from revela_hub.retrieval.mining_input import read_corpus, read_pairs
    from revela_hub.retrieval.mining_mixture import mine_mixture

    settings, report = MiningSettings(**values_of(MiningSettings, arguments)), MiningReport()
    if not arguments.positive_aware:
        settings = replace(settings, relative_margin=None)
    if [bool(arguments.pairs), bool(arguments.beir), bool(arguments.mixture)].count(True) != 1:
        raise UserError("give one of --pairs FILE, --beir FOLDER and --mixture FILE (see revela-hub mine --help)")
    if arguments.mixture and arguments.corpus:
        raise UserError("the tasks of a --mixture have their own corpora: leave out --corpus")
    arguments.check_modes("bm25" if arguments.model == "bm25" else arguments.mode or "dense")
    output = local_path(arguments.output).resolve()
    folder = claim(local_path(arguments.cache_dir or cache_folder("mining")))
    if arguments.mixture:
        claim(output)
    else:
        _check_output(arguments, output)
    models = load_models(arguments, arguments.model, arguments.mode, rerank=arguments.rerank is not None)
    loaded = {"ranker": models.dense, "sparse": models.sparse, "reranker": models.reranker}
    if arguments.mixture:
        print(mine_mixture(arguments.mixture, output, settings, models.settings, print, folder=folder, **loaded))
        return
    if arguments.beir:
        pairs = read_beir_pairs(arguments.beir, arguments.split)
    else:
        pairs = read_pairs(arguments.pairs or "", arguments.anchor_column, arguments.positive_column)
    source = arguments.corpus or arguments.beir
    corpus = read_corpus(source, arguments.text_column) if source else None
    rows = mine(pairs, corpus, settings=settings, ranking=models.settings, report=report, folder=folder, **loaded)
    with atomic(output) as temporary, temporary.open("wb") as stream:
        with gzip.open(stream, "wb") if output.suffix == ".gz" else nullcontext(stream) as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    print(report)


def _check_output(arguments: Arguments, output: Path) -> None:
    from revela_hub.data.sources.beir import is_beir

    if not output.name.endswith((".jsonl", ".jsonl.gz")) or (output.exists() and not output.is_file()):
        raise UserError(f"--output {output} must be a file whose name ends in .jsonl or .jsonl.gz")
    if output.exists() and not arguments.overwrite:
        raise UserError(f"{output} already exists; choose another --output, or replace it with --overwrite")
    for name in ("pairs", "corpus", "beir"):
        path = local_path(getattr(arguments, name) or "no file").resolve()
        if output.is_relative_to(path) and (output.exists() or not is_beir(path)):
            raise UserError(f"--output {output} is one of the files that --{name} reads: choose another")
