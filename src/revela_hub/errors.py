"""The exception for errors that users can fix, and one-line messages for the errors of libraries."""

import contextlib
import difflib
import errno
import importlib.util
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from revela_hub.hub_connection import prefer_cache
from revela_hub.paths import local_path

# Messages for error numbers of the operating system.
OS_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space, or write to another disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the system allows (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk cannot be read or written",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "is a file, not a folder",
    errno.EEXIST: "already exists",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EMFILE: "too many open files (ulimit -n)",
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The form in which safetensors, tokenizers and shutil report errors of the operating system, without an OSError.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")

ADAPTER = "it is an adapter of another model: merge it into that model first (merge_and_unload of PEFT)"
# The forms in which libraries report that memory cannot be allocated.
_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|unable to allocate|bad_alloc"
    r"|malloc of size|size calculation overflowed|array is too big|maximum allowed dimension exceeded|capacity overflow"
    r"|too large to convert to C",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"(?:allocate|malloc of size):? ([\d.]+) ?(bytes|[KMGTPE]?i?B)?", re.IGNORECASE)

# A name such as `text_column`, which is not a part of a path and not quoted.
_NAME = re.compile(r"(?<![\w./'\"`-])[a-z]+(?:_[a-z0-9]+)+(?![\w:]|\.\w)")

# Failures of the Hub, by the name of an error's class or a part of its message, and the message to print.
_HUB = {
    "GatedRepoError|gated repo": "its authors restrict access: accept the terms on its Hub page, and log in with `hf auth login`",
    "RepositoryNotFoundError|HFValidationError|is not a valid model identifier": (
        "it is neither a folder nor a model that you can access on the Hub: check the name, or log in with `hf auth login`"
    ),
    "LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to": (
        "it is not on this machine, and the Hub cannot be reached: download it with `hf download` where there is a network,"
        " and pass the folder"
    ),
}


class UserError(Exception):
    """An error that the user can fix: a wrong path, option, file content or model.

    The message is one line with the file, the line number if there is one, and the fix. The command line prints it without a
    traceback and exits with status 2.

    Fixes that need an option are given by the option's name, because the same code runs in several commands. The command line
    prints only those whose options the command has.

    >>> error = UserError("no split 'x' in qrels; there is: test", split="choose with --split")
    >>> str(error)
    "no split 'x' in qrels; there is: test; choose with --split"
    >>> error.line({"corpus", "top_k"})
    "no split 'x' in qrels; there is: test"

    An argument of Python that is also an option of the command is printed as the option.

    >>> UserError("no column 'text' (choose with text_column)").line({"text_column"})
    "no column 'text' (choose with --text_column)"
    """

    def __init__(self, message: str = "", /, **remedies: str) -> None:
        super().__init__("; ".join([message, *remedies.values()]))
        self.message = message
        self.remedies = remedies

    def line(self, options: Container[str]) -> str:
        """Return the message for a command with these options (field names such as `batch_size`) as one line."""
        shown = [self.message, *(words for name, words in self.remedies.items() if name in options)]
        text = " ".join("; ".join(shown).split())
        return _NAME.sub(lambda name: f"--{name[0]}" if name[0] in options else name[0], text)


