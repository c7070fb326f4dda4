r"""Train a retriever on raw text or code, without labels, with Revela (arXiv 2506.16552).

A language model predicts each chunk of text while it attends to the other chunks of its group, weighted by the
retriever's similarities; lowering the LM loss trains the retriever. The retriever can be a decoder, whose EOS state
is the embedding, or a sentence-transformers model. Both models are trained, with LoRA by default; --lm_training
frozen trains the retriever only.

In our measurements of up to an hour, `revela-hub train contriever` trained the better retriever from the same decoder,
and retrievers that work already became worse: use `revela-hub adapt` for them. docs/methods/revela.md compares the
forms of reading and of the similarity.

Queries made from the text are held out and evaluated before, during and after training. If training did not help, the
base model is exported unchanged.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; lm/, the language model,
unless it was frozen; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train revela --data path/to/code --retriever HuggingFaceTB/SmolLM2-135M \
      --lm HuggingFaceTB/SmolLM2-135M --output_dir outputs/my-code
  revela-hub train revela --config examples/revela/wikipedia.yaml --max_steps 500
  accelerate launch -m revela_hub train revela --config examples/revela/code.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.ranges import NonNegativeFloat, PositiveFloat, TextLength
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones
from revela_hub.trainers.base.arguments import ProbeArguments
from revela_hub.trainers.base.retriever import print_retriever
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from revela_hub.trainers.revela import REVELA
from revela_hub.trainers.revela.arguments import RevelaDataArguments, load_groups


@dataclass(kw_only=True)
class Arguments(ProbeArguments, RevelaDataArguments, RevelaTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train revela`: the models, then the data's, then those of every transformers Trainer."""

    retriever: str = required("Model to train as a retriever: Hub id or folder.")
    lm: str = required("Language model that teaches the retriever: Hub id or folder of a decoder.")
    output_dir: str = option("outputs/revela", "Output folder.")
    reading: Literal["added", "joint"] = option(
        "added",
        "How the LM reads the other chunks: added to its self-attention, as in the paper, or joint, in one softmax with"
        " its own tokens.",
    )
    reading_bias: float = option(
        -2.0, "Initial logit of the other chunks' tokens in joint reading; trained, one per layer."
    )
    similarity_sides: Literal["query_passage", "symmetric"] = option(
        "symmetric",
        "Compare each chunk as a query with the others as passages (query_passage, the authors' form), or passages with"
        " each other (symmetric).",
    )
    similarity_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Precision of the similarities; the paper's runs rounded them to bfloat16."
    )
    temperature: PositiveFloat = option(0.05, "Temperature of the softmax over similarities; the paper uses 1e-4.")
    v_normalization: bool = option(
        False, "Normalise cross-chunk attention outputs by the value norms (used for Wikipedia in the paper)."
    )
    similarity_tolerance: NonNegativeFloat | None = option(
        None, "Skip pairs with similarity / temperature at or below X; 0 skips none (default: those lost in rounding)."
    )
    pooling: Literal["last", "mean", "cls"] | None = option(
        None, "Pooling of the retriever (default: its own, or the last token of a plain decoder)."
    )
    query_prompt: str | None = option(
        None, "Text to prepend to every query (default: the retriever's own, or 'Query: ')."
    )
    document_prompt: str | None = option(
        None, "Text to prepend to every passage (default: the retriever's own, or 'Passage: ')."
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Type of the frozen weights; bfloat16 halves their memory under LoRA."
    )
    export_max_length: TextLength = option(
        2048, "Maximum number of tokens per text in evaluations and in the exported retriever."
    )
    trust_remote_code: bool = option(
        False, "Allow tokenizers to run their own code; models have to be supported by transformers."
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if weights would be trained in bfloat16, or options conflict."""
        if self.groups_column is not None:  # no text is held out of groups that are read as they are
            if self.probe not in ("auto", "none"):
                raise ValueError("--probe would not be held out of --groups_column: evaluate on it with --eval_corpus")
            self.probe = "none"
        super().__post_init__()
        if self.dtype != "float32" and not self.lora_rank:
            raise ValueError("--dtype bfloat16 is for LoRA: trained weights have to be float32 (--lora_rank above 0)")
        if self.dtype != "float32" and not self.bf16:
            raise ValueError("--dtype bfloat16 needs --bf16 true: adapters stay in float32")


def run(arguments: Arguments) -> None:
    """Train, export and print where the retriever is."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RevelaTrainer`, such as `callbacks`."""
    with open_run(REVELA, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        groups, report = run.read(*load_groups(arguments, held_out.folder))
        backbones = load_backbones(
            arguments.retriever,
            arguments.lm,
            trust_remote_code=arguments.trust_remote_code,
            **_model_settings(arguments),
        )
        trainer = RevelaTrainer(
            backbones.model,
            arguments,
            retriever_tokenizer=backbones.retriever_tokenizer,
            lm_tokenizer=backbones.lm_tokenizer,
            max_length=arguments.max_length,
            retrieval_task=held_out.task,
            train_dataset=groups,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output


def _model_settings(arguments: Arguments) -> dict[str, Any]:
    """The fields of `RevelaConfig`; without those that were left to the retriever."""
    names = ("group_size", "reading", "reading_bias", "temperature", "v_normalization", "similarity_sides")
    settings: dict[str, Any] = {
        name: getattr(arguments, name) for name in (*names, "similarity_dtype", "similarity_tolerance")
    }
    settings |= {"similarity_span": arguments.spans[0], "dtype": getattr(torch, arguments.dtype)}
    settings["max_seq_length"] = arguments.export_max_length
    prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
    if None not in prompts.values():
        settings["prompts"] = prompts
    elif set(prompts.values()) != {None}:
        raise UserError("give both --query_prompt and --document_prompt, or neither")
    return settings | ({} if arguments.pooling is None else {"pooling": arguments.pooling})
