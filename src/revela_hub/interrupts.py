"""Ctrl-C and the signals that end a command: one exception, whose message names the saved files and how to continue."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_raising: list[int] = []  # the signals that raise in this process
# Sent by `kill`, `timeout` and schedulers, and when a terminal closes; Windows has only the first.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupted(KeyboardInterrupt):
    """A signal stopped the command.

    Attributes:
        status: exit status for that signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.status = 128 + signum


@contextlib.contextmanager
def raising_signals() -> Iterator[None]:
    """Raise `Interrupted` on SIGTERM and SIGHUP, so that temporary files are deleted as after Ctrl-C.

    A second signal ends the process immediately. Signals that are ignored (`nohup`) stay ignored.
    """
    if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set handlers
        _raising.extend(number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL)
    for number in _raising:
        signal.signal(number, _receive)
    try:
        yield
    finally:
        _stop_raising()


def _receive(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise Interrupted("", signum)


def _stop_raising() -> None:
    for number in _raising:
        signal.signal(number, signal.SIG_DFL)
    _raising.clear()


def _end_as_worker() -> None:
    """Let a forked worker process end on SIGTERM without a message: its parent ends it so."""
    blocked = list(_raising)
    _stop_raising()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


if hasattr(os, "register_at_fork"):
    # Blocked during the fork, because Python drops signals that its handlers receive before the fork is complete.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _raising),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _raising),
        after_in_child=_end_as_worker,
    )


@contextlib.contextmanager
def if_interrupted(state: str | Callable[[], str]) -> Iterator[None]:
    """Add a message to an interrupt that has none: the saved files, and how to continue.

    Args:
        state: the rest of the sentence "interrupted: ...", or a function that returns it.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if str(error):
            raise
        told = state if isinstance(state, str) else state()
        raise Interrupted(f"interrupted: {told}", status_of(error) - 128) from error


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit status for an interrupt."""
    return error.status if isinstance(error, Interrupted) else 128 + signal.SIGINT
