"""A folder's model, loaded by the documented way for its kind, as a function from texts to vectors.

Part of `verify.py`'s clean process: standard library and siblings only, until the libraries are imported in the functions.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

from .contents import read_json
from .progress import doing
from .texts import LONGEST_PROBE, SHORT

if TYPE_CHECKING:
    import numpy as np

# The first half of a pair that a CrossEncoder scores.
_QUESTION = SHORT


class UnknownKind(ValueError):
    """Not a kind of model that can be checked."""


class Loaded:
    """What the folder holds.

    Attributes:
        module: the model.
        how: the call that loaded it.
        kind: `SentenceTransformer`, `SparseEncoder`, `MultiVectorEncoder`, `CrossEncoder`, or empty for a transformers model.
        kinds: of inputs, `query` and `document`, or `text`; none where it takes other inputs than text.
        tokenizer: None where there is none, or not one of transformers.
        dtype: of the weights as they are loaded.
        max_length: tokens that are kept; 10**9 or more where there is no limit.
        vectors: the method's own function of model, tokenizer, kind and texts, for a transformers model that has one.
        causal: whether it is a decoder, whose texts can be read one at a time without a padding token.
    """

    def __init__(self, folder: Path, trust_remote_code: bool, vectors: Path | None = None) -> None:
        self.kind = _kind(folder)
        self.vectors = None if self.kind or vectors is None else run_path(str(vectors))["vectors"]
        self.tokenizer: Any = None
        load = self._load_sentence_transformers if self.kind else self._load_transformers
        doing("loading the model")
        load(folder, trust_remote_code)
        self.module.eval()
        self.causal = _reads_from_left_to_right(self.module, read_json(folder / "config.json") or {})
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self.dtype = str(next((parameter.dtype for parameter in self.module.parameters()), "no weights"))
        self.max_length = min(int(self.tokenizer.model_max_length), 10**9) if self.tokenizer else 0

    def _load_sentence_transformers(self, folder: Path, trust_remote_code: bool) -> None:
        import sentence_transformers
        from transformers import PreTrainedTokenizerBase

        self.how = f"{self.kind}(...)"
        options: dict[str, Any] = {"device": "cpu", "trust_remote_code": trust_remote_code}
        options["model_kwargs"] = {"use_safetensors": True}  # check_files has looked for pickles beside those weights
        self.module: Any = getattr(sentence_transformers, self.kind)(str(folder), **options)
        tokenizer = getattr(self.module, "tokenizer", None)
        self.tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        self.kinds = ["text"] if self.kind == "CrossEncoder" else ["query", "document"]
        self.prompts = {name: text for name, text in (getattr(self.module, "prompts", None) or {}).items() if text}

    def _load_transformers(self, folder: Path, trust_remote_code: bool) -> None:
        import transformers

        config = read_json(folder / "config.json") or {}
        names = [name for name in config.get("architectures") or () if isinstance(name, str)]
        own = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        kind: Any = own if own is not None and not config.get("auto_map") else transformers.AutoModel
        self.how, self.prompts = f"{kind.__name__}.from_pretrained(...)", {}
        options = {"trust_remote_code": trust_remote_code} if kind is transformers.AutoModel else {}
        self.module = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, **options)
        # A model for pre-training, or with a decoder, takes other inputs than one text's tokens.
        needed = "input_ids" in inspect.signature(self.module.forward).parameters
        seq2seq = getattr(self.module.config, "is_encoder_decoder", False) and not kind.__name__.endswith(
            "EncoderModel"
        )
        has_tokenizer = needed and not seq2seq and (folder / "tokenizer_config.json").is_file()
        self.kinds = ["text"] if has_tokenizer else []
        if has_tokenizer and self.vectors is not None:
            self.kinds = ["query", "document"]
        if has_tokenizer:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
            self.tokenizer.padding_side = "right"
            self.tokenizer.model_max_length = text_limit(self.module, self.tokenizer)

    def encode(self, kind: str, texts: list[str], **options: Any) -> np.ndarray:
        """Returns (n_texts, d) float32 vectors as a reader gets them, all texts in one batch.

        Args:
            kind: one of `kinds`.
            texts: the texts.
            **options: of the library's method, such as `prompt`.
        """
        import numpy as np

        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        doing(f"encoding {texts[0][:30]!r}{more}")
        if not self.kind:
            if self.vectors is not None:
                return np.asarray(self.vectors(self.module, self.tokenizer, kind, texts).numpy())
            return np.concatenate([self._last_states(batch) for batch in self._batches(texts)])
        if self.kind == "CrossEncoder":
            import torch

            pairs = [(_QUESTION, text) for text in texts]
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
        """The tokens that can be encoded with so many operations: two for each weight and token."""
        return int(operations / (2 * max(self.parameters, 1)))

    def encode_all(self, kind: str, texts: list[str]) -> np.ndarray:
        """As `encode`, with the last text in a batch of its own."""
        import numpy as np

        return np.concatenate([self.encode(kind, texts[:-1]), self.encode(kind, texts[-1:])])

    def _batches(self, texts: list[str]) -> list[list[str]]:
        # An empty text has no token to read where the tokenizer adds none of its own.
        texts = [text or "a" for text in texts]
        # A language model may do without a padding token: one text at a time, then.
        return [texts] if self.tokenizer.pad_token is not None or not self.causal else [[text] for text in texts]

    def _last_states(self, texts: list[str]) -> np.ndarray:
        import torch

        tokens = self.tokenizer(texts, padding=len(texts) > 1, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = self.module(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        if states.dim() == 3:
            places = torch.arange(tokens.attention_mask.shape[1])
            states = states[torch.arange(len(texts)), (tokens.attention_mask * places).argmax(1)]
        found: np.ndarray = states.float().numpy()
        return found


def positions(module: Any) -> int | None:
    """The tokens that a table of absolute positions has room for; None where there is none."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("position_embeddings", "position_embedding", "wpe") and hasattr(part, "num_embeddings"):
            # RoBERTa's positions begin after the padding token's id.
            return int(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return None


def text_limit(module: Any, tokenizer: Any) -> int:
    """The tokens of a text that are kept, of a model that does not say: what its tokenizer and its positions allow."""
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", LONGEST_PROBE)
    return min(int(tokenizer.model_max_length), limit, positions(module) or limit)


def _reads_from_left_to_right(module: Any, config: dict[str, Any]) -> bool:
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto as auto

    inner = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    family = getattr(getattr(inner, "config", None), "model_type", None)
    if family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return family not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return any(
        "CausalLM" in str(name) for name in [*(config.get("architectures") or ()), *(config.get("auto_map") or ())]
    )


def _kind(folder: Path) -> str:
    """The class of sentence-transformers that the folder is for; empty for a transformers folder.

    Raises:
        UnknownKind: it is for another library, or another class.
    """
    settings = read_json(folder / "config_sentence_transformers.json")
    named = settings.get("model_type", "SentenceTransformer") if isinstance(settings, dict) else None
    if (folder / "modules.json").is_file():
        named = named or "SentenceTransformer"
    elif named != "CrossEncoder":
        config = read_json(folder / "config.json")
        named = "CrossEncoder" if isinstance(config, dict) and "sentence_transformers" in config else ""
    if named not in ("", "SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder"):
        raise UnknownKind(f"{named} is not a kind of model that check knows")
    return str(named)
