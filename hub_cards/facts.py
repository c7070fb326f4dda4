"""What a model card is filled from.

What the model is, is read off its folder (`describe`); what only people and runs know comes in `ModelCardFacts`, in code
or from a YAML file with the same keys; the paper comes from the record of the method.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from revela_hub.errors import UserError
from revela_hub.hub_cards.method import Method
from revela_hub.hub_cards.verify.weights import safetensors_header

METRIC_NAMES = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
# Model types that the two servers' documentation lists; a model with code of its own is never among them.
SERVED_BY_TEI = {"bert", "camembert", "gemma3_text", "mistral", "modernbert", "mpnet", "qwen2", "qwen3", "xlm-roberta"}
SERVED_BY_VLLM = SERVED_BY_TEI - {"camembert", "mpnet"} | {"gemma2", "llama", "roberta"}
# The identifiers of https://huggingface.co/docs/hub/repositories-licenses.
LICENSES = frozenset(
    """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
    openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
    other""".split()
)


@dataclass(frozen=True)
class Result:
    """What was measured of one model on one task.

    Attributes:
        task: name of the task.
        metrics: metric -> value in 0..1, the main one first, as in `{"ndcg_at_10": 0.645}`.
        model: whose result it is; None for the model of the card, a name for what it is compared with.
        dataset: id of the data set on the Hub, if it is there.
        split: of that data set.
        revision: commit of that data set.
        date: when it was measured, as YYYY-MM-DD.
    """

    task: str
    metrics: dict[str, float]
    model: str | None = None
    dataset: str | None = None
    split: str = "test"
    revision: str | None = None
    date: str | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Builds it from its own fields, or from what `revela-hub evaluate --json` prints.

        Raises:
            ValueError: a key that is not known, or none of what is needed.
        """
        if "metrics" in values:
            return cls(**_known(cls, values))
        metrics = {name: float(values[name]) for name in METRIC_NAMES if values.get(name) is not None}
        if not metrics or not values.get("name"):
            raise ValueError(f"a result needs `task` and `metrics`, or `name` and one of {', '.join(METRIC_NAMES)}")
        rest = {name: values[name] for name in ("model", "dataset", "split", "revision", "date") if name in values}
        return cls(task=values["name"], metrics=metrics, **rest)


@dataclass(frozen=True)
class Figure:
    """A picture of the run, shown in the card under its caption."""

    path: str
    caption: str


@dataclass(frozen=True)
class ModelCardFacts:
    """What the folder of a model does not tell. Everything may be left out.

    Attributes:
        method: the method that trained it.
        description: a paragraph on what the model is for.
        base_model: Hub id of the model it was trained from.
        license: identifier as the Hub knows it (`apache-2.0`).
        languages: ISO 639 codes.
        datasets: ids of the training data on the Hub.
        training_data: what it was trained on, in words.
        command: the exact command that trained it.
        config: the configuration file of that run, as YAML text.
        results: what was measured.
        verdict: what that says of the training, in a sentence.
        figures: pictures of the run.
        limitations: what it is bad at.
    """

    method: Method | None = None
    description: str = ""
    base_model: str | None = None
    license: str | None = None
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()
    training_data: str = ""
    command: str = ""
    config: str = ""
    results: Sequence[Result] = ()
    verdict: str = ""
    figures: Sequence[Figure] = ()
    limitations: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Rejects a number that was not measured."""
        for result in self.results:
            if bad := [name for name, value in result.metrics.items() if not math.isfinite(value)]:
                raise ValueError(f"{bad[0]} of {result.task} is not a number")

    @classmethod
    def from_file(cls, path: str | Path, methods: Mapping[str, Method]) -> ModelCardFacts:
        """Reads the facts from a YAML or JSON file; figures are relative to it.

        Args:
            path: of the file.
            methods: the known methods, by the name that the file gives.

        Raises:
            UserError: the file cannot be read, or has a key that is not known.
        """
        path = Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            values = _known(cls, values)
            if (name := values.pop("method", None)) is not None:
                if name not in methods:
                    raise ValueError(f"unknown method {name!r}: choose one of {', '.join(methods)}")
                values["method"] = methods[name]
            values["results"] = tuple(map(Result.from_dict, values.get("results", ())))
            values["figures"] = tuple(
                Figure(str(path.parent / figure["path"]), figure["caption"]) for figure in values.get("figures", ())
            )
            if isinstance(values.get("config"), dict):
                values["config"] = yaml.safe_dump(values["config"], sort_keys=False, allow_unicode=True)
            return cls(**values)
        except OSError as error:
            raise UserError(f"{path}: cannot read the facts of the card: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            raise UserError(f"{path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        """Writes the facts that are there as YAML, for `from_file`; figures as paths relative to the file."""
        path = Path(path)
        values = {name: value for name, value in asdict(replace(self, method=None)).items() if value}
        if self.method is not None:
            values = {"method": self.method.name, **values}
        for figure in values.get("figures", ()):
            figure["path"] = os.path.relpath(figure["path"], path.parent)
        values = json.loads(json.dumps(values))  # tuples become lists, which is all that YAML knows
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _known(kind: type, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError("expected a mapping from names to values")
    names = [entry.name for entry in fields(kind)]
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(names)}")
    return dict(values)


@dataclass(frozen=True)
class ModelFacts:
    """What the folder of a model tells about it."""

    model_type: str
    architecture: str
    parameters: int
    bytes: int
    dtype: str
    remote_code: bool
    adapter_of: str | None = None
    dimensions: int | None = None
    max_length: int | None = None
    pooling: str | None = None
    similarity: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    loader: str = "SentenceTransformer"  # the class of sentence-transformers that reads it, if one does
    routes: tuple[str, ...] = ()  # of a Router

    @property
    def is_encoder(self) -> bool:
        """Whether it is loaded with sentence-transformers."""
        return self.pooling is not None

    def loading_code(self, name: str) -> str:
        """Return the Python expression that loads the model by its folder or Hub id; its class is the caller's to import."""
        trust = ", trust_remote_code=True" if self.remote_code else ""
        kind = f"{self.loader}({{}})"
        if not self.is_encoder:
            causal = self.architecture.endswith("ForCausalLM")
            kind = "AutoModelForCausalLM.from_pretrained({})" if causal else "AutoModel.from_pretrained({})"
        return kind.format(json.dumps(name, ensure_ascii=False) + trust)

    @property
    def servers(self) -> list[str]:
        """The servers that take the folder as it is."""
        if not self.is_encoder or self.remote_code or self.adapter_of or self.routes:
            return []
        known = {"text-embeddings-inference": SERVED_BY_TEI, "vLLM": SERVED_BY_VLLM}
        return [name for name, types in known.items() if self.model_type in types]


