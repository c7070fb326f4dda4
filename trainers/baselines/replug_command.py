r"""Train a retriever on raw text with a frozen language model as teacher: REPLUG LSR (arXiv 2301.12652), a baseline.

The language model computes the likelihood of each chunk given each other chunk of its group, and the retriever's
similarities are trained to match that distribution. It starts from a sentence-transformers model, or from an encoder
or decoder with mean pooling. A group of n chunks costs n (n - 1) forward passes of the language model.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train replug --data path/to/texts --retriever HuggingFaceTB/SmolLM2-135M \
      --lm HuggingFaceTB/SmolLM2-135M --max_steps 200
  accelerate launch -m revela_hub train replug --config examples/revela/baselines/replug-wikipedia.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.data.text.groups import GroupSettings, build_groups
from revela_hub.options import option, required
from revela_hub.ranges import GroupSize, PositiveInt, TextLength
from revela_hub.trainers.base.arguments import ProbeArguments, StreamedTextArguments, text_rows
from revela_hub.trainers.base.retriever import RetrieverArguments, print_retriever
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from revela_hub.trainers.baselines import REPLUG
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments, load_chunk_encoder


@dataclass(kw_only=True)
class Arguments(ProbeArguments, RetrieverArguments, StreamedTextArguments, ReplugTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train replug`: the models, the data's, then those of every transformers Trainer."""

    retriever: str = required("Model to train: Hub id or folder.")
    lm: str = required("Frozen language model that teaches the retriever: Hub id or folder of a decoder.")
    output_dir: str = option("outputs/replug", "Output folder.")
    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to split chunks: at sentences (text), at lines (code), or by file extension (auto)."
    )
    group_size: GroupSize = option(16, "Number of chunks per group.")
    max_words: PositiveInt = option(120, "Maximum number of words per chunk.")
    max_length: TextLength = option(160, "Maximum number of tokens per chunk.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ReplugTrainer`, such as `callbacks`."""
    with open_run(REPLUG, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        cut = GroupSettings(arguments.group_size, max_words=arguments.max_words, language=arguments.language)
        groups, report = run.read(
            "reading and grouping the text", lambda: text_rows(arguments, build_groups, held_out.folder, settings=cut)
        )
        model = load_chunk_encoder(
            arguments.retriever,
            arguments.max_length,
            trust_remote_code=arguments.trust_remote_code,
            **arguments.loading(),
        )
        lm = load_lm(arguments.lm, trust_remote_code=arguments.trust_remote_code)
        trainer = ReplugTrainer(
            model,
            arguments,
            lm=lm.model,
            lm_tokenizer=lm.tokenizer,
            max_length=arguments.max_length,
            train_dataset=groups,
            retrieval_task=held_out.task,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output
