"""Help texts: quick, and with the options of transformers on request."""

import subprocess
import sys

import pytest

from revela_hub.cli import main as cli
from revela_hub.cli.main import COMMANDS


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
