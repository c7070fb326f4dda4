"""Tune a decoder to answer from passages in its prompt: RA-IT (arXiv 2310.01352), a baseline.

It uses the data of `revela-hub train imprag`. The best passages of the retriever --pseudo_labels are put before each
prompt, one "Passage: ..." line each, and the loss is computed on the answers only. Training uses TRL's SFTTrainer.

Writes to --output_dir: model/ for AutoModelForCausalLM, with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train ra-it --data train.jsonl --corpus docs --backbone Qwen/Qwen3-0.6B-Base --output_dir outputs/ra-it
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model --retriever my-retriever
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import PositiveInt
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.baselines import RA_IT
from revela_hub.trainers.baselines.arguments import RAITTrainingArguments
from revela_hub.trainers.baselines.pasted import READER_FOLDER, RAITTrainer
from revela_hub.trainers.imprag.data import ImpRAGDataArguments, load_data


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RAITTrainingArguments):  # type: ignore[misc] # of trl's max_length
    """Arguments of `revela-hub train ra-it`: the model, then the data's, then those of every transformers Trainer."""

    backbone: str = required("Decoder to tune: Hub id or folder.")
    output_dir: str = option("outputs/ra-it", "Output folder.")
    num_passages: PositiveInt = option(10, "Number of passages per prompt.")
    max_passage_length: PositiveInt = option(160, "Maximum number of tokens per passage.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    def __post_init__(self) -> None:
        """Raise a `UserError` if options conflict; see also the base classes."""
        super().__post_init__()
        if self.push_to_hub:
            raise UserError(
                "--push_to_hub is not supported for this baseline: upload its model folder with hf upload OWNER/NAME FOLDER"
            )


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    folder = train(arguments)
    if arguments.should_save:
        print(f"\nmodel: {folder / READER_FOLDER}")
        words = ["train", "ra-dit", "--reader", folder / READER_FOLDER, "--retriever", "RETRIEVER", "--data", "FILE"]
        print("next: ", command_line(*words, "--corpus", "PATH"))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RAITTrainer`, such as `callbacks`."""
    with open_run(RA_IT, arguments) as run:
        if run.finished:
            return run.output
        data, report = run.read("reading prompts and passages", lambda: load_data(arguments, arguments.seed))
        trainer = RAITTrainer(
            arguments.backbone,
            arguments,
            train_dataset=data.prompts,
            passages=data.passages,
            pseudo_labels=arguments.pseudo_labels,
            num_passages=arguments.num_passages,
            max_passage_length=arguments.max_passage_length,
            max_length=arguments.max_length,
            model_init_kwargs={"trust_remote_code": arguments.trust_remote_code},
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=[*arguments.data, *arguments.corpus])
        return run.output