def describe(folder: str | Path) -> ModelFacts:
    """Reads off a model folder what it is."""
    folder = Path(folder)
    config = _read(folder / "config.json")
    files = [file for file in sorted(folder.rglob("*.safetensors")) if not file.parent.name.startswith(".")]
    entries = [entry for file in files for entry in safetensors_header(file).values()]
    tensors = [
        entry for entry in entries if entry.get("dtype", "").lstrip("B").startswith("F")
    ]  # the others are tables
    stored = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    described: dict[str, Any] = {"model_type": config.get("model_type", "")} | _describe_encoder(folder)
    return ModelFacts(
        architecture=next(iter(config.get("architectures") or ()), ""),
        parameters=sum(math.prod(tensor["shape"]) for tensor in tensors),
        bytes=sum(file.stat().st_size for file in files),
        dtype=stored.get(tensors[0]["dtype"], tensors[0]["dtype"]) if tensors else "",
        remote_code=any(folder.rglob("*.py")),
        adapter_of=_read(folder / "adapter_config.json").get("base_model_name_or_path"),
        **described,
    )


def _describe_encoder(folder: Path) -> dict[str, Any]:
    """The facts of a sentence-transformers folder; of another one, none."""
    paths = {entry["type"].rpartition(".")[2]: entry["path"] for entry in _read(folder / "modules.json")}
    if not paths:
        return {}
    routes: dict[str, Any] = {}
    if "Router" in paths:  # each route has modules of its own; what they say is the same
        router = _read(folder / paths["Router"] / "router_config.json")
        routes = router["structure"]
        paths = {router["types"][name].rpartition(".")[2]: name for name in next(iter(routes.values()))}
    transformer = folder / paths.get("Transformer", "")
    splade = _read(folder / paths["SpladePooling"] / "config.json") if "SpladePooling" in paths else None
    pooling = splade or _read(folder / paths.get("Pooling", "") / "config.json")
    modes = [key.removeprefix("pooling_mode_") for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
    mode = str(pooling.get("pooling_mode") or next(iter(modes), "")).removesuffix("_tokens").removesuffix("_token")
    mode = {"lasttoken": "last token (EOS)", "cls": "first token"}.get(mode, mode)
    config = _read(folder / "config_sentence_transformers.json")
    length = _read(transformer / "sentence_bert_config.json").get("max_seq_length")
    if length is None and routes:  # sentence-transformers 6 leaves it to the tokenizer
        length = _read(transformer / "tokenizer_config.json").get("model_max_length")
    prompts = config["prompts"] if isinstance(config.get("prompts"), dict) else {}
    return {
        "model_type": _read(transformer / "config.json").get("model_type", ""),
        "dimensions": pooling.get("embedding_dimension") or pooling.get("word_embedding_dimension"),
        "max_length": length,
        "pooling": f"terms, {splade['pooling_strategy']} over the tokens" if splade else mode,
        "similarity": config.get("similarity_fn_name") or "cosine",
        "prompts": {name: text for name, text in prompts.items() if text},
        "loader": config.get("model_type") or "SentenceTransformer",
        "routes": tuple(routes),
    }


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
