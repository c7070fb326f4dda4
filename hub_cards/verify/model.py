"""What a loaded model is checked for: its weights, the end of texts, and vectors that depend on the text alone.

Part of `verify.py`'s clean process: standard library and siblings only, until the libraries are imported in the functions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import Check

if TYPE_CHECKING:
    import numpy as np
    import torch

_SENTENCE = "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock. "
SHORT = "What is the capital of France?"
LONGEST_PROBE = 4096  # words; a model that reads more is not probed at its limit

# How far a coordinate of a unit vector may move by rounding, by the type of the stored weights.
_TOLERANCE = {"torch.float32": 1e-5, "torch.float64": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.5e-2}


def probe_texts(max_length: int) -> list[str]:
    """Returns the texts that a model is verified on: short, long, empty, non-Latin, code, and one that is cut.

    Args:
        max_length: tokens the model keeps; the last text has more words than that, up to `LONGEST_PROBE`.
    """
    cut = _SENTENCE * (min(max_length, LONGEST_PROBE) // len(_SENTENCE.split()) + 1)
    code = "def area(width: float, height: float) -> float:\n    return width * height\n"
    return [SHORT, _SENTENCE * 8, "", "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر", code, cut]


def check_model(folder: Path, trust_remote_code: bool, adapter_only: bool, reference: Path | None) -> Iterator[Check]:
    """Yields the checks that need the model; the arguments are those of `verify`."""
    loads = _record_loads()
    try:
        model = _Model(folder, trust_remote_code)
    except Exception as error:  # whatever it is, the reader would see it, too
        yield Check("loading", False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return
    yield Check("loading", True, f"{model.how}, {model.parameters:,} parameters, {model.dtype}")
    yield _weights_check(folder, loads, adapter_only)
    bad = [name for name, tensor in model.module.state_dict().items() if not _finite(tensor)]
    yield Check("values", not bad, f"{bad[0]} holds NaN or infinity" if bad else "every weight is a finite number")
    if bad or not model.kinds:
        return
    yield from model.text_checks()
    texts = probe_texts(model.max_length)
    vectors = {kind: model.encode_all(kind, texts) for kind in model.kinds}
    yield _vectors_check(vectors, texts)
    if reference:
        yield _reference_check(reference, vectors, texts, _TOLERANCE.get(model.dtype, 1e-5))
    # Without the text that is cut: it would make all the others in its batch as long as itself.
    first, short = model.kinds[0], texts[:-1]
    yield _batching_check(model, short, vectors[first][:-1])
    yield _padding_check(model, short, vectors[first][:-1])


def _record_loads() -> list[tuple[Any, dict[str, Any]]]:
    """Has transformers report, for every model loaded from now on, which weights were missing, left over or of another shape."""
    from transformers import PreTrainedModel

    loads: list[tuple[Any, dict[str, Any]]] = []
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def recording(cls: type, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, report = original(cls, *args, output_loading_info=True, **kwargs)
        model.loaded_from = kwargs.get("subfolder") or ""  # a route's part of the folder
        loads.append((model, report))
        return (model, report) if wanted else model

    PreTrainedModel.from_pretrained = classmethod(recording)  # type: ignore[assignment]
    return loads


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _weights_check(folder: Path, loads: list[tuple[Any, dict[str, Any]]], adapter_only: bool) -> Check:
    says = {
        "missing_keys": "not in the file, would start at random",
        "unexpected_keys": "in the file, but not in the model",
        "mismatched_keys": "of another shape than the model's",
    }
    for _, report in loads:
        for kind, meaning in says.items():
            if names := sorted(map(str, report.get(kind) or ())):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return Check("weights", False, f"{names[0]}{more}: {meaning}")
    compared = 0
    for model, _ in [] if adapter_only else loads:
        for name, same in _compared_with_files(folder, model):
            compared += 1
            if not same:
                return Check("weights", False, f"{name} has other values in memory than in the file: initialised again")
    return Check(
        "weights", True, "none missing, left over or initialised again" + f" ({compared} compared)" * (not adapter_only)
    )


def _compared_with_files(folder: Path, model: Any) -> Iterator[tuple[str, bool]]:
    import torch
    from safetensors import safe_open

    loaded, prefix = model.state_dict(), f"{model.base_model_prefix}."
    for file in (folder / model.loaded_from).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it has no iterator)
                there = loaded.get(name, loaded.get(name.removeprefix(prefix)))
                if there is not None:
                    stored = tensors.get_tensor(name).to(there.dtype)
                    yield name, stored.shape == there.shape and torch.equal(stored.nan_to_num(), there.nan_to_num())


class _Model:
    """What the folder holds, loaded by the documented way, as a function from texts to vectors."""

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        self.is_encoder = (folder / "modules.json").is_file()
        load = self._load_encoder if self.is_encoder else self._load_transformer
        load(folder, trust_remote_code)
        self.module.eval()
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.dtype = str(next(self.module.parameters()).dtype)
        # What is stored in half precision is compared in float32: then a difference is a fault, not rounding.
        self.module.float()
        self.max_length = min(int(self.tokenizer.model_max_length), 10**9) if self.tokenizer else 0

    def _load_encoder(self, folder: Path, trust_remote_code: bool) -> None:
        import sentence_transformers
        from transformers import PreTrainedTokenizerBase

        file = folder / "config_sentence_transformers.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.is_sparse = settings.get("model_type") == "SparseEncoder"
        kind: Any = sentence_transformers.SparseEncoder if self.is_sparse else sentence_transformers.SentenceTransformer
        self.how = f"{kind.__name__}(...)"
        self.module: Any = kind(str(folder), device="cpu", trust_remote_code=trust_remote_code)
        self.tokenizer: Any = (
            self.module.tokenizer if isinstance(self.module.tokenizer, PreTrainedTokenizerBase) else None
        )
        self.kinds = ["query", "document"]

    def _load_transformer(self, folder: Path, trust_remote_code: bool) -> None:
        import transformers

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = [*config.get("auto_map", ()), *config.get("architectures", ())]
        causal = not config.get("auto_map") and any(name.endswith("ForCausalLM") for name in names)
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        self.how = f"{auto.__name__}.from_pretrained(...)"
        self.module = auto.from_pretrained(folder, trust_remote_code=trust_remote_code, dtype="auto")
        # A model for pre-training takes other inputs than one text's tokens: what it embeds cannot be compared.
        takes_tokens = "input_ids" in inspect.signature(self.module.forward).parameters
        has_tokenizer = takes_tokens and (folder / "tokenizer_config.json").is_file()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
        self.kinds = ["text"] if has_tokenizer else []
        # A model with an expert for each kind of text has to be told whose text it reads.
        self.has_experts = "expert" in inspect.signature(self.module.forward).parameters
        if has_tokenizer and self.has_experts:
            self.kinds = ["query", "document"]
        if self.tokenizer is not None:
            self.tokenizer.padding_side = "right"
            self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
            limit = getattr(self.module.config.get_text_config(), "max_position_embeddings", LONGEST_PROBE)
            self.tokenizer.model_max_length = min(self.tokenizer.model_max_length, limit)

    def encode(self, kind: str, texts: list[str]) -> np.ndarray:
        """Returns (n_texts, d) float32 vectors of length 1, all texts in one batch."""
        import numpy as np

        if self.is_encoder:
            function = {"query": self.module.encode_query, "document": self.module.encode_document}[kind]
            settings = {"convert_to_sparse_tensor": False} if self.is_sparse else {}
            vectors = np.asarray(function(texts, batch_size=len(texts), show_progress_bar=False, **settings))
        elif self.has_experts:
            vectors = self._vectors_of_expert({"query": "query", "document": "passage"}[kind], texts)
        else:
            vectors = self._last_states(texts)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return np.asarray(vectors / np.where(norms == 0, 1, norms), dtype=np.float32)

    def encode_all(self, kind: str, texts: list[str]) -> np.ndarray:
        """As `encode`, with the last text in a batch of its own."""
        import numpy as np

        return np.concatenate([self.encode(kind, texts[:-1]), self.encode(kind, texts[-1:])])

    def _last_states(self, texts: list[str]) -> np.ndarray:
        import torch

        # An empty text has no token to read where the tokenizer adds none of its own.
        batch = self.tokenizer([text or "a" for text in texts], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = self.module(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[0]
        places = torch.arange(batch.attention_mask.shape[1])
        last = (batch.attention_mask * places).argmax(1)
        vectors: np.ndarray = states[torch.arange(len(texts)), last].numpy()
        return vectors

    def _vectors_of_expert(self, expert: str, texts: list[str]) -> np.ndarray:
        """(n_texts, d): the dense vectors, then the sparse ones."""
        import torch

        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            output = self.module(batch.input_ids, batch.attention_mask, expert=expert)
        vectors: np.ndarray = torch.cat([output.pooler_output, output.sparse], dim=-1).numpy()
        return vectors

    def text_checks(self) -> Iterator[Check]:
        """Yields what can be said about prompts, similarity, length and the end of texts."""
        if not self.is_encoder:
            return
        prompts = {name: text for name, text in self.module.prompts.items() if text}
        yield Check("prompts", True, f"{prompts or 'none'}, {self.module.similarity_fn_name} similarity")
        if self.tokenizer is None:
            return
        known = self.max_length < 10**9
        yield Check(
            "length",
            known,
            f"{self.max_length} tokens" if known else "no maximum length is saved: long texts will fail",
        )
        if known and _pools_last_token(self.module):
            yield self._ending_check()

    def _ending_check(self) -> Check:
        texts = [self.module.prompts.get("query", "") + text for text in probe_texts(self.max_length)]
        rows = self.tokenizer(texts, truncation=True)["input_ids"]
        ends = [row[-1] if row else None for row in rows]
        names = self.tokenizer.convert_ids_to_tokens([end if end is not None else 0 for end in ends])
        special = self.tokenizer.all_special_ids
        if ends[0] not in special:
            return Check(
                "end of text",
                False,
                f"the vector is read off the last token, but {SHORT!r} ends with {names[0]!r}: EOS is not added",
            )
        for text, row, end, name in zip(texts, rows, ends, names, strict=True):
            if end != ends[0]:
                found = (
                    f"{names[0]!r} is lost where a text is cut to {len(row)} tokens: {text[:30]!r} ends with {name!r}"
                )
                return Check("end of text", False, found)
        return Check("end of text", True, f"every text ends with {names[0]!r}, cut or not")


def _pools_last_token(model: Any) -> bool:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return any("lasttoken" in module.pooling_mode for module in model if isinstance(module, Pooling))


def _vectors_check(vectors: dict[str, np.ndarray], texts: list[str]) -> Check:
    import numpy as np

    for kind, array in vectors.items():
        for text, vector in zip(texts, array, strict=True):
            if not np.isfinite(vector).all():
                return Check("vectors", False, f"{kind} {text[:30]!r} gives NaN or infinity")
    dimensions = next(iter(vectors.values())).shape[1]
    return Check("vectors", True, f"{dimensions} dimensions, finite, also of the empty and of the cut text")


def _difference(kind: str, texts: list[str], got: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Says which text differs most, or nothing where all are within the tolerance."""
    import numpy as np

    if got.shape != expected.shape:
        return f"{kind}: shape {got.shape} instead of {expected.shape}"
    worst = np.abs(got - expected).max(axis=1)
    index = int(worst.argmax())
    return f"{kind} {texts[index][:30]!r} differs by {worst[index]:.1e}" if worst[index] > tolerance else ""


