"""The data of model cards.

`describe` reads the description of a model from its folder. `ModelCardMetadata` holds the rest, from a run, from Python code or
from a YAML file with the same keys; papers come from the records of the methods.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.dataclasses import type_validator
from safetensors import safe_open

from revela_hub.data.sources.source import HUB_ADDRESS, parse_source
from revela_hub.data.sources.unicode import printable_name
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.contents import code_files, listed_modules, read_json
from revela_hub.hub_cards.method import Method
from revela_hub.loading import hub_name

METRIC_NAMES = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
# What sentence-transformers uses if a model was saved without a similarity.
DEFAULT_SIMILARITY = {"SentenceTransformer": "cosine", "SparseEncoder": "dot"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Result:
    """Scores of a model on a task; `dataset`, `split` and `revision` are those of a data set on the Hub."""

    task: str
    metrics: dict[str, float | int]  # from 0 to 1, the main metric first, as in {"ndcg_at_10": 0.645}
    model: str | None = None  # name of a model that is compared with the model of the card
    dataset: str | None = None
    split: str = "test"
    revision: str | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Result":
        """Build a result from its fields, or from the output of `revela-hub evaluate --json`."""
        if "metrics" not in values:
            metrics = {name: values[name] for name in METRIC_NAMES if values.get(name) is not None}
            own = {entry.name: values.get(entry.name) for entry in fields(cls)}
            values = own | {"task": values["name"], "metrics": metrics}
        result = cls(**_without_none(values))
        _check_types(result)
        if not result.task or not result.metrics:
            raise ValueError(f"a result needs `task` and `metrics`, or `name` and one of {', '.join(METRIC_NAMES)}")
        return result


@dataclass(frozen=True)
class ModelCardMetadata:
    """The part of a card that cannot be read from the model folder. All fields are optional.

    Attributes:
        method: training method.
        description: a paragraph on what the model is for.
        base_model: Hub id of the model that was trained.
        license: license identifier of the Hub (`apache-2.0`).
        languages: ISO 639 codes.
        datasets: Hub ids of the training data.
        training_data: description of the training data.
        training_run: steps, duration and hardware of the training.
        command: the command that trained the model.
        config: the configuration file of that command, as YAML text.
        results: evaluation results.
        verdict: summary of the results in a sentence.
        limitations: known weaknesses.
        unchanged: whether the weights are those of the base model.
    """

    method: Method | None = None
    description: str = ""
    base_model: str | None = None
    license: str | None = None
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()
    training_data: str = ""
    training_run: str = ""
    command: str = ""
    config: str = ""
    results: Sequence[Result] = ()
    verdict: str = ""
    limitations: Sequence[str] = ()
    unchanged: bool = False

    def __post_init__(self) -> None:
        """Reject scores that are not finite."""
        for result in self.results:
            if bad := [name for name, value in result.metrics.items() if not math.isfinite(value)]:
                raise ValueError(f"{bad[0]} of {result.task} is not a number")

    @classmethod
    def from_file(cls, path: str | Path, methods: Mapping[str, Method]) -> "ModelCardMetadata":
        """Read the metadata from a YAML or JSON file.

        Args:
            path: the file.
            methods: the known methods by name.

        Raises:
            UserError: the file has an unknown key or a value of the wrong type.
        """
        path = local_path(path)
        text = path.read_text(encoding="utf-8")
        try:
            plain = json.loads(json.dumps(yaml.safe_load(text) or {}, default=str))  # dates become texts
            values = _without_none(plain)
            if "method" in values:
                values["method"] = methods[values["method"]]
            values["results"] = tuple(map(Result.from_dict, values.get("results", ())))
            for name in ("languages", "datasets", "limitations"):
                if isinstance(values.get(name), str):
                    values[name] = (values[name],)
            if isinstance(values.get("config"), dict):
                values["config"] = yaml.safe_dump(values["config"], sort_keys=False, allow_unicode=True)
            metadata = cls(**values)
            _check_types(metadata)
            return metadata
        except (TypeError, AttributeError, ValueError, KeyError, yaml.YAMLError) as error:
            raise UserError(f"{path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        """Write the fields that are set as YAML for `from_file`."""
        values = {name: value for name, value in asdict(replace(self, method=None)).items() if value}
        if self.method is not None:
            values = {"method": self.method.name, **values}
        values = json.loads(json.dumps(values))  # turns tuples into lists, because YAML has no tuples
        local_path(path).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _check_types(record: Any) -> None:
    """Raise a TypeError if a field of a dataclass has a value of another type: YAML reads an unquoted `no` as false."""
    for name, kind in get_type_hints(type(record)).items():
        try:
            type_validator(name, getattr(record, name), kind)
        except TypeError as error:
            raise TypeError(f"{name} has a value of the wrong type, {getattr(record, name)!r}") from error


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def hub_model_id(name: str | None) -> str | None:
    """Return the Hub id of a base model; None for a path.

    sentence-transformers loads its own models by their names alone, so their organization is added.
    """
    name = hub_name(name or "").partition("@")[0]
    if not _HUB_NAME.fullmatch(name) or is_local(name):
        return None
    if "/" in name:
        return name
    from sentence_transformers.util import ORIGINAL_TRANSFORMER_MODELS  # such as bert-base-uncased

    return name if name.lower() in ORIGINAL_TRANSFORMER_MODELS else f"sentence-transformers/{name}"


def for_card(name: str, value: Any) -> Any:
    """Return an option's value: a model of the Hub with its commit, files and folders of this machine without their parent folders."""
    if isinstance(value, list):
        return [for_card(name, item) for item in value]
    if isinstance(value, dict):
        return {key: for_card(key, item) if key in ("path", "data_files") else item for key, item in value.items()}
    if not isinstance(value, str) or not value or value.startswith(HUB_ADDRESS) or "prompt" in name:
        return value
    value = hub_name(value)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not is_local(value):
        loaded = try_to_load_from_cache(value, "config.json")
        return hub_name(str(Path(loaded).parent)) if isinstance(loaded, str) else value
    prefix = next((kind for kind in ("lm:", "hf:") if value.startswith(kind)), "")
    rest = value.removeprefix(prefix)
    return prefix + printable_name(local_path(rest).resolve().name) if is_local(rest) else value


