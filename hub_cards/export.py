"""Export trained models as sentence-transformers folders with stock modules, which load without this package.

The folders have the format of sentence-transformers before version 6.0, because all versions of the library,
text-embeddings-inference and vLLM read it: they look for `sentence_transformers.models.Pooling` and `pooling_mode_*`.
"""

import copy
import json
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.metadata import DEFAULT_SIMILARITY
from revela_hub.hub_cards.tokenizers import padding_right, text_length, with_eos

PoolingMode = Literal["last", "mean", "cls"]

_POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
# Settings that a tokenizer keeps from the last batch and saves with a checkpoint.
_OF_A_BATCH = ("stride", "max_length", "truncation_strategy", "pad_to_multiple_of")
# The tested versions. transformers 4 silently ignores the rotary settings of transformers 5 and computes wrong vectors.
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
    similarity_fn_name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a sentence-transformers folder with the backbone, its tokenizer, pooling, normalization and prompts.

    With `pooling="last"` the saved tokenizer adds EOS to every text, truncated or not. `AutoModel` and `AutoTokenizer` can load
    the folder, too.

    Args:
        model: the bare backbone (`AutoModel`) with merged adapters.
        tokenizer: its tokenizer, which is not changed.
        folder: folder to write; created if it does not exist.
        pooling: how hidden states (n_tokens, hidden_size) become one vector.
        prompts: texts to prepend to inputs, named `query` and `document`.
        max_length: maximum length in tokens with EOS; reduced to the limits of the tokenizer and the model.
        normalize: normalize vectors to length 1.
        similarity_fn_name: how vectors are compared, `cosine` or `dot`; by default as in sentence-transformers, by cosine.
        dtype: type of the stored weights; by default unchanged.

    Raises:
        UserError: the model has unmerged adapters, a prompt is missing, or `pooling="last"` and the tokenizer has no EOS.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model has LoRA adapters: merge them first (merge_and_unload)")
    similarity = similarity_fn_name or DEFAULT_SIMILARITY["SentenceTransformer"]
    settings = RetrieverSettings(pooling, prompts, max_length, normalize, similarity_fn_name=similarity)
    folder = local_path(folder)
    tokenizer = settings.tokenizer(tokenizer)
    save_backbone(with_pooler(model), folder, dtype=dtype)
    save_settings(settings, tokenizer, model.config, folder)
    return folder


@dataclass(frozen=True)
class RetrieverSettings:
    """The settings that turn a backbone into a retriever; see `export_retriever`."""

    pooling: PoolingMode
    prompts: dict[str, str]
    max_length: int = 2048
    normalize: bool = True
    include_prompt: bool = True
    truncate_dim: int | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        """Reject prompts without `query` or `document`."""
        if missing := {"query", "document"} - self.prompts.keys():
            raise UserError(f"prompts lack {sorted(missing)}: set 'query' and 'document' ('' for no prompt)")

    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Return a copy of the tokenizer that ends texts as the pooling requires."""
        return with_eos(tokenizer) if self.pooling == "last" else padding_right(tokenizer)


def save_settings(
    settings: RetrieverSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    folder: Path,
) -> None:
    """Write a tokenizer from `settings.tokenizer` and the files of sentence-transformers, but not the backbone."""
    length = text_length(config, tokenizer, settings.max_length)
    save_tokenizer(tokenizer, folder, max_length=length)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if settings.normalize else {})
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    versions = {"sentence_transformers": "sentence-transformers", "transformers": "transformers", "pytorch": "torch"}
    modes = {key: mode == settings.pooling for mode, key in _POOLING_KEYS.items()}
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    pooling = {"word_embedding_dimension": config.get_text_config().hidden_size} | modes
    write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.include_prompt})
    library = {
        "model_type": "SentenceTransformer",
        "__version__": {name: version(package) for name, package in versions.items()},
        "requirements": _REQUIREMENTS,
        "prompts": dict(sorted(settings.prompts.items())),
        "default_prompt_name": settings.default_prompt_name,
        "similarity_fn_name": settings.similarity_fn_name,
    } | ({"truncate_dim": settings.truncate_dim} if settings.truncate_dim else {})
    write_json(folder / "config_sentence_transformers.json", library)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with a BERT pooler, if the class has one and the model, the body of a masked LM, does not.

    transformers always creates the pooler, at random and with a warning if the folder has no weights for it. Its output is
    unused; we initialize it to the identity.
    """
    if getattr(model, "pooler", model) is not None:
        return model
    whole: Any = type(model)(model.config)
    missing = whole.load_state_dict(model.state_dict(), strict=False).missing_keys
    if not missing:
        return model
    with torch.no_grad():
        for name in missing:
            weight = whole.get_parameter(name)
            torch.nn.init.eye_(weight) if weight.dim() == 2 else torch.nn.init.zeros_(weight)
    completed: PreTrainedModel = whole.to(dtype=model.dtype).eval()
    return completed


def save_backbone(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Save the model as safetensors in the given type, without changing the model."""
    state, casts = model.state_dict(), dtype is not None and dtype != model.dtype
    if casts:
        # Tensors that share memory (tied embeddings) must also share it after the cast, or they are stored twice.
        cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
        state = {
            name: cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in state.items()
        }
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"the weight {name} is not finite in {dtype or model.dtype}: nothing is exported")
    fields = dict(vars(model.config))
    model.save_pretrained(folder, state_dict=state if casts else None)
    vars(model.config).clear()  # save_pretrained changes the configuration, which other parts of the model may share
    vars(model.config).update(fields)
    make_readable(folder)
    if casts:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Save a configuration without references to code that is not in the folder: an adapter is saved without the model's code."""
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = (content.pop("auto_map", None) or {}).items()
    known = {auto: name for auto, name in named if (folder / f"{name.partition('.')[0]}.py").is_file()}
    write_json(folder / "config.json", content | ({"auto_map": known} if known else {}))


def make_readable(folder: Path) -> None:
    """Apply the umask to all weights, because safetensors makes them readable for their owner only."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in sorted(folder.rglob("*.safetensors")):
        if file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~umask)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_length: int | None = None) -> None:
    """Save a copy of the tokenizer without its origin, and without the padding and truncation of the last batch."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.is_fast:  # a slow one keeps neither
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    for key in ("is_local", "local_files_only", "name_or_path", *_OF_A_BATCH):
        tokenizer.init_kwargs.pop(key, None)
    for key, default in {"truncation_side": "right", "pad_token_type_id": 0}.items():
        if tokenizer.init_kwargs.get(key) == default:
            del tokenizer.init_kwargs[key]
    if max_length is not None:
        tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
