"""Use GGUF files, the format of llama.cpp, as models: each is converted once into a folder that every loader reads.

The folder holds the dequantised weights in float32, the configuration and the tokenizer. It lies in the cache of Hugging Face
(`HF_HOME`) and is named after the file and a digest of its content. It is written under another name and renamed when it is
complete, and a lock lets only one process convert a file.
"""

import hashlib
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

from revela_hub.digests import add_file
from revela_hub.errors import DISK_FULL, OS_ERRORS, UserError, first_line, os_error, out_of_memory, reason, require
from revela_hub.output import note
from revela_hub.paths import local_path
from revela_hub.pickles import pretrained
from revela_hub.whole_files import remove, whole_path

SUFFIX = ".gguf"
MAGIC = b"GGUF"
OTHER_DISK_REMEDY = "set HF_HOME to a folder on another disk"
COMMON_ARCHITECTURES = "llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def model_folder(name: str) -> str:
    """Return the folder of a GGUF file's model, converting the file on the first call; any other name is returned unchanged.

    The home folder replaces `~`.

    Args:
        name: `path/to/model.gguf`, `user/repo/model.gguf` on the Hub, or a Hub id or folder.

    Raises:
        UserError: the file is missing, damaged or not a GGUF file, transformers does not support its architecture, the package
            `gguf` is not installed, or there is too little memory or space on the disk.
    """
    path = local_path(name)
    if not is_gguf(name):
        return os.path.expanduser(name)
    from huggingface_hub import constants

    if not path.is_file():
        path = _download(name)
    if _starts(path) != MAGIC:
        raise UserError(f"{path} is not a GGUF file: it does not start with {MAGIC.decode()}")
    if _SPLIT.search(path.stem):
        raise UserError(f"{path} is a part of a split model: merge the parts first (llama-gguf-split --merge)")
    home = Path(constants.HF_HOME)
    if home.parts[:1] == ("~",):
        raise UserError("there is no home folder for the converted GGUF file: set HOME or HF_HOME")
    folder = home / "revela-hub" / "gguf" / f"{path.stem}-{_digest(path.resolve(), path.stat().st_mtime_ns)}"
    if not folder.is_dir():
        require("gguf")
        _convert_once(path.resolve(), folder)
    return str(folder)


def is_gguf(name: str) -> bool:
    """Return whether a model's name is that of a GGUF file: a name that ends with .gguf, or a file with that content."""
    path = local_path(name)
    if path.is_dir():
        return False
    return name.lower().endswith(SUFFIX) or (path.is_file() and _starts(path) == MAGIC)


def hub_repository(name: str) -> str:
    """Return the repository `user/repo` of `user/repo/model.gguf` on the Hub; any other name is returned unchanged.

    >>> hub_repository("bartowski/SmolLM2-135M-GGUF/SmolLM2-135M-Q4_K_M.gguf")
    'bartowski/SmolLM2-135M-GGUF'
    """
    return "/".join(name.split("/")[:2]) if is_gguf(name) and _is_hub_name(name) else name


def _is_hub_name(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") > 1 and not Path(name).exists()


def _download(name: str) -> Path:
    if not _is_hub_name(name):
        raise UserError(f"cannot load the model {name!r}: no such file")
    from huggingface_hub import hf_hub_download

    user, repository, file = name.split("/", 2)
    try:
        return Path(hf_hub_download(f"{user}/{repository}", file))
    except Exception as error:  # of the connection, or the repository or file does not exist
        raise UserError(
            f"cannot load the model {name!r}: there is no such file here, and {file} of {user}/{repository} cannot be"
            f" downloaded from the Hub ({reason(error)})"
        ) from error


def _starts(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


@lru_cache
def _digest(path: Path, changed: int) -> str:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    add_file(digest, path)
    return digest.hexdigest()[:12]


def _convert_once(path: Path, folder: Path) -> None:
    """Write the folder, unless another process has done so while this one waited for the lock."""
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(".lock")):
            if folder.is_dir():
                return
            for left in sorted(folder.parent.glob("*.tmp")):  # by a process that was killed
                remove(left)
            with whole_path(folder, "HF_HOME") as partial:
                partial.mkdir()
                note(f"converting {path.name}, once, into {folder}")
                _write(path, partial)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the reader of a damaged file raises anything
        if os_error(error) in OS_ERRORS:
            elsewhere = f"; {OTHER_DISK_REMEDY}" if os_error(error) in DISK_FULL else ""
            raise UserError(f"cannot convert {path} into {folder}: {reason(error)}{elsewhere}") from error
        raise UserError(f"cannot load {path}: {_fault(path, error)}") from error


def _write(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    # `path` is absolute. The empty folder keeps transformers from reading other files next to the GGUF file.
    model = _load(folder, path)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=str(path))
    needed, free = 4 * model.num_parameters(), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the weights of {path.name} need {needed / 2**30:.1f} GiB in {folder.parent}, where {free / 2**30:.1f} GiB are free:"
            f" free some space, or {OTHER_DISK_REMEDY}"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(folder: Path, path: Path) -> Any:
    """Return the model with dequantised weights, marked as a model without quantisation, which can be saved."""
    import torch
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    options: dict[str, Any] = {"gguf_file": str(path)}
    config = AutoConfig.from_pretrained(folder, **options)
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForSeq2SeqLM
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, loaded = pretrained(kind, folder, dtype=torch.float32, output_loading_info=True, **options)
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(f"it has no weights for {missing[0]}")
    model.hf_quantizer = None
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    return model


def _fault(path: Path, error: Exception) -> str:
    """Return why a GGUF file could not be converted."""
    from gguf import GGUFReader

    if shortage := out_of_memory(error):
        return shortage
    try:
        architecture = GGUFReader(path).fields["general.architecture"].contents()
    except Exception:  # numpy's, of lengths and offsets
        return "the file is damaged or incomplete: download it again"
    if "not supported" in str(error) or "Unrecognized" in str(error) or isinstance(error, KeyError):
        return (
            f"transformers cannot load the architecture {architecture!r} from a GGUF file: use a decoder such as {COMMON_ARCHITECTURES}, or"
            " the model's safetensors weights"
        )
    return f"{first_line(error)} (architecture {architecture})"
