"""Several processes: results of one for all, and weights that FSDP2 or ZeRO-3 shards."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Number of this process; 0 in a run with one process."""
    return dist.get_rank() if is_distributed() else 0


def from_main(work: Callable[[], T]) -> T:
    """Call `work` on the main process and return its result on every process.

    Raises:
        RuntimeError: the call failed on the main process, which raises the original error.
    """
    if not is_distributed():
        return work()
    sent: list[Any] = [None, None]
    error: Exception | None = None
    if rank() == 0:
        try:
            sent[0] = work()
        except Exception as raised:
            error, sent[1] = raised, f"{type(raised).__name__}: {raised}"
    dist.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    if sent[1] is not None:
        raise RuntimeError(f"the main process failed: {sent[1]}")
    result: T = sent[0]
    return result


def gathered(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a part of the weights (FSDP, ZeRO-3)."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 gathered for the last forward pass, so that all of them are sharded again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def full_weight(weight: Tensor) -> Tensor:
    """Return the whole of a weight that FSDP2 or ZeRO-3 may have sharded. All processes must call it."""
    if isinstance(weight, DTensor):
        whole: Tensor = weight.to(weight.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        return whole
    if hasattr(weight, "ds_id"):
        from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found] # optional

        with GatheredParameters([weight]):
            return weight.detach().clone()
    return weight.detach()


@torch.no_grad()
def copy_from_main(tensor: Tensor, values: Tensor | None) -> None:
    """Copy values to every process, in place. All processes must call it.

    Args:
        tensor: tensor to change; of a weight sharded by FSDP2 or ZeRO-3, each process gets its part.
        values: values of the whole tensor; None except on the main process.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
        if values is not None:
            whole.copy_(values)
        tensor.to_local().copy_(distribute_tensor(whole, mesh, tensor.placements).to_local())
    elif hasattr(tensor, "ds_id"):
        from deepspeed.zero import GatheredParameters

        with GatheredParameters([tensor], modifier_rank=0):
            if values is not None:
                tensor.copy_(values)
    else:
        if values is not None:
            tensor.copy_(values)
        if is_distributed():
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)
