"""Ctrl-C and the signals that end a command: one exception, whose message names the saved files and how to continue."""

import contextlib
import signal
from collections.abc import Callable, Iterator


class Interrupted(KeyboardInterrupt):
    """A signal stopped the command; `status` is the exit status for that signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.status = 128 + signum


@contextlib.contextmanager
def if_interrupted(state: Callable[[], str]) -> Iterator[None]:
    """Give an interrupt the message of a command: the saved files, and how to continue."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted: {state()}", status_of(error) - 128) from error


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit status for an interrupt."""
    return error.status if isinstance(error, Interrupted) else 128 + signal.SIGINT
