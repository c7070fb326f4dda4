"""What a model has to offer to be evaluated and searched with, and how one is loaded from a folder or the Hub."""

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, reason
from revela_hub.pickles import encoder, module_types
from revela_hub.precision import in_fast_precision
from revela_hub.retrieval.disk import default_cache_folder, key_of, make_folder, whole_file

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

LARGE_FOLDER = 1 << 26
"""Bytes from which the hash of a model's folder is kept: reading 64 MiB takes 0.1 s."""

# Files of a model folder that do not change what it computes.
_NOT_THE_MODEL = frozenset({"README.md", "LICENSE", ".gitattributes", "training_args.bin"})


@runtime_checkable
class Encoder(Protocol):
    """Anything with the two methods by which sentence-transformers encodes for retrieval; SentenceTransformer is one.

    Both take a list of N texts, and the keywords `batch_size` and `show_progress_bar`, and return an array (N, d).
    How two vectors are compared is its attribute `similarity_fn_name` (`similarity_of`).
    """

    def encode_query(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> Any:
        """Vectors (N, d) of N queries."""
        ...

    def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> Any:
        """Vectors (N, d) of N documents."""
        ...


def load_encoder(
    name: str,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    max_seq_length: int | None = None,
) -> "SentenceTransformer":
    """Loads a sentence-transformers model from a folder or, failing that, from the Hub; safetensors weights only.

    Args:
        name: A sentence-transformers folder, or a Hub id.
        device: "cpu", "cuda", "cuda:1", "mps"; by default the fastest there is.
        trust_remote_code: Whether code that comes with the model may run.
        max_seq_length: Cut texts at this many tokens, instead of at the model's own limit.

    Raises:
        UserError: There is no such model, it cannot be read, or it needs code that was not allowed to run.
    """
    from sentence_transformers import SentenceTransformer

    model: SentenceTransformer = _load(SentenceTransformer, name, device, trust_remote_code, max_seq_length)
    return model


def load_sparse_encoder(
    name: str,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    max_seq_length: int | None = None,
) -> "SparseEncoder":
    """Loads a `SparseEncoder` of sentence-transformers, as `load_encoder` does.

    Raises:
        UserError: As for `load_encoder`, and where the model has no sparse head.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

    # sentence-transformers would give a dense model a sparse head of random weights, without a word.
    types = module_types(name).values()
    if not types or any(word in " ".join(types) for word in ("Splade", "Sparse", "MLM")):
        model: SparseEncoder = _load(SparseEncoder, name, device, trust_remote_code, max_seq_length)
        if any(isinstance(module, (SpladePooling, SparseAutoEncoder)) for module in model.modules()):
            return model
    raise UserError(
        f"{name} gives no weights of terms: mode sparse needs a SparseEncoder",
        sparse_model="give one with --sparse_model",
        mode="or use --mode dense or hybrid",
    )


def model_identity(name: str, max_seq_length: int | None = None) -> str:
    """A string that changes whenever the vectors of the model `name` may change: the key of what is cached for it.

    For a folder it is a hash of its files, wherever it lies; for a Hub id the commit that is loaded. Where the texts are
    cut is part of it.

    Raises:
        UserError: The Hub does not say which commit that is, and the Hub's cache does not either.
    """
    cut = "" if max_seq_length is None else f":{max_seq_length}"
    path = Path(name).expanduser()
    if path.is_dir():
        return f"folder@{_hash_folder(path)}{cut}"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for file in ("modules.json", "config.json"):
        try:  # a file in the Hub's cache lies in snapshots/<commit>/
            return f"{_hub_id(name)}@{Path(hf_hub_download(_hub_id(name), file)).parent.name}{cut}"
        except EntryNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"cannot find out which version of {name} this is: {_one_line(error)}") from error
    raise UserError(f"cannot find out which version of {name} this is: it has neither modules.json nor config.json")


def _hub_id(name: str) -> str:
    """Fills in the organisation as sentence-transformers does for its own models."""
    return name if "/" in name else f"sentence-transformers/{name}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _hash_folder(folder: Path) -> str:
    """A hash of the files' content; that of a large folder is kept until a file's size or time of change is another."""
    files = [
        file
        for file in sorted(path for path in folder.rglob("*") if path.is_file())
        if file.name not in _NOT_THE_MODEL and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    states = [file.stat() for file in files]
    if sum(state.st_size for state in states) < LARGE_FOLDER:
        return _hash_files(folder, files)
    # ctime: a copy can keep the time at which the content changed, and not that at which the file did.
    stamps = [(str(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in zip(files, states, strict=True)]
    kept = default_cache_folder("models") / f"{key_of(str(folder.resolve()), stamps)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(kept.read_text(encoding="utf-8"))["hash"])
    found = _hash_files(folder, files)
    # A file that changes twice within the clock's resolution may have the same times.
    if time.time() - max(max(state.st_mtime, state.st_ctime) for state in states) > 2:
        with contextlib.suppress(UserError):
            make_folder(kept.parent)
            with whole_file(kept) as stream:
                stream.write(json.dumps({"folder": str(folder), "hash": found}).encode())
    return found


def _hash_files(folder: Path, files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def as_vectors(encoded: Any, count: int, *, normalize: bool) -> NDArray[np.float32]:
    """What an encoder returned for `count` texts as a float32 array (count, d), of unit length if `normalize`.

    Raises:
        ValueError: The shape is not (count, d).
        UserError: A number is NaN or infinite.
    """
    vectors = np.asarray(encoded, dtype=np.float32)
    if vectors.ndim != 2 or vectors.shape[0] != count:
        raise ValueError(f"the encoder returned an array of shape {vectors.shape} for {count} texts, not ({count}, d)")
    if not np.isfinite(vectors).all():
        raise UserError(
            "the model's vectors contain NaN or infinity: its weights are damaged, or its precision too low"
        )
    if normalize:
        # A zero vector stays zero, and is then similar to nothing.
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def similarity_of(encoder: Any, name: str = "the encoder") -> str:
    """Return how an encoder's vectors are compared, "cosine" or "dot": its `similarity_fn_name`.

    An encoder without one is compared by cosine, as sentence-transformers assumes of a model that does not say.

    Raises:
        UserError: It is another one (a distance), which neither search nor evaluation nor training here offers.
    """
    found = getattr(encoder, "similarity_fn_name", None) or "cosine"
    similarity = str(getattr(found, "value", found))  # an enumeration of sentence-transformers, or its word
    if similarity not in ("cosine", "dot"):
        raise UserError(f"{name} compares by {similarity} distance; only cosine and dot product are supported")
    return similarity


def _load(kind: Any, name: str, device: str | None, trust_remote_code: bool, max_seq_length: int | None) -> Any:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "modules.json").is_file():
            raise UserError(
                f"{name} is not a sentence-transformers folder (it has no modules.json); "
                f"turn a training checkpoint into one with `revela-hub export`"
            )
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise UserError(f"{name} is not a folder; give a sentence-transformers folder, a Hub id, or bm25")
    if max_seq_length is not None and max_seq_length < 1:
        raise UserError(f"the maximum sequence length must be at least 1, not {max_seq_length}")
    try:
        place = str(path) if path.is_dir() else _hub_id(name)
        model: Any = encoder(kind, place, device=device, trust_remote_code=trust_remote_code)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises plain Exceptions, remote code anything
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise UserError(
                f"{name} comes with code of its own",
                trust_remote_code="read it, then pass --trust_remote_code if you trust it",
            ) from error
        raise UserError(f"cannot load the model {name}: {reason(error, name)}") from error
    if max_seq_length is not None:
        if max_seq_length > (positions := learnt_positions(model) or max_seq_length):
            raise UserError(
                f"{name} has {positions} positions, fewer than the maximum length {max_seq_length}: lower it"
            )
        model.max_seq_length = max_seq_length
    return in_fast_precision(model)


def learnt_positions(model: Any) -> int | None:
    """How many tokens the model can read; None where positions are computed and have no end."""
    config = getattr(getattr(model[0], "auto_model", None), "config", None)
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None):
        return None
    return getattr(config, "max_position_embeddings", None)
