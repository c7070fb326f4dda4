"""A command's arguments: a dataclass filled from a YAML file and from the command line, with trl's parser.

What is added to `trl.TrlParser`:

- arguments without a name: `search MODEL "query"` is read as `search --model MODEL --query "query"`;
- numbers are checked against the ranges of `revela_hub.ranges`, whether they come from the command line or the file;
- every mistake is a `UserError` of one line, with the file and its line where it is the file's;
- the help text shows the options of ours, and those of transformers' Trainer that most runs set; `--help-all` shows all.
"""

import argparse
import copy
import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from trl import TrlParser

from revela_hub.cli.config_file import read_items
from revela_hub.errors import UserError, did_you_mean, first_line, install_hint
from revela_hub.output import note
from revela_hub.ranges import expected_range, range_in_words
from revela_hub.renamed import old_names

ArgumentsT = TypeVar("ArgumentsT")

KINDS = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}
METAVARS = {"int": "N", "float": "X", "string_to_bool": "[true|false]", "str": "WORD"}
TRUTH_VALUES = {"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"}  # what trl's string_to_bool takes
MAY_BE_EMPTY = ("prompt", "column", "instruction")  # parts of the names of texts that say something by being empty

DEVICE = re.compile(r"(cpu|cuda|mps|xpu|npu|hpu|mlu|musa|xla)(:\d+)?")
LIBRARIES = ("transformers.", "sentence_transformers.")  # whose options are not ours
TRAINER = "options of transformers' Trainer"
# Those of them that most runs set.
ESSENTIAL = frozenset(
    """activation_checkpointing bf16 dataloader_num_workers eval_steps eval_strategy fp16 gradient_accumulation_steps
    hub_model_id hub_private_repo learning_rate logging_steps lr_scheduler_type max_grad_norm max_steps num_train_epochs
    output_dir per_device_train_batch_size push_to_hub report_to resume_from_checkpoint save_steps save_strategy
    save_total_limit seed torch_compile use_cpu warmup_steps weight_decay""".split()
)


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
            all that is left. One that is given by its name, or in the file, takes no word.

    Returns:
        The filled dataclass, or None when `argv` asked for help, which is then printed.

    Raises:
        UserError: an unknown or missing argument, a value of the wrong kind or out of range, a file that is missing or
            not valid.
    """
    values = CommandParser(arguments, program, description, positionals).read(list(argv))
    return None if values is None else build_arguments(arguments, values, program)


def build_arguments(arguments: type[ArgumentsT], values: dict[str, Any], program: str) -> ArgumentsT:
    """The dataclass with the values that were given.

    Raises:
        UserError: options that do not go together, or that need a package; the dataclass's `__post_init__` says so, and
            those of transformers say it with whatever exception comes.
    """
    if values.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise UserError(install_hint("deepspeed"))
    try:
        return arguments(**values)
    except ValueError as error:
        raise UserError(f"{first_line(error)} (see {program} --help)") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ImportError, OSError) as error:
        raise UserError(f"the options cannot be used: {type(error).__name__}: {first_line(error)}") from error


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows one spelling of an option: `--max_length`, and not `--max_length`, which is accepted as well."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0 if action.dest != "help" else -1]
        return (
            name if action.nargs == 0 else f"{name} {action.metavar or 'WORD'}{' ...' if action.nargs == '+' else ''}"
        )


class _Places(NamedTuple):
    """The values of a configuration file, and where it says them."""

    values: dict[str, Any]
    file: Path | None
    old: list[str]  # the old names that it uses


class CommandParser(TrlParser):
    """trl's parser for one dataclass, with positional arguments, and with mistakes raised as `UserError`."""

    def __init__(self, arguments: type, program: str, description: str, positionals: Sequence[str] = ()) -> None:
        """Takes what `parse_arguments` takes."""
        self.hints = get_type_hints(arguments, include_extras=True)
        self.positionals = list(positionals)
        self.required: list[str] = []
        self.hidden: list[argparse.Action] = []  # shown by --help-all only
        dataclass_types: Any = [arguments]  # any dataclass; trl's own type for it takes none
        super().__init__(
            dataclass_types=dataclass_types,
            prog=program,
            description=description.strip(),
            formatter_class=_HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,  # an abbreviation that works today would break when an option is added
            add_help=False,
        )
        self.renamed = old_names({action.dest for action in self._actions})
        for old, new in self.renamed.items():
            self._accept(old, self._action(new))
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)  # -1e-4 is a value
        names = [f"{name.upper()}{' ...' if self._action(name).nargs == '+' else ''}" for name in self.positionals]
        self.usage = " ".join([program, *names, "[options]"])
        group = self.add_argument_group("more")
        group.add_argument("--config", metavar="FILE", help="a YAML file of options; the command line goes before it")
        self.quiet = False  # of what was read last
        self.has_quiet = "quiet" in self.hints  # a training run has a field of that name
        if not self.has_quiet:
            self.hints["quiet"] = bool
            kind = "string_to_bool"
            switch = group.add_argument("--quiet", nargs="?", const=True, metavar=METAVARS[kind], type=_truth_value)
            switch.help, switch.type = "print results and errors only", self._converter(switch, kind, [], own=True)
        group.add_argument("--traceback", action="store_true", help="say where in the program an error comes from")
        group.add_argument("-h", "--help", action="store_true", help="print this text")
        if self.hidden:
            group.add_argument(
                "--help-all",
                action="store_true",
                help=f"print {len(self.hidden)} more {TRAINER}, and all of their help",
            )

    # --- the options

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Adds the dataclass's fields, those of each class that it is made of in a group of their own."""
        hints = get_type_hints(dtype)
        owners = [cls for cls in dtype.__mro__ if "__dataclass_fields__" in vars(cls)]
        groups = {
            title: self.add_argument_group(title) for title in dict.fromkeys(_title(cls, dtype) for cls in owners)
        }
        for field in filter(lambda field: field.init, dataclasses.fields(dtype)):
            owner = next(cls for cls in reversed(owners) if vars(cls)["__dataclass_fields__"].get(field.name) is field)
            field.type = hints[field.name]
            count = len(self._actions)
            self._parse_dataclass_field(groups[_title(owner, dtype)], field)  # type: ignore[arg-type]
            for action in self._actions[count:]:
                self._finish(action, field, own=not owner.__module__.startswith(LIBRARIES))

    def _accept(self, old: str, action: argparse.Action) -> None:
        """Accepts the old name of an option, without showing it."""
        renamed = copy.copy(action)
        renamed.dest, renamed.help = old, argparse.SUPPRESS
        renamed.option_strings = list(dict.fromkeys([f"--{old}", f"--{old.replace('_', '-')}"]))
        self._add_action(renamed)

    def _finish(self, action: argparse.Action, field: "dataclasses.Field[Any]", *, own: bool) -> None:
        """Gives an action its help text and its checks; what was not given stays out of the result."""
        if action.required:
            self.required.append(field.name)
        action.required, action.default = False, argparse.SUPPRESS
        if action.nargs == 0:  # the --no_ form of a switch that is on
            action.help = argparse.SUPPRESS
            return
        kind = getattr(action.type, "__name__", "str")
        if kind == "string_to_bool":
            action.nargs, action.const = "?", True
        action.help = self._help(action, field)
        choices = list(action.choices or ())
        action.metavar = "|".join(map(str, choices)) if 0 < len(choices) < 6 else METAVARS.get(kind)
        action.type, action.choices = self._converter(action, kind, choices, own=own), None
        if not own and field.name not in ESSENTIAL:
            self.hidden.append(action)

    def _help(self, action: argparse.Action, field: "dataclasses.Field[Any]") -> str:
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = getattr(default, "value", default)  # of an enumeration
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        notes = [
            "required" if field.name in self.required else "",
            range_in_words(field.name, self.hints[field.name]),
            f"default: {default}" if default not in ("", None, False, dataclasses.MISSING) else "",
            "may be given without the option's name" if field.name in self.positionals else "",
        ]
        said = "; ".join(filter(None, notes))
        text = f"{action.help or ''} ({said})" if said else action.help or ""
        return text.replace("%%", "%").replace("%", "%%").strip()

    def _converter(self, action: argparse.Action, kind: str, choices: list[Any], *, own: bool) -> Callable[[str], Any]:
        convert: Callable[[str], Any] = action.type if callable(action.type) else str
        expected = f"one of {', '.join(map(str, choices))}" if choices else KINDS.get(kind, "a text")

        def converted(word: str) -> Any:
            try:
                value = convert(word)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise argparse.ArgumentTypeError(f"expected {expected}, not {word!r}") from error
            if not own and _takes_mapping(self.hints[action.dest]) and not _is_mapping(word):
                raise argparse.ArgumentTypeError(f"expected a JSON object, or a file that holds one, not {word!r}")
            if choices and value is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"expected {expected}, not {word!r}")
            if own and value == "" and not any(part in action.dest for part in MAY_BE_EMPTY):
                raise argparse.ArgumentTypeError("expected a text, and it is empty")
            if action.dest == "device" and not DEVICE.fullmatch(str(value or "cpu")):
                raise argparse.ArgumentTypeError(
                    f"expected cpu, cuda, cuda:1, mps or another device of torch, not {word!r}"
                )
            if wanted := expected_range(action.dest, self.hints[action.dest], value):
                raise argparse.ArgumentTypeError(f"must be {wanted}, not {word}")
            return value

        converted.__name__ = kind
        return converted

    def _action(self, name: str) -> argparse.Action:
        return next(action for action in self._actions if action.dest == name)

    # --- the command line

    def read(self, argv: list[str]) -> dict[str, Any] | None:
        """The values that `argv` and its configuration file give; None when help was asked for, which is then printed.

        Raises:
            UserError: as `parse_arguments`.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        words, free = argv[:end], argv[end + 1 :]
        if "--help-all" in words or not {"-h", "--help"}.isdisjoint(words):
            self._print_help(everything="--help-all" in words)
            return None
        for word in words:
            if _is_option(word) and word.partition("=")[0] not in self._option_string_actions:
                raise UserError(f"{self._unknown(word.partition('=')[0], 'option')} (see {self.prog} --help)")
        known, rest = self.parse_known_args(self._whole_switches(words))
        given = vars(known)
        old = {name: given[name] for name in self.renamed if name in given}
        for name, value in old.items():
            if (new := self.renamed[name]) in given:
                raise UserError(f"--{name} is the old name of --{new}: give one of the two (see {self.prog} --help)")
            given[new] = value
        configured = self._configured(given.pop("config", None), words)
        values = configured.values | {name: value for name, value in given.items() if name in self.hints}
        values |= self._without_names([*rest, *free], values, configured)
        for name in [*self.positionals, *self.required]:
            if name in self.required and name not in values:
                raise UserError(f"{self._missing(name)} (see {self.prog} --help)")
        self.quiet = bool(values.get("quiet"))
        for name in [] if self.quiet else dict.fromkeys([*old, *configured.old]):
            note(f"--{name} is now called --{self.renamed[name]}; the old name still works")
        if not self.has_quiet:
            values.pop("quiet", None)
        return values

    def error(self, message: str) -> NoReturn:
        """Replaces argparse's usage text and exit.

        Raises:
            UserError: always.
        """
        message = re.sub(r"^argument (--[^\s/]+)\S*: ", r"\1: ", message)
        raise UserError(f"{message} (see {self.prog} --help)")

    def _print_help(self, *, everything: bool) -> None:
        for action in [] if everything else self.hidden:
            action.help = argparse.SUPPRESS
        self.print_help()

    def _whole_switches(self, words: list[str]) -> list[str]:
        """Each switch with its value in one word: `--json "query"` must not take the query for it."""
        switches = {name for name, action in self._option_string_actions.items() if action.nargs == "?"}
        return [
            f"{word}=true" if word in switches and follower.lower() not in TRUTH_VALUES else word
            for word, follower in zip(words, [*words[1:], ""], strict=False)
        ]

    def _without_names(self, free: list[str], values: dict[str, Any], configured: _Places) -> dict[str, Any]:
        """The values of the arguments that are given without their names."""
        found: dict[str, Any] = {}
        for name in self.positionals:
            action = self._action(name)
            if name in values or not free:
                continue
            count = len(free) if action.nargs == "+" else 1
            try:
                read = [self._from_word(action, word) for word in free[:count]]
            except argparse.ArgumentTypeError as error:
                self.error(f"{name.upper()}: {error}")
            found[name] = read if action.nargs == "+" else read[0]
            free = free[count:]
        if free:
            taken = [name for name in self.positionals if name in configured.values]
            hint = f": {taken[0]} stands in {configured.file}, replace it with --{taken[0]}" if taken else ""
            raise UserError(f"unexpected argument {free[0]!r}{hint} (see {self.prog} --help)")
        return found

    def _from_word(self, action: argparse.Action, word: str) -> Any:
        assert callable(action.type)
        return action.type(word)

    def _missing(self, name: str) -> str:
        if name not in self.positionals:
            return f"--{name} is missing"
        lists = [action for action in self._actions if action.nargs == "+" and action.dest not in self.positionals]
        hint = "; an option with a list takes all words after it, so it goes last" if lists else ""
        return f"{name.upper()} is missing: {self.usage}{hint}"

    def _unknown(self, word: str, kind: str) -> str:
        """The message for an option or a key of a file that no field answers to."""
        names = {option.lstrip("-").replace("-", "_") for option in self._option_string_actions} - {"h"}
        known = {name: self.renamed.get(name, name) for name in sorted(names)}
        suggestion = did_you_mean(word.replace("-", "_").lstrip("_"), known, "--{}" if kind == "option" else "{}")
        return f"unknown {kind} {word!r}" + (f": {suggestion}" if suggestion else "")

    # --- the configuration file

    def _configured(self, file: str | None, words: list[str]) -> _Places:
        """The options that the YAML file gives, converted to their fields' types.

        Raises:
            UserError: with file and line, the file cannot be read, is not a mapping, has a key that is not a field or
                is given twice, or a value that is not of the field's type.
        """
        if sum(word == "--config" or word.startswith("--config=") for word in words) > 1 or file == "":
            raise UserError(f"--config takes one YAML file, once (see {self.prog} --help)")
        values: dict[str, Any] = {}
        old: list[str] = []
        for key, value, place in read_items(Path(file)) if file is not None else ():
            name = str(key).replace("-", "_")
            if name in self.renamed:
                old.append(name)
                name = self.renamed[name]
            if name not in self.hints:
                raise UserError(f"{place}: {self._unknown(str(key), 'key')}")
            if name in values:
                formerly = (
                    f" (old name: {', '.join(word for word in old if self.renamed[word] == name)})" if old else ""
                )
                raise UserError(f"{place}: {name}{formerly} is given twice")
            try:
                values[name] = self._from_file(self._action(name), value, self.hints[name])
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{place}: {key}: {error}") from error
        return _Places(values, None if file is None else Path(file), old)

    def _from_file(self, action: argparse.Action, value: Any, hint: Any) -> Any:
        """A value from YAML as the command line would have given it.

        Raises:
            argparse.ArgumentTypeError: the command line would not have taken it.
        """
        if value is None and type(None) in get_args(hint):
            return None
        if action.nargs == "+":
            # An item may be a mapping, which the command line cannot say; what it holds is for the command to check.
            items = value if isinstance(value, list) else [value]
            return [item if isinstance(item, dict) else self._plain(action, item) for item in items]
        if isinstance(value, (list, dict)) and type(value) in {
            get_origin(kind) or kind for kind in (hint, *get_args(hint))
        }:
            return value
        return self._plain(action, value)

    def _plain(self, action: argparse.Action, value: Any) -> Any:
        # YAML reads an unquoted no, off, yes and on as a truth value, which as a word would be "False" or "True".
        kind = getattr(action.type, "__name__", "str")
        if value is None or isinstance(value, (list, dict)) or (isinstance(value, bool) and kind != "string_to_bool"):
            hint = " (put the word in quotes)" if isinstance(value, bool) else ""
            raise argparse.ArgumentTypeError(f"expected {KINDS.get(kind, 'a text')}, not {value!r}{hint}")
        return self._from_word(action, str(value))


def _title(owner: type, arguments: type) -> str:
    """The heading of the options of one of the classes that `arguments` is made of."""
    if owner.__module__.startswith(LIBRARIES):
        return TRAINER
    default = "options" if owner is arguments else "training"
    return str(vars(owner).get("_argument_group_name", default))  # as HfArgumentParser reads it


def _truth_value(word: str) -> bool:
    if word.lower() not in TRUTH_VALUES:
        raise ValueError(word)
    return word.lower() in {"yes", "true", "t", "y", "1"}


def _takes_mapping(hint: Any) -> bool:
    return any((get_origin(kind) or kind) is dict for kind in get_args(hint))


def _is_mapping(word: str) -> bool:
    try:
        return isinstance(json.loads(word), dict)
    except ValueError:
        return word.lower() in ("none", "null") or Path(word).is_file()


def _is_option(word: str) -> bool:
    """Whether argparse would take the word for an option; a negative number and a text with spaces are values."""
    return (
        word.startswith("-") and len(word) > 1 and " " not in word and not re.match(r"-(\d|\.\d|inf|nan)", word, re.I)
    )
