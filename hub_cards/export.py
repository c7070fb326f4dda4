"""From a trained model to a plain sentence-transformers folder: stock modules, no remote code, loads without this package.

The folder is one frozen description (`_sentence_transformers_files`) beside what transformers itself saves. It is
written in the form that sentence-transformers used before 6.0, on purpose: every version of the library reads it, and so
do text-embeddings-inference and vLLM, which look for `sentence_transformers.models.Pooling` and `pooling_mode_*`.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.hub_cards.tokenizers import padding_right, text_length, with_eos

PoolingMode = Literal["last", "mean", "cls"]

_POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
# What this package is tested with. transformers 4 does not even read the rotary settings that transformers 5 writes into
# config.json: wrong vectors, and no error.
_REQUIREMENTS = {"transformers": ">=5.17", "sentence-transformers": ">=6.0"}


def export_retriever(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    pooling: PoolingMode,
    prompts: dict[str, str],
    max_length: int = 2048,
    normalize: bool = True,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a sentence-transformers folder: the backbone, its tokenizer, pooling, normalisation and prompts.

    With `pooling="last"` the saved tokenizer ends every text with EOS, truncated or not. The folder is also an ordinary
    transformers folder: `AutoModel` and `AutoTokenizer` load the backbone and the tokenizer from it.

    Args:
        model: the bare backbone (`AutoModel`), adapters merged.
        tokenizer: its tokenizer; it is copied, not changed.
        folder: where to write; made if it is not there.
        pooling: how a text's vector is read off the hidden states (n_tokens, hidden_size).
        prompts: text put before every input, under the names `query` and `document`.
        max_length: tokens kept of a text, EOS included; lowered to what the tokenizer and the positions of the model allow.
        normalize: whether vectors are scaled to length 1.
        dtype: type of the stored weights; by default the one they have.

    Raises:
        UserError: the model still carries adapters, a prompt is missing, or the tokenizer has no EOS for `pooling="last"`.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model still carries its LoRA adapters: merge them first (merge_and_unload)")
    settings = RetrieverSettings(pooling, prompts, max_length, normalize)
    tokenizer = settings.tokenizer(tokenizer)
    save_backbone(with_pooler(model), Path(folder), dtype=dtype)
    save_settings(settings, tokenizer, model.config, Path(folder))
    return Path(folder)


@dataclass(frozen=True)
class RetrieverSettings:
    """What makes a retriever of a backbone; the arguments of `export_retriever`."""

    pooling: PoolingMode
    prompts: dict[str, str]
    max_length: int = 2048
    normalize: bool = True
    include_prompt: bool = True

    def __post_init__(self) -> None:
        """Refuses prompts without a query or a document."""
        if missing := {"query", "document"} - self.prompts.keys():
            raise UserError(
                f"prompts lack {sorted(missing)}: give one for 'query' and one for 'document' ('' for none)"
            )

    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Returns a copy of the tokenizer that ends texts as the pooling needs it."""
        return with_eos(tokenizer) if self.pooling == "last" else padding_right(tokenizer)


def save_settings(
    settings: RetrieverSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    folder: Path,
    requirements: dict[str, str] | None = None,
) -> None:
    """Writes everything but the backbone: the tokenizer and the files of sentence-transformers.

    Args:
        settings: of the retriever.
        tokenizer: as `settings.tokenizer` returned it.
        config: of the backbone.
        folder: the backbone's folder.
        requirements: packages that readers need beyond the two libraries, with their versions.
    """
    text_config = config.get_text_config()
    length = text_length(config, tokenizer, settings.max_length)
    save_tokenizer(tokenizer, folder, max_length=length)
    _write_json_files(
        folder,
        _sentence_transformers_files(text_config.hidden_size, replace(settings, max_length=length), requirements or {}),
    )


def with_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with BERT's pooler, where the class has one and the model, being the body of a masked LM, has not.

    transformers builds a pooler whenever it loads such a class; where the folder has no weights for it they would start
    at random, with a warning. Nobody reads its output; as the identity it is the tanh of the first token's state.
    """
    if getattr(model, "pooler", model) is not None:
        return model
    whole: Any = type(model)(model.config)
    whole.load_state_dict(model.state_dict(), strict=False)
    torch.nn.init.eye_(whole.pooler.dense.weight)
    torch.nn.init.zeros_(whole.pooler.dense.bias)
    completed: PreTrainedModel = whole.to(dtype=model.dtype).eval()
    return completed


def save_backbone(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Save the model as safetensors in the given type, without changing it and without a trace of where it came from.

    Raises:
        UserError: a weight is not a finite number.
    """
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"the weight {name} is not finite: nothing is exported. Export a checkpoint from before that"
            )
    casts = dtype is not None and dtype != model.dtype
    # Tensors that share their memory (tied embeddings) must go on sharing it, or they are stored twice.
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
    weights = {
        name: cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in (model.state_dict().items() if casts else ())
    }
    fields = dict(vars(model.config))
    model.save_pretrained(folder, state_dict=weights if casts else None)
    vars(model.config).clear()  # it has the saved class now, and another part of the model may share it
    vars(model.config).update(fields)
    make_readable(folder)
    if casts:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _write_json_files(folder, {"config.json": config | {"dtype": str(dtype).removeprefix("torch.")}})


def make_readable(folder: Path) -> None:
    """Gives all weights the mode that the umask asks for: safetensors writes them for their owner alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in sorted(folder.rglob("*.safetensors")):
        if file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~umask)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_length: int | None = None) -> None:
    """Save a copy of the tokenizer without what the last training batch left in it or where it was loaded from."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for key in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(key, None)
    if max_length is not None:
        tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)


def _sentence_transformers_files(
    hidden_size: int, settings: RetrieverSettings, requirements: dict[str, str]
) -> dict[str, Any]:
    """Return path -> content of every file that sentence-transformers reads beside the backbone and the tokenizer."""
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Normalize", "Normalize")] if settings.normalize else []),
    ]
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": settings.max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            **{key: mode == settings.pooling for mode, key in _POOLING_KEYS.items()},
            "include_prompt": settings.include_prompt,
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "__version__": {
                "sentence_transformers": version("sentence-transformers"),
                "transformers": version("transformers"),
                "pytorch": version("torch"),
            },
            "requirements": _REQUIREMENTS | requirements,
            "prompts": settings.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


def _write_json_files(folder: Path, files: dict[str, Any]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
