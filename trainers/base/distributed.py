"""Several processes: results of one for all, and weights that FSDP2 shards."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Number of this process; 0 in a run with one process."""
    return dist.get_rank() if is_distributed() else 0


def from_main(work: Callable[[], T]) -> T:
    """Call `work` on the main process and return its result on every process; if it fails, all of them raise an error."""
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
    return sent[0]  # type: ignore[no-any-return]


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a part of the weights (FSDP2)."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())
