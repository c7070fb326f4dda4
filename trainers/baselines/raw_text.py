"""What Contriever and REPLUG share: options, and the steps of a run on raw text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.hub_cards.method import Method
from revela_hub.options import option, required
from revela_hub.ranges import NonNegativeInt
from revela_hub.trainers.base.arguments import (
    WARMUP,
    AdapterArguments,
    ProbeArguments,
    RunArguments,
    StreamedTextArguments,
    text_rows,
)
from revela_hub.trainers.base.retriever import PlainPooling
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text


@dataclass
class RetrieverTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` with the defaults of both methods."""

    learning_rate: float = option(2e-5, "Peak learning rate.")
    warmup_steps: float = option(0.1, WARMUP)
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")


@dataclass(kw_only=True)
class RawTextArguments(ProbeArguments, StreamedTextArguments):
    """The retriever, and how text is split."""

    option_group = "options"

    retriever: str = required("Model to train: Hub id or folder.")
    pooling: PlainPooling | None = option(
        None, "Pooling of a model that is not a sentence-transformers folder; last is an added EOS (default: mean)."
    )
    query_prompt: str | None = option(None, "Text to prepend to every query (default: the retriever's own, or none).")
    document_prompt: str | None = option(
        None, "Text to prepend to every passage (default: the retriever's own, or none)."
    )
    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to split the text: at sentences (text), at lines (code), or by file extension (auto)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def train_on_text(
    method: Method, arguments: Any, build: Callable[..., Any], make: Callable[..., Any], **trainer_options: Any
) -> Path:
    """Train and export a retriever."""
    with open_run(method, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        rows, report = run.read(*text_rows(arguments, build, held_out.folder))
        prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
        trainer = make(
            arguments.retriever,
            arguments,
            max_length=arguments.max_length,
            model_init_kwargs={
                "trust_remote_code": arguments.trust_remote_code,
                "pooling": arguments.pooling,
                "prompts": {name: prompt for name, prompt in prompts.items() if prompt is not None},
            },
            train_dataset=rows,
            retrieval_task=held_out.task,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output
