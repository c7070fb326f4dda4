"""The one exception that means: the user can put this right."""


class UserError(Exception):
    """A mistake in what the user gave: a path, an option, a file's content, a model that does not fit.

    The message is one line for the person who typed the command. It names the file, the line number where there is
    one, and the remedy. The command line prints it without a traceback and exits with status 2; code that calls the
    package catches it like any exception.
    """
