"""YAML files that are read with the lines of what is in them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from revela_hub.errors import UserError


@contextlib.contextmanager
def open_yaml(path: Path, what: str) -> Iterator[tuple[yaml.SafeLoader, yaml.Node | None]]:
    """Open a file for a block that makes values of its nodes.

    Args:
        path: The file.
        what: What the file is to the user, for the messages.

    Yields:
        The loader, and the node that the file holds; None where it is empty.

    Raises:
        UserError: with file and line, the file cannot be read, or is not YAML; also from within the block.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        yield loader, loader.get_single_node()
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the {what} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {problem}") from error


def line_of(node: yaml.Node) -> int:
    """Return the line that a node begins on, from 1."""
    return int(node.start_mark.line) + 1
