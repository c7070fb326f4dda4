"""Share results of the main process with the others, which may run on nodes without a shared disk."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from revela_hub.errors import UserError, first_line

T = TypeVar("T")


def several() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_main(work: Callable[[], T]) -> T:
    """Call `work` on the main process and return its result on every process.

    Raises:
        UserError: the call failed. The main process raises the original error.
    """
    if not several():
        return work()
    given: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            given[0] = work()
        except Exception as raised:
            error, given[1] = raised, first_line(raised)
    dist.broadcast_object_list(given, src=0)
    if error is not None:
        raise error
    if given[1] is not None:
        raise UserError(f"the main process failed: {given[1]}")
    result: T = given[0]
    return result


@torch.no_grad()
def copy_from_main(tensor: Tensor) -> None:
    """Copy the main process's values to every process, in place."""
    if several():
        values = tensor.detach().contiguous()
        dist.broadcast(values, src=0)
        tensor.copy_(values)
