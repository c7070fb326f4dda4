"""The interface of an encoder, and loading one from a folder or the Hub."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, loading
from revela_hub.files import content_digest, local_path
from revela_hub.loading import PEFT_ADAPTER, encoder, in_fast_precision, model_json, model_kind, module_types, pinned

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

DOCUMENT_ENCODER = "document_encoder.json"
"""File in the document route of a model with two routes, with the identity of the model whose vectors it returns."""
RERANKERS = ("CrossEncoder", "MultiVectorEncoder")
"""Classes of sentence-transformers that score pairs of a query and a passage."""
DOCUMENT_ROUTE = re.compile(r"document_0_\w+")
"""Folder of the first module of the document route."""
# Model types whose positions begin after the id of the padding token: a table of 514 has room for 512 tokens.
_POSITIONS_AFTER_PADDING = "camembert data2vec-text longformer mpnet roberta xlm-roberta xlm-roberta-xl".split()


@runtime_checkable
class Encoder(Protocol):
    """Any object with the two encoding methods of sentence-transformers for retrieval, such as SentenceTransformer.

    Both take a list of N texts and the keywords `batch_size` and `show_progress_bar`, and return an array (N, d). The
    attribute `similarity_fn_name` says how two vectors are compared (`similarity_of`).
    """

    def encode_query(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> Any:
        """Return the vectors (N, d) of N queries."""

    def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> Any:
        """Return the vectors (N, d) of N documents."""


def load_encoder(
    name: str, *, device: str | None = None, trust_remote_code: bool = False, max_seq_length: int | None = None
) -> "SentenceTransformer":
    """Load a sentence-transformers model from a folder or the Hub.

    Args:
        name: A sentence-transformers folder, or a Hub id.
        device: "cpu", "cuda", "cuda:1", "mps"; default: the fastest available.
        trust_remote_code: Whether to run the model's own Python code.
        max_seq_length: Truncate texts to this many tokens, instead of the model's own limit.

    Raises:
        UserError: The model does not exist, cannot be read, or requires remote code that was not allowed.
    """
    from sentence_transformers import SentenceTransformer

    refuse_other_kind(name)
    model: SentenceTransformer = _load(SentenceTransformer, name, device, trust_remote_code, max_seq_length)
    return model


def refuse_other_kind(name: str, *, sparse: bool = False) -> None:
    """Raise a `UserError` if a model was saved as another class than a dense (or sparse) one: it would get new random layers."""
    if (kind := model_kind(model_in(name))) in RERANKERS:
        raise UserError(f"{name} is a reranker ({kind}), not a retriever: pass it as rerank")
    if kind == PEFT_ADAPTER:
        raise UserError(
            f"{name} is a bare PEFT adapter, without the pooling and the prompts of a retriever: revela-hub export {name}"
            f" --output_dir FOLDER makes one with those of Revela"
        )
    if kind == "SparseEncoder" and not sparse:
        raise UserError(f"{name} is a SparseEncoder, where a dense retriever is needed: use mode sparse")


def load_sparse_encoder(name: str, **options: Any) -> "SparseEncoder":
    """Loads a `SparseEncoder` of sentence-transformers; keywords as for `load_encoder`."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

    # sentence-transformers would silently add a randomly initialised sparse head to a dense model.
    types = module_types(model_in(name)).values()
    if not types or any(word in " ".join(types) for word in ("Splade", "Sparse", "MLM")):
        model: SparseEncoder = _load(SparseEncoder, name, **options)
        if model.similarity_fn_name != "dot":
            raise UserError(
                f"{name} compares by {model.similarity_fn_name}; mode sparse supports only the dot product: set"
                " similarity_fn_name in config_sentence_transformers.json to dot"
            )
        if any(isinstance(module, (SpladePooling, SparseAutoEncoder)) for module in model.modules()):
            return model
    raise UserError(f"{name} is not a sparse model: use mode dense or hybrid, or pass a SparseEncoder as sparse_model")


