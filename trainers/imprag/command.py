"""Train a decoder to retrieve, read and answer, without an explicit query, with ImpRAG (arXiv 2506.02279).

The layers up to --retrieval_layer encode prompts and passages for retrieval; the layers from there to
--last_reading_layer attend to the retrieved passages. During warm-up, an existing retriever (--pseudo_labels)
provides the labels; afterwards passages are scored by how much they help the model answer.

Writes to --output_dir: model/ for AutoModelForCausalLM (trust_remote_code=True), `revela-hub index` and `revela-hub
answer`, with its model card; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train imprag --data train.jsonl --corpus docs --backbone Qwen/Qwen3-0.6B-Base --output_dir outputs/imprag
  revela-hub train imprag --config examples/imprag/squad.yaml
  revela-hub index outputs/imprag/model --corpus docs --output_dir my-index
  revela-hub answer outputs/imprag/model --index my-index --task question_answering "Who wrote Emma?"
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.trainers.imprag import IMPRAG
from revela_hub.trainers.imprag.checkpoint import OPTIONS
from revela_hub.trainers.imprag.data import ImpRAGDataArguments, ImpRAGTrainingArguments, train_on_prompts
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer

MODEL_FOLDER = "model"


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, ImpRAGTrainingArguments):
    """Arguments of `revela-hub train imprag`: the model, then the data's, then those of every transformers Trainer."""

    backbone: str = required("Model to start from: Hub id or folder of a decoder or an ImpRAG model.")
    output_dir: str = option("outputs/imprag", "Output folder.")
    retrieval_layer: int | None = option(
        None, "Index of the retrieval layer (default: one quarter of the depth, at least 2)."
    )
    last_reading_layer: int | None = option(None, "Last layer that attends to passages (default: 70% of the depth).")
    num_passages: int | None = option(None, "Number of passages per prompt (default: 10).")
    max_passage_length: int | None = option(None, "Maximum number of tokens per passage (default: 160).")
    passage_encoding: Literal["full", "segmented", "independent"] | None = option(
        None, "full: one joint text; segmented: each passage attends to itself; independent: also restarts positions."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the paths of the results."""
    folder = train(arguments)
    if arguments.should_save:
        model = folder / MODEL_FOLDER
        print(f"\nmodel: {model}")
        words = ["index", model, "--max_words", arguments.max_words, "--output_dir", "my-index"]
        print("next: ", command_line(*words, "--corpus", *arguments.corpus))
        print("then: ", command_line("answer", model, "your prompt", "--index", "my-index"))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ImpRAGTrainer`, such as `callbacks`."""
    layers = {name: getattr(arguments, name) for name in OPTIONS.values()}
    return train_on_prompts(
        IMPRAG, arguments, ImpRAGTrainer, arguments.backbone, model_init_kwargs=layers, **trainer_options
    )
