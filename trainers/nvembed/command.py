r"""Train a generalist embedder from a decoder with NV-Embed (arXiv 2405.17428).

Training has two stages. Stage 1 uses retrieval tasks, with in-batch negatives. Stage 2 starts from the output of
stage 1 and uses all tasks, with each row's own negatives only. Both read the same mixture, a YAML file that lists the
tasks with their data and instructions; without --stage, all tasks are trained at once.

Some questions of the mixture are held out and evaluated before, during and after training. If training did not help,
the base model is exported unchanged.

Writes to --output_dir: embedder/ for SentenceTransformer(..., trust_remote_code=True), with a prompt for each task
and its model card; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train nvembed --backbone mistralai/Mistral-7B-v0.1 --mixture examples/nvembed/local.yaml --stage 1 \
      --output_dir outputs/nvembed-1
  revela-hub train nvembed --backbone outputs/nvembed-1 --mixture examples/nvembed/local.yaml --stage 2 \
      --output_dir outputs/nvembed-2
  accelerate launch --num_processes 8 -m revela_hub train nvembed --config examples/nvembed/stage_one.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.data.mixture.mixture import load_mixture
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import Latents, Negatives, PositiveInt, TextLength
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.base.arguments import ProbeArguments, check_positions
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_rows
from revela_hub.trainers.nvembed import EMBEDDER, NVEMBED
from revela_hub.trainers.nvembed.checkpoint import BACKBONE_OPTIONS, load_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.data import QUERY_INSTRUCTION, NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.trainer import NVEmbedTrainer


@dataclass(kw_only=True)
class Arguments(ProbeArguments, NVEmbedTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train nvembed`: the model and the data, then those of every transformers Trainer."""

    backbone: str = required("Model to start from: Hub id or folder of a decoder, or the output of an earlier run.")
    mixture: str = required("YAML file that lists the training tasks.")
    output_dir: str = option("outputs/nvembed", "Output folder.")
    stage: Literal[1, 2] | None = option(
        None, "Training stage, which selects tasks and defaults (default: all tasks at once)."
    )
    classes: Literal["example", "label"] = option(
        "example",
        "Positive of a class, in tasks without a mode: another example of the class, or the text of its label.",
    )
    without_tasks: list[str] = option([], "Tasks of the mixture to leave out: names or patterns, e.g. 'synthetic*'.")
    in_batch_negatives: bool | None = option(  # type: ignore[assignment]
        None, "Also use the other rows' passages as negatives (default: true in stage 1, false in stage 2)."
    )
    learning_rate: float | None = option(  # type: ignore[assignment]
        None, "Peak learning rate (default: 2e-5 in stage 1, 1.5e-5 in stage 2)."
    )
    num_negatives: Negatives = option(7, "Number of hard negatives per row.")
    max_length: TextLength = option(512, "Maximum number of tokens per text, including the instruction and EOS.")
    pooling: Literal["latent", "mean", "eos", "self_attention"] | None = option(
        None, "Pooling of the token states (default: latent for a decoder)."
    )
    mask: Literal["bidirectional", "causal"] | None = option(
        None, "Attention mask of the backbone (default: bidirectional for a decoder)."
    )
    num_latents: Latents | None = option(None, "Number of latent vectors (default: 512 for a decoder).")
    num_heads: int | None = option(None, "Number of heads of the latent attention or self-attention (default: 8).")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Type of the frozen weights; bfloat16 halves their memory under LoRA."
    )
    query_instruction: str | None = option(
        None, f"Instruction for queries (default: the model's own; for a decoder, {QUERY_INSTRUCTION!r})."
    )
    cache_dir: str | None = option(None, "Cache folder for the rows of the mixture.")
    num_proc: PositiveInt = option(1, "Number of processes that prepare the tasks of the mixture, each one at a time.")

    def __post_init__(self) -> None:
        """Set the defaults of the stage; raise a `ValueError` if a value is out of range or options conflict."""
        if self.in_batch_negatives is None:
            if self.stage is None:
                raise ValueError("without --stage, set --in_batch_negatives true or false")
            self.in_batch_negatives = self.stage == 1
        if self.learning_rate is None:
            self.learning_rate = 1.5e-5 if self.stage == 2 else 2e-5
        if self.stage == 2:
            self.export = self.export or "last"  # it also trains tasks that the probe does not ask
        if self.dtype != "float32" and not self.lora_rank:
            raise ValueError("--dtype bfloat16 is for LoRA: trained weights have to be float32 (--lora_rank above 0)")
        super().__post_init__()
        if self.dtype != "float32" and not self.bf16:
            raise ValueError("--dtype bfloat16 needs --bf16 true: adapters and pooling stay in float32")


def run(arguments: Arguments) -> None:
    """Train, export and print the paths of the results."""
    folder = train(arguments)
    if arguments.should_save:
        print(f"\nembedder: {folder / EMBEDDER}")
        words = ["search", folder / EMBEDDER, "your query", "--trust_remote_code", "--corpus", "PATH"]
        print("try it: ", command_line(*words))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `NVEmbedTrainer`, such as `callbacks`."""
    with open_run(NVEMBED, arguments) as run:
        if run.finished:
            return run.output
        names = ("num_negatives", "seed", "stage", "classes", "without_tasks", "cache_dir", "num_proc")
        options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        mixture = load_mixture(arguments.mixture, **options)
        _, report = run.read(mixture.dataset, mixture)
        rows, task = hold_out_rows(arguments, mixture.dataset, mixture.retrieval)
        if len(rows) < len(mixture.dataset):
            report = f"{len(rows):,} of {report}"
        config = {name: getattr(arguments, name) for name in BACKBONE_OPTIONS}
        start = load_nvembed(arguments.backbone, dtype=getattr(torch, arguments.dtype), **config)
        check_positions(arguments.backbone, text_positions(start.model.config.text_config), arguments.max_length)
        # Of `encode_query` and `encode_document`, of the run before, and of this run's tasks.
        prompts = start.encoding_prompts(arguments.query_instruction)
        prompts |= {task.name: query_prompt(task.instruction) for task in mixture.tasks}
        trainer = NVEmbedTrainer(
            nvembed_encoder(start.model, start.tokenizer, max_length=arguments.max_length, prompts=prompts),
            arguments,
            train_dataset=rows,
            retrieval_task=task,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=[task.mined_from or task.source.path for task in mixture.tasks])
        return run.output
