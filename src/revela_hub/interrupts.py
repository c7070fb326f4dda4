"""Ctrl-C and the signals that end a command: one exception, whose message names the saved files and how to continue."""

import contextlib
import signal
from collections.abc import Callable, Iterator


class Interrupted(KeyboardInterrupt):
    """A signal stopped the command.

    Attributes:
        status: exit status for that signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.status = 128 + signum


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
