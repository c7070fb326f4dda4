"""One-line messages for errors caused by input, disks, networks, devices or missing packages; all others are bugs.

Errors of torch, safetensors and the Hub are recognised by class name, because importing these packages takes seconds.
"""

import sys
import traceback

from revela_hub.errors import (
    OS_ERRORS,
    UserError,
    causes,
    first_line,
    install_hint,
    is_file_error,
    os_error,
    out_of_memory,
    reason,
)

LESS_MEMORY = {
    "per_device_train_batch_size": "lower --per_device_train_batch_size",
    "batch_size": "lower --batch_size",
    "queue_size": "lower --queue_size",
    "max_length": "shorten texts with --max_length",
}
USE_THE_CPU = {"device": "leave out --device, or use --device cpu", "use_cpu": "use --use_cpu true"}
DEVICES = {"device": "use cpu, cuda, cuda:1 or mps as --device"}
# Parts of the messages of torch's RuntimeError, AssertionError and ValueError, with the fix: a text, or one per option.
REMEDIES: dict[str, str | dict[str, str]] = {
    "not compiled with CUDA": {
        "device": "this torch build supports the CPU only: leave out --device, or install torch with CUDA"
    },
    "no NVIDIA driver": USE_THE_CPU,
    "No CUDA GPUs are available": USE_THE_CPU,
    "invalid device ordinal": "this machine has fewer GPUs",
    "Invalid device string": DEVICES,
    "Expected one of cpu, cuda": DEVICES,
    "PYTORCH_ENABLE_MPS_FALLBACK": USE_THE_CPU,
    "CUDA error": "the GPU failed or is in use; set CUDA_LAUNCH_BLOCKING=1 to see where",
    "NCCL": "the processes cannot connect to each other",
    "gloo/transport": "another process of the run has ended or cannot be reached; see its message",
}
# Errors of packages that are not imported here, by the name of their class or a base class, with a prefix for the message.
ERROR_CLASSES = {
    "OfflineModeIsEnabled": "not on this machine, and offline mode is on",
    "LocalEntryNotFoundError": "not on this machine, and the Hub cannot be reached",
    "HfHubHTTPError": "the Hub",
    "HTTPError": "the network",
    "TransportError": "the network",
    "RequestException": "the network",
    "TorchDynamoException": "torch.compile",
    "UnicodeDecodeError": "a file is not UTF-8 text",
}


def explain(error: BaseException) -> UserError | None:
    """Return the error to print, or None if it is a bug."""
    for cause in causes(error):
        if isinstance(cause, UserError):
            return cause
        if shortage := out_of_memory(cause):
            return UserError(shortage, **LESS_MEMORY)
        if line := _known(cause):
            return line if isinstance(line, UserError) else UserError(line)
    return None


def _known(error: BaseException) -> UserError | str | None:
    if isinstance(error, ImportError):
        if (error.name or "").startswith("revela_hub"):
            return None
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return install_hint(missing) if missing else _joined(error)  # transformers' message names the package
    for kind in type(error).__mro__:
        if kind.__name__ in ERROR_CLASSES:
            return f"{ERROR_CLASSES[kind.__name__]}: {_joined(error)}"
    if isinstance(error, OSError) and os_error(error) not in OS_ERRORS:
        return error.strerror or _joined(error)
    if is_file_error(error):
        return reason(error)
    for words, remedy in REMEDIES.items() if isinstance(error, (RuntimeError, AssertionError, ValueError)) else ():
        if words.lower() in str(error).lower():
            remedies = {} if isinstance(remedy, str) else remedy
            return UserError(f"{first_line(error)}{'' if remedies else f': {remedy}'}", **remedies)
    # A library rejects the value of an option.
    library = _raised_in(error) if isinstance(error, ValueError) else None
    return f"{library}: {_joined(error)}" if library else None


def _raised_in(error: BaseException) -> str | None:
    """Return the library that raised the error; None if it was this package, directly or through the standard library."""
    tops = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    last = next((top for top in reversed(tops) if top not in sys.stdlib_module_names), "")
    return None if last in ("", "revela_hub") else last


def _joined(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
