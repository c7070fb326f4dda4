"""A YAML file of options, read with the line of each."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from revela_hub.errors import UserError


class Item(NamedTuple):
    """A key of a YAML mapping, its value, and its place, `file:line`."""

    key: Any
    value: Any
    place: str


def read_items(path: Path) -> list[Item]:
    """The keys and values of the YAML mapping that a file holds.

    Raises:
        UserError: with file and line, the file cannot be read, or is not such a mapping.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            line = root.start_mark.line + 1
            raise UserError(f"{path}:{line}: expected a mapping from options to values (`key: value`)")
        # Not loader.get_data(): it forgets the lines, and lets the last of two equal keys win.
        return [
            Item(
                loader.construct_object(key, deep=True),
                loader.construct_object(value, deep=True),
                f"{path}:{key.start_mark.line + 1}",
            )
            for key, value in root.value
        ]
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the configuration file is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
