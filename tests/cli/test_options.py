"""The options of all commands: one spelling, one name per concept, and a help text for each."""

import subprocess
import sys
from functools import cache

import pytest

from revela_hub.cli import main as cli
from revela_hub.cli.main import COMMANDS

# Names that must not be used: the option that has another name for the same thing.
SYNONYMS = {
    "input",
    "dataset",
    "documents",
    "out",
    "folder",
    "max_tokens",
    "max_seq_length",
    "top_n",
    "query_prefix_text",
}

parser_of = cache(cli.parser_of)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_have_one_name_one_spelling_and_a_help_text(command: str) -> None:
    parser = parser_of(command)
    assert SYNONYMS.isdisjoint(parser.options)
    for name, option in parser.options.items():
        assert option.option_strings[0] == f"--{name}"
        if name not in parser.hidden:
            assert option.help and option.help.endswith((".", ")")), name
            assert len(option.help) < 220, name
            assert option.metavar or option.nargs == "?", name


@pytest.mark.parametrize("command", [name for name in COMMANDS if not name.startswith("train ")])
def test_help_of_commands_that_do_not_train_imports_no_torch(command: str) -> None:
    code = f"""if True:
        import sys
        from revela_hub.cli.main import main
        assert main({[*command.split(), "--help"]!r}) == 0
        assert main({[*command.split(), "--sede", "1"]!r}) == 2
        assert not {{"torch", "transformers", "sentence_transformers", "datasets"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_options_of_transformers_are_accepted_and_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.parser_of("train contriever")
    values = parser.read(["--retriever", "folder", "--optim", "adafactor", "--fp16_full_eval", "--eval_steps", "0.5"])
    assert values == {"retriever": "folder", "optim": "adafactor", "fp16_full_eval": True, "eval_steps": 0.5}
    assert parser.read(["--help-all"]) is None
    assert "--adam_beta1 " in capsys.readouterr().out
    assert parser.read(["--help"]) is None
    assert "--adam_beta1 " not in capsys.readouterr().out
