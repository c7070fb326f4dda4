"""The command line: dispatch, arguments with and without names, YAML files, exit statuses, one line per mistake."""

import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

import revela_hub
from revela_hub.cli import main as cli
from revela_hub.errors import UserError
from revela_hub.output import is_quiet, progress_bar
from revela_hub.ranges import PositiveFloat


@dataclass
class ProbeArguments:
    model: str = field(metadata={"help": "A model."})
    query: str = field(metadata={"help": "A question."})
    corpus: list[str] = field(default_factory=lambda: ["."], metadata={"help": "Files."})
    top: int = field(default=10, metadata={"help": "How many."})
    margin: float = field(default=1e-4, metadata={"help": "100% of it."})
    temperature: PositiveFloat = field(default=0.5, metadata={"help": "Of the softmax."})
    limit: int | None = field(default=None, metadata={"help": "At most."})
    json: bool = field(default=False, metadata={"help": "As JSON."})
    cache: bool = field(default=True, metadata={"help": "Keep."})
    span: Literal["full", "first_half"] = field(default="full", metadata={"help": "How much."})
    device: str | None = field(default=None, metadata={"help": "Where."})
    batch_size: int = field(default=32, metadata={"help": "At a time."})
    extra: dict[str, int] | str | None = field(default=None, metadata={"help": "More."})
    fail: str | None = field(default=None, metadata={"help": "How to fail."})


class Probe(types.ModuleType):
    """Replaces a command's module and keeps its arguments."""

    def __init__(self) -> None:
        super().__init__(
            "revela_hub.cli.commands.probe", "Asks a model.\n\nExamples:\n\n    revela-hub probe MODEL 'why?'\n"
        )
        self.Arguments: type = ProbeArguments
        self.POSITIONALS = ("model", "query")
        self.ran_with: list[ProbeArguments] = []

    def run(self, arguments: ProbeArguments) -> None:
        self.ran_with.append(arguments)
        if arguments.fail == "user":
            raise UserError("corpus.jsonl:3: not JSON:\nwrite one object per line")
        if arguments.fail == "interrupt":
            raise KeyboardInterrupt
        if arguments.fail == "bug":
            raise RuntimeError("a bug")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    module = Probe()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command(module.__name__, "ask a model"))
    return module


