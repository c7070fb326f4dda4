"""The one exception that means: the user can put this right; and what an error of a library says in one line."""


class UserError(Exception):
    """A mistake in what the user gave: a path, an option, a file's content, a model that does not fit.

    The message is one line for the person who typed the command. It names the file, the line number where there is
    one, and the remedy. The command line prints it without a traceback and exits with status 2; code that calls the
    package catches it like any exception.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something; the error's type where it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
