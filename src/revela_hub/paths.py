"""Paths as users write them."""

import os
from pathlib import Path


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder for `~`.

    `Path.expanduser` raises an error for other names with a tilde, such as `~$report.docx`; these are returned unchanged.
    """
    return Path(os.path.expanduser(path))
