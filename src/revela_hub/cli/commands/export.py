"""Turns a training checkpoint into folders that need nothing of this package.

OUTPUT/retriever is a plain sentence-transformers model (adapters merged, prompts, EOS, length and padding side saved);
OUTPUT/lm, with --lm, is the language model trained with Revela, an ordinary AutoModelForCausalLM. From a checkpoint of
RetroMAE comes OUTPUT/encoder, a sentence-transformers model whose vector is the first token's state.

Examples:
  revela-hub export outputs/revela/checkpoint-1000 --output my-retriever
  revela-hub export outputs/revela --output my-retriever --lm --dtype bfloat16
"""

from dataclasses import dataclass, field
from typing import Literal

from revela_hub.ranges import PositiveInt

POSITIONALS = ("checkpoint",)


@dataclass
class Arguments:
    """Arguments of `revela-hub export`."""

    checkpoint: str = field(metadata={"help": "Folder that `revela-hub train` saved."})
    output: str = field(metadata={"help": "Folder to write into; made if it is not there."})
    lm: bool = field(default=False, metadata={"help": "Also write the co-trained language model."})
    max_length: PositiveInt | None = field(
        default=None, metadata={"help": "Tokens kept of a text, EOS included; by default those of the checkpoint."}
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Type of the stored weights; by default the one they have."}
    )


def run(arguments: Arguments) -> None:
    """Writes the folders and prints how to load them."""
    import torch

    from revela_hub.checkpoints import METHODS, export_checkpoint

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    output = export_checkpoint(
        arguments.checkpoint, arguments.output, lm=arguments.lm, max_length=arguments.max_length, dtype=dtype
    )
    exported = next(output / method.folder for method in METHODS.values() if (output / method.folder).is_dir())
    print(f'{exported.name}: SentenceTransformer("{exported}")')
    if arguments.lm:
        print(f'language model: AutoModelForCausalLM.from_pretrained("{output / "lm"}")')
