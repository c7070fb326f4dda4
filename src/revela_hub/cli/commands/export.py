"""Convert a training checkpoint to folders that load without this package, or a model to ONNX.

LoRA adapters are merged. Training exports the final model itself; use this command for intermediate checkpoints, or
for another --max_length or --dtype. It writes a folder for each part of the model, and prints their names.

A bare PEFT adapter of a decoder, such as those of Revela's authors, becomes a retriever with the pooling and prompts
of Revela, or those of the options.

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

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from revela_hub.errors import UserError
from revela_hub.files import atomic, local_path
from revela_hub.loading import PEFT_ADAPTER, model_kind
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
    pooling: Literal["last", "mean", "cls"] = option(
        "last", "Pooling of a PEFT adapter's retriever; last is an EOS appended to every text."
    )
    query_prompt: str = option("Query: ", "Text to prepend to every query, for a PEFT adapter.")
    document_prompt: str = option("Passage: ", "Text to prepend to every passage, for a PEFT adapter.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Type of the stored weights (default: unchanged)."
    )
    format: Literal["safetensors", "onnx"] = option(
        "safetensors", "Format of the weights; onnx also writes onnx/model.onnx in float32."
    )


def run(arguments: Arguments) -> None:
    """Write the folders and print how to load them."""
    from revela_hub.checkpoints import is_checkpoint
    from revela_hub.retrieval.encoder import model_in

    onnx = arguments.format == "onnx"
    if onnx and not is_checkpoint(local_path(arguments.checkpoint)):
        arguments.checkpoint = model_in(arguments.checkpoint)
    if onnx and (Path(arguments.checkpoint) / "modules.json").is_file():
        _add_onnx_to_copy(Path(arguments.checkpoint), Path(arguments.output_dir))
        return
    folders = _export(arguments)
    for folder in folders if onnx else ():
        _add_onnx(folder)


def _add_onnx_to_copy(source: Path, output: Path) -> None:
    """Copy a finished model, unless the output is its own folder, and add the file."""
    from revela_hub.hub_cards.assemble import copy_with_metadata

    if source.resolve() == output.resolve():
        _add_onnx(output)
        return
    _check_empty(output, f"a new folder, or {source} itself")
    with atomic(output) as new:
        copy_with_metadata(source, new)
        _add_onnx(new, shown=output)


def _add_onnx(folder: Path, shown: Path | None = None) -> None:
    from revela_hub.hub_cards.onnx_export import export_onnx

    file = export_onnx(folder)
    path = (shown or folder) / file.path.relative_to(folder)
    print(f"{path}: {file.bytes / 1e6:,.1f} MB, vectors differ from the model's by {file.difference:.0e}")


def _check_empty(folder: Path, choice: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output_dir {folder} is not empty: choose {choice}")


def _export(arguments: Arguments) -> list[Path]:
    """Write the folders of a checkpoint or an adapter, and return them without that of the language model."""
    import torch

    from revela_hub.checkpoints import export_checkpoint, is_checkpoint, method_of
    from revela_hub.hub_cards.metadata import describe
    from revela_hub.hub_cards.peft_adapters import export_adapter

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    checkpoint, output = local_path(arguments.checkpoint), local_path(arguments.output_dir)
    names = {"retriever": output}
    if model_kind(arguments.checkpoint) == PEFT_ADAPTER and not is_checkpoint(checkpoint):
        _check_empty(output, "a new folder")
        prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
        length = arguments.max_length or 2048
        export_adapter(
            arguments.checkpoint, output, pooling=arguments.pooling, prompts=prompts, max_length=length, dtype=dtype
        )
    else:
        export_checkpoint(checkpoint, output, lm=arguments.lm, max_length=arguments.max_length, dtype=dtype)
        wanted = [*method_of(checkpoint).folders, *(["lm"] if arguments.lm else [])]
        names = {name: output / name for name in wanted}
    for name, folder in names.items():
        print(f"{'language model' if name == 'lm' else name}: {describe(folder).loading_code(str(folder))}")
    return [folder for name, folder in names.items() if name != "lm"]
