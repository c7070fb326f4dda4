"""The one exception that means: the user can put this right; and what an error of a library says in one line."""

from pathlib import Path


class UserError(Exception):
    """A mistake in what the user gave: a path, an option, a file's content, a model that does not fit.

    The message is one line for the person who typed the command. It names the file, the line number where there is
    one, and the remedy. The command line prints it without a traceback and exits with status 2; code that calls the
    package catches it like any exception.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; the error's type where it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def refuse_missing_folder(name: str, what: str) -> None:
    """Refuses a path at which nothing is, before a library takes it for an id of the Hub.

    Raises:
        UserError: it looks like a path (`./x`, `/x`, `~/x`, `a/b/c`), and there is no folder.
    """
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise UserError(f"cannot load {what} {name!r}: there is no such folder")


# What to install for a module that only some commands need.
PACKAGES = {
    "bm25s": "bm25s PyStemmer",
    "Stemmer": "bm25s PyStemmer",
    "faiss": "faiss-cpu",
    "pytrec_eval": "pytrec-eval-terrier",
}


def install_hint(module: str) -> str:
    """What to say when a module is missing; it names the packages, which works however this one was installed."""
    top = module.partition(".")[0]
    return f"this needs the package {top}, which is not installed: pip install {PACKAGES.get(top, top)}"
