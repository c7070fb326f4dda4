"""Reads a command's options into a dataclass, from the command line and a YAML file, with TRL's parser.

In addition to `trl.TrlParser`:

- positional arguments: `search MODEL "query"` is read as `search --model MODEL --query "query"`;
- numbers from the command line and from the file are checked against the ranges of `revela_hub.ranges`;
- every mistake is a `UserError` of one line, with file and line number if it is in the file;
- old names of options are accepted (`revela_hub.options.old_names`);
- `--help` of a command with many options lists the basic ones, `--help-all` lists all.
"""

import argparse
import copy
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from trl import TrlParser

from revela_hub.cli.config_file import option_value, read_items
from revela_hub.cli.help_texts import KINDS, METAVARS, TRAINER_OPTIONS, WITHOUT_EFFECT
from revela_hub.data.sources.unicode import printable_name
from revela_hub.errors import UserError, did_you_mean, first_line, require
from revela_hub.internals import option_group
from revela_hub.options import old_names
from revela_hub.output import note
from revela_hub.paths import local_path
from revela_hub.ranges import expected_range, limits

ArgumentsT = TypeVar("ArgumentsT")

NUMBER_METAVARS = {"int": "N", "float": "X"}
TRUE, FALSE = {"yes", "true", "t", "y", "1"}, {"no", "false", "f", "n", "0"}  # what trl's string_to_bool accepts
# In the name of a text option for which an empty text means something.
MAY_BE_EMPTY = ("prompt", "column", "instruction")

_DEVICE = r"(cpu|cuda|mps|xpu|npu|hpu|mlu|musa|xla)(:\d+)?"
DEVICE = re.compile(f"{_DEVICE}(,{_DEVICE})*")
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)  # a value, not an option
MAX_LISTED_OPTIONS = 20
"""`--help` of a command with more options lists the required ones and those that its classes name in `basic_options`."""
FREE_TEXT = ("query", "queries")  # options in which ~/ is not the home folder
OUTPUT_OPTIONS = ("output", "output_dir", "cache_dir")  # options that name a file or folder to write
OTHER_OPTIONS = "other options of transformers' Trainer"
LIBRARIES = ("transformers.", "sentence_transformers.", "trl.")  # the modules whose options are not defined here


def build_arguments(arguments: type[ArgumentsT], values: dict[str, Any], program: str) -> ArgumentsT:
    """Return the dataclass with these values.

    Raises:
        UserError: The dataclass's `__post_init__` rejects the values, or a package that they need is not installed.
    """
    for name in OUTPUT_OPTIONS:
        _check_name(name, values.get(name))
    if values.get("deepspeed"):
        require("deepspeed")
    try:
        return arguments(**{name: value if name in FREE_TEXT else _at_home(value) for name, value in values.items()})
    except ValueError as error:
        raise UserError(f"{first_line(error)} (see {program} --help)") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ImportError, OSError) as error:  # from transformers
        raise UserError(f"the options cannot be used: {type(error).__name__}: {first_line(error)}") from error


def _at_home(value: Any) -> Any:
    """Expand `~/`, which a shell does not in a configuration file or after `=`; in lists, too."""
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _check_name(option: str, path: Any) -> None:
    """Check that a name has the same bytes for Python and for libraries such as Arrow, which take names in UTF-8 only."""
    try:
        if path is None or os.fsencode(path) == path.encode():
            return
    except UnicodeEncodeError:
        pass
    encoding = sys.getfilesystemencoding()
    remedy = "" if encoding == "utf-8" else f", or set PYTHONUTF8=1, as this system's encoding is {encoding}"
    raise UserError(f"--{option} {printable_name(path)} is not a name in UTF-8: use another name{remedy}")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description and shows one spelling of each option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[-1 if action.dest == "help" else 0]
        return f"{name} {value_of(action)}".strip()


def value_of(action: argparse.Action) -> str:
    """Return the placeholder of an option's value in help texts, e.g. `N` or `PATH ...`; empty for a switch."""
    if action.nargs == 0 or not isinstance(action.metavar, str):
        return ""
    return f"{action.metavar} ..." if action.nargs == "+" else action.metavar


