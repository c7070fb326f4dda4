"""Assemble the model folder to publish: one part of a checkpoint, or the model files of a finished folder, with reference vectors."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.files import atomic
from revela_hub.hub_cards.card import METADATA_FOLDER
from revela_hub.hub_cards.contents import code_files, copy_model, is_of_model, read_json
from revela_hub.hub_cards.export import make_readable, write_json
from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method, Part
from revela_hub.hub_cards.verify import probe_texts

# The expected vectors of an exported model. The folder is hidden, so that libraries do not load the file as weights.
REFERENCE = f"{METADATA_FOLDER}/reference.safetensors"


@dataclass(frozen=True)
class Assembly:
    """Settings for exporting a checkpoint.

    Attributes:
        part: part of the model, one of `Method.parts`.
        max_length: maximum length in tokens with EOS; by default that of the checkpoint.
        dtype: type of the stored weights; by default unchanged.
        metadata: metadata of the card; by default from the checkpoint's card.yaml.
        trust_remote_code: run the remote code of a finished model folder.
        timeout: time limit of the verification in seconds; by default depends on the size of the weights.
    """

    part: Part = "retriever"
    max_length: int | None = None
    dtype: torch.dtype | None = None
    metadata: ModelCardMetadata | None = None
    trust_remote_code: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Assembled:
    """A folder that is ready to be verified."""

    folder: Path
    method: Method | None = None  # of a checkpoint
    base: str | None = None  # a Hub id or a folder
    reference: Path | None = None  # file with the expected vectors
    remote_code: bool = False  # whether the verification runs code in the folder
    keep_card: bool = False  # unless there is metadata for a new one: its author wrote it
    skipped: list[str] = field(default_factory=list)  # files of a finished folder that are not published


# (checkpoint, new folder, assembly) -> the folder as it was written
Assemble = Callable[[Path, Path, Assembly], Assembled]


def assemble_part(
    method: Method, checkpoint: Path, folder: Path, assembly: Assembly, loaded: object = None
) -> Assembled:
    """Write one part of a checkpoint to a new folder, with the functions of its method.

    If the method has no retriever, its first part takes the place of `retriever`. `loaded` is the result of `method.loader`, if the
    checkpoint is already loaded.
    """
    part = assembly.part
    if part == "retriever" and part not in method.parts:
        part = method.parts[0]
    if part not in method.parts:
        raise UserError(f"{method.title} has no part {part}: its parts are {', '.join(method.parts)}")
    if loaded is None:
        loaded = resolve_name(method.loader)(str(checkpoint))
    written: Assembled = resolve_name(method.assembler)(loaded, checkpoint, folder, replace(assembly, part=part))
    return written


def export_parts(
    method: Method,
    checkpoint: Path,
    output: Path,
    folders: Mapping[str, Part],
    *,
    assembly: Assembly | None = None,
    loaded: object = None,
) -> list[Path]:
    """Write folders of a method, each with its part, and return those that get a card: `Method.folders`.

    Each folder gets its name when all are complete: without modules.json, libraries would load the weights with other settings.
    """
    assembly = assembly or Assembly()
    if loaded is None:
        loaded = resolve_name(method.loader)(str(checkpoint))
    with ExitStack() as stack:
        wanted = {name: stack.enter_context(atomic(output / name)) for name in folders}
        for name, new in wanted.items():
            (new / METADATA_FOLDER).mkdir(parents=True)  # lets a later export replace the folder
            # The maximum length is that of the parts with a card.
            length = assembly.max_length if name in method.folders else None
            assemble_part(method, checkpoint, new, replace(assembly, part=folders[name], max_length=length), loaded)
        for name, new in wanted.items():
            keep_other_files(output / name, new)
    return [output / name for name in method.folders]


def keep_other_files(old: Path, new: Path) -> None:
    """Copy the user's files of an exported folder that is replaced: not those of the old model, and not our card and figures."""
    ours = {METADATA_FOLDER, *(["README.md", "figures"] if has_our_card(old) else []), *code_files(old)}
    for file in (file for file in sorted(old.rglob("*")) if file.is_file()):
        name = file.relative_to(old)
        if name.parts[0] not in ours and not is_of_model(name.as_posix()) and not (new / name).exists():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, new / name)


def has_our_card(folder: Path) -> bool:
    """Return whether the README.md of a folder is as `write_card` wrote it."""
    card, ours = folder / "README.md", folder / METADATA_FOLDER / "README.md"
    return ours.is_file() and card.is_file() and ours.read_bytes() == card.read_bytes()


def copy_finished(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Copy the model files of a finished sentence-transformers folder."""
    if assembly.part != "retriever" or assembly.max_length or assembly.dtype:
        raise UserError(f"{checkpoint} is a finished model, not a checkpoint: it can only be published as it is")
    skipped = copy_model(checkpoint, folder).skipped
    return Assembled(
        folder,
        reference=checkpoint / REFERENCE if (checkpoint / REFERENCE).is_file() else None,
        remote_code=assembly.trust_remote_code,
        keep_card=(checkpoint / "README.md").is_file() and not has_our_card(checkpoint),
        skipped=skipped,
    )


# --- for the functions of methods that write a part


def save_reference(
    embed: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, str],
    folder: Path,
) -> Path:
    """Save the vectors of the probe texts, computed by the trained model, which the exported model must reproduce.

    `embed` takes token ids and mask (n, length) of the tokenizer of the training, and the prompt they begin with, and returns the
    final vectors (n, d). The prompts are those of `query` and `document`, or of `text` for a model without prompts.
    """
    settings = read_json(folder / "sentence_bert_config.json", {})
    length = settings.get("max_seq_length", tokenizer.model_max_length)
    vectors: dict[str, torch.Tensor] = {}
    kinds: list[str] = [kind for kind in ("query", "document") if kind in prompts]
    for kind in kinds or ["text"]:
        # Without special tokens an empty text has no tokens.
        parts, texts = [], [text or ("a" if kind == "text" else "") for text in probe_texts(length)]
        for batch in (texts[:-1], texts[-1:]):  # the last text is long, and all in its batch would be padded to it
            prompted = [prompts[kind] + text for text in batch]
            tokens = tokenizer(prompted, padding=True, truncation=True, max_length=length, return_tensors="pt")
            with torch.no_grad():
                parts.append(embed(tokens["input_ids"], tokens["attention_mask"], prompts[kind]).float())
        vectors[kind] = torch.cat(parts)
    return write_reference(folder, vectors, length)


def write_reference(folder: Path, vectors: dict[str, torch.Tensor], max_length: int) -> Path:
    """Save the vectors (n_texts, d) of `probe_texts(max_length)` for each kind of input, next to the model."""
    config = read_json(folder / "config_sentence_transformers.json", {})
    settings = {"max_length": str(max_length), "similarity": config.get("similarity_fn_name")}
    file = folder / REFERENCE
    file.parent.mkdir(exist_ok=True)
    # As one entry, because safetensors writes several in random order.
    kept = json.dumps({name: value for name, value in settings.items() if value})
    save_file(vectors, file, metadata={"settings": kept})
    make_readable(file.parent)
    return file


def forget_origins(folder: Path, *parts: str) -> None:
    """Remove the paths that parts of the model were loaded from; they may be local, and the card names the base model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in parts:
        config[part].pop("_name_or_path", None)
    write_json(folder / "config.json", config)
