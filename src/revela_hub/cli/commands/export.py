"""Convert a training checkpoint to folders that load without this package.

LoRA adapters are merged. Training exports the final model itself; use this command for intermediate checkpoints, or
for another --max_length or --dtype. The folders depend on the method: retriever/ (Revela), encoder/ (RetroMAE),
embedder/ (NV-Embed), dense/, sparse/ and model/ (CoT-MoTE), model/ (ImpRAG).

Examples:
  revela-hub export outputs/revela/checkpoint-1000 --output_dir my-retriever
  revela-hub export outputs/revela --output_dir my-retriever --lm --dtype bfloat16
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from revela_hub.ranges import TextLength

POSITIONALS = ("checkpoint",)


@dataclass
class Arguments:
    """Arguments of `revela-hub export`."""

    old_names: ClassVar[dict[str, str]] = {"output": "output_dir"}

    checkpoint: str = field(metadata={"help": "Checkpoint folder that `revela-hub train` saved."})
    output_dir: str = field(metadata={"help": "Output folder."})
    lm: bool = field(default=False, metadata={"help": "Also export the co-trained language model."})
    max_length: TextLength | None = field(
        default=None, metadata={"help": "Maximum number of tokens per text, including EOS (default: the checkpoint's)."}
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Type of the stored weights (default: unchanged)."}
    )


def run(arguments: Arguments) -> None:
    """Write the folders and print how to load them."""
    import torch

    from revela_hub.checkpoints import export_checkpoint, method_of
    from revela_hub.hub_cards.metadata import describe
    from revela_hub.retrieval.disk import try_folder

    try_folder(Path(arguments.output_dir), "--output_dir")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    output = export_checkpoint(
        arguments.checkpoint, arguments.output_dir, lm=arguments.lm, max_length=arguments.max_length, dtype=dtype
    )
    for name in [*method_of(Path(arguments.checkpoint)).folders, *(["lm"] if arguments.lm else [])]:
        folder = output / name
        print(f"{'language model' if name == 'lm' else name}: {describe(folder).loading_code(str(folder))}")
