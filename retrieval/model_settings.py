"""The settings of a sentence-transformers folder that decide a vector, read without loading the model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from revela_hub.errors import UserError, loading
from revela_hub.pickles import model_json, module_types
from revela_hub.retrieval.encoder import model_place, similarity_of, text_positions


@dataclass(frozen=True)
class ModelSettings:
    """Prompts, maximum length, similarity and dimension of a dense model.

    Attributes:
        name: The folder or Hub id.
        prompts: Prompt name -> text.
        similarity: "cosine" or "dot".
        dimension: The dimension of its vectors; None if the folder does not tell.
        truncate_dim: The dimension that its vectors are cut to.
        normalizes: Whether its vectors have unit length.
        include_prompt: Whether the tokens of the prompt are pooled.
        max_length: Maximum number of tokens per text.
        tokenizer: The tokenizer.
    """

    name: str
    prompts: Mapping[str, str]
    similarity: str
    dimension: int | None
    truncate_dim: int | None
    normalizes: bool
    include_prompt: bool
    max_length: int
    tokenizer: Any

    @classmethod
    def read(cls, name: str, *, max_length: int | None = None, trust_remote_code: bool = False) -> "ModelSettings":
        """Read the settings of a folder or a model on the Hub."""
        from transformers import AutoTokenizer

        place = model_place(name)
        types = module_types(place)
        if other := next((kind for kind in types.values() if _last(kind) in _OTHERS), None):
            raise UserError(
                f"{name} has a {_last(other)}: {_OTHERS[_last(other)]}, which servers of dense vectors cannot compute;"
                " leave out --endpoint"
            )
        model = _json(place, "config_sentence_transformers.json")
        pooling = next(
            (_json(place, f"{path}/config.json") for path, kind in types.items() if _last(kind) == "Pooling"), {}
        )
        transformer, config = _json(place, "sentence_bert_config.json"), _json(place, "config.json")
        with loading(f"cannot load the tokenizer of {name}", name):
            tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        limits = [
            transformer.get("max_seq_length") or tokenizer.model_max_length,
            text_positions(config),
        ]
        return cls(
            name=name,
            # As sentence-transformers does: a default prompt, or one called passage, is not used for documents.
            prompts={"query": "", "document": ""}
            | {key: text or "" for key, text in (model.get("prompts") or {}).items()},
            similarity=similarity_of(SimpleNamespace(**model), name),
            dimension=_dimension(place, types, pooling, config),
            truncate_dim=model.get("truncate_dim"),
            normalizes=any(_last(kind) == "Normalize" for kind in types.values()),
            include_prompt=bool(pooling.get("include_prompt", True)),
            max_length=max_length or min(int(limit) for limit in limits if limit and limit > 0),
            tokenizer=tokenizer,
        )

    def inputs(self, texts: list[str], kind: str, prompt: str | None = None) -> list[str]:
        """Return what a server has to encode: prompt and text, cut to the maximum length."""
        prompt = self.prompts[kind] if prompt is None else prompt
        if prompt and not self.include_prompt:
            raise UserError(
                f"{self.name} leaves the tokens of the prompt out of its pooling (include_prompt: false), which servers do"
                f" not support: encode {'queries' if kind == 'query' else 'documents'} without --endpoint"
            )
        return [self.cut(prompt + text) for text in texts]

    def cut(self, text: str) -> str:
        """Return the beginning (or the end, for tokenizers that truncate on the left) that fits the maximum length."""
        if len(text.encode()) + 8 <= self.max_length or not self.tokenizer.is_fast:  # a token has at least one byte
            return text
        found = self.tokenizer(text, truncation=True, max_length=self.max_length, return_offsets_mapping=True)
        offsets = [(start, end) for start, end in found["offset_mapping"] if end > start]
        if not offsets:
            return text
        if self.tokenizer.truncation_side == "left":
            return text[offsets[0][0] :]
        whole = len(self.tokenizer(text, verbose=False)["input_ids"]) <= self.max_length
        return text if whole else text[: offsets[-1][1]]


_OTHERS = {
    "Router": "queries and documents have different networks",
    "Asym": "queries and documents have different networks",
    "SpladePooling": "its vectors are weighted terms",
    "SparseAutoEncoder": "its vectors are sparse",
}


def _last(kind: str) -> str:
    return kind.rpartition(".")[2]


def _json(place: str, file: str) -> dict[str, Any]:
    try:
        read = model_json(place, file)
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _dimension(place: str, types: dict[str, str], pooling: dict[str, Any], config: dict[str, Any]) -> int | None:
    """Return the dimension of the last module that names one."""
    found = pooling.get("embedding_dimension") or pooling.get("word_embedding_dimension") or config.get("hidden_size")
    for path, kind in types.items():
        if _last(kind) == "Dense":
            found = _json(place, f"{path}/config.json").get("out_features") or found
    modes = pooling.get("pooling_mode")
    several = (
        isinstance(modes, list) or sum(value is True for key, value in pooling.items() if "pooling_mode_" in key) > 1
    )
    return None if several or found is None else int(found)
