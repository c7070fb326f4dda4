"""The one exception that means: the user can put this right; and what an error of a library says in one line."""

import contextlib
import difflib
import errno
import importlib.util
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
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


# How libraries say that memory could not be had: too little of it, or sizes beyond all memory.
_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|unable to allocate|bad_alloc"
    r"|malloc of size|size calculation overflowed|array is too big|maximum allowed dimension exceeded|capacity overflow"
    r"|too large to convert to C",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"(?:allocate|malloc of size):? ([\d.]+) ?(bytes|[KMGTPE]?i?B)?", re.IGNORECASE)


class UserError(Exception):
    """A mistake in what the user gave: a path, an option, a file's content, a model that does not fit.

    The message is one line for the person who typed the command. It names the file, the line number where there is
    one, and the remedy. The command line prints it without a traceback and exits with status 2; code that calls the
    package catches it like any exception.

    What an option can do about it is given by the option's name, since the same code runs in several commands: only the
    remedies whose options the command has are printed.

    >>> error = UserError("no split 'x' in qrels; there is: test", split="choose with --split")
    >>> str(error)
    "no split 'x' in qrels; there is: test; choose with --split"
    >>> error.line({"corpus", "top_k"})
    "no split 'x' in qrels; there is: test"
    """

    def __init__(self, message: str = "", /, **remedies: str) -> None:
        super().__init__("; ".join([message, *remedies.values()]))
        self.message = message
        self.remedies = remedies

    def line(self, options: Container[str]) -> str:
        """Return the message for a command with these options (names of fields, as `batch_size`), in one line."""
        shown = [self.message, *(words for name, words in self.remedies.items() if name in options)]
        return " ".join("; ".join(shown).split())


def did_you_mean(word: str, known: Iterable[str], shown: str = "{}") -> str:
    """Return a suggestion for an unknown word, or an empty string if no known word is similar.

    Args:
        word: the unknown word.
        known: the known words, or a mapping from them to the words to suggest.
        shown: how a suggestion is formatted.

    >>> did_you_mean("--recal", ["recall", "rank"], "--{}")
    'did you mean --recall?'
    >>> did_you_mean("zebra", ["recall", "rank"])
    ''
    """
    close = difflib.get_close_matches(word.lstrip("-"), list(known), n=1)
    if not close:
        return ""
    return f"did you mean {shown.format(known[close[0]] if isinstance(known, Mapping) else close[0])}?"


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


def out_of_memory(error: BaseException) -> str | None:
    """Return in one line that memory could not be had, and how much; None where an error means something else.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000000 bytes."))
    'out of memory: 372.5 GiB could not be allocated'
    """
    kinds = (MemoryError, RuntimeError, ValueError, OverflowError, OSError)
    if not isinstance(error, kinds) or not (isinstance(error, MemoryError) or _MEMORY.search(str(error))):
        return None
    shortage = "out of memory on the GPU" if "cuda" in str(error).lower() else "out of memory"
    if not (found := _AMOUNT.search(str(error))):
        return shortage
    amount, unit = float(found[1].rstrip(".")), found[2]
    if unit in (None, "bytes"):
        amount, unit = (amount / 2**30, "GiB") if amount >= 2**30 else (amount / 2**20, "MiB")
    return f"{shortage}: {amount:,.1f} {unit} could not be allocated"


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
        if shortage := out_of_memory(cause):
            return shortage
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
    "pydantic": "openai pydantic",
    "pytrec_eval": "pytrec-eval-terrier",
}


def require(*modules: str) -> None:
    """Refuses to begin what needs modules that are not installed.

    Raises:
        UserError: one is not; the message names the package.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(install_hint(module))


def install_hint(module: str) -> str:
    """What to say when a module is missing; it names the packages, which works however this one was installed."""
    top = module.partition(".")[0]
    return f"this needs the package {top}, which is not installed: pip install {PACKAGES.get(top, top)}"
