"""What went wrong, in one line, where a user, a disk, a network or a missing package is the cause; the rest are bugs.

Errors of torch, safetensors and the Hub are known by their class's name: importing their packages to ask would cost seconds
to say that a file is missing.
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
ON_THE_CPU = {"device": "leave --device out, or give --device cpu", "use_cpu": "give --use_cpu true"}
DEVICES = {"device": "--device takes cpu, cuda, cuda:1, mps"}
# Words in the messages of torch's RuntimeError, AssertionError and ValueError that a user can put right: what to do, in
# words or by the option that helps.
REMEDIES: dict[str, str | dict[str, str]] = {
    "not compiled with CUDA": {
        "device": "this torch runs on the CPU only: leave --device out, or install torch for CUDA"
    },
    "no NVIDIA driver": ON_THE_CPU,
    "No CUDA GPUs are available": ON_THE_CPU,
    "invalid device ordinal": "there are fewer GPUs than the device's number says",
    "Invalid device string": DEVICES,
    "Expected one of cpu, cuda": DEVICES,
    "PYTORCH_ENABLE_MPS_FALLBACK": ON_THE_CPU,
    "CUDA error": "the GPU failed or is in use; CUDA_LAUNCH_BLOCKING=1 shows where",
    "NCCL": "the processes cannot reach each other",
    "gloo/transport": "another process of the run has ended, or cannot be reached: its own message says why",
}
# Errors of packages that are not imported here, by their class or one that it derives from, and what to say before them.
NAMED = {
    "OfflineModeIsEnabled": "not on this machine, and the Hub is switched off",
    "LocalEntryNotFoundError": "not on this machine, and the Hub cannot be reached",
    "HfHubHTTPError": "the Hub",
    "HTTPError": "the network",
    "TransportError": "the network",
    "RequestException": "the network",
    "TorchDynamoException": "torch.compile",
    "UnicodeDecodeError": "a file is not UTF-8 text",
}


def explain(error: BaseException) -> UserError | None:
    """Return what to tell the user, or None where the error is a bug of ours."""
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
        return None if (error.name or "").startswith("revela_hub") else _missing_package(error)
    for kind in type(error).__mro__:
        if kind.__name__ in NAMED:
            return f"{NAMED[kind.__name__]}: {_joined(error)}"
    if isinstance(error, OSError) and os_error(error) not in OS_ERRORS:
        return error.strerror or _joined(error)
    if is_file_error(error):
        return reason(error)
    for words, remedy in REMEDIES.items() if isinstance(error, (RuntimeError, AssertionError, ValueError)) else ():
        if words.lower() in str(error).lower():
            remedies = {} if isinstance(remedy, str) else remedy
            return UserError(f"{first_line(error)}{'' if remedies else f': {remedy}'}", **remedies)
    # A library that refuses what it was given: a value of an option that was handed on to it.
    library = _raised_in(error) if isinstance(error, ValueError) else None
    return f"{library}: {_joined(error)}" if library else None


def _raised_in(error: BaseException) -> str | None:
    """The library whose code it comes from; None for our own, also where Python itself noticed it there."""
    tops = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    last = next((top for top in reversed(tops) if top not in sys.stdlib_module_names), "")
    return None if last in ("", "revela_hub") else last


def _missing_package(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return install_hint(error.name)
    return _joined(error)  # transformers' own text says what to install


def _joined(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