def model_identity(name: str, max_seq_length: int | None = None) -> str:
    """Return a string that changes whenever the model's vectors may change; caches use it as their key.

    For a folder it contains a hash of the files, independent of the path; for a Hub id the commit. The truncation length
    is included.
    """
    cut = "" if max_seq_length is None else f":{max_seq_length}"
    path = local_path(model_in(name))
    if path.is_dir():
        return f"folder@{content_digest(path)[:32]}{cut}"
    from huggingface_hub import snapshot_download

    # Files in the Hub's cache are in snapshots/<commit>/.
    snapshot = snapshot_download(_hub_id(name), allow_patterns=["modules.json", "*config.json"])
    return f"{_hub_id(name)}@{Path(snapshot).name}{cut}"


def document_identity(name: str, max_seq_length: int | None = None) -> str | None:
    """Return `model_identity` of the model whose documents have the same vectors as a model's; None if it names none.

    A model that was trained with `--query_only` names its base model.
    """
    folder = local_path(model_in(name))
    place = str(folder) if folder.is_dir() else _hub_id(name)
    route = next((path for path in module_types(place) if DOCUMENT_ROUTE.fullmatch(path)), None)
    if route is None or (found := model_json(place, f"{route}/{DOCUMENT_ENCODER}")) is None:
        return None
    return str(found["identity"]) + ("" if max_seq_length is None else f":{max_seq_length}")


def _hub_id(name: str) -> str:
    return name if "/" in name else f"sentence-transformers/{name}"  # as sentence-transformers does


def as_vectors(encoded: Any, count: int, *, normalize: bool) -> NDArray[np.float32]:
    """Convert an encoder's output for `count` texts to a float32 array (count, d), with unit length if `normalize`."""
    vectors = np.asarray(encoded, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != count:
        raise ValueError(f"the encoder returned an array of shape {vectors.shape} for {count} texts, not ({count}, d)")
    if not np.isfinite(vectors).all():
        raise UserError(
            "the model's vectors contain NaN or infinity: its weights are damaged, or its precision is too low"
        )
    if normalize:
        # A zero vector stays zero.
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def similarity_of(encoder: Any, name: str = "the encoder") -> str:
    """Return how an encoder's vectors are compared, "cosine" or "dot": its `similarity_fn_name`.

    The default for an encoder without that attribute is cosine, as in sentence-transformers.
    """
    found = getattr(encoder, "similarity_fn_name", None) or "cosine"
    similarity = str(getattr(found, "value", found))  # sentence-transformers' enumeration, or a string
    if similarity not in ("cosine", "dot"):
        raise UserError(
            f"{name} compares by {similarity} distance; only cosine and dot product are supported: set similarity_fn_name in"
            " config_sentence_transformers.json to one of them"
        )
    return similarity


def model_in(name: str) -> str:
    """Return the model in an output folder of `adapt` or `train`: its only sentence-transformers folder; else the name itself."""
    name = pinned(name)
    models = [] if (local_path(name) / "modules.json").is_file() else _exported_in(local_path(name))
    return str(models[0]) if len(models) == 1 else name


def _exported_in(folder: Path) -> list[Path]:
    """Return the sentence-transformers folders in a folder that are not checkpoints."""
    models = [file.parent for file in sorted(folder.glob("*/modules.json"))]
    return [model for model in models if not (model / "trainer_state.json").is_file()]


def model_place(name: str) -> str:
    """Return the path of a sentence-transformers folder, or the full Hub id."""
    name = model_in(name)
    path = local_path(name)
    refuse_other_kind(name, sparse=True)
    if not path.is_dir():
        if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"{name} is not a folder; pass a sentence-transformers folder, a Hub id, or bm25")
        return _hub_id(name)
    if not (path / "modules.json").is_file():
        several = " or ".join(map(str, _exported_in(path)))
        remedy = "turn a checkpoint into one with `revela-hub export`; `revela-hub train` measures a plain model before training"
        remedy = f"pass {several}" if several else remedy
        raise UserError(f"{name} is not a sentence-transformers folder (it has no modules.json): {remedy}")
    return str(path)


