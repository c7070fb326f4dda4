"""Reads a YAML file of options, with the line number of each."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from revela_hub.data.yaml_lines import line_of, open_yaml
from revela_hub.errors import UserError


class Item(NamedTuple):
    """A key of a YAML mapping, its value, and its place (`file:line`)."""

    key: Any
    value: Any
    place: str


def read_items(path: Path) -> list[Item]:
    """Return the items of the YAML mapping in a file."""
    with open_yaml(path, "configuration file") as (loader, root):
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}:{line_of(root)}: expected a mapping from options to values (`key: value`)")
        # loader.get_data() would lose the line numbers and accept repeated keys.
        return [
            Item(
                loader.construct_object(key, deep=True),
                loader.construct_object(value, deep=True),
                f"{path}:{line_of(key)}",
            )
            for key, value in root.value
        ]
