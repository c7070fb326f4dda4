"""The checks of a model folder: eight rows, in the clean process.

| row | passes if |
|---|---|
| files | there are settings and safetensors weights, and no adapter next to the model |
| private data | no token, key, home folder or local path is in the files |
| loading | the folder loads as its card says |
| weights | no weight is missing, unexpected, NaN or infinite |
| length | the maximum length fits the model's positions; with last-token pooling, every text ends with the same special token |
| vectors | they are finite and differ between texts, also for empty and truncated ones |
| batching | a text has the same vector alone, in a batch, and with padding on the other side |
| same as checkpoint | the vectors are the reference vectors, which the trained model computed |

Only `clean_process.py` imports these functions, after it has hidden all packages that readers may not have; this package uses the
texts and `text_limit`.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .contents import Check, contents, read_json
from .secrets import private_faults

LONGEST_PROBE = 4096  # words; longer maximum lengths are not tested
SENTENCE = "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock. "
SHORT = "What is the capital of France?"
CODE = "def area(width: float, height: float) -> float:\n    return width * height\n"
FOREIGN = "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر"
# Largest difference that rounding can make in a unit vector, by type of the stored weights.
_TOLERANCE = {"torch.float16": 2e-3, "torch.bfloat16": 1.5e-2}
_NO_LIMIT = 10**9


def probe_texts(max_length: int) -> list[str]:
    """Return a short, a long, an empty, a non-Latin and a code text, and one with more words than the maximum length in tokens."""
    cut = SENTENCE * (min(max_length, LONGEST_PROBE) // len(SENTENCE.split()) + 1)
    return [SHORT, SENTENCE * 8, "", FOREIGN, CODE, cut]


def checks(folder: Path, trust_remote_code: bool, reference: str | None, vectors: str | None) -> Iterator[Check]:
    """Yield the rows, up to a fault that makes the following ones pointless; see `clean_process.verify` for the arguments."""
    names = contents(folder, links=True).included
    yield (files := Check.of("files", _file_faults(folder, names), f"{len(names)} files of the model"))
    yield Check.of("private data", private_faults(folder, names), "no token, key, home folder or local path")
    if not files.ok:
        return
    reports = _record_loads()
    try:
        model = LoadedModel(folder, trust_remote_code, vectors)
    except Exception as error:  # readers would get the same error
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if not trust_remote_code and "trust_remote_code" in str(error):
            detail = "the model requires remote code: read the code, and set trust_remote_code to run it"
        yield Check("loading", False, detail)
        return
    yield Check("loading", True, f"{model.how}, {model.parameters:,} parameters, {model.dtype}")
    yield (
        weights := Check.of("weights", _weights_faults(model, reports), "none missing or unexpected; all are finite")
    )
    if not weights.ok:
        return
    if not model.kinds:
        yield Check("vectors", True, "not checked: the inputs of the model are not single texts")
        return
    texts = probe_texts(model.max_length)
    half = model.encode(model.kinds[0], texts[:2]) if model.dtype in _TOLERANCE else None
    model.module.float()  # so that differences between vectors are faults, not rounding errors
    if model.kind:
        yield (length := Check.of("length", _length_faults(model, texts), f"{model.max_length} tokens"))
        if not length.ok:
            return
    # In two batches, because all texts in that of the last, long one would be padded to it.
    found = {
        kind: np.concatenate([model.encode(kind, texts[:-1]), model.encode(kind, texts[-1:])]) for kind in model.kinds
    }
    dimension = found[model.kinds[0]].shape[1]
    yield (
        finite := Check.of("vectors", _vector_faults(found, half, texts), f"{dimension} dimensions, finite, different")
    )
    if finite.ok:
        yield Check.of("batching", _batching_faults(model, found, texts), "same vectors alone, in a batch and padded")
        yield _reference_check(reference, model, found, texts)


def _file_faults(folder: Path, names: list[str]) -> Iterator[str]:
    if not {"modules.json", "config.json"} & set(names):
        yield f"{folder.name} contains neither modules.json nor config.json: not a model folder"
    if not any(name.endswith(".safetensors") for name in names):
        yield "no safetensors weights: pickled weights can run code when they are loaded, and are not used"
    if "adapter_config.json" in names:
        yield "adapter_config.json: the adapter is not merged into the model"


# --- the loaded model


class LoadedModel:
    """A model, loaded as its card says.

    `kind` is `SentenceTransformer`, `SparseEncoder`, or empty for a transformers model, which `vectors` of the method's record encodes
    texts with. The `kinds` of inputs are `query` and `document`, or `text`, or none if the inputs are not single texts.
    """

    def __init__(self, folder: Path, trust_remote_code: bool, vectors: str | None) -> None:
        self.kind = ""
        if (folder / "modules.json").is_file():
            config = read_json(folder / "config_sentence_transformers.json", {})
            self.kind = config.get("model_type") or "SentenceTransformer"
        self.vectors = run_path(vectors)["vectors"] if vectors and not self.kind else None
        self.module: Any
        self.tokenizer: Any = None
        (self._load_encoder if self.kind else self._load_transformers)(folder, trust_remote_code)
        self.module.eval()
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.dtype = str(next((parameter.dtype for parameter in self.module.parameters()), "no weights"))
        self.max_length = min(int(self.tokenizer.model_max_length), _NO_LIMIT) if self.tokenizer else 0

    def _load_encoder(self, folder: Path, trust_remote_code: bool) -> None:
        import sentence_transformers

        if self.kind not in ("SentenceTransformer", "SparseEncoder"):
            raise ValueError(f"models of the class {self.kind} are not checked")
        load, self.how = getattr(sentence_transformers, self.kind), f"{self.kind}(...)"
        safe = {"use_safetensors": True}
        self.module = load(str(folder), device="cpu", trust_remote_code=trust_remote_code, model_kwargs=safe)
        tokenizer = getattr(self.module, "tokenizer", None)
        self.tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        self.kinds = ["query", "document"]

    def _load_transformers(self, folder: Path, trust_remote_code: bool) -> None:
        config = read_json(folder / "config.json", {})
        own = next((getattr(transformers, name, None) for name in config.get("architectures") or ()), None)
        kind: Any = own if own is not None and not config.get("auto_map") else transformers.AutoModel
        options = {"trust_remote_code": trust_remote_code} if kind is transformers.AutoModel else {}
        self.how = f"{kind.__name__}.from_pretrained(...)"
        self.module = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, **options)
        encodes = "input_ids" in inspect.signature(self.module.forward).parameters
        self.kinds = []
        if encodes and (folder / "tokenizer_config.json").is_file():
            self.kinds = ["query", "document"] if self.vectors else ["text"]
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            self.tokenizer.padding_side = "right"
            self.tokenizer.model_max_length = text_limit(self.module, self.tokenizer)

    def encode(self, kind: str, texts: list[str]) -> np.ndarray:
        """Return (n_texts, d) float32 vectors of one of the `kinds`, computed in one batch."""
        if self.vectors is not None:
            return np.asarray(self.vectors(self.module, self.tokenizer, kind, texts).numpy())
        if not self.kind:
            # Decoders without a padding token encode one text at a time; without special tokens "" has no token.
            texts = [text or "a" for text in texts]
            batches = [texts] if self.tokenizer.pad_token is not None else [[text] for text in texts]
            return np.concatenate([self._last_states(batch) for batch in batches])
        function = {"query": self.module.encode_query, "document": self.module.encode_document}[kind]
        options: dict[str, Any] = {"batch_size": len(texts), "show_progress_bar": False}
        if self.kind == "SparseEncoder":
            options |= {"convert_to_tensor": True, "convert_to_sparse_tensor": False}
            return np.asarray(function(texts, **options).float().numpy())
        return np.asarray(function(texts, **options), dtype=np.float32)

    def _last_states(self, texts: list[str]) -> np.ndarray:
        tokens = self.tokenizer(texts, padding=len(texts) > 1, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = self.module(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        if states.dim() == 3:
            places = torch.arange(tokens.attention_mask.shape[1])
            states = states[torch.arange(len(texts)), (tokens.attention_mask * places).argmax(1)]
        return np.asarray(states.float().numpy())


def _table_of_positions(module: Any) -> int | None:
    """Return the number of absolute positions; None for models without a table of positions."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "position_embedding", "wpe") and hasattr(
            part, "num_embeddings"
        ):
            # positions of RoBERTa start after the id of the padding token
            return int(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return None


def text_limit(module: Any, tokenizer: Any) -> int:
    """Return the maximum length that the tokenizer and the positions of a model allow."""
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", LONGEST_PROBE)
    return min(int(tokenizer.model_max_length), limit, _table_of_positions(module) or limit)


# --- weights


def _record_loads() -> list[tuple[Any, dict[str, Any]]]:
    """Record each model that transformers loads in this process, and its missing, unexpected and mismatched weights."""
    loads: list[tuple[Any, dict[str, Any]]] = []
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def recording(cls: type, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, report = original(cls, *args, output_loading_info=True, **kwargs)
        loads.append((model, report))
        return (model, report) if wanted else model

    PreTrainedModel.from_pretrained = classmethod(recording)  # type: ignore[assignment]
    return loads


def _weights_faults(model: LoadedModel, reports: list[tuple[Any, dict[str, Any]]]) -> Iterator[str]:
    for part, report in reports:
        missing, extra, mismatched = (
            sorted(map(str, report.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")
        )
        if model.kind:  # sentence-transformers pools the token states itself
            missing = [name for name in missing if not name.startswith("pooler.")]
        if type(part).__name__ not in (part.config.architectures or [type(part).__name__]):
            extra = []  # the head of the architecture that was trained
        for names, fault in (
            (mismatched, "has another shape"),
            (missing, "is missing"),
            (extra, "is not in the model"),
        ):
            yield from (f"{name} {fault}" for name in names)
    for name, tensor in model.module.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield f"{name} contains NaN or infinity"


# --- vectors


def _length_faults(model: LoadedModel, texts: list[str]) -> Iterator[str]:
    if model.tokenizer is None:  # static embeddings
        return
    positions = _table_of_positions(model.module)
    if model.max_length >= _NO_LIMIT:
        yield "no maximum length is saved: long texts will fail"
    elif positions is not None and model.max_length > positions:
        yield f"the maximum length is {model.max_length} tokens, but the model has {positions} positions"
    elif any("lasttoken" in (getattr(part, "pooling_mode", None) or ()) for part in model.module.modules()):
        prompt = (getattr(model.module, "prompts", None) or {}).get("query") or ""
        rows = model.tokenizer([prompt + text for text in texts], truncation=True)["input_ids"]
        ends = [row[-1] if row else None for row in rows]
        for text, end in zip(texts, ends, strict=True):
            if end != ends[0] or end not in model.tokenizer.all_special_ids:
                token = None if end is None else model.tokenizer.convert_ids_to_tokens(end)
                yield f"the vector is that of the last token, but {text[:30]!r} ends with {token!r} instead of EOS"


def _vector_faults(vectors: dict[str, np.ndarray], half: np.ndarray | None, texts: list[str]) -> Iterator[str]:
    if len({array.shape[1] for array in vectors.values()}) > 1:
        yield "queries and documents have different dimensions"
    for kind, array in vectors.items():
        for text, vector in zip(texts, array, strict=True):
            if not np.isfinite(vector).all():
                yield f"{kind} {text[:30]!r} gives NaN or infinity"
        if not array[0].any() or difference(array[:1], array[1:2]) < 1e-5:
            yield f"{kind}: {texts[0]!r} and {texts[1][:30]!r} give the same vector, or zeros"
    if half is not None and not difference(half, next(iter(vectors.values()))[:2]) < 0.25:  # also NaN
        yield "they differ between float32 and the type of the weights: store another type"


def _batching_faults(model: LoadedModel, vectors: dict[str, np.ndarray], texts: list[str]) -> Iterator[str]:
    # Without the truncated text, to which all others in its batch would be padded.
    kind, texts = model.kinds[0], texts[:-1]
    together = vectors[kind][: len(texts)]
    alone = np.concatenate([model.encode(kind, [text]) for text in texts])
    if worst := _worst(texts, alone, together, 1e-5):
        yield f"alone and in a batch, {kind} {worst}"
    saved = getattr(model.tokenizer, "padding_side", "right")
    # Absolute positions require padding on the right.
    if not model.kind or model.tokenizer is None or (saved == "right" and _table_of_positions(model.module)):
        return
    model.tokenizer.padding_side = "left" if saved == "right" else "right"
    if worst := _worst(texts, model.encode(kind, texts), together, 1e-5):
        yield f"padded left and right, {kind} {worst}"
    model.tokenizer.padding_side = saved


def _reference_check(file: str | None, model: LoadedModel, vectors: dict[str, np.ndarray], texts: list[str]) -> Check:
    name = "same as checkpoint"
    if file is None:
        return Check(name, True, "not checked: no reference for pooling, normalization, prompts and similarity")
    with safe_open(file, framework="np") as stored:
        expected = {kind: stored.get_tensor(kind) for kind in stored.keys()}  # noqa: SIM118 (not a mapping)
        trained = json.loads((stored.metadata() or {}).get("settings", "{}"))
    settings = {"max_length": str(model.max_length), "similarity": getattr(model.module, "similarity_fn_name", None)}
    for key, value in settings.items():
        if trained.get(key, value) != value:
            return Check(name, False, f"the {key} is {value}, but {trained[key]} in the checkpoint")
    tolerance = _TOLERANCE.get(model.dtype, 1e-5)
    worst = {kind: _worst(texts, vectors[kind], array, tolerance) for kind, array in expected.items()}
    faults = (f"{kind} {fault}" for kind, fault in worst.items() if fault)
    return Check.of(name, faults, f"to {tolerance:g} on {len(texts)} texts")


def _worst(texts: list[str], got: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Return which text differs most, or an empty string if all are within the tolerance."""
    if got.shape != expected.shape:
        return f"has the shape {got.shape} instead of {expected.shape}"
    differences = [difference(one, other[None]) for one, other in zip(got, expected, strict=True)]
    place = int(np.argmax(differences))
    if differences[place] <= tolerance or difference(got, expected) <= tolerance:
        return ""
    return f"{texts[place][:30]!r} differs by {differences[place]:.1e}"


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of a coordinate, relative to the norm of the longest expected vector."""
    scale = float(np.linalg.norm(expected, axis=-1).max(initial=0.0))
    return float(np.abs(got - expected).max(initial=0.0)) / (scale or 1.0)
