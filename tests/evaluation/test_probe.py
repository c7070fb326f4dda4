"""A probe: queries of the text for passages of the text, and not in the training text."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from revela_hub.cli.main import main
from revela_hub.data import ReadReport, read_beir, read_documents
from revela_hub.data.sources.source import Document, Source
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import NoProbe, Probe, ProbeSettings, build_probe, kind_of, write_probe
from revela_hub.evaluation.probe_queries import passages_of_each
from revela_hub.evaluation.query_shapes import SHAPES, QueryShape
from revela_hub.trainers.pair_tuning.data import build_text_pairs

FUNCTION = '''def make_{name}(value):
    """Builds the {name} of a value and returns it with care.

    A second paragraph about {name}.
    """
    result = value + {number}
    log(result)
    return result


'''
SETTINGS = ProbeSettings(queries=40, passages=80, shape="whole")


def sentences(name: str) -> str:
    first = f"Everything that is known about {name} comes from the old books of the monks."
    second = f"They were the first to write down how {name} moves from the hills to the sea."
    third = f"Later travellers saw {name} with their own eyes and drew it in their notes."
    return f"{first} {second} {third}"


def numeral(number: int) -> str:
    """A different word for each number, so that no two texts are near-duplicates of each other."""
    return "".join("abcdefghij"[int(digit)] * 3 for digit in f"{number:03}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with Markdown, rows with titles, and code."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        names = [f"{numeral(10 * number + part)} {numeral(500 + 10 * number + part)}" for part in range(3)]
        parts = "".join(f"## The story of {name}\n\n{sentences(name)}\n\n" for name in names)
        (folder / f"{number}.md").write_text(parts)
    rows = [
        {"_id": f"r{n}", "title": f"A short title {numeral(n)} here", "text": sentences(numeral(900 + n))}
        for n in range(30)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for number in range(4):
        code = "".join(FUNCTION.format(name=numeral(10 * number + n), number=n) for n in range(10))
        (folder / f"code{number}.py").write_text(f"import log\n\f\n{code}", newline="\r\n" if number == 3 else "\n")
    return folder


@pytest.mark.parametrize(
    ("start", "title"),
    [
        ('---\ntitle: "The story: of a river"\nlast_update: 2024 by the editor\n---\n\n', "The story: of a river"),
        ("+++\r\ntitle = 'The story of a river'\r\ndraft = false\r\n+++\r\n", "The story of a river"),
        ("The story of a river\n\n---\nid: river\ntitle: Other\ndraft: false\n---\n", "The story of a river"),
        ("---\nsidebar_position: 3\ndraft: false\n---\n\n", None),
    ],
    ids=["YAML", "TOML", "row with a title", "no title"],
)
@pytest.mark.parametrize("fence", ["```", "~~~", "````md\n```", "unclosed"])
def test_front_matter_and_comments_in_code_are_no_titles(start: str, title: str | None, fence: str) -> None:
    code = f"{fence.replace('unclosed', '~~~')}\n# install it before you run it\nrun --now\n"
    end = "" if fence == "unclosed" else "```\n````\n" if "md" in fence else f"{fence}\n"
    text = f"{start}{sentences('rivers')}\n\n# The story of a road\n\n{sentences('roads')}\n{code}{end}"
    if end:
        text += f"\nThe story of a hill\n-------------------\n\n{sentences('hills')}\n"
    ((_, passages),) = passages_of_each([Document("a", text, None, "text")], lambda _: Random(0))
    titles = [passage.candidates["title"].text if "title" in passage.candidates else None for passage in passages]
    assert titles == [title, "The story of a road", *(["The story of a hill"] if end else [])]
    assert all("draft" not in passage.text and "editor" not in passage.text for passage in passages)
    assert all(each.removed in text for passage in passages for each in passage.candidates.values())
    assert "run --now" in passages[1].text


def test_queries_are_without_numbers_of_sections_markup_tables_and_code() -> None:
    link = '[the monks](old/books.html "Monks")'
    text = "\n".join(
        [
            "## B.4.7. The story of `rivers`",
            f"Everything that is **known** about rivers comes from the old books of {link}.",
            "| The cells of a table are | no sentence that anybody would ask for. |",
            "```\n# A comment in the code above is no sentence that anybody would ask for.\n```",
        ]
    )
    [(_, [passage])] = passages_of_each([Document("a", text, None, "text")], lambda _: Random(0))
    assert {kind: candidate.text for kind, candidate in passage.candidates.items()} == {
        "title": "The story of rivers",
        "sentence": "Everything that is known about rivers comes from the old books of the monks.",
    }
    assert all(candidate.removed in text for candidate in passage.candidates.values())


@pytest.fixture
def probe(text: Path) -> Probe:
    return build_probe(str(text), SETTINGS)


def test_every_query_is_out_of_its_passage_and_out_of_the_text(
    text: Path, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(probe.kinds) == {"docstring", "title", "sentence"} and min(probe.kinds.values()) >= 9
    assert len(probe.task.queries) == 40 and len(probe.task.corpus) == 80
    assert build_probe(str(text), SETTINGS).task == probe.task
    assert build_probe(str(text), replace(SETTINGS, seed=1)).task.queries != probe.task.queries
    everything = "\n".join(" ".join(passage.split()) for passage in probe.task.corpus.values())
    folder = write_probe(probe, tmp_path / "probe")
    report = ReadReport()
    rest = [d.text for d in read_documents({"path": str(text), "held_out": str(folder)}, report=report)]
    before = [d.text for d in read_documents(str(text))]
    kept, whole = ([" ".join(text.split()) for text in texts] for texts in (rest, before))
    for query in probe.task.queries.values():
        assert sum(query in document for document in whole) == 1
        assert query not in everything
        assert not any(query in document for document in kept)
    assert report.held_out == 40
    assert [text.count("\n") for text in rest] == [text.count("\n") for text in before]  # the rest is unchanged
    assert len("".join(whole)) - len("".join(kept)) < 40 * 130
    # by another path to the same text, and from another text
    monkeypatch.chdir(text.parent)
    for path in (text.name, f"{text.name}/../{text.name}"):
        assert [document.text for document in read_documents({"path": path, "held_out": str(folder)})] == rest
    assert "no text of the probe" not in caplog.text
    (tmp_path / "other.txt").write_text("Rivers carry sediment.")
    list(read_documents({"path": str(tmp_path / "other.txt"), "held_out": str(folder)}))
    assert "no text of the probe" in caplog.text


def test_a_query_is_answered_by_what_it_was_taken_from(probe: Probe) -> None:
    for query, text in probe.task.queries.items():
        [(passage, grade)] = probe.task.qrels[query].items()
        found = probe.task.corpus[passage]
        assert grade == 1
        if kind_of(query) == "docstring":
            assert f"def make_{text.split()[2]}(value)" in found and '"""' not in found
        elif text.startswith("The story of"):
            assert text.removeprefix("The story of ") in found and "#" not in found
        elif kind_of(query) == "sentence":
            names = {word for word in text.split() if re.fullmatch(r"(?:([a-z])\1\1)+", word)}  # of what it is about
            assert names and names <= set(found.replace(".", " ").split())


