"""Check that the ONNX files of a model give the model's vectors when they are loaded as the card says."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .contents import MODEL, QUANTIZED
from .files import Check
from .loading import LoadedModel
from .progress import report_step
from .texts import probe_texts
from .vectors import difference

# Largest difference of a coordinate of a unit vector that another order of additions can make.
_TOLERANCE = 1e-4
# Lowest cosine between a vector of int8 weights and the model's. all-MiniLM-L6-v2 has 0.988.
_LEAST_COSINE = 0.8


class OnnxModel:
    """An ONNX file with its tokenizer.

    `modules` are those of sentence-transformers after the first, for files without the output `sentence_embedding`.
    """

    def __init__(self, file: Path, tokenizer: Any, max_length: int, modules: Sequence[Any] = ()) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._tokenizer, self._max_length, self._pooling = tokenizer, max_length, modules
        known = ("sentence_embedding", "last_hidden_state", "token_embeddings")
        outputs = [output.name for output in self._session.get_outputs()]
        self._output = next((name for name in known if name in outputs), outputs[0])

    def encode(self, texts: list[str]) -> np.ndarray:
        """Return the vectors (n_texts, d), computed in one batch."""
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="np")
        inputs = {one.name: tokens[one.name].astype(np.int64) for one in self._session.get_inputs()}
        found = np.asarray(self._session.run([self._output], inputs)[0])
        if self._output == "sentence_embedding":
            return found
        features = {
            "token_embeddings": torch.from_numpy(found),
            "attention_mask": torch.from_numpy(tokens["attention_mask"]),
        }
        for module in self._pooling:
            features = module(features)
        return np.asarray(features["sentence_embedding"].numpy())


def lowest_cosine(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the lowest cosine between two vectors of the same text."""
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((got * expected).sum(axis=1) / np.maximum(norms, 1e-12)).min())


def check_onnx(folder: Path, model: LoadedModel) -> Iterator[Check]:
    """Yield one check if the folder has ONNX files."""
    files = [name for name in (MODEL, QUANTIZED) if (folder / name).is_file()]
    if not files:
        return
    if model.kind != "SentenceTransformer" or model.tokenizer is None:
        yield Check("onnx", True, f"{', '.join(files)} not checked: only the files of dense models are")
        return
    if find_spec("onnxruntime") is None:
        yield Check("onnx", True, f"{', '.join(files)} not checked: onnxruntime is not installed")
        return
    found: list[str] = []
    for name in files:
        report_step(f"encoding with {name}")
        try:
            onnx = OnnxModel(folder / name, model.tokenizer, model.max_length, list(model.module)[1:])
            fault, summary = _compared(name, onnx, model)
        except Exception as error:  # readers would get the same error
            fault = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if fault:
            yield Check("onnx", False, f"{fault}: export it again, or delete it")
            return
        found.append(summary)
    yield Check("onnx", True, "; ".join(found))


def _compared(name: str, onnx: OnnxModel, model: LoadedModel) -> tuple[str, str]:
    """Return the fault of an ONNX file, or an empty string, and a summary."""
    texts = [text for text in probe_texts(model.max_length) if text]
    worst, lowest = 0.0, 1.0
    for kind in model.kinds:
        prompted = [model.prompts.get(kind, "") + text for text in texts]
        # The last text is truncated, and all in its batch would be padded to it.
        got = np.concatenate([onnx.encode(prompted[:-1]), onnx.encode(prompted[:1]), onnx.encode(prompted[-1:])])
        got = got[:, : model.module.truncate_dim]  # the file has the whole vectors; the folder's settings cut them
        expected = np.concatenate([model.encode(kind, part) for part in (texts[:-1], texts[:1], texts[-1:])])
        if got.shape != expected.shape:
            return f"{name} gives vectors with {got.shape[1]} dimensions, the model {expected.shape[1]}", ""
        worst, lowest = max(worst, difference(got, expected)), min(lowest, lowest_cosine(got, expected))
    if name == QUANTIZED:
        fault = f"{name}: a cosine with the model's vector is {lowest:.2f}" if not lowest >= _LEAST_COSINE else ""
        return fault, f"{name} gives vectors with a cosine of at least {lowest:.3f}"
    fault = f"{name}: its vectors differ from the model's by {worst:.1e}" if not worst <= _TOLERANCE else ""
    return fault, f"{name} gives the same vectors to {worst:.0e}"
