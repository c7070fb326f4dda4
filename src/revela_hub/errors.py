"""The one exception that means: the user can put this right; and what an error of a library says in one line."""

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

# What an error number of the operating system means to a user.
OS_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space, or write to another disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system allows (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk cannot be read or written",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "there is no such file or folder",
    errno.EISDIR: "is a folder, a file was expected",
    errno.ENOTDIR: "is a file, a folder was expected",
    errno.EEXIST: "is there already",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EMFILE: "too many open files (ulimit -n)",
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# safetensors, tokenizers and shutil report the system's errors in words, in exceptions that are no OSError with a number.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


class UserError(Exception):
    """A mistake in what the user gave: a path, an option, a file's content, a model that does not fit.

    The message is one line for the person who typed the command. It names the file, the line number where there is
    one, and the remedy. The command line prints it without a traceback and exits with status 2; code that calls the
    package catches it like any exception.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; the error's type where it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def os_error(error: BaseException) -> int | None:
    """Return the operating system's error number behind an error, also where a library reports it in words."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := _OS_ERROR.search(str(error)):
        return int(found.group(1) or found.group(2))
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and each one that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def is_file_error(error: BaseException) -> bool:
    """Whether a file could not be read or written, whatever class a library raises then."""
    return (
        isinstance(error, OSError)
        or os_error(error) in OS_ERRORS
        or type(error).__name__ == "SafetensorError"
        or "inline_container" in str(error)  # torch's writer of files
    )


def reason(error: BaseException, model: str | Path | None = None) -> str:
    """Return in one line why a file could not be read or written.

    The system's reason comes first (a full disk, a missing permission), then a damaged file of `model`, then what the
    library says.

    Args:
        error: what was raised.
        model: the folder or Hub id that was being loaded.
    """
    for cause in causes(error):
        number = os_error(cause)
        if number in OS_ERRORS:
            file = getattr(cause, "filename", None)
            words = "" if file or number in DISK_FULL else f" ({first_line(cause)})"
            return f"{file}: {OS_ERRORS[number]}" if file else OS_ERRORS[number] + words
    if model is not None and (fault := damaged_file(model)):
        return fault
    if type(error).__name__ == "SafetensorError":
        return f"a .safetensors file is damaged or not complete: {first_line(error)}"
    if "inline_container" in str(error):  # which does not say why a file came out too short
        return "torch could not write the whole file: the disk may be full"
    return first_line(error)


def damaged_file(model: str | Path) -> str | None:
    """Return which file of a model is damaged, and how; None if every JSON and safetensors file can be opened.

    Args:
        model: a folder, or the id of a model in the Hub's cache.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(model), local_files_only=True))
        except Exception:  # no id, or not in the cache: then no file of it can be damaged
            return None
    for file in sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.json")]):
        if any(part.startswith((".", "checkpoint-")) for part in file.relative_to(folder).parts) or not file.is_file():
            continue
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            else:
                safe_open(file, "np")
        except OSError as error:
            return f"{file}: {OS_ERRORS.get(error.errno or 0) or first_line(error)}"
        except (ValueError, RecursionError, SafetensorError) as error:
            return f"{file} is damaged or not complete: {first_line(error)}"
    return None


@contextlib.contextmanager
def loading(failure: str, model: str | Path) -> Iterator[None]:
    """Say which model cannot be loaded, and which of its files is damaged.

    Args:
        failure: how the message begins, such as "cannot load the encoder 'x'".
        model: its folder or Hub id.

    Raises:
        UserError: in place of what the loading raises.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises plain Exceptions, remote code anything
        raise UserError(f"{failure}: {reason(error, model)}") from error


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
