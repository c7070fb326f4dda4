"""Train a retriever on raw text with a contrastive loss: Contriever (arXiv 2112.09118), a baseline.

Two random crops of a passage are a positive pair; the crops of other passages in the batch (or, with --queue_size, of
earlier batches) are negatives. It starts from a sentence-transformers model, or from an encoder or decoder
with mean pooling. In our measurements, it did not improve all-MiniLM-L6-v2: use `revela-hub adapt` for such models.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train contriever --data path/to/texts --retriever HuggingFaceTB/SmolLM2-135M --max_steps 200
  revela-hub train contriever --data path/to/texts --retriever google-bert/bert-base-uncased --views inverse_cloze
  accelerate launch -m revela_hub train contriever --config examples/revela/baselines/contriever-wikipedia.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.data.text.passages import build_passages
from revela_hub.options import option, required
from revela_hub.ranges import PositiveInt, TextLength
from revela_hub.trainers.base.arguments import ProbeArguments, StreamedTextArguments, text_rows
from revela_hub.trainers.base.retriever import RetrieverArguments, load_retriever, print_retriever
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from revela_hub.trainers.baselines import CONTRIEVER
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments


@dataclass(kw_only=True)
class Arguments(ProbeArguments, RetrieverArguments, StreamedTextArguments, ContrieverTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train contriever`: the model, the data's, then those of every transformers Trainer."""

    retriever: str = required("Model to train: Hub id or folder.")
    output_dir: str = option("outputs/contriever", "Output folder.")
    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to split passages: at sentences (text), at lines (code), or by file extension (auto)."
    )
    max_words: PositiveInt = option(200, "Maximum number of words per passage.")
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text (default: the retriever's own limit)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ContrieverTrainer`, such as `callbacks`."""
    with open_run(CONTRIEVER, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        cut: dict[str, Any] = {"max_words": arguments.max_words, "language": arguments.language}
        rows, report = run.read(
            "reading the text", lambda: text_rows(arguments, build_passages, held_out.folder, **cut)
        )
        model = load_retriever(
            arguments.retriever,
            max_length=arguments.max_length,
            trust_remote_code=arguments.trust_remote_code,
            **arguments.loading(),
        )
        trainer = ContrieverTrainer(
            model, arguments, train_dataset=rows, retrieval_task=held_out.task, **trainer_options
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output
