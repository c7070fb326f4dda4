r"""Fine-tune a retriever on query-passage pairs.

The pairs are labelled (--pairs: JSON lines, a data set, or a BEIR folder) or natural: --data takes raw text or code,
and pairs each docstring with its function, each title with its section, and a sentence with the rest of its passage.
The other passages of a batch are the negatives; `revela-hub mine` adds hard ones to labelled pairs. With
--query_only true, only the query encoder is trained: document vectors of the base model stay valid, and
`revela-hub search --index` accepts its index.

Some queries are held out and evaluated before, during and after training. The best weights are exported; if training
did not help, the base model is exported unchanged.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train pairs --pairs pairs.jsonl --retriever sentence-transformers/all-MiniLM-L6-v2 --output_dir outputs/tuned
  revela-hub train pairs --data path/to/code --retriever sentence-transformers/all-MiniLM-L6-v2 --output_dir outputs/tuned
  revela-hub train pairs --pairs hf:sentence-transformers/natural-questions --anchor_column query --positive_column answer \
      --retriever BAAI/bge-small-en-v1.5
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from revela_hub.data.mixture.labelled import read_labelled_pairs
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import MIN_QUERIES
from revela_hub.options import option, required
from revela_hub.ranges import TextLength
from revela_hub.trainers.base.arguments import ProbeArguments, TextArguments
from revela_hub.trainers.base.retriever import PlainPooling, print_retriever
from revela_hub.trainers.base.run import Run, open_run
from revela_hub.trainers.base.run_probe import HeldOutText, hold_out_rows, hold_out_text
from revela_hub.trainers.pair_tuning import PAIR_TUNING
from revela_hub.trainers.pair_tuning.data import build_text_pairs
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments


@dataclass(kw_only=True)
class Arguments(ProbeArguments, TextArguments, PairsTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train pairs`: the model, the data, then those of every transformers Trainer."""

    retriever: str = required("Model to train: Hub id or folder of a retriever, an encoder or a decoder.")
    pairs: str | None = option(None, "Labelled pairs: JSON lines, a data set (hf:owner/name), or a BEIR folder.")
    kind: Literal["auto", "text", "code"] = option(
        "auto", "With --data: How to read files: text, code (Python functions), or by file extension (auto)."
    )
    anchor_column: str = option("anchor", "Column of the pairs that holds the query.")
    positive_column: str = option("positive", "Column of the pairs that holds the passage, or a list of passages.")
    split: str = option("train", "Split of a BEIR folder to train on.")
    output_dir: str = option("outputs/pairs", "Output folder.")
    max_length: TextLength | None = option(None, "Maximum number of tokens per text (default: the model's own limit).")
    query_max_length: TextLength | None = option(None, "Maximum number of tokens per query (default: as per text).")
    pooling: PlainPooling | None = option(
        None, "Pooling of a model that is not a sentence-transformers folder; last is an added EOS (default: mean)."
    )
    similarity: Literal["cosine", "dot"] | None = option(
        None, "How vectors are compared, also by the exported model (default: the model's own, or cosine)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    def __post_init__(self) -> None:
        """Raise a `UserError` if options conflict; see also the base classes."""
        super().__post_init__()
        if bool(self.pairs) == bool(self.data):
            raise UserError("give either --pairs FILE (labelled pairs) or --data PATH (raw text with natural pairs)")


def run(arguments: Arguments) -> None:
    """Train, export and print where the model is."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `PairsTrainer`, such as `callbacks`."""
    with open_run(PAIR_TUNING, arguments) as run:
        if run.finished:
            return run.output
        rows, task, report = _read(arguments, run)
        trainer = PairsTrainer(
            arguments.retriever,
            arguments,
            train_dataset=rows,
            retrieval_task=task,
            max_length=arguments.max_length,
            query_max_length=arguments.query_max_length,
            model_init_kwargs={
                name: getattr(arguments, name) for name in ("trust_remote_code", "pooling", "similarity")
            },
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=[arguments.pairs] if arguments.pairs else arguments.data)
        return run.output


def _read(arguments: Arguments, run: Run) -> tuple[Dataset, RetrievalTask | None, str]:
    """Return the rows to train on, the task to measure on, and the report of the data."""
    if arguments.pairs:
        names = ("anchor_column", "positive_column", "split", "cache_dir")
        options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        rows, said = run.read(*read_labelled_pairs(arguments.pairs, **options))
        left, task = hold_out_rows(arguments, rows)
        if len(left) < len(rows):
            said = f"{said}, of which {len(left):,} are trained on"
        return left, task, said
    report = ReadReport()
    kept: dict[str, Any] = {name: getattr(arguments, name) for name in ("seed", "cache_dir", "num_proc")}
    task, probe = _hold_out(arguments, kept)
    kept["report"] = report
    rows, said = run.read(build_text_pairs(arguments.sources(probe), **kept), report)
    return rows, task, said


def _hold_out(arguments: Arguments, kept: dict[str, Any]) -> HeldOutText:
    """Return the task to measure on; a probe of the text takes at most half of its pairs."""
    most = None
    if arguments.probe == "auto" and not arguments.eval_corpus:
        available = len(build_text_pairs(arguments.sources(), **kept))
        if available < 2 * MIN_QUERIES:
            pairs = counted(available, "natural pair")
            arguments.log(f"no evaluation: the text has {pairs}, fewer than {2 * MIN_QUERIES}")
            return HeldOutText()
        most = available // 2
    return hold_out_text(arguments, max_queries=most)
