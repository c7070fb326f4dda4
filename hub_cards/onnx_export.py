"""Export a sentence-transformers folder to ONNX: `onnx/model.onnx`, which text-embeddings-inference and onnxruntime load.

The graph contains all modules of the model, so its output `sentence_embedding` (n_texts, d) is the final vector, pooled and
normalized. text-embeddings-inference prefers this output to its own pooling. A second output, `last_hidden_state`
(n_texts, length, hidden_size), is for programs that pool the tokens themselves. The inputs are `input_ids`, `attention_mask`
and, if the tokenizer returns them, `token_type_ids`: (n_texts, length) int64.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from revela_hub.errors import UserError, require
from revela_hub.files import local_path, scratch_folder
from revela_hub.hub_cards.tokenizers import uses_chat_template
from revela_hub.hub_cards.verify import difference, probe_texts
from revela_hub.retrieval.encoder import load_encoder

MODEL = "onnx/model.onnx"
TOLERANCE = 1e-4
"""Largest difference of a coordinate, relative to the longest vector, that another order of additions can make."""
LARGEST_FILE = 1_900_000_000
"""A file of protobuf has at most 2 GiB; the weights of larger models are stored in a second file."""
# The newest version that onnxruntime 1.17 and all later ones support, and that the exporter writes without a conversion.
_OPSET = 18
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class OnnxFile(NamedTuple):
    """An exported file, its size in bytes (with its weights), and the largest difference of a coordinate from the model's vectors."""

    path: Path
    bytes: int
    difference: float


class OnnxModel:
    """An ONNX file with its tokenizer."""

    def __init__(self, file: Path, tokenizer: Any, max_length: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._tokenizer, self._max_length = tokenizer, max_length

    def encode(self, texts: list[str]) -> np.ndarray:
        """Return the vectors (n_texts, d), computed in one batch."""
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="np")
        inputs = {one.name: tokens[one.name].astype(np.int64) for one in self._session.get_inputs()}
        return np.asarray(self._session.run(["sentence_embedding"], inputs)[0])


def export_onnx(folder: str | Path) -> OnnxFile:
    """Write `onnx/model.onnx` into the folder of a dense model without remote code, and compare its vectors with the model's."""
    require("onnx", "onnxscript", "onnxruntime")
    folder = local_path(folder)
    model: Any = load_encoder(str(folder), device="cpu").float().eval()
    modules = {type(module).__name__ for module in model}
    included = all(getattr(module, "include_prompt", True) for module in model)
    prompted = any((model.prompts or {}).values()) and not included
    if "Transformer" not in modules or modules & {"Router", "Asym"} or prompted or uses_chat_template(model):
        raise UserError(
            f"{folder} cannot be exported to ONNX: it needs one transformer for queries and passages, that pools prompts and has no"
            " chat template"
        )
    with scratch_folder("onnx", folder) as new:  # an interrupted export leaves the earlier files
        _write(model, new / "model.onnx")
        # The last text is truncated, and all in its batch would be padded to it. The folder's settings cut the vectors of the file.
        texts, onnx = (
            probe_texts(model.max_seq_length),
            OnnxModel(new / "model.onnx", model.tokenizer, model.max_seq_length),
        )
        parts = ([text for text in texts[:-1] if text], texts[-1:])
        got = np.concatenate([onnx.encode(part) for part in parts])[:, : model.truncate_dim]
        expected = np.concatenate([model.encode(part, prompt="", show_progress_bar=False) for part in parts])
        if not (found := difference(got, expected)) <= TOLERANCE:
            raise UserError(f"{folder} cannot be exported to ONNX: the vectors differ from the model's by {found:.1e}")
        size = sum(file.stat().st_size for file in new.iterdir())
        (folder / MODEL).parent.mkdir(exist_ok=True)
        (folder / MODEL).with_suffix(".onnx_data").unlink(missing_ok=True)
        for file in sorted(new.glob("model*"), reverse=True):  # the weights before the model that refers to them
            file.replace((folder / MODEL).with_name(file.name))
    return OnnxFile(folder / MODEL, size, found)


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
    exported: Any = program.model  # type: ignore[union-attr]
    ClearMetadataAndDocStringPass()(exported)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    onnx_ir.save(exported, file, external_data="model.onnx_data" if size > LARGEST_FILE else None)
