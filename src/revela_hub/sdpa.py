"""Attention kernels for batches of varying shape.

On recent NVIDIA GPUs (from compute capability 9.0, such as the H100), torch prefers cuDNN's attention, which builds an execution plan
for every new shape of a batch. In our commands almost every batch has a new shape, because texts are padded to the longest of
their batch: without cuDNN's attention, an H100 encoded 6.7 times as many new texts per second (benchmarks/gpu.md).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_users = 0
"""Threads and calls inside `varying_shapes`: the setting is torch's own, for the whole process."""
_before = True


@contextmanager
def varying_shapes() -> Iterator[None]:
    """Use torch's other attention kernels: in a `with` statement, or as a decorator. Has no effect without an NVIDIA GPU."""
    torch = sys.modules.get("torch")
    if torch is None:  # the model does not run here
        yield
        return
    global _users, _before
    with _LOCK:
        if not _users:
            _before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if not _users:
                torch.backends.cuda.enable_cudnn_sdp(_before)