def did_you_mean(word: str, known: Iterable[str], shown: str = "{}") -> str:
    """Return a suggestion for an unknown word, or an empty string if no known word is similar.

    Args:
        word: The unknown word.
        known: The known words, or a mapping from them to the words to suggest.
        shown: Format of the suggestion.

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
    """Return the first non-empty line of an error's message, or the error's type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def os_error(error: BaseException) -> int | None:
    """Return the operating system's error number behind an error; some libraries only mention it in the message."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := _OS_ERROR.search(str(error)):
        return int(found.group(1) or found.group(2))
    return None


def out_of_memory(error: BaseException) -> str | None:
    """Return a one-line message if an error means that memory cannot be allocated, otherwise None.

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
    """Yield the error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def is_file_error(error: BaseException) -> bool:
    """Return whether an error means that a file cannot be read or written; libraries raise several classes for this."""
    return (
        isinstance(error, OSError)
        or os_error(error) in OS_ERRORS
        or type(error).__name__ == "SafetensorError"
        or "inline_container" in str(error)  # torch's file writer
    )


def reason(error: BaseException, model: str | Path | None = None) -> str:
    """Return one line that explains why a file cannot be read or written.

    Reasons of the operating system (a full disk, missing permissions) take precedence over the Hub's, those over damaged files of
    `model`, and these over the library's message.

    Args:
        error: The error.
        model: The folder or Hub id that was being loaded.
    """
    for cause in causes(error):
        if shortage := out_of_memory(cause):
            return shortage
        number = os_error(cause)
        if number in OS_ERRORS:
            file = getattr(cause, "filename", None)
            words = "" if file or number in DISK_FULL else f" ({first_line(cause)})"
            return f"{file}: {OS_ERRORS[number]}" if file else OS_ERRORS[number] + words
    if model is not None and (fault := _hub_failure(error) or damaged_file(model)):
        return fault
    if type(error).__name__ == "SafetensorError":
        return f"a .safetensors file is damaged or incomplete: {first_line(error)}"
    if "inline_container" in str(error):  # torch gives no reason
        return "torch cannot write the whole file: the disk may be full"
    return first_line(error)


def _hub_failure(error: BaseException) -> str | None:
    """Return why a model cannot be fetched from the Hub, or None if the error has another reason."""
    for cause in causes(error):
        words = " ".join([str(cause), *(kind.__name__ for kind in type(cause).__mro__)])
        for pattern, message in _HUB.items():
            if re.search(pattern, words):
                return message
    return None


def damaged_file(model: str | Path) -> str | None:
    """Return the first damaged or missing file of a model, or that it is only an adapter; None if nothing is wrong.

    Args:
        model: A folder, or the id of a model in the Hub's cache.
    """
    from safetensors import SafetensorError, safe_open

    folder = local_path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(model), local_files_only=True))
        except Exception:  # not in the cache: no file can be damaged
            return None
    for file in sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.json")]):
        if any(part.startswith((".", "checkpoint-")) for part in file.relative_to(folder).parts) or not file.is_file():
            continue
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            else:
                file.open("rb").close()  # safetensors calls a file that may not be read a missing one
                safe_open(file, "np")
        except OSError as error:
            return f"{file}: {OS_ERRORS.get(error.errno or 0) or first_line(error)}"
        except (ValueError, RecursionError, SafetensorError) as error:
            return f"{file} is damaged or incomplete: {first_line(error)}"
    names = {file.name for file in folder.iterdir()}
    if "adapter_config.json" in names and not names & {"config.json", "modules.json"}:
        return ADAPTER
    if not names & {"config.json", "modules.json", "tokenizer.json", "tokenizer_config.json"}:
        return f"{folder} holds no model: config.json is missing"
    return _missing_module(folder)


def _missing_module(folder: Path) -> str | None:
    """Return the first module without files of a sentence-transformers model, with the remedy."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # another kind of model
        for module in json.loads((folder / "modules.json").read_bytes()):
            path = folder / module["path"]
            if not module["type"].endswith("Normalize") and not any(path.glob("*")):  # Normalize has no files
                return f"{path} is missing, but modules.json names it: copy or download the whole model again"
    return None


@contextlib.contextmanager
def loading(failure: str, model: str | Path, *, trusted: bool = True) -> Iterator[None]:
    """Turn errors of loading a model into a `UserError` that names the model and a damaged file.

    Args:
        failure: The beginning of the message, e.g. "cannot load the encoder 'x'".
        model: The folder or Hub id.
        trusted: Whether its code is allowed to run; if not, the message for a model with code names the option.

    Raises:
        UserError: For any error in the block.
    """
    if not local_path(model).exists():
        prefer_cache()
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises Exception, remote code any class
        if not trusted and "trust_remote_code" in str(error):
            why = "it requires remote code: review the code, then pass --trust_remote_code true"
        else:
            why = reason(error, model)
        raise UserError(f"{failure}: {why}") from error


def refuse_missing_folder(name: str, what: str) -> None:
    """Reject a path that does not exist, before a library takes it for a Hub id.

    Raises:
        UserError: The name looks like a path (`./x`, `/x`, `~/x`, `a/b/c`), and the folder does not exist.
    """
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if is_path and not local_path(name).is_dir():
        raise UserError(f"cannot load {what} {name!r}: no such folder")


# Modules that only some commands need, with their extra; then modules whose package has another name.
EXTRAS = {
    "faiss": "search",
    "gguf": "gguf",
    "gradio": "demo",
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "openai": "endpoint",
    "pydantic": "synthesis",
    "pymilvus": "milvus",
    "ray": "ray",
}
PACKAGES = {"Stemmer": "PyStemmer", "pytrec_eval": "pytrec-eval-terrier"}


def require(*modules: str) -> None:
    """Check that optional modules are installed.

    Raises:
        UserError: A module is missing; the message names the package to install.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(install_hint(module))


def install_hint(module: str) -> str:
    """Return the message for a missing module, with the packages to install."""
    top = module.partition(".")[0]
    packages = packages_of(EXTRAS[top]) if top in EXTRAS else PACKAGES.get(top, top)
    return f"the package {top} is not installed: pip install {packages}"


def packages_of(extra: str) -> str:
    """Return the packages of an extra for `pip install`, from the installed metadata: `revela-hub[extra]` would need PyPI."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires("revela-hub") or []):
        marker, requirement.marker = requirement.marker, None
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(f'"{requirement}"')
    return " ".join(found)