def run(probe: Probe, *words: str) -> ProbeArguments:
    """The arguments that the probe is run with."""
    assert cli.main(["probe", *words]) == 0
    return probe.ran_with[-1]


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a mistake prints."""
    assert cli.main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("revela-hub: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("revela-hub: error: ").removesuffix(f"{cli.DEBUG}\n")


# --- finding the command


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert command.summary in out
    assert max(map(len, out.splitlines())) <= 120
    assert cli.main(["train"]) == 0
    out = capsys.readouterr().out
    assert "train revela" in out and "evaluate" not in out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"revela-hub {revela_hub.__version__}\n"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: revela-hub {name} ")
    assert f"revela-hub {name} " in out.partition("\n")[2], "the help text has an example"
    assert "--config" in out


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean search?" in mistake(capsys, "serach")
    assert "choose one of quickstart, adapt, " in mistake(capsys, "xyzzy")
    assert "did you mean train revela?" in mistake(capsys, "train", "revella")
    assert "unknown command '--verbose'" in mistake(capsys, "--verbose")


# --- arguments


@pytest.mark.parametrize(
    "words",
    [
        ["minilm", "why?", "--corpus", "a", "b"],
        ["minilm", "--corpus", "a", "b", "--", "why?"],
        ["--corpus", "a", "b", "--model", "minilm", "--query", "why?"],
        ["--model", "minilm", "why?", "--corpus", "a", "b"],
    ],
)
def test_positionals_around_a_list_option(probe: Probe, words: list[str]) -> None:
    assert run(probe, *words) == ProbeArguments("minilm", "why?", corpus=["a", "b"])


def test_switches_do_not_take_the_next_word(probe: Probe) -> None:
    assert run(probe, "--json", "minilm", "--no_cache", "why?") == ProbeArguments(
        "minilm", "why?", json=True, cache=False
    )
    assert run(probe, "minilm", "why?", "--json", "false", "--cache", "no").cache is False


def test_values_and_queries_that_start_with_a_dash(probe: Probe) -> None:
    arguments = run(probe, "minilm", "- why?", "--margin", "-1e-4", "--top", "-1")
    assert (arguments.query, arguments.margin, arguments.top) == ("- why?", -1e-4, -1)
    assert run(probe, "minilm", "--", "--why").query == "--why"
    assert run(probe, "minilm", "--", "--help").query == "--help"
    probe.POSITIONALS = ("model", "query", "corpus")  # a list takes all remaining words
    assert run(probe, "minilm", "why?", "a", "b") == ProbeArguments("minilm", "why?", corpus=["a", "b"])


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ([], "MODEL is missing"),
        (["minilm", "why?", "how?"], "unexpected argument 'how?'"),
        (["--topp", "3"], "did you mean --top?"),  # reported before missing options
        (["minilm", "why?", "--co=a"], "unknown option '--co'"),  # no abbreviations
        (["minilm", "why?", "--top", "many"], "--top: expected N, not 'many'"),
        (["minilm", "why?", "--json=maybe"], "--json: expected true|false, not 'maybe'"),
        (["minilm", "why?", "--temperature", "0"], "temperature must be above 0"),
        (["", "why?"], "MODEL: the text is empty"),
    ],
)
def test_mistakes_in_arguments(probe: Probe, capsys: pytest.CaptureFixture[str], words: list[str], fact: str) -> None:
    assert fact in mistake(capsys, "probe", *words)
    assert not probe.ran_with


# --- the YAML file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "probe.yaml"
    file.write_text(
        "# what to ask\nmodel: minilm\ncorpus: [a, b]\nmargin: 1e-5\ntop: 3\nlimit: null\n"
        "json: yes\ncache: false\nspan: first_half\nextra:\n  depth: 2\n"
    )
    return file


def test_config_gives_defaults_and_the_command_line_overrides(
    probe: Probe, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(config.parent))
    expected = ProbeArguments(
        "minilm", "why?", ["a", "b"], 3, 1e-5, limit=None, json=True, cache=False, span="first_half", extra={"depth": 2}
    )
    assert run(probe, "--config", str(config), "why?") == expected
    assert run(probe, "why?", f"--config=~/{config.name}") == expected  # which a shell does not expand
    overridden = run(
        probe, "--config", str(config), "--model", "other", "why?", "--corpus", "c", "--top", "4", "--cache"
    )
    assert (overridden.model, overridden.corpus, overridden.top, overridden.cache) == ("other", ["c"], 4, True)
    config.write_text("corpus: a\n")
    assert run(probe, "minilm", "why?", "--config", str(config)).corpus == ["a"]
    config.write_text("corpus:\n- a\n- path: b\n  split: dev\n")
    assert run(probe, "minilm", "why?", "--config", str(config)).corpus == ["a", {"path": "b", "split": "dev"}]
    config.write_text("# nothing\n")
    assert run(probe, "minilm", "why?", "--config", str(config)) == ProbeArguments("minilm", "why?")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("top: 3\ntopp: 4\n", "unknown option 'topp': did you mean --top?"),
        ("top: 3\n\ntop: 4\n", "given twice"),
        ("top: many\n", "top: expected N, not 'many'"),
        ("model: no\n", "model: expected MODEL, not False"),
        ("corpus: [a, [b]]\n", "corpus: expected PATH, not ['b']"),
        ("top: 3\nmodel: [a\n", "not valid YAML"),
    ],
)
def test_mistakes_in_the_config(
    probe: Probe, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, fact: str
) -> None:
    file = tmp_path / "probe.yaml"
    file.write_text(text)
    line = mistake(capsys, "probe", "minilm", "why?", "--config", str(file))
    assert str(file) in line and fact in line


@pytest.mark.parametrize("words", [["--quiet"], ["--quiet", "true"], ["--quiet=yes"], ["--config", "quiet.yaml"]])
def test_quiet_from_the_command_line_and_from_the_file(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quiet.yaml").write_text("quiet: true\n")
    seen: list[bool] = []
    monkeypatch.setattr(probe, "run", lambda _: seen.append(is_quiet()))
    assert cli.main(["probe", "minilm", "why?", *words]) == 0
    assert cli.main(["probe", "minilm", "why?", "--quiet", "false"]) == 0
    assert cli.main(["probe", "minilm", "why?", "--config", "quiet.yaml", "--quiet=false"]) == 0
    assert seen == [True, False, False]


def test_without_a_terminal_the_end_of_a_bar_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar(range(3), show=True)
    bar.mininterval = bar.delay = 0
    assert len([*bar]) == 3 and capsys.readouterr().err.count("3/3") == 1


# --- how a command ends


def test_mistakes_and_interrupts(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "corpus.jsonl:3: not JSON: write one object per line"
    assert mistake(capsys, "probe", "minilm", "why?", "--fail", "user") == expected
    assert cli.main(["probe", "minilm", "why?", "--fail", "user", "--debug"]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and last == f"revela-hub: error: {expected}"
    assert cli.main(["probe", "minilm", "why?", "--fail", "interrupt"]) == 130
    assert capsys.readouterr().err == "revela-hub: interrupted\n"


def test_any_error_is_one_line_and_its_traceback_is_kept(
    probe: Probe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["probe", "minilm", "why?", "--fail", "bug"]) == 1
    assert capsys.readouterr().err == (
        "revela-hub: error: RuntimeError: a bug; this may be a bug: please report it with the traceback"
        " (--debug shows the traceback)\n"
    )
    assert (tmp_path / "revela-hub" / "last-error.log").read_text().startswith("Traceback")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "revela_hub", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_the_module_and_the_script_are_the_command_line() -> None:
    script = Path(sys.executable).with_name("revela-hub")
    commands = [[sys.executable, "-m", "revela_hub"], *([[str(script)]] if script.exists() else [])]
    for command in commands:
        ended = subprocess.run([*command, "nothing"], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith("revela-hub: error: unknown command 'nothing'")


def test_closed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`revela-hub --help >&-` was an AttributeError."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["--help"]) == 0 and cli.main(["no such command"]) == 2
