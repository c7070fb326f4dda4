"""Load the model of a folder as its documentation says, and encode texts with it."""

import inspect
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto as auto

from .contents import read_json
from .progress import report_step
from .texts import LONGEST_PROBE, SHORT


class UnknownKind(ValueError):
    """The class of the model is not supported."""


class LoadedModel:
    """A loaded model.

    Attributes:
        module: the model.
        how: the call that loaded it.
        kind: `SentenceTransformer`, `SparseEncoder`, `MultiVectorEncoder`, `CrossEncoder`, or empty for a transformers model.
        kinds: kinds of inputs: `query` and `document`, or `text`, or none if the inputs are not single texts.
        tokenizer: a tokenizer of transformers, or None.
        prompts: prompt name -> text.
        dtype: type of the loaded weights.
        max_length: maximum length in tokens; 10**9 if there is no limit.
        vectors: the function of the method's record that encodes texts, for a transformers model; see `Method.vectors`.
        causal: whether the model is a decoder, which can encode single texts without a padding token.
    """

    def __init__(self, folder: Path, trust_remote_code: bool, vectors: Path | None = None) -> None:
        self.kind = _kind(folder)
        self.vectors = run_path(str(vectors))["vectors"] if vectors and not self.kind else None
        self.tokenizer: Any = None
        load = self._load_sentence_transformers if self.kind else self._load_transformers
        report_step("loading the model")
        load(folder, trust_remote_code)
        self.module.eval()
        self.causal = _is_causal(self.module, read_json(folder / "config.json", {}))
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.dtype = str(next((parameter.dtype for parameter in self.module.parameters()), "no weights"))
        self.max_length = min(int(self.tokenizer.model_max_length), 10**9) if self.tokenizer else 0

    def _load_sentence_transformers(self, folder: Path, trust_remote_code: bool) -> None:
        import sentence_transformers

        self.how = f"{self.kind}(...)"
        load = getattr(sentence_transformers, self.kind)
        safe = {"use_safetensors": True}  # check_files looks for other pickles
        self.module: Any = load(str(folder), device="cpu", trust_remote_code=trust_remote_code, model_kwargs=safe)
        tokenizer = getattr(self.module, "tokenizer", None)
        self.tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        self.kinds = ["text"] if self.kind == "CrossEncoder" else ["query", "document"]
        self.prompts = {name: text for name, text in (getattr(self.module, "prompts", None) or {}).items() if text}

    def _load_transformers(self, folder: Path, trust_remote_code: bool) -> None:
        config = read_json(folder / "config.json", {})
        names = [name for name in config.get("architectures") or () if isinstance(name, str)]
        own = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        kind: Any = own if own is not None and not config.get("auto_map") else transformers.AutoModel
        self.how, self.prompts = f"{kind.__name__}.from_pretrained(...)", {}
        options = {"trust_remote_code": trust_remote_code} if kind is transformers.AutoModel else {}
        self.module = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, **options)
        # Models with a decoder, or only for pre-training, have other inputs than the tokens of a text.
        encodes = "input_ids" in inspect.signature(self.module.forward).parameters
        if getattr(self.module.config, "is_encoder_decoder", False) and not kind.__name__.endswith("EncoderModel"):
            encodes = False
        self.kinds = []
        if encodes and (folder / "tokenizer_config.json").is_file():
            self.kinds = ["query", "document"] if self.vectors else ["text"]
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            self.tokenizer.padding_side = "right"
            self.tokenizer.model_max_length = text_limit(self.module, self.tokenizer)

    def encode(self, kind: str, texts: list[str], **options: Any) -> np.ndarray:
        """Return (n_texts, d) float32 vectors of one of the `kinds`, computed in one batch with options of `encode_query`."""
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        report_step(f"encoding {texts[0][:30]!r}{more}")
        if not self.kind:
            if self.vectors is not None:
                return np.asarray(self.vectors(self.module, self.tokenizer, kind, texts).numpy())
            return np.concatenate([self._last_states(batch) for batch in self._batches(texts)])
        if self.kind == "CrossEncoder":
            pairs = [(SHORT, text) for text in texts]
            scores = self.module.predict(pairs, batch_size=len(texts), activation_fn=torch.nn.Identity())
            return np.asarray(scores, dtype=np.float32).reshape(len(texts), -1)
        function = {"query": self.module.encode_query, "document": self.module.encode_document}[kind]
        options = {"batch_size": len(texts), "show_progress_bar": False} | options
        if self.kind == "SparseEncoder":
            found = function(texts, convert_to_tensor=True, convert_to_sparse_tensor=False, **options)
            return np.asarray(found.float().numpy(), dtype=np.float32)
        vectors = function(texts, **options)
        if self.kind == "MultiVectorEncoder":
            vectors = np.stack([np.asarray(tokens, dtype=np.float32).sum(0) for tokens in vectors])
        return np.asarray(vectors, dtype=np.float32)

    def tokens_in_all(self, operations: float) -> int:
        """Return the number of tokens that can be encoded with a number of operations, at two per weight and token."""
        return int(operations / (2 * max(self.parameters, 1)))

    def _batches(self, texts: list[str]) -> list[list[str]]:
        # Without special tokens an empty text has no tokens.
        texts = [text or "a" for text in texts]
        # Decoders without a padding token encode one text at a time.
        return [texts] if self.tokenizer.pad_token is not None or not self.causal else [[text] for text in texts]

    def _last_states(self, texts: list[str]) -> np.ndarray:
        tokens = self.tokenizer(texts, padding=len(texts) > 1, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = self.module(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        if states.dim() == 3:
            places = torch.arange(tokens.attention_mask.shape[1])
            states = states[torch.arange(len(texts)), (tokens.attention_mask * places).argmax(1)]
        found: np.ndarray = states.float().numpy()
        return found


def positions(module: Any) -> int | None:
    """Return the number of absolute positions; None for models without a table of positions."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("position_embeddings", "position_embedding", "wpe") and hasattr(part, "num_embeddings"):
            # positions of RoBERTa start after the id of the padding token
            return int(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return None


def text_limit(module: Any, tokenizer: Any) -> int:
    """Return the maximum length that the tokenizer and the positions of a model allow."""
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", LONGEST_PROBE)
    return min(int(tokenizer.model_max_length), limit, positions(module) or limit)


def _is_causal(module: Any, config: dict[str, Any]) -> bool:
    inner = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    family = getattr(getattr(inner, "config", None), "model_type", None)
    if family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return family not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return any(
        "CausalLM" in str(name) for name in [*(config.get("architectures") or ()), *(config.get("auto_map") or ())]
    )


def _kind(folder: Path) -> str:
    """Return the class of sentence-transformers that loads the folder; empty for a transformers folder.

    Raises:
        UnknownKind: the class is not supported.
    """
    kind = read_json(folder / "config_sentence_transformers.json", {}).get("model_type") or "SentenceTransformer"
    if not (folder / "modules.json").is_file() and kind != "CrossEncoder":
        kind = "CrossEncoder" if "sentence_transformers" in read_json(folder / "config.json", {}) else ""
    if kind not in ("", "SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder"):
        raise UnknownKind(f"models of the class {kind} cannot be checked")
    return str(kind)
