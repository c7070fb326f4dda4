"""A command's arguments: a dataclass filled from a YAML file and from the command line, with trl's parser.

What is added to `trl.TrlParser`:

- arguments without a name: `search MODEL "query"` is read as `search --model MODEL --query "query"`;
- the values of a YAML file are checked as those of the command line are, and a mistake is reported with file and line;
- every mistake is a `UserError` of one line instead of a usage text or a traceback.
"""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from revela_hub.errors import UserError

ArgumentsT = TypeVar("ArgumentsT")

KINDS = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}
TRUTH_VALUES = {"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"}  # what trl's string_to_bool takes


def parse_arguments(
    arguments: type[ArgumentsT],
    argv: Sequence[str],
    *,
    program: str,
    description: str,
    positionals: Sequence[str] = (),
) -> ArgumentsT | None:
    """Fills the dataclass `arguments` from `argv` and from the YAML file that `argv` may name with `--config`.

    The command line goes before the file, the file before the dataclass's defaults.

    Args:
        arguments: a dataclass; a field's `metadata["help"]` is its help text.
        argv: the words of the command line after the command's name.
        program: the command's name, for the help text and the messages.
        description: the help text's beginning.
        positionals: the fields that may be given without their names, in order; the last may be a list, which takes
            all that is left.

    Returns:
        The filled dataclass, or None when `argv` asked for help, which is then printed.

    Raises:
        UserError: an unknown or missing argument, a value of the wrong kind, a file that is missing or not valid.
    """
    parser = CommandParser(arguments, program, description, positionals)
    words, config = parser.take_config(list(argv))
    if words is None:
        parser.print_help()
        return None
    if config is not None:
        parser.set_defaults_with_config(**parser.read_config(config, get_type_hints(arguments)))
    words = parser.name_positionals(words)
    try:
        filled: ArgumentsT
        filled, *_, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:  # options that do not go together: the dataclass's __post_init__ says so
        raise UserError(f"{error} (see {program} --help)") from error
    if unknown:
        raise UserError(f"{parser.unknown(unknown[0], 'option')} (see {program} --help)")
    return filled


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds the defaults to the options."""


class _Option(NamedTuple):
    """An option on the command line: its word (`--corpus`, or `--top=3` with its value) and the values after it."""

    word: str
    values: list[str]
    action: argparse.Action | None

    def words(self) -> list[str]:
        """The option's words as argparse reads them, also where the value starts with a dash (`--lr -1e-4`)."""
        return [f"{self.word}={self.values[0]}"] if len(self.values) == 1 else [self.word, *self.values]