def hub_datasets(sources: Iterable[object]) -> list[str]:
    """Return the ids of the data sets on the Hub among paths and ids; those start with `hf:`."""
    found = {parse_source(str(each)).path.removeprefix("hf:") for each in sources if str(each).startswith("hf:")}
    return sorted(name for name in found if "/" in name and not is_local(name))


def is_local(name: str) -> bool:
    """Return whether this is a path of this machine, which may be gone, and not a model or data set on the Hub."""
    path = local_path(name)
    return path.is_absolute() or os.path.exists(path)


# --- the model


@dataclass(frozen=True)
class ModelDescription:
    """The part of a card that is read from the model folder."""

    architecture: str
    parameters: int
    bytes: int
    dtype: str
    remote_code: bool
    dimensions: int | None = None
    truncate_dim: int | None = None
    max_length: int | None = None
    pooling: str | None = None
    similarity: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    loader: str = "SentenceTransformer"  # class of sentence-transformers that loads the model
    routes: tuple[str, ...] = ()  # of a Router
    onnx: bool = False  # has onnx/model.onnx
    hybrid: bool = False  # has settings of adapt

    @property
    def is_encoder(self) -> bool:
        """Whether sentence-transformers loads the model."""
        return self.pooling is not None

    def loading_code(self, name: str) -> str:
        """Return the Python expression that loads the model from a folder or Hub id."""
        causal = self.architecture.endswith("ForCausalLM")
        auto = "AutoModelForCausalLM.from_pretrained" if causal else "AutoModel.from_pretrained"
        return f"{self.loader if self.is_encoder else auto}({self._arguments(name)})"

    def tokenizer_code(self, name: str) -> str:
        """Return the Python expression that loads the tokenizer.

        `AutoTokenizer` reads the model's configuration, and would ask whether to run its code.
        """
        return f"AutoTokenizer.from_pretrained({self._arguments(name)})"

    def _arguments(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False) + (", trust_remote_code=True" if self.remote_code else "")


