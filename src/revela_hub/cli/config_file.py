"""A YAML file of options, read with the line of each."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from revela_hub.data.yaml_lines import line_of, open_yaml
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
    with open_yaml(path, "configuration file") as (loader, root):
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}:{line_of(root)}: expected a mapping from options to values (`key: value`)")
        # Not loader.get_data(): it forgets the lines, and lets the last of two equal keys win.
        return [
            Item(
                loader.construct_object(key, deep=True),
                loader.construct_object(value, deep=True),
                f"{path}:{line_of(key)}",
            )
            for key, value in root.value
        ]
