import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from revela_hub.data.sources.source import parse_sources
from revela_hub.errors import UserError
from revela_hub.trainers.revela.arguments import RevelaDataArguments, RevelaTrainingArguments, load_groups

RECIPES = ("wikipedia", "code", "fineweb", "mixed")


def write(path: Path, name: str, documents: int, column: str = "text") -> str:
    rows = [{"_id": f"{name}{n}", column: f"This is {name}{n}. It is short."} for n in range(documents)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(tmp_path: Path, data: list[Any], **options: Any) -> RevelaDataArguments:
    return RevelaDataArguments(data=data, group_size=4, max_words=3, cache_dir=str(tmp_path / "cache"), **options)


def test_options_reach_the_sources(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    write(tmp_path / "docs" / "a.jsonl", "a", 9, "body")
    write(tmp_path / "docs" / "0-left-out.jsonl", "x", 9)
    own = {"path": write(tmp_path / "b.jsonl", "b", 9, "own"), "text_column": "own", "max_documents": 1}

    groups, report = load_groups(
        arguments(
            tmp_path,
            [str(tmp_path / "docs"), own],
            text_column="body",
            exclude=["*left-*"],
            kind="code",
            max_documents=2,
        )
    )

    assert groups["document"][:] == [["a0", "a0", "a1", "a1"], ["b0", "b0", "", ""]]
    assert groups[0]["text"][:2] == ["This is a0.", " It is short."]  # cut as code is
    assert str(report) == (
        "3 documents, 6 chunks, 2 groups; skipped: 1 excluded; 3 sentences longer than a chunk (split); "
        "last group incomplete (2 rows empty)"
    )


def test_mixture(tmp_path: Path) -> None:
    data = [write(tmp_path / f"{name}.jsonl", name, 600) for name in "ab"]

    groups, report = load_groups(arguments(tmp_path, data, weights=[3, 1], max_groups=200))

    first = sum(row[0].startswith("a") for row in groups["document"])
    assert len(groups) == report.groups == 200
    assert 125 < first < 175
    assert report.documents < 600  # no more was read than a mixture of 200 groups may need
    again, _ = load_groups(arguments(tmp_path, data, weights=[3, 1], max_groups=200))
    assert again[:] == groups[:]
    other, _ = load_groups(arguments(tmp_path, data, weights=[3, 1], max_groups=200, group_seed=1))
    assert other["document"][:] != groups["document"][:]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_source_of_a_mixture_has_its_span(tmp_path: Path, streaming: bool) -> None:
    data = [write(tmp_path / f"{name}.jsonl", name, 60) for name in "ab"]
    given = arguments(
        tmp_path, data, weights=[1, 1], similarity_span=["first_half", "full"], max_groups=20, streaming=streaming
    )

    groups, _ = load_groups(given)

    found = {(row["document"][0][0], row["similarity_span"]) for row in groups}
    assert found == {("a", "first_half"), ("b", "full")}


@pytest.mark.parametrize("streaming", [False, True])
def test_groups_that_were_made_before(tmp_path: Path, streaming: bool) -> None:
    """As in the corpora of Revela's authors: a column with lists of texts, cut to the group size or padded."""
    texts = [[f"text {g} {n}" for n in range(size)] for g, size in enumerate((4, 6, 3))]
    file = tmp_path / "groups.jsonl"
    file.write_text("".join(json.dumps({"src": "wiki", "passages": row}) + "\n" for row in texts))
    groups, _ = load_groups(arguments(tmp_path, [str(file)], groups_column="passages", streaming=streaming))

    rows = list(groups)
    assert [row["text"] for row in rows] == [texts[0], texts[1][:4], [*texts[2], ""]]
    assert [row["group"] for row in rows] == [0, 1, 2]
    assert rows[2]["document"][3] == "" and len({*rows[2]["document"][:3]}) == 1
    two, _ = load_groups(arguments(tmp_path, [str(file)], groups_column="passages", max_groups=2))
    assert len(two) == 2
    with pytest.raises(UserError, match="passages"):
        load_groups(arguments(tmp_path, [str(file)], groups_column="texts"))
    with pytest.raises(Exception, match="not a list of texts"):
        list(load_groups(arguments(tmp_path, [str(file)], groups_column="src", streaming=streaming))[0])


def test_the_groups_of_a_step_are_those_of_all_devices(tmp_path: Path) -> None:
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    made = RevelaTrainingArguments(str(tmp_path), total_groups_per_step=32, **given)
    assert made.gradient_accumulation_steps == 16
    with pytest.raises(ValueError, match="33"):
        RevelaTrainingArguments(str(tmp_path), total_groups_per_step=33, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": []}, "no data: pass a folder"),
        ({"data": ["a.jsonl", "a.jsonl"], "weights": [1.0]}, "--weights"),
        ({"data": ["a.jsonl"], "run_length": 3}, "run_length is 3; it must divide group_size"),
        ({"data": ["a.jsonl"], "similarity_span": ["half"]}, "half"),
        ({"data": ["a.jsonl"], "similarity_span": ["full", "full"]}, "--weights"),
        ({"data": ["a.jsonl"] * 2, "weights": [1, 1], "similarity_span": ["full"] * 3}, "--similarity_span"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", "a", 3)
    with pytest.raises(UserError, match=message):
        load_groups(arguments(tmp_path, **options))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_understood(repository: Path, name: str) -> None:
    recipe = yaml.safe_load((repository / "examples" / "revela" / f"{name}.yaml").read_text())

    known = {option.name for option in fields(RevelaDataArguments)}
    settings = RevelaDataArguments(**{key: value for key, value in recipe.items() if key in known})
    sources = parse_sources(settings.data, text_column=settings.text_column)
    assert all(source.is_dataset for source in sources)
    assert settings.weights is None or len(settings.weights) == len(sources)
    assert (settings.group_size, settings.max_words, settings.max_length) == (16, 120, 160)
    assert (recipe["temperature"], recipe["learning_rate"]) == (1e-4, 1e-4)  # numbers: YAML reads 1e-4 as a string
    assert (recipe["warmup_steps"], recipe["total_groups_per_step"]) == (100, 32)
    assert (recipe["lora_rank"], recipe["lora_alpha"], recipe["lora_dropout"]) == (256, 64, 0.1)
    assert (recipe["similarity_sides"], recipe["similarity_dtype"]) == ("query_passage", "bfloat16")
    assert recipe["export"] == "last"
    assert len(settings.spans) in (1, len(sources)) and set(settings.spans) <= {"full", "first_half"}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        *((name, "revela.command") for name in RECIPES),
        *((f"baselines/{name}-wikipedia", f"baselines.{name}") for name in ("contriever", "replug")),
    ],
)
def test_recipe_has_no_key_that_the_command_lacks(repository: Path, name: str, module: str) -> None:
    train = importlib.import_module(f"revela_hub.trainers.{module}")
    recipe = yaml.safe_load((repository / "examples" / "revela" / f"{name}.yaml").read_text())
    assert set(recipe) <= {option.name for option in fields(train.Arguments)}


def test_wikipedia_recipe_on_passages_of_its_form(repository: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((repository / "examples" / "revela" / "wikipedia.yaml").read_text())
    passages = [
        ("1", "Aaron", "Aaron Aaron is a prophet. He was the brother"),
        ("2", "Aaron", "of Moses. He went first."),
        ("3", "Abba", "Abba Abba is a word. It is short."),
    ]
    file = tmp_path / "corpus.jsonl"
    rows = (json.dumps({"docid": docid, "title": title, "text": text}) + "\n" for docid, title, text in passages)
    file.write_text("".join(rows))
    (source,) = recipe["data"]

    groups, _ = load_groups(
        RevelaDataArguments(data=[source | {"data_files": str(file)}], max_words=6, cache_dir=str(tmp_path))
    )

    assert groups[0]["text"][:5] == [
        "Aaron Aaron is a prophet.",
        "He was the brother of Moses.",
        "He went first.",
        "Abba Abba is a word.",
        "It is short.",
    ]
    assert groups[0]["document"][:5] == ["1", "1", "1", "3", "3"]
