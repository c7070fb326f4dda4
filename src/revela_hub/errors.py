"""The exception for errors that users can fix, and the line that the command line prints for any exception."""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Modules that only some commands need, with the extra of this package that installs them.
EXTRAS = {
    "faiss": "search",
    "gradio": "demo",
    "openai": "endpoint",
    "pymilvus": "milvus",
    "ray": "ray",
    "markitdown": "documents",
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
}

# Words in the class names and messages of an error and of its causes, and what to do about it.
HINTS = {
    "OutOfMemory|MemoryError|out of memory|can('t|not) allocate|unable to allocate|bad_alloc": (
        "lower --per_device_train_batch_size, --batch_size or --max_length"
    ),
    "GatedRepoError|gated repo": "accept the terms on the model's Hub page, and log in with `hf auth login`",
    "RepositoryNotFoundError|HFValidationError|not a valid model identifier": (
        "check the name, or log in with `hf auth login`"
    ),
    "LocalEntryNotFound|OfflineMode|couldn't connect to|ConnectError|ConnectionError|ConnectTimeout": (
        "is there a network? HF_HUB_OFFLINE=1 uses only the files on this machine"
    ),
    "trust_remote_code": "review the model's code, then pass --trust_remote_code true",
    "SafetensorError": "a .safetensors file is damaged: download or copy the model again",
    "UnicodeDecodeError": "convert the file to UTF-8",
    "Stemming algorithm": "give a language such as english or german, or none",
    "No space left|Disk quota|os error 28": "free some disk space, or write to another disk",
    "PermissionError|Read-only file": "choose a folder that you may write to",
    "not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|invalid device|Expected one of cpu": (
        "use --device cpu, for training --use_cpu true"
    ),
    "CUDA error": "is another program using the GPU? CUDA_LAUNCH_BLOCKING=1 shows where it failed",
    "NCCL|gloo|closed by peer|reset by peer": "another process of the run has ended: see its message",
}


class UserError(Exception):
    """An error that the user can fix; the message is one line with the file, the line number if there is one, and the fix."""


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for an error, and the exit status: 2 if the user can probably fix it, 1 if it may be a bug.

    >>> explain(OSError(28, "No space left on device", "a.npy"))
    ("[Errno 28] No space left on device: 'a.npy'; free some disk space, or write to another disk", 2)
    >>> explain(KeyError("text"))
    ("KeyError: 'text'; this may be a bug: please report it with the traceback", 1)
    """
    chain = [error]
    while (cause := chain[-1].__cause__) and cause not in chain:  # pymilvus raises errors that cause themselves
        chain.append(cause)
    # Our own sentence, or the Hub's with the server's words; otherwise the innermost cause.
    ours = (e for e in chain if isinstance(e, UserError) or type(e).__module__.startswith("huggingface_hub"))
    shown = next(ours, chain[-1])
    words = " ".join(f"{' '.join(kind.__name__ for kind in type(cause).__mro__)}: {cause}" for cause in chain)
    hint = next((text for pattern, text in HINTS.items() if re.search(pattern, words, re.IGNORECASE)), "")
    if isinstance(shown, ModuleNotFoundError) and shown.name:
        hint = install_hint(shown.name)
    text, status = " ".join(str(shown).split()) or type(shown).__name__, 2
    if not hint and not isinstance(shown, UserError | ValueError | OSError | ImportError):
        text, status = f"{type(shown).__name__}: {text}", 1
        hint = "this may be a bug: please report it with the traceback"
    if len(text) > 500 and not isinstance(shown, UserError):
        text = f"{text[:500]} ..."
    return f"{text}; {hint}" if hint else text, status


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or the error's type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def did_you_mean(word: str, known: Iterable[str], shown: str = "{}") -> str:
    """Return a suggestion for an unknown word, or an empty string if no known word is similar.

    >>> did_you_mean("--recal", ["recall", "rank"], "--{}")
    'did you mean --recall?'
    >>> did_you_mean("zebra", ["recall", "rank"])
    ''
    """
    close = difflib.get_close_matches(word.lstrip("-"), list(known), n=1)
    return f"did you mean {shown.format(close[0])}?" if close else ""


@contextmanager
def loading(failure: str, model: str | Path) -> Iterator[None]:
    """Put a sentence such as "cannot load the encoder 'x'" before an error of loading a model from a folder or the Hub."""
    missing = not os.path.exists(os.path.expanduser(model))
    if missing and re.match(r"/|\.\.?/|~|.*/.*/", str(model)):
        raise UserError(f"{failure}: no such folder")
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises Exception, remote code any class
        place = "no such folder; on the Hub: " if missing and isinstance(error, OSError | ValueError) else ""
        raise UserError(f"{failure}: {place}{first_line(error)}") from error


def require(*modules: str) -> None:
    """Raise an error before long work if optional modules are not installed; it names what to install."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the package {module} is not installed: {install_hint(module)}")


def install_hint(module: str) -> str:
    """Return the command that installs a missing module."""
    top = module.partition(".")[0]
    return f'pip install "revela-hub[{EXTRAS[top]}]"' if top in EXTRAS else f"pip install {top}"
