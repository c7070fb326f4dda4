"""Temporary folders. Those of a process that was killed are deleted by the next command that needs one.

The process holds the lock of a file in its folder, which the system releases when the process ends for any reason.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "revela-hub-"
LOCK = ".revela-hub.lock"


@contextlib.contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder, which is deleted at the end.

    Args:
        kind: word for its name.
        parent: existing folder to create it in (default: that of the system).
    """
    parent = parent or Path(tempfile.gettempdir())
    _delete_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{kind}-", dir=parent, ignore_cleanup_errors=True) as folder:
        lock = FileLock(Path(folder, f"{LOCK}.new"))
        lock.acquire()
        # Renamed after it is locked: until then, other processes do not take the folder for an abandoned one.
        with contextlib.suppress(OSError):  # Windows renames no open files: the folder is deleted by this process only
            Path(lock.lock_file).rename(Path(folder, LOCK))
        try:
            yield Path(folder)
        finally:
            lock.release()


@contextlib.contextmanager
def deleted_after(folder: Path, error: type[BaseException]) -> Iterator[None]:
    """Delete a folder that the block writes after such an error, so that the same command can write it again."""
    try:
        yield
    except error:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _delete_abandoned(parent: Path) -> None:
    """Delete the temporary folders whose lock no process holds."""
    for file in sorted(parent.glob(f"{PREFIX}*/{LOCK}")):
        # Not an error: a folder that another process is deleting. Another user's lock might be a link to a file of this user.
        with contextlib.suppress(OSError, Timeout):
            if not hasattr(os, "getuid") or file.parent.lstat().st_uid == os.getuid():
                with FileLock(file, timeout=0):
                    shutil.rmtree(file.parent, ignore_errors=True)
