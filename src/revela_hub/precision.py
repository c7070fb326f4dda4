"""Devices on which half precision is fast: one decision for training, encoding and generation.

On CPUs without bf16 instructions (most of them), a bf16 matrix product takes about 57 times as long as in float32, and
transformers and sentence-transformers load a model in the type that its config.json names.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)


def bf16_is_fast(device: str | None = None) -> bool:
    """Return whether bf16 is fast: on a GPU with bf16, or on a CPU with bf16 instructions.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps", ... (default: the fastest one).
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return torch.cuda.is_available() and bool(torch.cuda.is_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device == "cpu" and any(getattr(torch.cpu, probe, bool)() for probe in probes)


def loading_dtype(device: str | None = None) -> str:
    """Return the `dtype` for `from_pretrained`: "auto" (as in config.json), or "float32" if half precision is slow."""
    import torch

    on_cpu = device == "cpu" or (device is None and not torch.accelerator.is_available())
    return "float32" if on_cpu and not bf16_is_fast("cpu") else "auto"


def in_fast_precision(model: "Model") -> "Model":
    """Return the model, converted to float32 if it is in half precision on a CPU where that is slow."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "cpu" and loading_dtype("cpu") == "float32":
        model.float()
    return model