def test_the_passages_come_from_all_documents(tmp_path: Path) -> None:
    """Most of them are short. The queries of a document are a group, also when the probe is read again."""
    for number in range(64):
        parts = range(15 if number < 28 else 1)
        names = [f"{numeral(15 * number + part)} {numeral((7 * number + 31 * part) % 1000)}" for part in parts]
        (tmp_path / f"{number}.md").write_text("".join(f"# The story of {n}\n\n{sentences(n)}\n\n" for n in names))
    probe = build_probe(str(tmp_path), ProbeSettings(queries=200, passages=300))
    assert len(probe.task.corpus) == 300 and len(set(probe.documents_of.values())) >= 50  # others repeat
    assert len(set(probe.task.groups.values())) >= 55  # one query of each, then a second one
    assert read_beir(write_probe(probe, tmp_path / "probe")).groups == probe.task.groups


def test_near_duplicates_and_what_stands_twice_are_not_asked(tmp_path: Path) -> None:
    words = [
        [numeral((37 * n + 7 * part + 101 * place) % 1000) for place in range(9)]
        for n in range(40)
        for part in range(3)
    ]
    texts = [f"Now {' '.join(line)} indeed." for line in words]
    rows = [" ".join(texts[n : n + 3]) for n in range(0, 120, 3)]
    again = [f"{row} And so on." for row in rows[:20]]  # the same passages but for three words
    quoted = f"{texts[90]} That is all that this page has to say of it, and it is not much. Other pages say more."
    content = "".join(json.dumps({"text": text}) + "\n" for text in [*rows, *again, quoted])
    (tmp_path / "rows.jsonl").write_text(content)
    probe = build_probe(str(tmp_path / "rows.jsonl"), ProbeSettings(queries=20, passages=100, shape="whole"))
    assert len(probe.task.corpus) == 41
    assert texts[90] not in probe.task.queries.values()
    whole = " ".join(content.split())
    assert all(whole.count(query) == 1 for query in probe.task.queries.values())