def describe(folder: str | Path) -> ModelDescription:
    """Read the description of a model from its folder."""
    folder = local_path(folder)
    config = read_json(folder / "config.json", {})
    files = [file for file in sorted(folder.rglob("*.safetensors")) if not file.parent.name.startswith(".")]
    parameters, dtype = 0, ""
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                stored = tensors.get_slice(name)
                if "F" in stored.get_dtype():  # not tables of token ids
                    dtype = dtype or stored.get_dtype()
                    parameters += math.prod(stored.get_shape())
    return ModelDescription(
        architecture=next(iter(config.get("architectures") or ()), ""),
        parameters=parameters,
        bytes=sum(file.stat().st_size for file in files),
        dtype={"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(dtype, dtype),
        remote_code=bool(code_files(folder)),
        onnx=(folder / "onnx" / "model.onnx").is_file(),
        hybrid=(folder / "hybrid.json").is_file(),
        **_describe_encoder(folder),
    )


def _describe_encoder(folder: Path) -> dict[str, Any]:
    """Return the fields of a sentence-transformers model; empty for other models."""
    paths = {kind.rpartition(".")[2]: path for path, kind in listed_modules(folder)}
    if not paths:
        return {}
    config = read_json(folder / "config_sentence_transformers.json", {})
    routes: dict[str, Any] = {}
    if "Router" in paths:  # the routes differ only in their weights
        router = read_json(folder / paths["Router"] / "router_config.json", {})
        routes = router["structure"]
        paths = {router["types"][name].rpartition(".")[2]: name for name in next(iter(routes.values()))}
    splade = read_json(folder / paths["SpladePooling"] / "config.json", {}) if "SpladePooling" in paths else {}
    pooling = splade or read_json(folder / paths.get("Pooling", "") / "config.json", {})
    modes = [key.removeprefix("pooling_mode_") for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    mode = str(pooling.get("pooling_mode") or next(iter(modes), "")).removesuffix("_tokens").removesuffix("_token")
    mode = {"lasttoken": "last token (EOS)", "cls": "first token"}.get(mode, mode)
    inside = {"latent": "latent attention, then ", "self_attention": "self-attention, then "}
    mode = inside.get(read_json(folder / "config.json", {}).get("pooling"), "") + mode
    transformer = folder / paths.get("Transformer", "")
    length = read_json(transformer / "sentence_bert_config.json", {}).get("max_seq_length")
    if length is None:  # sentence-transformers 6 saves it with the tokenizer; no limit is a number of 30 digits
        length = read_json(transformer / "tokenizer_config.json", {}).get("model_max_length")
        length = None if length is None or length > 1e9 else length
    # Vectors have the width of the last Dense module, and are cut after all modules.
    width = read_json(folder / paths["Dense"] / "config.json", {}).get("out_features") if "Dense" in paths else None
    width = width or pooling.get("embedding_dimension") or pooling.get("word_embedding_dimension")
    truncated, loader = config.get("truncate_dim"), config.get("model_type") or "SentenceTransformer"
    return {
        "dimensions": min(filter(None, (truncated, width)), default=None),
        "truncate_dim": truncated,
        "max_length": length,
        "pooling": f"sparse, {splade['pooling_strategy']} over the tokens" if splade else mode,
        "similarity": config.get("similarity_fn_name") or DEFAULT_SIMILARITY.get(loader),
        "prompts": {name: text for name, text in (config.get("prompts") or {}).items() if text},
        "loader": loader,
        "routes": tuple(routes),
    }
