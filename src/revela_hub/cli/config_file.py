"""Reads a YAML file of options, with the line number of each."""

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml

from revela_hub.cli.help_texts import KINDS
from revela_hub.data.yaml_lines import line_of, open_yaml
from revela_hub.errors import UserError

EXPONENTIAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


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


def option_value(action: argparse.Action, value: Any, hint: Any) -> Any:
    """Convert a value from YAML as the command line would.

    Raises:
        argparse.ArgumentTypeError: the option does not take this value.
    """
    if value is None and type(None) in get_args(hint):
        return None
    if action.nargs == "+":
        # An item may be a mapping, which the command line has no form for; the command checks its content.
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else _single_value(action, item) for item in items]
    kinds = {get_origin(kind) or kind for kind in (hint, *get_args(hint))}
    if isinstance(value, (list, dict)) and type(value) in kinds:
        return _with_numbers(value)
    return _single_value(action, value)


def _single_value(action: Any, value: Any) -> Any:
    # YAML reads an unquoted no, off, yes and on as a truth value, which would become the text "False" or "True".
    kind = getattr(action.type, "__name__", "str")
    if value is None or isinstance(value, (list, dict)) or (isinstance(value, bool) and kind != "string_to_bool"):
        hint = " (put the word in quotes)" if isinstance(value, bool) else ""
        raise argparse.ArgumentTypeError(f"expected {KINDS.get(kind, 'a text')}, not {value!r}{hint}")
    return action.type(str(value))


def _with_numbers(value: Any) -> Any:
    """Convert the numbers in a mapping or list that PyYAML reads as text, such as 1e-6."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and EXPONENTIAL.fullmatch(value) else value
