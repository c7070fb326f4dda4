"""What a command says on the way, beside its results: on standard error, and not at all with `--quiet`."""

import os
import sys

QUIET = "TQDM_DISABLE"  # the variable that turns off the bars of the libraries, too


def be_quiet() -> None:
    """Turns off notes, progress bars and the libraries' warnings; to be called before the libraries are imported."""
    os.environ |= {
        QUIET: "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def is_quiet() -> bool:
    """Whether `be_quiet` was called, here or by whoever started this process."""
    return os.environ.get(QUIET) == "1"


def shows_progress() -> bool:
    """Whether progress bars are wanted: a person watches; a bar fills a log."""
    return sys.stderr.isatty() and not is_quiet()


def note(text: object) -> None:
    """Prints a line on standard error."""
    if not is_quiet():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
