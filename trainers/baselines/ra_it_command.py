r"""Tunes a decoder to answer from passages that are pasted into its prompts: RA-IT (arXiv 2310.01352), a baseline.

The same data as `revela-hub train imprag`; --pseudo_labels is the retriever whose best passages are read: BM25, or a
sentence-transformers model. Each of the k passages comes as a line "Passage: ..." before the prompt, and the loss is on the
answers. By trl's SFTTrainer.

What comes out, in --output_dir: model/ for AutoModelForCausalLM, a plain decoder with its model card; checkpoint-*/, from
which --resume_from_checkpoint last goes on with the same result as if nothing had happened. `revela-hub train ra-dit` then
tunes a retriever for that reader.

Examples:
  revela-hub train ra-it --data train.jsonl --corpus docs --backbone Qwen/Qwen3-0.6B-Base --output_dir outputs/ra-it
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model --retriever my-retriever
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revela_hub.data.own_folder import check_apart
from revela_hub.errors import UserError
from revela_hub.output import command_line
from revela_hub.ranges import PositiveInt
from revela_hub.trainers.baselines import RA_IT
from revela_hub.trainers.baselines.arguments import RAITTrainingArguments
from revela_hub.trainers.baselines.language_models import load_reader
from revela_hub.trainers.baselines.pasted import MODEL, RAITTrainer
from revela_hub.trainers.common.run import open_run
from revela_hub.trainers.imprag.data_arguments import ImpRAGDataArguments, load_data, warm_up_labels


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RAITTrainingArguments):  # type: ignore[misc] # of trl's max_length
    """Arguments of `revela-hub train ra-it`: the model, then the data's, then those of every transformers Trainer."""

    backbone: str = field(metadata={"help": "Decoder to tune: Hub id or folder."})
    output_dir: str = field(default="outputs/ra-it", metadata={"help": "Output folder."})
    num_passages: PositiveInt = field(default=10, metadata={"help": "Number of passages per prompt."})
    max_passage_length: PositiveInt = field(default=160, metadata={"help": "Maximum number of tokens per passage."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model to run its own code from the Hub."})


def run(arguments: Arguments) -> None:
    """Trains, exports and says where everything is."""
    folder = train(arguments)
    if arguments.should_save:
        print(f"\nmodel: {folder / MODEL}")
        words = ["train", "ra-dit", "--reader", folder / MODEL, "--retriever", "RETRIEVER", "--data", "FILE"]
        print("next: ", command_line(*words, "--corpus", "PATH"))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Trains and exports; returns the output folder, which holds `model/` and the checkpoints.

    The options are those of `RAITTrainer`, such as `callbacks`. Data, models or options that do not work raise a `UserError`.
    """
    if arguments.push_to_hub:
        raise UserError("a baseline is not published by its run: upload its model folder (hf upload OWNER/NAME FOLDER)")
    with open_run(RA_IT, arguments) as run:
        if run.nothing_to_do:
            return run.output
        check_apart(arguments.sources(), run.output)
        loaded = load_reader(arguments.backbone, trust_remote_code=arguments.trust_remote_code)
        data, report = run.read("reading prompts and passages", lambda: load_data(arguments, arguments.seed))
        trainer = RAITTrainer(
            loaded.model,
            arguments,
            tokenizer=loaded.tokenizer,
            prompts=data.prompts,
            passages=data.passages,
            ranking=warm_up_labels(arguments, data, min(arguments.num_passages, len(data.passages))),
            k=arguments.num_passages,
            l_max=arguments.max_passage_length,
            max_length=arguments.max_length,
            **trainer_options,
        )
        run.train(trainer)
        sources = [*arguments.data, *arguments.corpus]
        run.export(trainer, summary=report, sources=sources)
        return run.report(trainer)