class CommandParser(TrlParser):
    """trl's parser for one dataclass, with positional arguments, and with mistakes raised as `UserError`."""

    def __init__(self, arguments: type, program: str, description: str, positionals: Sequence[str]) -> None:
        """Takes what `parse_arguments` takes."""
        dataclass_types: Any = [arguments]  # any dataclass; trl's own type for it takes none
        super().__init__(
            dataclass_types=dataclass_types,
            prog=program,
            description=description.strip(),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,  # an abbreviation that works today would break when an option is added
        )
        self.positionals = {name: self._action(name) for name in positionals}
        names = [f"{name.upper()}{' ...' if action.nargs == '+' else ''}" for name, action in self.positionals.items()]
        self.usage = " ".join([program, *names, "[options]"])
        for action in self.positionals.values():
            action.help = f"{action.help or ''} [may be given without the option's name]".strip()
        group = self.add_argument_group("configuration file")
        group.add_argument("--config", metavar="FILE", help="a YAML file of options; the command line goes before it")

    def error(self, message: str) -> NoReturn:
        """Replaces argparse's usage text and exit.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message} (see {self.prog} --help)")

    def unknown(self, word: str, kind: str) -> str:
        """The message for an option or a key of a file that no field answers to."""
        names = [action.dest for action in self._actions]
        close = difflib.get_close_matches(word.partition("=")[0].lstrip("-").replace("-", "_"), names, n=1)
        dashes = "--" if kind == "option" else ""
        suggestion = f": did you mean {dashes}{close[0]}?" if close else ""
        return f"unknown {kind} {word!r}{suggestion}"

    def _action(self, name: str) -> argparse.Action:
        return next(action for action in self._actions if action.dest == name)

    # --- the configuration file

    def take_config(self, argv: list[str]) -> tuple[list[str] | None, Path | None]:
        """Splits `--config FILE` off; the words are None where `argv` asks for help.

        Raises:
            UserError: `--config` without a file, or twice.
        """
        words: list[str] = []
        files: list[str] = []
        rest = iter(argv)
        for word in rest:
            if word == "--":
                words += [word, *rest]
            elif word in ("-h", "--help"):
                return None, None
            elif word == "--config":
                files.append(next(rest, ""))
            elif word.startswith("--config="):
                files.append(word.removeprefix("--config="))
            else:
                words.append(word)
        if len(files) > 1 or files == [""]:
            raise UserError(f"--config takes one YAML file, once (see {self.prog} --help)")
        return words, Path(files[0]) if files else None

    def read_config(self, path: Path, hints: dict[str, Any]) -> dict[str, Any]:
        """The options that the YAML file gives, converted to their fields' types.

        Args:
            path: the file: a mapping from field names (dashes or underscores) to values.
            hints: the dataclass's type hints.

        Raises:
            UserError: with file and line, the file cannot be read, is not such a mapping, has a key that is not a
                field or is given twice, or a value that is not of the field's type.
        """
        values: dict[str, Any] = {}
        for key, value, place in _yaml_items(path):
            name = str(key).replace("-", "_")
            if name not in hints:
                raise UserError(f"{place}: {self.unknown(str(key), 'key')}")
            if name in values:
                raise UserError(f"{place}: {key} is given twice")
            try:
                values[name] = _converted(self._action(name), value, hints[name])
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise UserError(f"{place}: {key}: {_expected(self._action(name), value)}") from error
        return values

    # --- arguments without a name

    def name_positionals(self, words: list[str]) -> list[str]:
        """Puts the option's name before every argument that was given without it.

        A list option takes all words up to the next option, so in `--corpus a b "query"` it takes the query too; as
        many of the last words as required arguments are missing are then taken back from it.

        Raises:
            UserError: an argument is missing, or there is one too many.
        """
        free, options = self._split(words)
        given = {option.action.dest for option in options if option.action}
        wanted = [name for name in self.positionals if name not in given]
        required = [name for name in wanted if self.positionals[name].required]
        if options and len(free) < len(required):
            values = options[-1].values
            spare = min(len(required) - len(free), len(values) - 1)
            if spare > 0 and words[-1] == values[-1]:
                free += values[-spare:]
                del values[-spare:]
        if len(free) < len(required):
            raise UserError(f"{required[len(free)].upper()} is missing: {self.usage} (see {self.prog} --help)")
        # Fewer words than arguments: those that have a value already, from the file or by default, go without.
        for name in [name for name in wanted if name not in required][: max(0, len(wanted) - len(free))]:
            wanted.remove(name)
        named = [word for option in options for word in option.words()]
        for position, name in enumerate(wanted):
            last = position == len(wanted) - 1
            if last and self.positionals[name].nargs == "+":
                return [*named, f"--{name}", *free[position:]]
            named.append(f"--{name}={free[position]}")
        if len(free) > len(wanted):
            raise UserError(f"unexpected argument {free[len(wanted)]!r} (see {self.prog} --help)")
        return named

    def _split(self, words: list[str]) -> tuple[list[str], list[_Option]]:
        """The words that belong to no option, and the options with their values."""
        free: list[str] = []
        options: list[_Option] = []
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if word == "--":
                return free + words[position:], options
            if not _is_option(word):
                free.append(word)
                continue
            action = self._option_string_actions.get(word.partition("=")[0])
            values = [] if "=" in word or action is None else _values(action, words[position:])
            position += len(values)
            options.append(_Option(word, values, action))
        return free, options


def _is_option(word: str) -> bool:
    """Whether argparse would take the word for an option; a negative number and a text with spaces are values."""
    if not word.startswith("-") or len(word) == 1 or " " in word:
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _values(action: argparse.Action, words: list[str]) -> list[str]:
    """The words after an option that are its values: none, one, or all up to the next option."""
    count = next((i for i, word in enumerate(words) if _is_option(word)), len(words))
    if action.nargs == "+":
        return words[:count]
    if action.nargs == "?":  # a switch: `--json "query"` must not take the query for its value
        return words[: count and words[0].lower() in TRUTH_VALUES]
    return words[: min(count, 1 if action.nargs is None else 0)]


def _yaml_items(path: Path) -> list[tuple[Any, Any, str]]:
    """The keys and values of a YAML mapping, each with its place, `file:line`."""
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
            (
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


def _converted(action: argparse.Action, value: Any, hint: Any) -> Any:
    """A value from YAML as the command line would have given it.

    Raises:
        ValueError, TypeError, argparse.ArgumentTypeError: it is not of the field's type.
    """
    if value is None:
        return None
    if action.nargs == "+":
        # An item may be a mapping, which the command line cannot say; what it holds is for the command to check.
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else _converted_word(action, item) for item in items]
    if isinstance(value, (list, dict)):
        if type(value) not in {get_origin(kind) or kind for kind in (hint, *get_args(hint))}:
            raise TypeError
        return value
    return _converted_word(action, value)


def _converted_word(action: argparse.Action, value: Any) -> Any:
    # YAML reads an unquoted no, off, yes and on as a truth value, which as a word would be "False" or "True".
    if isinstance(value, (list, dict)) or (isinstance(value, bool) and _kind(action) != "string_to_bool"):
        raise TypeError
    converted = action.type(str(value)) if callable(action.type) else value
    if action.choices is not None and converted not in action.choices:
        raise ValueError
    return converted


def _kind(action: argparse.Action) -> str:
    return getattr(action.type, "__name__", "str")


def _expected(action: argparse.Action, value: Any) -> str:
    if action.choices is not None:
        kind = f"one of {', '.join(map(str, action.choices))}"
    else:
        kind = KINDS.get(_kind(action), "a text")
    many = "a list, each item " if action.nargs == "+" and isinstance(value, list) else ""
    hint = " (put the word in quotes)" if isinstance(value, bool) else ""
    return f"expected {many}{kind}, not {value!r}{hint}"
