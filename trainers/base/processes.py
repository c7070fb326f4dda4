"""Share results of one process with the others, which may run on nodes without a shared disk."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from revela_hub.errors import UserError, first_line

T = TypeVar("T")
_LOST = re.compile(
    "(connection|socket) (was )?(closed|reset)|closed by peer|reset by peer|broken pipe|ncclRemoteError", re.I
)


def is_distributed() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Number of this process; 0 in a run with one process."""
    return dist.get_rank() if is_distributed() else 0


def from_main(work: Callable[[], T], source: int = 0) -> T:
    """Call `work` on the main process, or on process `source`, and return its result on every process.

    Raises:
        UserError: the call failed. The process that called it raises the original error.
    """
    if not is_distributed():
        return work()
    given: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == source:
        try:
            given[0] = work()
        except Exception as raised:
            error, given[1] = raised, first_line(raised)
    dist.broadcast_object_list(given, src=source)
    if error is not None:
        raise error
    if given[1] is not None:
        name = "the main process" if source == 0 else f"process {source}"
        raise UserError(f"{name} failed: {given[1]}")
    result: T = given[0]
    return result


def gathered(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_all(work: Callable[[], T]) -> T:
    """Call `work` on every process and return its result. If it fails on one process, all of them raise an error.

    Raises:
        UserError: the call failed on another process. A process on which it failed raises the original error.
    """
    if not is_distributed():
        return work()
    try:
        result = work()
    except Exception as error:
        gathered(first_line(error))
        raise
    for number, line in enumerate(gathered("")):
        if line:
            raise UserError(f"process {number} failed: {line}")
    return result


@contextmanager
def explained() -> Iterator[None]:
    """Explain errors of a process that lost the connection to another one, which has ended.

    Raises:
        UserError: the connection is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_distributed() or not _LOST.search(str(error)):
            raise
        raise UserError(
            f"process {rank()} lost the connection to another process of the run, whose output has the cause: start all nodes"
            " again with --resume_from_checkpoint last"
        ) from error


@torch.no_grad()
def copy_from_main(tensor: Tensor, values: Tensor | None = None) -> None:
    """Copy the main process's values to every process, in place. All processes must call it.

    Args:
        tensor: tensor to change; of a weight sharded by FSDP2 or ZeRO-3, each process gets its part.
        values: values of the whole tensor, read on the main process only; by default its current ones.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
        if values is not None:
            whole.copy_(values)
        tensor.to_local().copy_(distribute_tensor(whole, mesh, tensor.placements).to_local())
    elif hasattr(tensor, "ds_id"):
        from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found] # optional

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


@torch.no_grad()
def full_weight(weight: Tensor) -> Tensor:
    """Return the whole of a weight that FSDP2 or ZeRO-3 may have sharded. All processes must call it."""
    if isinstance(weight, DTensor):
        gathered_weight: Tensor = weight.to(weight.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        return gathered_weight
    if hasattr(weight, "ds_id"):
        from deepspeed.zero import GatheredParameters

        with GatheredParameters([weight]):
            return weight.detach().clone()
    return weight.detach()
