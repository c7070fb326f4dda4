"""Convert a training checkpoint to folders that load without this package, or a model to ONNX.

LoRA adapters are merged. Training exports the final model itself; use this command for intermediate checkpoints, or
for another --max_length or --dtype. It writes a folder for each part of the model, and prints their names.

A bare PEFT adapter of a decoder, such as those of Revela's authors, becomes a retriever with the pooling and prompts
of Revela, or those of the options.

--format onnx also writes onnx/model.onnx, which onnxruntime and text-embeddings-inference load, and prints how much its
vectors differ from the model's. It takes a checkpoint, a sentence-transformers folder, or the output folder of adapt or
train with one model; if --output_dir is the model's folder, the file is added to it. --quantize int8 adds
onnx/model_quantized.onnx, a quarter of the size. Models with remote code, sparse models, and models with separate query
and document encoders cannot be converted.

Examples:
  revela-hub export outputs/run/checkpoint-1000 --output_dir my-retriever
  revela-hub export trumancai/Revela-1b --output_dir revela-1b
  revela-hub export outputs/run --output_dir my-retriever --lm --dtype bfloat16
  revela-hub export my-retriever --output_dir my-retriever --format onnx --quantize int8
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from revela_hub.errors import UserError, require
from revela_hub.files import local_path
from revela_hub.options import option, required
from revela_hub.pickles import PEFT_ADAPTER, model_kind
from revela_hub.ranges import TextLength
from revela_hub.scratch import deleted_after

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
    quantize: Literal["none", "int8"] = option(
        "none", "ONNX: Also write onnx/model_quantized.onnx with weights of this type."
    )


def run(arguments: Arguments) -> None:
    """Write the folders and print how to load them."""
    from revela_hub.checkpoints import is_checkpoint
    from revela_hub.retrieval.disk import try_folder
    from revela_hub.retrieval.encoder import model_in

    if arguments.quantize != "none" and arguments.format != "onnx":
        raise UserError("--quantize requires --format onnx")
    if arguments.format == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    try_folder(Path(arguments.output_dir), "--output_dir")
    if arguments.format == "onnx" and not is_checkpoint(local_path(arguments.checkpoint)):
        arguments.checkpoint = model_in(arguments.checkpoint)
    finished = arguments.format == "onnx" and (Path(arguments.checkpoint) / "modules.json").is_file()
    folders = [Path(arguments.output_dir)] if finished else _exported(arguments)
    with _copied(arguments) if finished else nullcontext():
        if arguments.format == "onnx":
            _add_onnx(folders, quantize=arguments.quantize == "int8")


def _exported(arguments: Arguments) -> list[Path]:
    """Write the folders of a checkpoint or an adapter, and return them without that of the language model."""
    import torch

    from revela_hub.checkpoints import export_checkpoint, is_checkpoint, method_of
    from revela_hub.hub_cards.metadata import describe
    from revela_hub.hub_cards.peft_adapters import export_adapter

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    if model_kind(arguments.checkpoint) == PEFT_ADAPTER and not is_checkpoint(local_path(arguments.checkpoint)):
        folder = Path(arguments.output_dir)
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"--output_dir {folder} is not empty: choose a new folder")
        prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
        length = arguments.max_length or 2048
        export_adapter(
            arguments.checkpoint, folder, pooling=arguments.pooling, prompts=prompts, max_length=length, dtype=dtype
        )
        print(f"retriever: {describe(folder).loading_code(str(folder))}")
        return [folder]
    output = export_checkpoint(
        arguments.checkpoint, arguments.output_dir, lm=arguments.lm, max_length=arguments.max_length, dtype=dtype
    )
    names = list(method_of(Path(arguments.checkpoint)).folders)
    for name in [*names, *(["lm"] if arguments.lm else [])]:
        folder = output / name
        print(f"{'language model' if name == 'lm' else name}: {describe(folder).loading_code(str(folder))}")
    return [output / name for name in names]


@contextmanager
def _copied(arguments: Arguments) -> Iterator[None]:
    """Copy the model files of a finished folder to the output folder, unless it is the same folder; delete the copy after an error."""
    from revela_hub.hub_cards.assemble import copy_with_metadata
    from revela_hub.hub_cards.onnx_export import onnx_obstacle

    source, output = Path(arguments.checkpoint), Path(arguments.output_dir)
    if given := [name for name in ("lm", "max_length", "dtype") if getattr(arguments, name)]:
        raise UserError(f"--{given[0]} applies to checkpoints, but {source} is a finished model")
    if why := onnx_obstacle(source):
        raise UserError(f"{source} cannot be exported to ONNX: it {why}")
    if source.resolve() == output.resolve():
        yield
        return
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output_dir {output} is not empty: choose a new folder, or {source} itself")
    with deleted_after(output, BaseException):
        copy_with_metadata(source, output)
        yield


def _add_onnx(folders: list[Path], *, quantize: bool) -> None:
    """Add the ONNX files to each folder that can have them, and print how much their vectors differ."""
    from revela_hub.hub_cards.onnx_export import export_onnx, onnx_obstacle

    reasons = {folder: onnx_obstacle(folder) for folder in folders}
    if all(reasons.values()):
        found = "; ".join(f"{folder} {why}" for folder, why in reasons.items())
        raise UserError(f"none of the exported folders can be converted to ONNX: {found}")
    for folder in (folder for folder, why in reasons.items() if not why):
        for file in export_onnx(folder, quantize=quantize):
            print(
                f"{file.path}: {file.bytes / 1e6:,.1f} MB, vectors differ from the model's by at most"
                f" {file.difference:.0e}, cosine at least {file.cosine:.4f}"
            )
