"""Open models: weights are read as tensors, never as code; precision and attention kernels for this machine.

Old repositories have only pickles (`pytorch_model.bin`). transformers, sentence-transformers and PEFT read them with
`torch.load(weights_only=True)`, which rejects everything but tensors.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from revela_hub.files import local_path

if TYPE_CHECKING:
    import torch
    from torch import nn

    Module = TypeVar("Module", bound=nn.Module)

Model = TypeVar("Model")
# transformers is not thread-safe: while it loads a model, it replaces functions of transformers and torch.
_ONE_AT_A_TIME = threading.RLock()
PEFT_ADAPTER = "PEFT adapter"
OTHER_WEIGHTS = ["*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.tflite", "onnx/*", "openvino/*", "coreml/*"]
# huggingface_hub says that it uses its cache again for each file of a model; in offline mode, the user knows it.
_UNREACHED = count(bool(os.environ.get("HF_HUB_OFFLINE")))
logging.getLogger("huggingface_hub.hf_api").addFilter(
    lambda record: not record.getMessage().startswith("Could not reach the Hub") or not next(_UNREACHED)
)
# transformers would ask a service of the Hub to convert a pickle, in a pull request to its repository.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def pretrained(kind: Any, name: str | Path, **options: Any) -> Any:
    """Load a model of transformers with `kind.from_pretrained(name, **options)`."""
    with _ONE_AT_A_TIME:
        return kind.from_pretrained(os.path.expanduser(name), **options)


def encoder(kind: Callable[..., Model], name: str, **options: Any) -> Model:
    """Load a model or module of sentence-transformers with `kind(name, **options)`."""
    with _ONE_AT_A_TIME:
        return kind(os.path.expanduser(name), **options)


def pinned(name: str) -> str:
    """Return the folder in the Hub's cache of a model `owner/name@revision`; any other name is returned unchanged."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", name) or local_path(name).exists():
        return name
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    return snapshot_download(repository, revision=revision, ignore_patterns=OTHER_WEIGHTS)


def hub_name(name: str) -> str:
    """Return `owner/name@commit` for a folder that `pinned` returned; any other name is returned unchanged.

    >>> hub_name("/cache/models--org--bert/snapshots/0a1b"), hub_name("outputs/bert")
    ('org/bert@0a1b', 'outputs/bert')
    """
    return re.sub(r".*/models--([^/]+)--([^/]+)/snapshots/(\w+)/?", r"\1/\2@\3", name)


def model_json(name: str | Path, file: str) -> Any:
    """Return the content of a JSON file of a folder or Hub id; None if there is no such file."""
    from transformers.utils import cached_file

    place = folder if (folder := local_path(name)).is_dir() else name
    found = cached_file(str(place), file, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(found).read_text(encoding="utf-8")) if found else None


def module_types(name: str | Path) -> dict[str, str]:
    """Return folder -> class of the modules of a sentence-transformers model, including routes; empty for other models."""
    try:
        types = {module["path"]: module["type"] for module in model_json(name, "modules.json") or ()}
        for path in [path for path, kind in types.items() if kind.endswith(("Router", "Asym"))]:
            folder = f"{path}/" if path else ""
            config = model_json(name, f"{folder}router_config.json") or model_json(name, f"{folder}config.json") or {}
            types |= {f"{folder}{part}": kind for part, kind in config["types"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # loading reports the error
    return types


def model_kind(name: str | Path) -> str:
    """Return the class of sentence-transformers that a model was saved as, or `PEFT_ADAPTER`; empty for others and unreadable ones."""
    try:
        kind = (model_json(name, "config_sentence_transformers.json") or {}).get("model_type")
        if kind or model_json(name, "modules.json"):
            return str(kind or "SentenceTransformer")
        if model_json(name, "adapter_config.json"):
            return PEFT_ADAPTER
        config = model_json(name, "config.json") or {}
        classifier = any(str(each).endswith("ForSequenceClassification") for each in config.get("architectures") or ())
        return "CrossEncoder" if classifier or "sentence_transformers" in config else ""
    except (OSError, ValueError, TypeError, AttributeError):
        return ""  # loading reports the error


def bf16_is_fast(device: str | None = None) -> bool:
    """Return whether bf16 is fast on a device (default: the fastest one): on a GPU with bf16, or on a CPU with its instructions.

    On other CPUs, a matrix product takes about 57 times as long as in float32.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        return torch.cuda.is_available() and bool(torch.cuda.is_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device == "cpu" and any(getattr(torch.cpu, probe, bool)() for probe in probes)


def hardware(device: "torch.device", processes: int = 1) -> str:
    """Describe the hardware: `2 x NVIDIA H100` or `CPU (2 threads, AVX2)`."""
    import torch

    threads = torch.get_num_threads()
    cpu = f"CPU ({threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()})"
    kind = device.type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else cpu if kind == "cpu" else kind.upper()
    return f"{processes} x {name}" if processes > 1 else name


def loading_dtype(device: str | None = None) -> str:
    """Return the `dtype` for `from_pretrained`: "auto" (as in config.json), or "float32" if half precision is slow."""
    import torch

    on_cpu = device == "cpu" or (device is None and not torch.accelerator.is_available())
    return "float32" if on_cpu and not bf16_is_fast("cpu") else "auto"


def in_fast_precision(model: "Module") -> "Module":
    """Return the model, converted to float32 if it is in half precision on a CPU where that is slow."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "cpu" and loading_dtype("cpu") == "float32":
        model.float()
    return model


@contextmanager
def varying_shapes() -> Iterator[None]:
    """Use attention kernels for batches of varying shape: in a `with` statement, or as a decorator.

    On recent NVIDIA GPUs, torch prefers cuDNN's attention, which builds an execution plan for every new shape of a batch. Without
    it, an H100 encoded 6.7 times as many new texts per second (benchmarks/gpu.md).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
