"""The options of all commands: one spelling, one name per concept, old names that still work, and a help text for each."""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from revela_hub.cli import main as cli
from revela_hub.cli.main import COMMANDS
from revela_hub.cli.outline import outline
from revela_hub.cli.parser import LIBRARIES, build_arguments
from revela_hub.errors import UserError
from revela_hub.options import old_names
from revela_hub.trainers.base.settings import changes
from revela_hub.trainers.imprag import IMPRAG

# Names that must not be used, besides the old names: the option that has another name for the same thing.
SYNONYMS = {
    "input": "data",
    "dataset": "data",
    "documents": "corpus",
    "out": "output_dir",
    "folder": "output_dir",
    "max_tokens": "max_length",
    "top_n": "top_k",
    "max_answer_tokens": "max_new_tokens",
    "negatives": "num_negatives",
    "query_prefix_text": "query_prompt",
}
# Where an old name is the name of another option: a number of passages, a file, models to compare.
OTHER_MEANINGS = {"probe": {"passages"}, "mine": {"output"}, "evaluate": {"models"}}


parser_of = cache(cli.parser_of)

# The old names of each command: exactly those that it had when they were renamed.
OLD = {
    "quickstart": "models",
    "train revela": "passage_prompt",
    "train imprag": "b t k l_max passages text plain_text_share denoising_share sentence_share likelihood_block_size",
    "train ra-it": "k l_max passages text plain_text_share denoising_share sentence_share",
    "train ra-dit": "b l_max passages text plain_text_share denoising_share sentence_share",
    "mine": "max_seq_length",
    "synthesize": "output",
    "probe": "output kinds",
    "export": "output",
    "evaluate": "k max_seq_length",
    "encode": "passages output max_seq_length",
    "index": "passages output max_seq_length",
    "search": "max_seq_length",
    "publish": "keep",
    "answer": "k",
}
OLD_NAMES = sorted({name for names in OLD.values() for name in names.split()})


@cache
def renamed() -> dict[str, str]:
    """The old names of all commands, and the new ones."""
    return {old: new for command in COMMANDS for old, new in parser_of(command).renamed.items()}