def _load(
    kind: Any, name: str, device: str | None = None, trust_remote_code: bool = False, max_seq_length: int | None = None
) -> Any:
    place = model_place(name)
    model = open_model(kind, place, name, device=device, trust_remote_code=trust_remote_code)
    if not module_types(place):
        without_chat_template(model[0])
    if max_seq_length is not None:
        limit_length(model, max_seq_length, name)
    return in_fast_precision(model)


def open_model(kind: Any, place: str, name: str, *, device: str | None, trust_remote_code: bool) -> Any:
    """Return a model of sentence-transformers, of the class `kind`."""
    with loading(f"cannot load the model {name}", name):
        model = encoder(kind, place, device=device, trust_remote_code=trust_remote_code)
    limit_to_positions(model)
    return model


def limit_to_positions(model: Any) -> None:
    """Truncate texts to the model's positions: sentence-transformers' default for RoBERTa's relatives is too long for them."""
    for module in input_modules(model):
        limit, positions = getattr(module, "max_seq_length", None), _positions(module)
        if positions and _truncates(module) and (limit is None or limit > positions):
            module.max_seq_length = positions


def _positions(module: Any) -> int | None:
    """Return how many tokens a module can read; None for unlimited (computed) positions."""
    config = getattr(getattr(module, "auto_model", None), "config", None)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    return None if rotary else text_positions(config)


def text_positions(config: Any) -> int | None:
    """Return how many tokens a transformers configuration, or the dictionary of one, has positions for; None for no limit."""
    if isinstance(config, dict):
        config = SimpleNamespace(**config)
    positions = getattr(config, "max_position_embeddings", None) or 0
    if getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING:
        padding = getattr(config, "pad_token_id", None)
        positions -= (1 if padding is None else padding) + 1
    return positions if positions > 0 else None  # XLNet's configuration has -1


def input_modules(model: Any) -> list[Any]:
    """Return the modules that read texts: the first one of a sentence-transformers model, or of each of its routes."""
    routes = getattr(model[0], "sub_modules", None)
    return [model[0]] if routes is None else [modules[0] for modules in routes.values()]


def without_chat_template(module: Any) -> None:
    """Let a module read texts as they are: sentence-transformers puts them into the chat template of a plain language model."""
    getattr(module, "modality_config", {}).pop("message", None)


def length_limit(model: Any) -> int | None:
    """Return the maximum number of tokens per text; None if unlimited (static embeddings), or if routes differ in it."""
    limits = {getattr(module, "max_seq_length", None) for module in input_modules(model)}
    limit = limits.pop() if len(limits) == 1 else None
    return int(limit) if limit and math.isfinite(limit) else None


def limit_length(model: Any, max_length: int, name: str) -> None:
    """Truncate texts to a number of tokens; modules that read texts of any length (static embeddings) stay as they are."""
    for module in filter(_truncates, input_modules(model)):
        special = getattr(getattr(module, "tokenizer", None), "num_special_tokens_to_add", int)()
        if max_length <= special:  # every text would have the same vector
            raise UserError(f"max_length {max_length} leaves no room for text: {name} adds {special} special tokens")
        if max_length > (positions := _positions(module) or max_length):
            raise UserError(f"{name} has {positions} positions, fewer than max_length {max_length}: lower it")
        module.max_seq_length = max_length


def truncates(model: Any) -> bool:
    """Whether the maximum length of texts can be set, in some route at least."""
    return any(map(_truncates, input_modules(model)))


def _truncates(module: Any) -> bool:
    limit = getattr(module, "max_seq_length", None)
    return hasattr(module, "max_seq_length") and (limit is None or math.isfinite(limit))
