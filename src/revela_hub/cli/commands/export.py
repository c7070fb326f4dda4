"""Turns a training checkpoint into folders that need nothing of this package.

OUTPUT/retriever is a plain sentence-transformers model (adapters merged, prompts, EOS, length and padding side saved);
OUTPUT/lm, with --lm, is the language model trained with Revela, an ordinary AutoModelForCausalLM. From a checkpoint of
RetroMAE comes OUTPUT/encoder, a sentence-transformers model whose vector is the first token's state. From one of CoT-MoTE
come OUTPUT/dense (SentenceTransformer), OUTPUT/sparse (SparseEncoder) and OUTPUT/model (AutoModel, with its code).

Examples:
  revela-hub export outputs/revela/checkpoint-1000 --output_dir my-retriever
  revela-hub export outputs/revela --output_dir my-retriever --lm --dtype bfloat16
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from revela_hub.ranges import TextLength

POSITIONALS = ("checkpoint",)


@dataclass
class Arguments:
    """Arguments of `revela-hub export`."""

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
    """Writes the folders and prints how to load them."""
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
