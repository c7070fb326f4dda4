"""The arguments of a command, from the words of its command line."""

from collections.abc import Sequence
from typing import TypeVar

from revela_hub.cli.parser import CommandParser, build_arguments

ArgumentsT = TypeVar("ArgumentsT")


def parse_arguments(
    arguments: type[ArgumentsT], argv: Sequence[str], *, program: str = "p", positionals: Sequence[str] = ()
) -> ArgumentsT:
    values = CommandParser(arguments, program, "", positionals).read(list(argv))
    assert values is not None
    return build_arguments(arguments, values)
