r"""Tune a retriever with the likelihoods of a reader: RA-DIT (arXiv 2310.01352, equation 6), a baseline.

The frozen reader of `revela-hub train ra-it` computes how likely the answer is after each of the best passages of
--pseudo_labels, and the retriever's scores are trained to match. --retriever is a sentence-transformers model. With
--backbone instead, the retriever is the first layers of a decoder, up to --retrieval_layer (RA-DIT-Llama in the
ImpRAG paper); it needs --retrieval_warmup_epochs.

Writes to --output_dir: retriever/ for SentenceTransformer(...), or with --backbone an ImpRAG model for `revela-hub
index`; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --retriever sentence-transformers/all-MiniLM-L6-v2
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --backbone Qwen/Qwen3-0.6B-Base --retrieval_layer 7 --retrieval_warmup_epochs 1
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import NonNegativeInt, PositiveInt
from revela_hub.trainers.base.retriever import RETRIEVER
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.ra_dit import RADITTrainer
from revela_hub.trainers.imprag.data import ImpRAGDataArguments, load_data


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RADITTrainingArguments):
    """Arguments of `revela-hub train ra-dit`: the models, then the data's, then those of every transformers Trainer."""

    reader: str = required("Frozen decoder that reads the passages: the output of `revela-hub train ra-it`.")
    retriever: str | None = option(None, "Retriever to train: Hub id or folder of a sentence-transformers model.")
    backbone: str | None = option(
        None, "Decoder whose first layers, up to --retrieval_layer, are the retriever, instead of --retriever."
    )
    retrieval_layer: NonNegativeInt | None = option(None, "Index of the last layer of --backbone to use.")
    output_dir: str = option("outputs/ra-dit", "Output folder.")
    max_passage_length: PositiveInt = option(160, "Maximum number of tokens per passage.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    def __post_init__(self) -> None:
        """Raise a `UserError` if options conflict; see also the base classes."""
        super().__post_init__()
        if self.push_to_hub:
            raise UserError(
                "--push_to_hub is not supported for this baseline: publish its retriever folder with revela-hub publish"
            )
        if (self.retriever is None) == (self.backbone is None):
            raise UserError("give the model to train: either --retriever, or --backbone and --retrieval_layer")
        if (self.backbone is None) != (self.retrieval_layer is None):
            raise UserError(
                "--backbone and --retrieval_layer go together: the retriever consists of the decoder's layers up to that one"
            )


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    folder = train(arguments)
    if arguments.should_save:
        retriever = folder / RETRIEVER
        print(f"\nretriever: {retriever}")
        words = ["index", retriever, "--max_words", arguments.max_words, "--output_dir", "my-index"]
        print("next: ", command_line(*words, "--corpus", *arguments.corpus))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RADITTrainer`, such as `callbacks`."""
    with open_run(RA_DIT, arguments) as run:
        if run.finished:
            return run.output
        data, report = run.read("reading prompts and passages", lambda: load_data(arguments, arguments.seed))
        trainer = RADITTrainer(
            arguments.retriever or arguments.backbone or "",
            arguments,
            train_dataset=data.prompts,
            passages=data.passages,
            reader=arguments.reader,
            pseudo_labels=arguments.pseudo_labels,
            retrieval_layer=arguments.retrieval_layer,
            max_length=arguments.max_length,
            max_passage_length=arguments.max_passage_length,
            model_init_kwargs={"trust_remote_code": arguments.trust_remote_code},
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=[*arguments.data, *arguments.corpus])
        return run.output
