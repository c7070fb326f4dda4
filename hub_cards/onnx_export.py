"""Export a sentence-transformers folder to ONNX: `onnx/model.onnx`, which text-embeddings-inference and onnxruntime load.

The graph contains all modules of the model, so its output `sentence_embedding` (n_texts, d) is the final vector, pooled and
normalized. text-embeddings-inference prefers this output to its own pooling. A second output, `last_hidden_state`
(n_texts, length, hidden_size), is for programs that pool the tokens themselves. The inputs are `input_ids`, `attention_mask`
and, if the tokenizer returns them, `token_type_ids`: (n_texts, length) int64.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from revela_hub.errors import UserError, reason, require
from revela_hub.files import local_path
from revela_hub.hub_cards.contents import auto_maps, listed_modules, read_json
from revela_hub.hub_cards.tokenizers import uses_chat_template
from revela_hub.hub_cards.verify import difference, probe_texts
from revela_hub.pickles import encoder
from revela_hub.scratch import scratch_folder

MODEL, QUANTIZED = "onnx/model.onnx", "onnx/model_quantized.onnx"
# The newest version that onnxruntime 1.17 and all later ones support, and that the exporter writes without a conversion.
_OPSET = 18
# A file of protobuf has at most 2 GiB; the weights of larger models are stored in a second file.
LARGEST_FILE = 1_900_000_000
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class OnnxFile(NamedTuple):
    """An exported file."""

    path: Path
    bytes: int  # with the file of its weights
    difference: float  # largest one of a coordinate from the model's vectors, relative to the longest vector's norm
    cosine: float  # lowest one with the model's vector of the same text


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


def onnx_obstacle(folder: Path) -> str:
    """Return why a model folder cannot be exported to ONNX; empty if it can."""
    listed = listed_modules(folder)
    modules = [kind.rpartition(".")[2] for _, kind in listed]
    config = read_json(folder / "config_sentence_transformers.json", {})
    if not modules:
        return "is not a sentence-transformers folder (it has no modules.json)"
    if any(True for _ in auto_maps(folder)):
        return "requires remote code"
    if "Router" in modules or "Asym" in modules:
        return "has separate routes for queries and documents"
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return f"is a {config['model_type']}, not a model with one dense vector per text"
    if modules[0] != "Transformer":
        return f"begins with the module {modules[0]}, not with a Transformer"
    pooling = next((path for path, kind in listed if kind.endswith("Pooling")), "")
    included = read_json(folder / pooling / "config.json", {}).get("include_prompt", True)
    if not included and any((config.get("prompts") or {}).values()):
        return "excludes the prompt from pooling, which depends on the text before it"
    return ""


def export_onnx(folder: str | Path, *, quantize: bool = False) -> list[OnnxFile]:
    """Write `onnx/model.onnx` into a sentence-transformers folder, and compare its vectors with the model's.

    Args:
        folder: the folder of a dense model without remote code.
        quantize: also write `onnx/model_quantized.onnx`, with int8 weights and dynamically quantized activations.

    Raises:
        UserError: a package is not installed, or the model cannot be exported.
    """
    folder = local_path(folder)
    require("onnx", "onnxscript", "onnxruntime")
    if why := onnx_obstacle(folder):
        raise UserError(f"{folder} cannot be exported to ONNX: it {why}")
    from sentence_transformers import SentenceTransformer

    model = encoder(SentenceTransformer, str(folder), device="cpu").float().eval()
    if uses_chat_template(model):
        raise UserError(
            f"{folder} cannot be exported to ONNX: it puts texts into a chat template, which other programs do not"
        )
    try:
        with scratch_folder("onnx", folder) as new, _quiet():  # an interrupted export leaves the earlier files
            _write(model, new / Path(MODEL).name)
            if quantize:
                _quantize(new / Path(MODEL).name, new / Path(QUANTIZED).name)
            (folder / MODEL).parent.mkdir(exist_ok=True)
            (folder / MODEL).with_suffix(".onnx_data").unlink(missing_ok=True)
            for file in sorted(new.glob("model*"), reverse=True):  # the weights before the model that refers to them
                file.replace((folder / MODEL).with_name(file.name))
    except OSError:
        raise
    except Exception as error:  # torch.onnx and onnxruntime raise exceptions of many types
        raise UserError(f"{folder} cannot be exported to ONNX: {reason(error)}") from error
    return [_compared(model, folder / name) for name in (MODEL, *([QUANTIZED] if quantize else []))]


class _Graph(nn.Module):
    """All modules of a model, with tensors as inputs and outputs."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `last_hidden_state` and `sentence_embedding`."""
        features = self.model(dict(zip(self.names, inputs, strict=True)))
        return features["token_embeddings"], features["sentence_embedding"]


def _write(model: Any, file: Path) -> None:
    """Export the model with dynamic numbers of texts and tokens, without the exporter's paths of source files."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    tokens = model.tokenizer(["A short text.", "A text that is a little longer."], padding=True, return_tensors="pt")
    names = [name for name in _INPUTS if name in tokens]
    with torch.no_grad():
        program = torch.onnx.export(
            _Graph(model, names).eval(),
            tuple(tokens[name] for name in names),
            dynamo=True,
            input_names=names,
            output_names=["last_hidden_state", "sentence_embedding"],
            dynamic_shapes=(tuple({0: "batch", 1: "length"} for _ in names),),
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    exported: Any = program.model
    ClearMetadataAndDocStringPass()(exported)
    weights = file.with_suffix(".onnx_data")
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    onnx_ir.save(exported, file, external_data=weights.name if size > LARGEST_FILE else None)


def _quantize(file: Path, quantized: Path) -> None:
    """Store the weights in int8, one scale per channel: on MiniLM, one scale per matrix costs five times as much."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file, quantized, weight_type=QuantType.QInt8, per_channel=True)


def _compared(model: Any, file: Path) -> OnnxFile:
    onnx = OnnxModel(file, model.tokenizer, model.max_seq_length)
    texts = [text for text in probe_texts(model.max_seq_length) if text]
    parts = (texts[:-1], texts[-1:])  # the last text is truncated, and all in its batch would be padded to it
    # The file has the whole vectors; the folder's settings cut them.
    got = np.concatenate([onnx.encode(part) for part in parts])[:, : model.truncate_dim]
    expected = np.concatenate([model.encode(part, prompt="", show_progress_bar=False) for part in parts])
    size = sum(path.stat().st_size for path in (file, file.with_suffix(".onnx_data")) if path.exists())
    return OnnxFile(file, size, difference(got, expected), lowest_cosine(got, expected))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of the exporter about missing packages and its own deprecations."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
