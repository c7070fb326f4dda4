"""Options without importing the command: the same fields as the real dataclass has, and nothing heavy."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from revela_hub.cli.main import COMMANDS
from revela_hub.cli.outline import outline
from revela_hub.cli.parser import CommandParser


@pytest.mark.parametrize("name", COMMANDS)
def test_the_outline_has_the_options_of_the_command(name: str) -> None:
    module = COMMANDS[name].module
    light, real = outline(module), importlib.import_module(module)
    assert light.__doc__ == real.__doc__
    assert getattr(light, "POSITIONALS", ()) == getattr(real, "POSITIONALS", ())
    assert [field.name for field in dataclasses.fields(light.Arguments)] == [
        field.name for field in dataclasses.fields(real.Arguments)
    ]
    for ours, theirs in zip(options(light.Arguments), options(real.Arguments), strict=True):
        if ours["dest"] == "optim":  # its default asks which torch there is
            ours["help"] = theirs["help"]
        assert ours == theirs
    plain = get_type_hints(real.Arguments, include_extras=True)
    for field, hint in get_type_hints(light.Arguments, include_extras=True).items():
        if hint in (int, float, bool, str) or "Annotated" in str(hint):
            assert hint == plain[field]


def options(arguments: type) -> list[dict[str, Any]]:
    parser = CommandParser(arguments, "p", "d")
    names = ("dest", "option_strings", "nargs", "const", "metavar", "help")
    return [{name: getattr(action, name) for name in names} for action in parser._actions]


def test_only_what_is_asked_for_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "outlined"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('run')\n")
    (package / "base.py").write_text(
        "import torch\nfrom enum import Enum\n\n"
        "class Kind(Enum):\n    A = 'a'\n\n    def f(self):\n        return torch\n\n"
        "DEFAULT = max(LOW, 3)\nLOW = 2\nBROKEN = 1 / 0\n"
    )
    (package / "options.py").write_text(
        "from dataclasses import dataclass, field\nfrom torch import Tensor\n"
        "from .base import DEFAULT, Kind\n"
        "import torch\n\n@torch.no_grad()\n@dataclass\nclass Options(Tensor):\n"
        "    '''Its options.'''\n    kind: Kind | Tensor = Kind.A\n    size: int = field(default=DEFAULT)\n"
        "    def g(self) -> Tensor:\n        raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("revela_hub.cli.outline.PARSED_PACKAGES", {"outlined"})
    options = outline("outlined.options")["Options"]
    assert [(field.name, getattr(field.default, "value", field.default)) for field in dataclasses.fields(options)] == [
        ("kind", "a"),
        ("size", 3),
    ]
    with pytest.raises(NameError, match="'nothing' is not defined in outlined.options"):
        outline("outlined.options")["nothing"]
    with pytest.raises(ModuleNotFoundError):
        outline("outlined.absent")
