"""The one place that knows both sides: which method saved a checkpoint, and what is made of it for readers.

To add a method: write `assemble_<method>` in `trainers/<method>/export.py` (it loads the checkpoint by the method's own
loader and hands the models to `hub_cards`), and add its line to `METHODS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assemble, Assembly, Part, copy_finished
from revela_hub.hub_cards.repository import Destination
from revela_hub.hub_cards.upload import Published
from revela_hub.hub_cards.upload import publish as publish_assembled
from revela_hub.trainers.cot_mote.export import assemble_cot_mote
from revela_hub.trainers.imprag.export import assemble_imprag
from revela_hub.trainers.nvembed.checkpoint import EMBEDDER
from revela_hub.trainers.nvembed.export import assemble_nvembed
from revela_hub.trainers.retromae.export import assemble_retromae
from revela_hub.trainers.revela.export import assemble_revela


class Method(NamedTuple):
    """What becomes of a method's checkpoints, and the folders that `export` writes, each with the part that is in it."""

    assemble: Assemble
    folders: dict[str, Part]


METHODS = {  # by the model_type in the checkpoint's config.json
    "revela": Method(assemble_revela, {"retriever": "retriever"}),
    "retromae": Method(assemble_retromae, {"encoder": "retriever"}),
    "nvembed": Method(assemble_nvembed, {EMBEDDER: "retriever"}),
    "cot_mote": Method(assemble_cot_mote, {"dense": "retriever", "sparse": "sparse", "model": "model"}),
    "imprag": Method(assemble_imprag, {"model": "model"}),
}


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    lm: bool = False,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Exports a checkpoint for sentence-transformers.

    Of Revela: `output/retriever`, and `output/lm` if asked for. Of RetroMAE: `output/encoder`, whose vector is the first
    token's state. Of NV-Embed: `output/embedder`. Of CoT-MoTE: `output/dense` for SentenceTransformer, `output/sparse` for
    SparseEncoder, and `output/model`, both vectors by the model's own code. Of ImpRAG: `output/model`, for
    `AutoModelForCausalLM`.

    Args:
        checkpoint: folder the trainer saved, with full weights or with LoRA adapters (they are merged).
        output: folder to write into.
        lm: also write the co-trained language model, an ordinary `AutoModelForCausalLM` folder.
        max_length: tokens kept of a text, EOS included; by default those of the checkpoint.
        dtype: type of the stored weights; by default the one they have.

    Raises:
        UserError: the folder is not a checkpoint, or has no language model.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    method, assembly = _method(checkpoint), Assembly(max_length=max_length, dtype=dtype)
    if lm:
        method.assemble(checkpoint, output / "lm", replace(assembly, part="lm"))
    for folder, part in method.folders.items():
        method.assemble(checkpoint, output / folder, replace(assembly, part=part))
    return output


def publish(
    checkpoint: str | Path,
    destination: Destination,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Published:
    """Publishes a checkpoint, or a finished sentence-transformers folder, on the Hub, or refuses to and says why.

    Args:
        checkpoint: folder that a trainer saved, or a finished sentence-transformers folder.
        destination: where to.
        assembly: what of it, and how.
        dry_run: stop before the upload; the Hub is asked nothing but, with `update`, what is there now.
        keep: folder to leave the assembled files in; they are deleted otherwise.
        say: told, before the upload, what it will delete.

    Raises:
        UserError: the checkpoint cannot be assembled, a check failed, or the Hub refused; the message says what is visible.
    """
    checkpoint = Path(checkpoint)
    finished = (checkpoint / "modules.json").is_file()
    assemble = copy_finished if finished else _method(checkpoint).assemble
    return publish_assembled(assemble, checkpoint, destination, assembly, dry_run=dry_run, keep=keep, say=say)


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is what a run of ours left behind to go on from, and not a model for readers."""
    folder = Path(folder)
    left = ("trainer_state.json", "training_args.bin", "adapter_model.safetensors", "trained.safetensors", "run.json")
    if (folder / "modules.json").exists() or not any((folder / name).exists() for name in left):
        return False
    try:
        _method(folder)
    except UserError:
        return False
    return True


def _method(checkpoint: Path) -> Method:
    """The method that saved the folder, as its config.json says, or that of the embedder in it.

    Raises:
        UserError: none of ours.
    """
    for file in (checkpoint / "config.json", checkpoint / EMBEDDER / "config.json"):
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and config.get("model_type") in METHODS:
            return METHODS[config["model_type"]]
    finished = next((name for name in ("retriever", "model") if (checkpoint / name / "config.json").is_file()), None)
    remedy = f"; the model that its run exported is {checkpoint / finished}" if finished else ""
    raise UserError(
        f"{checkpoint} is not a checkpoint: it holds no config.json of {', '.join(METHODS)}, and no modules.json either{remedy}"
    )
