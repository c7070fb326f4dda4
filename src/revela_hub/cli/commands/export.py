"""Convert a training checkpoint to folders that load without this package, or a model to ONNX.

LoRA adapters are merged. Training exports the final model itself; use this command for intermediate checkpoints, or
for another --max_length or --dtype. It writes a folder for each part of the model, and prints their names.

A bare PEFT adapter of a decoder, such as those of Revela's authors, becomes a retriever with their pooling and prompts.

--format onnx also writes onnx/model.onnx, which onnxruntime and text-embeddings-inference load, and prints how much its
vectors differ from the model's. It takes a checkpoint, a sentence-transformers folder, or the output folder of adapt or
train with one model; if --output_dir is the model's folder, the file is added to it. Models with remote code, sparse
models, and models with separate query and document encoders cannot be converted.

Examples:
  revela-hub export outputs/run/checkpoint-1000 --output_dir my-retriever
  revela-hub export trumancai/Revela-1b --output_dir revela-1b
  revela-hub export outputs/run --output_dir my-retriever --lm --dtype bfloat16
  revela-hub export my-retriever --output_dir my-retriever --format onnx
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, required
from revela_hub.ranges import TextLength

POSITIONALS = ("checkpoint",)


@dataclass
class Arguments:
    """Arguments of `revela-hub export`."""

    checkpoint: str = required(
        "Checkpoint folder that `revela-hub train` saved, or a PEFT adapter (Hub id or folder); for ONNX also a model"
        " folder, or the output folder of adapt or train."
    )
    output_dir: str = required("Output folder.")
    lm: bool = option(False, "Also export the co-trained language model.")
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text, including EOS (default: the checkpoint's)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Type of the stored weights (default: unchanged)."
    )
    format: Literal["safetensors", "onnx"] = option(
        "safetensors", "Format of the weights; onnx also writes onnx/model.onnx in float32."
    )


def run(arguments: Arguments) -> None:
    """Write the folders and print how to load them."""
    from revela_hub.checkpoints import is_adapter, resolve

    onnx, output = arguments.format == "onnx", local_path(arguments.output_dir)
    if onnx and not is_adapter(arguments.checkpoint) and (model := resolve(arguments.checkpoint)).finished:
        if Path(model.path).resolve() != output.resolve():
            shutil.copytree(model.path, output)
        folders = [output]
    else:
        folders = _export(arguments, output)
    for folder in folders if onnx else ():
        from revela_hub.hub_cards.onnx_export import export_onnx

        file = export_onnx(folder)
        print(f"{file.path}: {file.bytes / 1e6:,.1f} MB, vectors differ from the model's by {file.difference:.0e}")


def _export(arguments: Arguments, output: Path) -> list[Path]:
    """Write the folders of a checkpoint or an adapter, and return them without that of the language model."""
    import torch

    from revela_hub.checkpoints import checkpoint_method, export_checkpoint, is_adapter, resolve
    from revela_hub.hub_cards.metadata import describe
    from revela_hub.hub_cards.peft_adapters import export_adapter

    dtype, length = getattr(torch, arguments.dtype) if arguments.dtype else None, arguments.max_length
    if is_adapter(arguments.checkpoint):
        if output.exists():
            raise UserError(f"--output_dir {output} exists: choose a new folder")
        export_adapter(arguments.checkpoint, output, max_length=length or 2048, dtype=dtype)
        folders = {"retriever": output}
    else:
        export_checkpoint(arguments.checkpoint, output, lm=arguments.lm, max_length=length, dtype=dtype)
        names = [*checkpoint_method(resolve(arguments.checkpoint)).folders, *(["lm"] if arguments.lm else [])]
        folders = {name: output / name for name in names}
    for name, folder in folders.items():
        print(f"{'language model' if name == 'lm' else name}: {describe(folder).loading_code(str(folder))}")
    return [folder for name, folder in folders.items() if name != "lm"]