class CommandParser(TrlParser):
    """TRL's parser for one dataclass, with positional arguments and with mistakes raised as `UserError`.

    Command-line options override the YAML file that `--config` names, and the file overrides the dataclass's defaults.

    Args:
        arguments: A dataclass; a field's `metadata["help"]` is its help text.
        program: The command's name, for the help text and the messages.
        description: The beginning of the help text.
        positionals: The fields that can be given without their names, in order. The last one may be a list, which takes
            all remaining words. A field that is given by its name or in the file takes no word.

    Attributes:
        hints: The type of each option.
        renamed: The old names that are accepted, with the new ones.
        hidden: The options that only `--help-all` shows.
        quiet: Whether the arguments that were read last ask for results and errors only.
    """

    def __init__(self, arguments: type, program: str, description: str, positionals: Sequence[str] = ()) -> None:
        self.hints = get_type_hints(arguments, include_extras=True)
        self.positionals = list(positionals)
        fields = {field.name: field for field in dataclasses.fields(arguments) if field.init and field.name != "debug"}
        self.required = [name for name, field in fields.items() if field.default is field.default_factory]
        self.hidden: list[argparse.Action] = []
        super().__init__(
            dataclass_types=_groups(arguments, fields),
            prog=program,
            description=description.strip(),
            formatter_class=_HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,  # an abbreviation that works today would break when an option is added
            add_help=False,
        )
        self._negative_number_matcher = NEGATIVE_NUMBER
        for action in self._actions:
            self._finish(action, fields[action.dest], own=_owner(arguments, action.dest) is not None)
        self._hide_some(arguments)
        self.renamed = {old: new for old, new in old_names(arguments).items() if old not in fields}
        for old, new in self.renamed.items():
            self._accept(old, self._action(new))
        names = [f"{name.upper()}{' ...' if self._action(name).nargs == '+' else ''}" for name in self.positionals]
        self.usage = " ".join([program, *names, "[options]"])
        self._add_common_options()

    # --- the options

    def _add_common_options(self) -> None:
        group = self.add_argument_group("common options")
        group.add_argument("--config", metavar="FILE", help="YAML file of options; command-line options override it.")
        self.quiet = False
        self.has_quiet = "quiet" in self.hints  # training commands have a field of this name
        if not self.has_quiet:
            self.hints["quiet"] = bool
            switch = group.add_argument("--quiet", nargs="?", const=True, type=_truth_value)
            switch.help = "Print results and errors only."
            switch.type = self._converter(switch, "string_to_bool", [], own=True)
        group.add_argument("--debug", action="store_true", help="Print the full traceback of an error.")
        group.add_argument("-h", "--help", action="store_true", help="Print this text.")
        if self.hidden:
            group.add_argument(
                "--help-all", action="store_true", help=f"Print this text with {len(self.hidden)} more options."
            )

    def _hide_some(self, arguments: type) -> None:
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS and action not in self.hidden]
        basic = {name for cls in arguments.__mro__ for name in vars(cls).get("basic_options", ())}
        if len(shown) > MAX_LISTED_OPTIONS:
            basic |= {*self.required, *self.positionals}
            self.hidden += [action for action in shown if action.dest not in basic]

    def _finish(self, action: argparse.Action, field: "dataclasses.Field[Any]", *, own: bool) -> None:
        """Give an action its help text and its checks, and keep it out of the result if it is not given."""
        action.required, action.default = False, argparse.SUPPRESS
        if action.nargs == 0:  # the --no_ form of a switch
            action.help = argparse.SUPPRESS
            return
        kind = getattr(action.type, "__name__", "str")
        choices = list(action.choices or ())
        if kind == "string_to_bool":
            action.nargs, action.const = "?", True
            action.metavar = None if field.default is False else "true|false"
        elif 0 < len(choices) < 6:
            action.metavar = "|".join(map(str, choices))
        else:
            action.metavar = action.metavar or NUMBER_METAVARS.get(kind) or METAVARS.get(field.name, "TEXT")
        if not own:
            action.help = TRAINER_OPTIONS.get(field.name, action.help)
            if field.name not in {*TRAINER_OPTIONS, *WITHOUT_EFFECT}:
                self.hidden.append(action)
        action.help = argparse.SUPPRESS if field.name in WITHOUT_EFFECT else self._help(action, field)
        action.type, action.choices = self._converter(action, kind, choices, own=own), None

    def _help(self, action: argparse.Action, field: "dataclasses.Field[Any]") -> str:
        """Return the help text with the default and the range."""
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = getattr(default, "value", default)  # of an enumeration
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        elif isinstance(default, float):
            default = f"{default:g}"
        notes = [
            "required" if field.name in self.required else "",
            ""
            if default is None or default is False or default in ("", dataclasses.MISSING)
            else f"default: {'true' if default is True else default}",
            limits(self.hints[field.name]),
        ]
        text = (action.help or "").strip().replace("%%", "%")
        if said := ", ".join(filter(None, notes)):
            text = text.removesuffix(".")
            text = f"{text[:-1]}, {said})" if text.endswith(")") and "(default" in text else f"{text} ({said})"
        return text.replace("%", "%%")

    def _converter(self, action: argparse.Action, kind: str, choices: list[Any], *, own: bool) -> Callable[[str], Any]:
        convert: Callable[[str], Any] = action.type if callable(action.type) else str
        expected = f"one of {', '.join(map(str, choices))}" if choices else KINDS.get(kind, "a text")
        kinds = get_args(self.hints[action.dest])
        mapping = not own and any((get_origin(kind) or kind) is dict for kind in kinds)

        def converted(word: str) -> Any:
            try:
                value = convert(word)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise argparse.ArgumentTypeError(f"expected {expected}, not {word!r}") from error
            if mapping and not _is_mapping(word):
                raise argparse.ArgumentTypeError(f"expected a JSON object, or a file that holds one, not {word!r}")
            if choices and value is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"expected {expected}, not {word!r}")
            if own and value == "" and not any(part in action.dest for part in MAY_BE_EMPTY):
                raise argparse.ArgumentTypeError("expected a text, but it is empty")
            if action.dest == "device" and not DEVICE.fullmatch(str(value or "cpu")):
                raise argparse.ArgumentTypeError(
                    f"expected cpu, cuda, cuda:1, mps or another torch device, not {word!r}"
                )
            if wanted := expected_range(action.dest, self.hints[action.dest], value):
                raise argparse.ArgumentTypeError(f"must be {wanted}, not {word}")
            return value

        converted.__name__ = kind
        return converted

    def _accept(self, old: str, action: argparse.Action) -> None:
        """Accept the old name of an option, without showing it."""
        renamed = copy.copy(action)
        renamed.dest, renamed.help = old, argparse.SUPPRESS
        renamed.option_strings = list(dict.fromkeys([f"--{old}", f"--{old.replace('_', '-')}"]))
        self._add_action(renamed)

    def _action(self, name: str) -> argparse.Action:
        return next(action for action in self._actions if action.dest == name)

    # --- the command line

    def read(self, argv: list[str]) -> dict[str, Any] | None:
        """Return the values that `argv` and its configuration file give; print the help text and return None if asked to.

        Raises:
            UserError: An argument is unknown or missing, a value has the wrong type or is out of range, or the file cannot be
                read.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        words, free = argv[:end], argv[end + 1 :]
        if "--help-all" in words or not {"-h", "--help"}.isdisjoint(words):
            for action in [] if "--help-all" in words else self.hidden:
                action.help = argparse.SUPPRESS
            self.print_help()
            return None
        for word in words:
            if _is_option(word) and word.partition("=")[0] not in self._option_string_actions:
                raise self._mistake(self._unknown(word.partition("=")[0], "option"))
        known, rest = self.parse_known_args(self._whole_switches(words))
        given = vars(known)
        old = [name for name in self.renamed if name in given]
        for name in old:
            if (new := self.renamed[name]) in given:
                raise self._mistake(f"--{name} is the old name of --{new}: give one of the two")
            given[new] = given.pop(name)
        file = given.pop("config", None)
        configured, old_keys = self._configured(file, words)
        values = configured | {name: value for name, value in given.items() if name in self.hints}
        values |= self._without_names([*rest, *free], values, {name: file for name in configured})
        for name in [*self.positionals, *self.required]:
            if name in self.required and name not in values:
                raise self._mistake(self._missing(name))
        self.quiet = bool(values.get("quiet"))
        self._note([*old, *old_keys], values)
        if not self.has_quiet:
            values.pop("quiet", None)
        return values

    def _note(self, old: Iterable[str], values: Iterable[str]) -> None:
        if self.quiet:
            return
        for name in dict.fromkeys(old):
            note(f"--{name} is now called --{self.renamed[name]}; the old name still works")
        for name in sorted(WITHOUT_EFFECT.intersection(values)):
            note(f"--{name} has no effect on this command")

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` instead of printing argparse's usage text."""
        raise self._mistake(re.sub(r"^argument (--[^\s/]+)\S*: ", r"\1: ", message))

    def _mistake(self, message: str) -> UserError:
        return UserError(f"{message} (see {self.prog} --help)")

    def _whole_switches(self, words: list[str]) -> list[str]:
        """Write each switch with its value as one word: `--json "query"` must not take the query as its value."""
        switches = {name for name, action in self._option_string_actions.items() if action.nargs == "?"}
        return [
            f"{word}=true" if word in switches and follower.lower() not in TRUE | FALSE else word
            for word, follower in zip(words, [*words[1:], ""], strict=False)
        ]

    def _without_names(self, free: list[str], values: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the arguments that are given without their names."""
        found: dict[str, Any] = {}
        for name in self.positionals:
            action: Any = self._action(name)
            if name in values or not free:
                continue
            count = len(free) if action.nargs == "+" else 1
            try:
                read = [action.type(word) for word in free[:count]]
            except argparse.ArgumentTypeError as error:
                self.error(f"{name.upper()}: {error}")
            found[name] = read if action.nargs == "+" else read[0]
            free = free[count:]
        if free:
            taken = [name for name in self.positionals if name in files]
            hint = f": {files[taken[0]]} gives {taken[0]}, override it with --{taken[0]}" if taken else ""
            raise self._mistake(f"unexpected argument {free[0]!r}{hint}")
        return found

    def _missing(self, name: str) -> str:
        if name not in self.positionals:
            return f"--{name} is missing"
        lists = [action for action in self._actions if action.nargs == "+" and action.dest not in self.positionals]
        hint = "; an option that takes a list takes all words after it, so put it last" if lists else ""
        return f"{name.upper()} is missing: {self.usage}{hint}"

    def _unknown(self, word: str, kind: str) -> str:
        """Return the message for an unknown option, or an unknown key of a file."""
        names = {option.lstrip("-").replace("-", "_") for option in self._option_string_actions} - {"h"}
        close = did_you_mean(word.replace("-", "_").lstrip("_"), names, "--{}" if kind == "option" else "{}")
        return f"unknown {kind} {word!r}" + (f": {close}" if close else "")

    # --- the configuration file

    def _configured(self, file: str | None, words: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the options that the YAML file gives, converted to their fields' types, and the old names in it."""
        if sum(word == "--config" or word.startswith("--config=") for word in words) > 1 or file == "":
            raise self._mistake("--config takes one YAML file, once")
        values: dict[str, Any] = {}
        old: list[str] = []
        for key, value, place in read_items(local_path(file)) if file is not None else ():
            name = str(key).replace("-", "_")
            if name in self.renamed:
                old.append(name)
                name = self.renamed[name]
            if name not in self.hints:
                raise UserError(f"{place}: {self._unknown(str(key), 'key')}")
            if name in values:
                formerly = [word for word in old if self.renamed[word] == name]
                raise UserError(f"{place}: {name}{f' (old name: {formerly[0]})' if formerly else ''} is given twice")
            try:
                values[name] = option_value(self._action(name), value, self.hints[name])
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{place}: {key}: {error}") from error
        return values, old


def _groups(arguments: type, fields: "dict[str, dataclasses.Field[Any]]") -> list[Any]:
    """Return a dataclass of fields for each heading of the help text: one for each class that `arguments` is made of."""
    hints = get_type_hints(arguments)
    titles = [_title(cls, arguments) for cls in arguments.__mro__ if "__dataclass_fields__" in vars(cls)]
    groups: dict[str, list[Any]] = {title: [] for title in [*titles, "training", OTHER_OPTIONS]}
    for name, field in fields.items():
        field.type = hints[name]
        owner = _owner(arguments, name)
        shared = "training" if name in TRAINER_OPTIONS else OTHER_OPTIONS
        groups[shared if owner is None else _title(owner, arguments)].append(field)
    return [option_group(title, group) for title, group in groups.items() if group]


def _owner(arguments: type, name: str) -> type | None:
    """Return the class of this project that a field comes from; None if it is a library's."""
    field, fields = vars(arguments)["__dataclass_fields__"][name], "__dataclass_fields__"
    owner = next(cls for cls in reversed(arguments.__mro__) if vars(cls).get(fields, {}).get(name) is field)
    return None if owner.__module__.startswith(LIBRARIES) else owner


def _title(owner: type, arguments: type) -> str:
    """Return the heading of the options of one of the classes that `arguments` is made of: its `option_group`."""
    default = "options" if owner is arguments else "training"
    return str(vars(owner).get("option_group", default))


def _truth_value(word: str) -> bool:
    if word.lower() not in TRUE | FALSE:
        raise ValueError(word)
    return word.lower() in TRUE


def _is_mapping(word: str) -> bool:
    try:
        return isinstance(json.loads(word), dict)
    except ValueError:
        return word.lower() in ("none", "null") or Path(word).is_file()


def _is_option(word: str) -> bool:
    """Return whether argparse would take the word for an option; a negative number and a text with spaces are values."""
    return word.startswith("-") and len(word) > 1 and " " not in word and not NEGATIVE_NUMBER.match(word)
