"""Load models from safetensors only, because pickles can run code when loaded. All models are loaded with these functions.

The option `use_safetensors` of the libraries does not apply to adapters and to modules of sentence-transformers after the
model, so the file names are checked first.
"""

import json
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from revela_hub.errors import UserError
from revela_hub.paths import local_path

Model = TypeVar("Model")

# transformers is not thread-safe: while it loads a model, it replaces functions of transformers and torch.
_ONE_AT_A_TIME = threading.RLock()
PEFT_ADAPTER = "PEFT adapter"
_PICKLED = re.compile(r"(adapter_model|pytorch_model)\b.*\.bin")
_SAFE = {
    "adapter_model": re.compile(r"adapter_model.*\.safetensors"),
    "pytorch_model": re.compile(r"model.*\.safetensors"),
}


def pretrained(kind: Any, name: str | Path, **options: Any) -> Any:
    """Load a model with `kind.from_pretrained(name)` of transformers.

    Args:
        kind: a model class, or an `AutoModel` class.
        name: folder or Hub id.
        **options: options of `from_pretrained`.

    Raises:
        UserError: the model has pickled weights.
    """
    refuse_pickles(name)
    with _ONE_AT_A_TIME:
        return kind.from_pretrained(os.path.expanduser(name), use_safetensors=True, **options)


def encoder(
    kind: Callable[..., Model], name: str, *, model_kwargs: dict[str, Any] | None = None, **options: Any
) -> Model:
    """Load a model with `kind(name)` of sentence-transformers.

    Args:
        kind: `SentenceTransformer`, `SparseEncoder`, or a module such as `Transformer`.
        name: folder or Hub id.
        model_kwargs: options of `from_pretrained` of transformers.
        **options: options of `kind`.

    Raises:
        UserError: the model has pickled weights.
    """
    refuse_pickles(name)
    with _ONE_AT_A_TIME:
        return kind(os.path.expanduser(name), model_kwargs={"use_safetensors": True} | (model_kwargs or {}), **options)


def refuse_pickles(name: str | Path) -> None:
    """Check that all weights of a model exist as safetensors.

    Raises:
        UserError: some weights are only available as a pickle.
    """
    files = [PurePosixPath(file) for file in _files(name)]
    folders = [PurePosixPath(folder) for folder in module_types(name)] or [PurePosixPath()]
    for file in files:
        found = _PICKLED.fullmatch(file.name)
        read = file.parent in folders or any(folder.name and folder in file.parents for folder in folders)
        if found and read and not any(f.parent == file.parent and _SAFE[found[1]].fullmatch(f.name) for f in files):
            raise UserError(
                f"cannot load {name}: {file} is a pickle, which can run code when loaded; save the model again with a"
                " newer version of its library, which writes safetensors"
            )


def module_types(name: str | Path) -> dict[str, str]:
    """Return folder -> class of the modules of a sentence-transformers model, including routes; empty for other models."""
    read = partial(model_json, name)
    try:
        types = {module["path"]: module["type"] for module in read("modules.json") or ()}
        waiting = [path for path, kind in types.items() if kind.endswith(("Router", "Asym"))]
        while waiting:
            path = waiting.pop()
            config = read(f"{path}/router_config.json".lstrip("/")) or read(f"{path}/config.json".lstrip("/")) or {}
            routes = {f"{path}/{part}".lstrip("/"): kind for part, kind in config["types"].items()}
            waiting += [
                part for part, kind in routes.items() if kind.endswith(("Router", "Asym")) and part not in types
            ]
            types |= routes
        return types
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # loading reports the error


def model_kind(name: str | Path) -> str:
    """Return the class of sentence-transformers that a model was saved as, or `PEFT_ADAPTER`; empty for other models and unreadable ones."""
    read = partial(model_json, name)
    try:
        kind = (read("config_sentence_transformers.json") or {}).get("model_type")
        if kind or read("modules.json"):
            return str(kind or "SentenceTransformer")
        if read("adapter_config.json"):
            return PEFT_ADAPTER
        config = read("config.json") or {}
        classifier = any(str(each).endswith("ForSequenceClassification") for each in config.get("architectures") or ())
        return "CrossEncoder" if classifier or "sentence_transformers" in config else ""
    except (OSError, ValueError, TypeError, AttributeError):
        return ""  # loading reports the error


def model_json(name: str | Path, file: str) -> Any:
    """Return the content of a JSON file of a model, a folder or Hub id; None if there is no such file.

    Raises:
        OSError: the file cannot be read, or the Hub cannot be reached.
        ValueError: it is not JSON.
    """
    from transformers.utils import cached_file

    folder = local_path(name)
    place = folder if folder.is_dir() else name
    found = cached_file(str(place), file, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(found).read_text(encoding="utf-8")) if found else None


def _files(name: str | Path) -> list[str]:
    """Return the files of a folder or a repository; if the Hub cannot be reached, those in its cache.

    Raises:
        OfflineModeIsEnabled: the Hub cannot be reached, and the repository is not in the cache.
    """
    folder = local_path(name)
    if not folder.is_dir():
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        try:
            return sorted(HfApi().list_repo_files(str(name)))
        except Exception as error:
            try:
                folder = Path(snapshot_download(str(name), local_files_only=True))
            except Exception:  # not in the cache
                if isinstance(error, (HFValidationError, RepositoryNotFoundError)):
                    return []  # loading reports it
                raise error from None
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.*") if file.is_file())