def test_a_text_with_too_few_queries(tmp_path: Path) -> None:
    """Lines without sentences; a title that its own text repeats."""
    for number in range(30):
        name = f"Renewing a contract {numeral(number)}"
        text = (
            f"{name} is described here, with all the forms that one has to fill in and send to {numeral(500 + number)}."
        )
        (tmp_path / f"{number}.md").write_text(f"# {name}\n\n{text}\n")
        (tmp_path / f"{number}.txt").write_text(f"a line about {numeral(number)} " * 20)
    with pytest.raises(NoProbe, match="has 0 candidate queries.* in 60 documents"):
        build_probe(str(tmp_path), SETTINGS)


def test_pairs_that_ask_a_query_of_the_evaluation_are_left_out(tmp_path: Path) -> None:
    """Labelled queries have no text that is held out: `adapt` writes them to its probe, with judgements or without."""
    rows = [
        {"title": f"What is number {n}?", "text": "It follows another one in order. It has a name here. " * 5}
        for n in range(20)
    ]
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "held_out.jsonl").write_text("")
    (probe / "queries.jsonl").write_text('{"_id": "a", "text": "what is  number 3?"}\n{"_id": "b", "text": "Other"}\n')
    source = Source(str(tmp_path / "faq.jsonl"), held_out=str(probe))
    anchors = build_text_pairs(source, cache_dir=tmp_path / "cache", report=(report := ReadReport()))["anchor"][:]
    assert anchors == [f"What is number {n}?" for n in range(20) if n != 3] and report.held_out == 1
    lines = (json.dumps({"_id": str(n), "text": row["title"]}) + "\n" for n, row in enumerate(rows[1:]))
    (probe / "queries.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match="20 natural pairs, of which the evaluation leaves 1"):
        build_text_pairs(source, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_changes_sentences_only(shape: QueryShape, text: Path, probe: Probe) -> None:
    other = build_probe(str(text), replace(SETTINGS, shape=shape))
    assert other.held_out == probe.held_out and other.task.corpus == probe.task.corpus
    for query, whole in probe.task.queries.items():
        found = other.task.queries[query]
        assert set(re.findall(r"\w+", found.lower())) <= set(re.findall(r"\w+", whole.lower()))
        assert (
            len(found.split()) < len(whole.split())
            if kind_of(query) == "sentence" and shape != "whole"
            else found == whole
        )


def test_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "probe"
    words = ["probe", str(text), "--output_dir", str(output), "--queries", "30", "--passages", "60"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "probe: 30 queries (10 docstring, 10 sentence, 10 title) from" in captured.out
    assert captured.out.count("  query:   ") == captured.out.count("  passage: ") == 5
    task = read_beir(output)
    assert len(task.queries) == 30 and len(task.corpus) == 60
    assert json.loads((output / "probe.json").read_text())["made"] == {"docstring": 10, "sentence": 10, "title": 10}
    before = {file.name: file.read_bytes() for file in output.rglob("*.*")}
    assert main(words) == 0
    assert {file.name: file.read_bytes() for file in output.rglob("*.*")} == before
    (tmp_path / "log.txt").write_text("hills of the moon\nwho drew the notes\n")
    assert main([*words, "--example_queries", str(tmp_path / "log.txt")]) == 0
    assert read_beir(output).qrels == task.qrels and read_beir(output).queries != task.queries
    assert main([*words, "--example_queries", "none.txt"]) == 2
    assert "none.txt" in capsys.readouterr().err
    words[3] = str(text / "in")  # would be part of the training text, and might replace files of the same names
    assert main(words) == 2
    assert "is inside the data" in capsys.readouterr().err
    assert main([*words, "--exclude", "in/"]) == 0
