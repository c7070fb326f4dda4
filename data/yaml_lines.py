"""Reading YAML files with line numbers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from revela_hub.errors import UserError


@contextlib.contextmanager
def open_yaml(path: Path, what: str) -> Iterator[tuple[yaml.SafeLoader, yaml.Node | None]]:
    """Parse a file of a kind (`what`, for messages) for a block that constructs values from its nodes.

    Yields:
        The loader and the root node; None for an empty file.

    Raises:
        UserError: The file cannot be read or is not YAML, with file and line; also for errors in the block.
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
    """Return the line on which a node begins, from 1."""
    return int(node.start_mark.line) + 1
