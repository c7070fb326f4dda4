r"""Tunes a retriever by what helps a reader answer: RA-DIT (arXiv 2310.01352, equation 6), a baseline.

The reader is what `revela-hub train ra-it` made, and stays as it is: for each prompt it says how likely the answer is after
each of the best passages of --pseudo_labels, and the retriever's scores learn that. --retriever is any sentence-transformers
model (RA-DIT). With --backbone in its place, the retriever is that decoder's first layers, up to --retrieval_layer (RA-DIT-Llama, the
baseline of the ImpRAG paper), which knows nothing of retrieval and needs --retrieval_warmup_epochs.

What comes out, in --output_dir: retriever/, for SentenceTransformer(...), or of a decoder an ImpRAG model, which `revela-hub
index` takes; checkpoint-*/, from which --resume_from_checkpoint last goes on with the same result as if nothing had happened.

Examples:
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --retriever sentence-transformers/all-MiniLM-L6-v2
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --backbone Qwen/Qwen3-0.6B-Base --retrieval_layer 7 --retrieval_warmup_epochs 1
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.own_folder import check_apart
from revela_hub.errors import UserError
from revela_hub.output import command_line
from revela_hub.ranges import NonNegativeInt, PositiveInt
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.language_models import LanguageModel, load_reader, load_tokenizer
from revela_hub.trainers.baselines.pasted import shortened
from revela_hub.trainers.baselines.ra_dit import RADITTrainer, Retriever, decoder_retriever, reader_likelihoods
from revela_hub.trainers.common.prompts import tokenize_prompts
from revela_hub.trainers.common.retriever import RETRIEVER, load_retriever
from revela_hub.trainers.common.run import open_run
from revela_hub.trainers.imprag.data_arguments import ImpRAGDataArguments, load_data, warm_up_labels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from revela_hub.trainers.imprag.data_arguments import ImpRAGData


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RADITTrainingArguments):
    """Arguments of `revela-hub train ra-dit`: the models, then the data's, then those of every transformers Trainer."""

    reader: str = field(
        metadata={"help": "Frozen decoder that reads the passages: the output of `revela-hub train ra-it`."}
    )
    retriever: str | None = field(
        default=None, metadata={"help": "Retriever to train: Hub id or folder of a sentence-transformers model."}
    )
    backbone: str | None = field(
        default=None,
        metadata={
            "help": "Decoder whose first layers, up to --retrieval_layer, are the retriever, instead of --retriever."
        },
    )
    retrieval_layer: NonNegativeInt | None = field(
        default=None, metadata={"help": "Index of the last layer of --backbone to use."}
    )
    output_dir: str = field(default="outputs/ra-dit", metadata={"help": "Output folder."})
    max_passage_length: PositiveInt = field(default=160, metadata={"help": "Maximum number of tokens per passage."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model to run its own code from the Hub."})


def run(arguments: Arguments) -> None:
    """Trains, exports and says where everything is."""
    folder = train(arguments)
    if arguments.should_save:
        retriever = folder / RETRIEVER
        print(f"\nretriever: {retriever}")
        words = ["index", retriever, "--max_words", arguments.max_words, "--output_dir", "my-index"]
        print("next: ", command_line(*words, "--corpus", *arguments.corpus))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Trains and exports; returns the output folder, which holds `retriever/` and the checkpoints.

    The options are those of `RADITTrainer`, such as `callbacks`. Data, models or options that do not work raise a `UserError`.
    """
    if arguments.push_to_hub:
        raise UserError("a baseline is not published by its run: revela-hub publish takes its retriever folder")
    if (arguments.retriever is None) == (arguments.backbone is None):
        raise UserError("name what is to be trained: either --retriever, or --backbone and --retrieval_layer")
    if (arguments.backbone is None) != (arguments.retrieval_layer is None):
        raise UserError("--backbone and --retrieval_layer go together: the retriever is the decoder's layers 0 to b")
    with open_run(RA_DIT, arguments) as run:
        if run.nothing_to_do:
            return run.output
        check_apart(arguments.sources(), run.output)
        retriever = _retriever(arguments)
        reader = load_reader(arguments.reader, trust_remote_code=arguments.trust_remote_code)
        data, report = run.read("reading prompts and passages", lambda: load_data(arguments, arguments.seed))
        if arguments.num_candidates > len(data.passages):
            raise UserError(
                f"--num_candidates {arguments.num_candidates} is more than the collection's {len(data.passages)} passages:"
                " lower it"
            )
        kept = tokenize_prompts(data.prompts, reader.tokenizer, arguments.max_length, arguments.say)["source_row"]
        data = data._replace(prompts=data.prompts.select(kept))
        candidates = warm_up_labels(arguments, data, arguments.num_candidates)
        trainer = RADITTrainer(
            retriever,
            arguments,
            prompts=data.prompts,
            passages=data.passages,
            candidates=candidates,
            log_likelihoods=_likelihoods(arguments, reader, data, candidates),
            max_length=arguments.max_length,
            passage_length=arguments.max_passage_length,
            **trainer_options,
        )
        run.train(trainer)
        sources = [*arguments.data, *arguments.corpus]
        run.export(trainer, summary=report, sources=sources)
        return run.report(trainer)


def _retriever(arguments: Arguments) -> Retriever:
    if arguments.backbone is not None and arguments.retrieval_layer is not None:
        tokenizer = load_tokenizer(arguments.backbone, trust_remote_code=arguments.trust_remote_code)
        return decoder_retriever(arguments.backbone, arguments.retrieval_layer, tokenizer, arguments.max_passage_length)
    model = load_retriever(str(arguments.retriever), trust_remote_code=arguments.trust_remote_code)
    return Retriever(model, model.tokenizer, decoder=False)


def _likelihoods(
    arguments: Arguments, reader: LanguageModel, data: "ImpRAGData", candidates: "NDArray[np.int32]"
) -> Any:
    """Of the answers under the candidates, by the reader, which the accelerator has no more room for afterwards."""
    reader.model.to(arguments.device)  # type: ignore[arg-type]  # its decorator hides what it takes
    likelihoods = reader_likelihoods(
        reader.model,
        reader.tokenizer,
        data.prompts,
        shortened(data.passages, reader.tokenizer, arguments.max_passage_length, arguments.say),
        candidates,
        arguments.likelihood_batch_size,
        show_progress_bar=not arguments.disable_tqdm,
    )
    reader.model.to("cpu")  # type: ignore[arg-type]
    return likelihoods