def options_of(command: str) -> Iterator[argparse.Action]:
    """The options of a command that its full help text shows."""
    return (action for action in parser_of(command)._actions if action.help != argparse.SUPPRESS)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_have_one_name_and_one_spelling(command: str) -> None:
    for action in options_of(command):
        assert action.dest not in {*renamed(), *SYNONYMS} - OTHER_MEANINGS.get(command, set())
        if action.dest != "help":
            assert action.option_strings[0] == f"--{action.dest}" or action.dest == "help_all"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_text_shows_underscores_and_no_old_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parser_of(command).read(["--help-all"]) is None
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert {f"--{name}" for name in parser_of(command).renamed}.isdisjoint(lines)
    assert [line for line in lines if "-" in line[2:]] == ["--help-all"] * ("--help-all" in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_placeholder_and_a_help_text_of_one_sentence(command: str) -> None:
    parser = parser_of(command)
    told = outline(COMMANDS[command].module).Arguments
    defaults = {field.name: field.default for field in dataclasses.fields(told)}
    for action in parser._actions:
        text = action.help or ""
        if action.help == argparse.SUPPRESS or action in parser.hidden and not is_own(told, action.dest):
            continue
        where = f"--{action.dest}: {text}"
        assert action.metavar not in ("WORD", "VALUE"), where
        assert re.match(r"([A-Z]|(pretrain|finetune|full|auto|k1|--task qa)\b)", text), where
        assert re.search(r"([.)])$", text), where
        assert not re.search(r"[.;] [A-Z]", text.removesuffix(".").replace("e.g. ", "")), (
            f"{where}: more than one sentence"
        )
        assert len(text) < 170, where
        default = defaults.get(action.dest)
        if action.dest in parser.required:
            assert "required" in text, where
        elif isinstance(default, (int, float, str)) and default is not False and default != "":
            shown = "true" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
            assert f"(default: {shown}" in text, where


def is_own(arguments: type, name: str) -> bool:
    """Whether a field's help text is in this project, and not in transformers or trl."""
    owner = next(cls for cls in arguments.__mro__ if name in vars(cls).get("__annotations__", {}))
    return not owner.__module__.startswith(LIBRARIES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_lists_at_most_thirty_options(command: str) -> None:
    parser = parser_of(command)
    shown = [action for action in options_of(command) if action not in parser.hidden]
    assert {*parser.required, *parser.positionals} <= {action.dest for action in shown}
    assert len(shown) <= 30
    assert not parser.hidden or any(action.dest == "help_all" for action in shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_accepts_the_old_names_that_it_had(command: str) -> None:
    parser = parser_of(command)
    assert set(parser.renamed) == set(OLD.get(command, "").split())
    assert set(parser.renamed.values()) <= set(parser.hints)
    with pytest.raises(UserError, match="unknown option '--l_maximum'"):
        parser.read(["--l_maximum", "1"])


@pytest.mark.parametrize("option", ["--output", "--keep", "--max_seq_length"])
def test_train_commands_reject_old_names_that_they_never_had(option: str) -> None:
    with pytest.raises(UserError, match=f"unknown option '{option}'"):
        parser_of("train contriever").read([option, "7"])


def test_an_option_of_transformers_without_effect_is_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--retriever", "folder", "--do_eval", "true", "--label_names", "labels"]
    values = parser_of("train contriever").read(words)
    assert values == {"retriever": "folder", "do_eval": True, "label_names": ["labels"]}
    notes = "--do_eval has no effect on this command\n--label_names has no effect on this command\n"
    assert capsys.readouterr().err == notes
    assert parser_of("train contriever").read(["--help-all"]) is None
    assert "do_eval" not in capsys.readouterr().out
    parser_of("train pairs").read(["--retriever", "folder", "--router_mapping", '{"anchor": "query"}'])
    assert capsys.readouterr().err == "--router_mapping has no effect on this command\n"  # the trainer sets it


def test_numbers_in_mappings_of_a_file_are_those_of_json(tmp_path: Path) -> None:
    """PyYAML reads 1e-6 as text."""
    file = tmp_path / "options.yaml"
    file.write_text(
        "learning_rate_mapping: {embeddings: 1e-6, head: 2.5E5, '1e5': .5e+1}\n"
        "deepspeed: {optimizer: {betas: [0.9, 1e-8]}, words: [nan, inf, e5, 1e, 1e-6x, 12, true]}\n"
        "lr_scheduler_kwargs: '{\"min_lr\": 1e-6}'\n"
    )
    values = parser_of("train pairs").read(["--config", str(file), "--retriever", "x"])
    assert values is not None
    assert values["learning_rate_mapping"] == {"embeddings": 1e-6, "head": 2.5e5, "1e5": 5.0}
    words = ["nan", "inf", "e5", "1e", "1e-6x", 12, True]
    assert values["deepspeed"] == {"optimizer": {"betas": [0.9, 1e-8]}, "words": words}
    assert values["lr_scheduler_kwargs"] == '{"min_lr": 1e-6}'


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_accepted_with_a_note(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, seen = renamed()[old], 0
    for parser in map(parser_of, COMMANDS):
        if old not in parser.renamed:
            continue
        seen += 1
        parser.required = []
        value = {"sentence_fraction": "0.5", "index_type": "flat"}.get(new, "7")
        expected = parser.read([f"--{new}", value])
        assert capsys.readouterr().err == ""
        assert parser.read([f"--{old}", value]) == parser.read([f"--{old.replace('_', '-')}={value}"]) == expected
        note = f"--{old} is now called --{new}; the old name still works\n"
        assert capsys.readouterr().err == 2 * note
        file = tmp_path / "options.yaml"
        file.write_text(f"{old}: {value}\n")
        assert parser.read(["--config", str(file)]) == expected, parser.prog
        assert capsys.readouterr().err == note
        assert parser.read(["--config", str(file), f"--{old}", value, "--quiet"]) is not None
        assert capsys.readouterr().err == ""
        assert parser.read(["--config", str(file), f"--{new}", "8"]) == parser.read([f"--{new}", "8"])
        assert capsys.readouterr().err == note
        with pytest.raises(UserError, match=f"--{old} is the old name of --{new}: give one of the two"):
            parser.read([f"--{old}", value, f"--{new}", "8"])
        file.write_text(f"{old}: {value}\n{new}: 8\n")
        with pytest.raises(UserError, match=rf"options.yaml:2: {new} \(old name: {old}\) is given twice"):
            parser.read(["--config", str(file)])
    assert seen


def test_a_misspelt_old_name_suggests_the_new_one() -> None:
    for word, new in {"--l_mx": "max_passage_length", "--passage": "corpus", "--max-seq-len": "max_length"}.items():
        command = "train imprag" if new == "max_passage_length" else "index"
        with pytest.raises(UserError, match=rf"unknown option '{word}': did you mean --{new}\?"):
            parser_of(command).read([word, "1"])


def test_settings_that_were_stored_under_old_names_are_equal() -> None:
    before = {"l_max": 160, "k": 10, "b": 7, "passages": ["docs"], "text": [], "plain_text_share": 0.1, "seed": 0}
    now = {
        "max_passage_length": 160,
        "num_passages": 10,
        "retrieval_layer": 7,
        "corpus": ["docs"],
        "plain_text": [],
        "plain_text_fraction": 0.1,
        "seed": 0,
    }
    arguments = outline(COMMANDS["train imprag"].module).Arguments
    assert changes(before, now, IMPRAG, arguments) == {}
    assert changes(before, now | {"num_passages": 3}, IMPRAG, arguments) == {"num_passages": (10, 3)}
    # Of a run whose option has the old name, it is that option.
    assert changes({"k": 3}, {"k": 3, "num_passages": 10}, IMPRAG, arguments) == {}
    assert old_names(arguments)["k"] == "num_passages"


def test_no_old_name_leads_to_another_old_name() -> None:
    for old, new in renamed().items():
        assert new not in renamed(), f"{old} -> {new} -> {renamed().get(new)}"
    assert all(old != new for old, new in itertools.product(renamed(), renamed().values()))


@pytest.mark.parametrize(
    ("encoding", "name", "remedy"), [("utf-8", "\udcff", ""), ("ascii", "\udcc3\udca9", ", or set PYTHONUTF8=1")]
)
def test_outputs_have_names_that_libraries_can_write(
    encoding: str, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forced ASCII locale, an é is two such characters."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: encoding)
    encode = outline(COMMANDS["encode"].module).Arguments
    values = {"model": "m", "corpus": ["a"], "output_dir": name}
    with pytest.raises(UserError, match=re.escape(f" is not a name in UTF-8: use another name{remedy}")):
        build_arguments(encode, values, "revela-hub encode")
    build_arguments(encode, values | {"output_dir": "é"}, "revela-hub encode")


def test_the_home_folder_is_found_in_options_but_not_in_queries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell expands it only at the beginning of a word, not after `=` or in a configuration file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    search = outline(COMMANDS["search"].module).Arguments
    values = {"model": "~/m", "query": "~/m", "corpus": ["~/a", "b~/c"]}
    made = build_arguments(search, values, "revela-hub search")
    assert (made.model, made.query, made.corpus) == (str(tmp_path / "m"), "~/m", [str(tmp_path / "a"), "b~/c"])


@pytest.mark.parametrize(
    ("words", "name", "needed"),
    [
        ("search bm25", "precision int8", "dense"),
        ("search bm25", "index_type hnsw", "dense"),
        ("search bm25", "query_prompt x", "dense, sparse"),
        ("search m", "max_terms 7", "sparse"),
        ("search m --mode sparse", "truncate_dim 7", "dense"),
        ("search m --mode hybrid --parts dense sparse", "bm25_k1 1", "bm25"),
        ("mine bm25 --output x.jsonl", "dtype float16", "dense"),
        ("mine m --mode bm25 --output x.jsonl", "max_length 7", "dense, sparse"),
        ("evaluate bm25", "document_prompt x", "dense, sparse"),
        ("evaluate bm25 m --mode dense hybrid", "max_query_terms 7", "sparse"),
        ("evaluate m --mode sparse bm25", "index_type flat", "dense"),
    ],
)
def test_a_ranking_option_without_effect_is_an_error(
    words: str, name: str, needed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words.split(), *f"--{name} --corpus {tmp_path}".split()]) == 2
    assert f"--{name.split()[0]} requires --mode {needed} or hybrid with --parts" in capsys.readouterr().err


def test_a_ranking_option_with_an_effect_in_some_mode_is_accepted() -> None:
    from revela_hub.search.ranker_options import RankerOptions, check_used

    @dataclasses.dataclass(kw_only=True)
    class Evaluated(RankerOptions):
        models: list[str]

    check_used(Evaluated(models=["bm25"], bm25_k1=1.0), [])
    check_used(Evaluated(models=["bm25", "m"], bm25_k1=1.0, query_prompt="x", index_type="flat"), [])
    check_used(Evaluated(models=["m"], bm25_k1=1.0, max_terms=7, query_prompt=""), ["sparse", "bm25"])
    both = Evaluated(
        models=["m"], parts=["sparse", "bm25"], max_query_terms=7, bm25_b=0.5, query_prompt="x", max_length=7
    )
    check_used(both, ["hybrid"])