def _reference_check(file: Path, vectors: dict[str, np.ndarray], texts: list[str], tolerance: float) -> Check:
    from safetensors.numpy import load_file

    faults = [_difference(kind, texts, vectors[kind], array, tolerance) for kind, array in load_file(file).items()]
    found = "; ".join(filter(None, faults))
    return Check("same as checkpoint", not found, found or f"to {tolerance:g} on {len(texts)} texts")


def _batching_check(model: _Model, texts: list[str], together: np.ndarray) -> Check:
    import numpy as np

    kind = model.kinds[0]
    alone = np.concatenate([model.encode(kind, [text]) for text in texts])
    found = _difference(kind, texts, alone, together, 1e-5)
    return Check("batching", not found, f"alone and in a batch: {found}" if found else "alone or in a batch, the same")


def _padding_check(model: _Model, texts: list[str], as_saved: np.ndarray) -> Check:
    if not model.is_encoder or model.tokenizer is None:
        return Check("padding", True, "right")
    saved, kind = model.tokenizer.padding_side, model.kinds[0]
    model.tokenizer.padding_side = "left" if saved == "right" else "right"
    found = _difference(kind, texts, model.encode(kind, texts), as_saved, 1e-5)
    model.tokenizer.padding_side = saved
    if not found:
        return Check("padding", True, f"{saved} is saved; left or right, the same")
    if saved == "right" and _counts_positions_from_the_edge(model.module):
        return Check("padding", True, "right is saved, and needed: positions are counted from the left edge")
    return Check("padding", False, f"left and right: {found}")


def _counts_positions_from_the_edge(module: Any) -> bool:
    """Whether the model has a table of absolute positions, as BERT and GPT-2 do; rotary ones are no table."""
    tables = [name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "num_embeddings")]
    return any("position" in name or name == "wpe" for name in tables)
