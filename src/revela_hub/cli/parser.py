"""Reads a command's options into a dataclass, from the command line and from the YAML file that `--config` names.

The command line overrides the file, and the file the dataclass's defaults. In addition to `argparse`: positional arguments
(`search MODEL "query"` is `search --model MODEL --query "query"`), "did you mean", and an error for an unknown key of the file.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from revela_hub.errors import UserError, did_you_mean
from revela_hub.files import local_path
from revela_hub.loading import pinned
from revela_hub.ranges import check_ranges

ArgumentsT = TypeVar("ArgumentsT")

TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
MAY_BE_EMPTY = ("prompt", "column", "instruction")  # in the name of an option for which an empty text means something
LIBRARIES = ("transformers.", "sentence_transformers.")  # modules of dataclasses that are not defined here
NOT_OPTIONS = ("debug", "router_mapping")  # of transformers: `--debug` is ours, and trainers set the other one
OTHER_OPTIONS = "other options of transformers' Trainer"
METAVARS = {
    "FOLDER": "output_dir cache_dir models_dir checkpoint index eval_corpus beir",
    "MODEL": "model models sparse_model rerank retriever lm backbone encoder reader base pseudo_labels",
    "PATH": "data corpus plain_text labels space_corpus",
    "FILE": "output mixture pairs card config example_queries space_queries ranking",
    "REPO_ID": "repo_id push_to_hub",
}


def build_arguments(arguments: type[ArgumentsT], values: dict[str, Any]) -> ArgumentsT:
    """Return the dataclass with these values; raise a `ValueError` for a number out of range."""
    check_ranges(arguments, values)
    return arguments(**values)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, whose arguments are a dataclass; a field's `metadata["help"]` is its help text.

    The `positionals` are the fields that can be given without their names, in order. The last one may be a list, which takes all
    remaining words. A field that is given by its name or in the file takes no word. `quiet` is whether the arguments that were read
    last ask for results and errors only.
    """

    def __init__(self, arguments: type, program: str, description: str, positionals: Sequence[str] = ()) -> None:
        super().__init__(
            prog=program,
            description=description.strip(),
            formatter_class=_HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,  # an abbreviation that works today would break when an option is added
            add_help=False,
        )
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)  # values, not options
        self.positionals, self.quiet = list(positionals), False
        self.types = {name: _Type(name, hint) for name, hint in get_type_hints(arguments).items()}
        fields = [field for field in dataclasses.fields(arguments) if field.init and field.name not in NOT_OPTIONS]
        self.required = [field.name for field in fields if field.default is field.default_factory]
        fields.sort(key=lambda field: (field.name not in self.positionals, field.name not in self.required))
        titles = {field.name: _title(arguments, field.name) for field in fields}
        order = sorted(dict.fromkeys(titles.values()), key=lambda title: (title == OTHER_OPTIONS, title != "options"))
        groups = {title: self.add_argument_group(title) for title in order}
        self.options = {field.name: self._add(groups[titles[field.name]], field) for field in fields}
        self.hidden = [name for name in titles if titles[name] == OTHER_OPTIONS]
        words = {name: f"{name.upper()}{' ...' if self.types[name].is_list else ''}" for name in self.positionals}
        shown = [word if name in self.required else f"[{word}]" for name, word in words.items()]
        self.usage = " ".join([program, *shown, "[options]"])
        common = self.add_argument_group("common options")
        common.add_argument("--config", metavar="FILE", help="YAML file of options; command-line options override it.")
        if "quiet" not in self.options:  # training commands have a field of this name
            self.types["quiet"] = _Type("quiet", bool)
            help_text = "Print results and errors only."
            common.add_argument("--quiet", nargs="?", const=True, type=self.types["quiet"].read, help=help_text)
        common.add_argument("--debug", action="store_true", help="Print the traceback of an error.")
        common.add_argument("--help", "-h", action="store_true", help="Print this text.")
        if self.hidden:
            common.add_argument("--help-all", action="store_true", help=f"Print this text with {OTHER_OPTIONS}.")

    def _add(self, group: Any, field: "dataclasses.Field[Any]") -> argparse.Action:
        """Add the option of a field, in both spellings."""
        name, kind = field.name, self.types[field.name]
        default = field.default_factory() if callable(field.default_factory) else field.default
        option: argparse.Action = group.add_argument(*_spellings(name), type=kind.read)
        if kind.is_list:
            option.nargs = "+"
        elif {*kind.kinds} <= {bool, NoneType}:
            option.nargs, option.const = "?", True
            if default is True:
                group.add_argument(*_spellings(f"no_{name}"), dest=name, action="store_false", help=argparse.SUPPRESS)
        if default is not False:
            option.metavar = field.metadata.get("metavar") or kind.expected
        option.help = _help(field.metadata.get("help", ""), default, required=name in self.required)
        return option

    def read(self, argv: list[str]) -> dict[str, Any] | None:
        """Return the values that `argv` and its configuration file give; print the help text and return None if asked to."""
        end = argv.index("--") if "--" in argv else len(argv)
        words, free = argv[:end], argv[end + 1 :]
        if not {"-h", "--help", "--help-all"}.isdisjoint(words):
            for name in self.hidden if "--help-all" not in words else ():
                self.options[name].help = argparse.SUPPRESS
            self.print_help()
            return None
        # A switch takes the next word only if it is a truth value: `--json "query"`.
        switches = {name for name, option in self._option_string_actions.items() if option.nargs == "?"}
        pairs = zip(words, [*words[1:], ""], strict=False)
        whole = [f"{word}=true" if word in switches and after.lower() not in TRUTH else word for word, after in pairs]
        known, rest = self.parse_known_args(whole)
        for word in rest:
            if word[:1] == "-" and word != "-" and " " not in word and not self._negative_number_matcher.match(word):
                self.error(self._unknown(word.partition("=")[0]))
        values = (self._from_file(local_path(known.config)) if "config" in known else {}) | vars(known)
        values |= self._without_names([*rest, *free], values)
        for name in self.required:
            if name not in values:
                self.error(f"{name.upper() if name in self.positionals else f'--{name}'} is missing")
        if not values.get("endpoint"):  # a server has its own names of models
            values |= {name: self.types[name].placed(value) for name, value in values.items() if name in self.options}
        self.quiet = bool(values.get("quiet"))
        return {name: value for name, value in values.items() if name in self.options}

    def _without_names(self, free: list[str], values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the arguments that are given without their names."""
        found: dict[str, Any] = {}
        for name in self.positionals:
            if name not in values and free:
                kind = self.types[name]
                taken, free = (free, []) if kind.is_list else (free[:1], free[1:])
                try:
                    found[name] = kind.read_all(taken if kind.is_list else taken[0])
                except argparse.ArgumentTypeError as error:
                    self.error(f"{name.upper()}: {error}")
        if free:
            self.error(f"unexpected argument {free[0]!r}")
        return found

    def _from_file(self, path: Path) -> dict[str, Any]:
        """Return the options that a YAML file gives."""
        import yaml

        try:
            text = path.read_text(encoding="utf-8")
            content, node = yaml.safe_load(text) or {}, yaml.compose(text, yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a mapping from options to values (`key: value`)")
        if node and len(node.value) > len(content):
            raise UserError(f"{path}: an option is given twice")
        values: dict[str, Any] = {}
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if name not in {*self.options, "quiet"}:
                raise UserError(f"{path}: {self._unknown(str(key))}")
            try:
                values[name] = self.types[name].read_all(value)
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{path}: {key}: {error}") from error
        return values

    def _unknown(self, word: str) -> str:
        known = {option.lstrip("-").replace("-", "_") for option in self._option_string_actions} - {"h"}
        close = did_you_mean(word.replace("-", "_").strip("_"), sorted(known), "--{}")
        return f"unknown option {word!r}{f': {close}' if close else ''}"

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` instead of printing argparse's usage text."""
        message = re.sub(r"^argument (--[^ /]+)[^ ]*:", r"\1:", message)
        raise UserError(f"{message} (see {self.prog} --help)")


class _Type:
    """The type of an option, which reads its values from words of the command line and from the file."""

    def __init__(self, name: str, hint: Any) -> None:
        self.name, self.kinds = name, get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        self.is_list = any(get_origin(kind) is list for kind in self.kinds)
        items = [item for kind in self.kinds for item in (get_args(kind) if get_origin(kind) is list else [kind])]
        self.items = sorted(items, key=lambda kind: kind is str)  # any word is a text

    @property
    def expected(self) -> str:
        """The placeholder of the value."""
        named = next((metavar for metavar, names in METAVARS.items() if self.name in names.split()), None)
        choices = [choice for kind in self.items for choice in _choices(kind)]
        types = [word for kind, word in {bool: "true|false", int: "N", float: "X"}.items() if kind in self.items]
        return named or "|".join(choices) or next(iter(types), "TEXT")

    def read_all(self, value: Any) -> Any:
        """Return the value of the option; of a list, one item may stand alone."""
        if not self.is_list or value is None:
            return self.read(value)
        return [self.read(item) for item in (value if isinstance(value, list) else [value])]

    def placed(self, value: Any) -> Any:
        """Return a value with each model `owner/name@revision` replaced by its folder in the Hub's cache."""
        if isinstance(value, list):
            return list(map(self.placed, value))
        return pinned(value) if self.expected == "MODEL" and isinstance(value, str) else value

    def read(self, value: Any) -> Any:
        """Return the value, or an item of a list, from a word of the command line, or from a scalar or mapping of the file."""
        if value is None and NoneType in self.items:
            return value
        if isinstance(value, dict) and (self.is_list or dict in [get_origin(kind) or kind for kind in self.items]):
            return value
        if value == "" and not any(part in self.name for part in MAY_BE_EMPTY):
            raise argparse.ArgumentTypeError("the text is empty")
        # YAML reads an unquoted no, off, yes and on as a truth value, which would become the text "False" or "True".
        if isinstance(value, str | int | float) and (not isinstance(value, bool) or bool in self.items):
            for kind in self.items:
                choices, word = (TRUTH, str(value).lower()) if kind is bool else (_choices(kind), str(value))
                if word in choices:
                    return choices[word]
                if kind in (int, float, str):
                    with suppress(ValueError):
                        return kind(word)
        raise argparse.ArgumentTypeError(f"expected {self.expected}, not {value!r}")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description and shows one spelling of each option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return f"{action.option_strings[0]} {value_of(action)}".strip()


def value_of(action: argparse.Action) -> str:
    """Return the placeholder of an option's value in help texts, e.g. `N` or `PATH ...`; empty for a switch."""
    if action.nargs == 0 or not action.metavar:
        return ""
    return f"{action.metavar} ..." if action.nargs == "+" else str(action.metavar)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _help(text: str, default: Any, *, required: bool) -> str:
    """Return the first sentence of a help text, with the default."""
    text = re.split(r"(?<=[a-z)][a-z)])\. (?=[A-Z])", " ".join(text.split()))[0].removesuffix(".")
    default = " ".join(map(str, default)) if isinstance(default, list | tuple) else getattr(default, "value", default)
    if required:
        text += " (required)"
    elif default not in (None, "", False, dataclasses.MISSING):
        text += f" (default: {str(default).lower() if default is True else default})"
    return f"{text}.".replace("%", "%%")


def _title(arguments: type, name: str) -> str:
    """Return the heading of a field: the `option_group` of the class that it comes from, or OTHER_OPTIONS of a library's."""
    field, fields = vars(arguments)["__dataclass_fields__"][name], "__dataclass_fields__"
    owner = next(cls for cls in reversed(arguments.__mro__) if vars(cls).get(fields, {}).get(name) is field)
    if owner.__module__.startswith(LIBRARIES):
        return OTHER_OPTIONS
    return str(vars(owner).get("option_group", "options" if owner is arguments else "training"))


def _choices(kind: Any) -> dict[str, Any]:
    """Return the values of an enumeration or of a `Literal`, by their texts."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {str(choice.value): choice.value for choice in kind}
    return {str(choice): choice for choice in get_args(kind)} if get_origin(kind) is Literal else {}
