"""A mixture from its description to the rows: each source, each type, the proportions, the cache, and the mistakes."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.data.mixture.mixture import Mixture, load_mixture
from revela_hub.data.mixture.tasks import parse_mixture
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError

PASSAGES = {f"p{number}": f"Passage number {number}." for number in range(8)}
INSTRUCTION = "Given a question, retrieve passages that answer the question"


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a source of each form."""
    folder = tmp_path / "sources"
    corpus = [{"_id": id_, "title": f"Title {id_}", "text": text} for id_, text in PASSAGES.items()]
    write_lines(folder / "passages.jsonl.gz", corpus)
    questions = [{"question": f"Where is {n}?", "passage_id": f"p{n}"} for n in range(4)]
    write_lines(folder / "questions.jsonl", questions)
    write_lines(folder / "beir/corpus.jsonl.gz", corpus)
    write_lines(folder / "beir/queries.jsonl", ({"_id": f"q{n}", "text": f"Claim {n}"} for n in range(3)))
    (folder / "beir/qrels").mkdir()
    judged = ["q0\tp0\t1", "q0\tp1\t2", "q0\tp2\t0", "q1\tp3\t1", "q9\tp0\t1", "q2\tp9\t1"]
    (folder / "beir/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{row}\n" for row in judged))
    mined = [
        {"anchor": f"m{n}", "positive": f"right {n}", **{f"negative_{i}": f"hard {n} {i}" for i in (1, 2, 10)}}
        for n in range(3)
    ]
    write_lines(folder / "mined.jsonl", mined)
    labels = [{"text": f"{label} {n}", "label": label} for label in ("red", "green", "blue") for n in range(4)]
    write_lines(folder / "colours.jsonl", labels)
    scored = [{"sentence1": f"s{n}", "sentence2": f"t{n}", "score": float(n)} for n in range(6)]
    write_lines(folder / "sts.jsonl", scored)
    return folder


def load(folder: Path, *tasks: dict[str, Any], **options: Any) -> Mixture:
    return load_mixture({"tasks": list(tasks)}, root=folder, cache_dir=folder.parent / "cache", **options)


def rows(mixture: Mixture) -> list[dict[str, str]]:
    return sorted(mixture.dataset, key=lambda row: (row["task"], row["anchor"], row["positive"]))


QUESTIONS = {
    "name": "questions",
    "type": "retrieval",
    "source": "questions.jsonl",
    "columns": {"anchor": "question", "positive": "passage_id"},
    "corpus": "passages.jsonl.gz",
    "instruction": INSTRUCTION,
}
COLOURS = {"name": "colours", "type": "classification", "source": "colours.jsonl", "instruction": "Find the colour"}
STS = {"name": "sts", "type": "sts", "source": "sts.jsonl", "instruction": "Find similar text"}


# --- sources and types


def test_positives_are_joined_by_id_with_their_titles(folder: Path) -> None:
    mixture = load(folder, QUESTIONS, num_negatives=2)

    documents = {f"Title {id_} {text}" for id_, text in PASSAGES.items()}
    assert list(mixture.dataset.features) == [
        "task", "anchor", "positive", "negative_1", "negative_2", "anchor_prompt", "document_prompt", "kind"
    ]  # fmt: skip
    for number, row in enumerate(rows(mixture)):
        assert row["anchor"] == f"Where is {number}?"
        assert row["positive"] == f"Title p{number} Passage number {number}."
        assert {row["negative_1"], row["negative_2"]} < documents - {row["positive"]}
        assert row["negative_1"] != row["negative_2"]
        assert (row["task"], row["kind"]) == ("questions", "retrieval")
        assert (row["anchor_prompt"], row["document_prompt"]) == (query_prompt(INSTRUCTION), "")
    assert str(mixture) == ("4 rows of 1 task\n  questions (retrieval): 4 rows; negatives: 8 drawn")


def test_corpus_columns_can_be_chosen(folder: Path) -> None:
    write_lines(folder / "other.jsonl", ({"docid": n, "body": f"Body {n}", "head": "Head"} for n in range(4)))
    write_lines(folder / "questions.jsonl", ({"anchor": f"Number {n}", "positive": [n, n + 1]} for n in (0, 2)))
    corpus = {"path": "other.jsonl", "id_column": "docid", "text_column": ["head", "body"], "title_column": ""}

    mixture = load(folder, {"name": "a", "type": "retrieval", "source": "questions.jsonl", "corpus": corpus})

    assert [(row["anchor"], row["positive"]) for row in rows(mixture)] == [
        ("Number 0", "Head Body 0"), ("Number 0", "Head Body 1"), ("Number 2", "Head Body 2"), ("Number 2", "Head Body 3")
    ]  # fmt: skip
    for row in rows(mixture):  # the other positive of the same query is no negative
        assert row["negative_1"][-1] in ("23" if "0" in row["anchor"] else "01")


def test_beir_folder(folder: Path) -> None:
    mixture = load(folder, {"name": "beir", "type": "retrieval", "source": "beir", "split": "train"}, num_negatives=5)

    assert [(row["anchor"], row["positive"].split()[1]) for row in rows(mixture)] == [
        ("Claim 0", "p0"), ("Claim 0", "p1"), ("Claim 1", "p3")
    ]  # fmt: skip
    for row in rows(mixture)[:2]:
        ids = {row[f"negative_{n}"].split()[1] for n in range(1, 6)}
        assert len(ids) == 5
        assert not ids & {"p0", "p1"}
    (report,) = mixture.reports
    assert report.dropped == {"query is not in queries": 1, "passage is not in the corpus": 1}


def test_mined_negatives_are_kept_in_their_order(folder: Path) -> None:
    task = {"name": "mined", "type": "retrieval", "source": "mined.jsonl"}

    for number, row in enumerate(rows(load(folder, task, num_negatives=2))):
        assert [row["negative_1"], row["negative_2"]] == [f"hard {number} 1", f"hard {number} 2"]
    mixture = load(folder, task, num_negatives=4)
    for number, row in enumerate(rows(mixture)):
        assert [row[f"negative_{n}"] for n in (1, 2, 3)] == [f"hard {number} {n}" for n in (1, 2, 10)]
        assert row["negative_4"] in {f"right {other}" for other in range(3) if other != number}
    assert mixture.reports[0].negatives == {"given": 9, "drawn": 3}


def test_pairs_and_triplets(folder: Path) -> None:
    given = [{"q": f"q{n}", "d": f"d{n}", "hard": f"h{n}", "negative": "unused"} for n in range(3)]
    write_lines(folder / "rows.jsonl", given)
    pairs = {"name": "pairs", "type": "pairs", "source": "rows.jsonl", "columns": {"anchor": "q", "positive": "d"}}
    triplets = {**pairs, "name": "triplets", "type": "triplets", "columns": {**pairs["columns"], "negative": "hard"}}

    for row in rows(load(folder, pairs, triplets)):
        number = row["anchor"][1]
        expected = {f"h{number}"} if row["task"] == "triplets" else {f"d{n}" for n in range(3)} - {f"d{number}"}
        assert row["negative_1"] in expected
        assert row["kind"] == "retrieval"


def test_rows_with_their_own_instruction(folder: Path) -> None:
    given = {"positive": "d", "negative_1": "n"}
    write_lines(folder / "rows.jsonl", [given | {"anchor": f"q{n}", "instruction": n} for n in ("A", "")])
    task = {"name": "synthetic", "type": "retrieval", "source": "rows.jsonl", "instruction": "B"}

    own = rows(load(folder, {**task, "columns": {"instruction": "instruction"}, "symmetric": True}, num_negatives=2))
    same = rows(load(folder, task))

    for name in ("anchor_prompt", "document_prompt"):
        assert {row["anchor"]: row[name] for row in own} == {"qA": query_prompt("A"), "q": query_prompt("B")}
    assert {row["anchor_prompt"] for row in same} == {query_prompt("B")}


def test_passages_in_the_rows(folder: Path) -> None:
    row = {"query": "q", "positive_passages": [{"docid": 1, "title": "T", "text": "right"}, {"text": "also"}]}
    write_lines(folder / "rows.jsonl", [{**row, "negative_passages": [{"title": "", "text": "wrong"}]}])
    columns = {"anchor": "query", "positive": "positive_passages", "negatives": "negative_passages"}

    mixture = load(folder, {"name": "t", "type": "retrieval", "source": "rows.jsonl", "columns": columns})

    assert [(row["positive"], row["negative_1"]) for row in rows(mixture)] == [("T right", "wrong"), ("also", "wrong")]


def test_classification_by_examples_and_by_labels(folder: Path) -> None:
    by_label = {**COLOURS, "name": "labels", "mode": "label"}

    for row in rows(load(folder, COLOURS, by_label, num_negatives=2)):
        colour = row["anchor"].split()[0]
        documents = [row["positive"], row["negative_1"], row["negative_2"]]
        prompt = query_prompt("Find the colour")
        if row["task"] == "labels":
            assert (row["anchor_prompt"], row["document_prompt"], row["positive"]) == (prompt, "", colour)
            assert set(documents) == {"red", "green", "blue"}
        else:
            assert [text.split()[0] == colour for text in documents] == [True, False, False]
            assert row["positive"] != row["anchor"]
            assert row["anchor_prompt"] == row["document_prompt"] == prompt
        assert row["kind"] == "other"
    named = rows(load(folder, {**COLOURS, "labels": {"red": "rouge"}}, classes="label"))
    assert {row["positive"] for row in named if row["anchor"].startswith(("red", "blue"))} == {"rouge", "blue"}


def test_clusters_in_lists_as_mteb_has_them(folder: Path) -> None:
    given = [{"sentences": ["a", "b", "c"], "labels": [0, 1, 0]}, {"sentences": ["d"], "labels": [1]}]
    write_lines(folder / "rows.jsonl", given)
    columns = {"text": "sentences", "label": "labels"}

    mixture = load(folder, {"name": "t", "type": "clustering", "source": "rows.jsonl", "columns": columns})

    assert {row["anchor"]: row["positive"] for row in rows(mixture)} == {"a": "c", "b": "d", "c": "a", "d": "b"}


def test_rows_are_a_sample_and_not_those_of_evaluation_sets(folder: Path) -> None:
    given = [{"text": f"colour {n} of the many colours", "label": n % 2} for n in range(40)]
    write_lines(folder / "rows.jsonl", given)
    write_lines(folder / "test.jsonl", [{"sentences": [row["text"] for row in given[3:30]]}])
    task = {"name": "t", "type": "clustering", "source": "rows.jsonl"}

    samples = [{row["anchor"] for row in load(folder, {**task, "max_rows": 9}, seed=seed).dataset} for seed in range(3)]
    left = load(folder, {**task, "exclude": {"path": "test.jsonl", "text_column": "sentences"}})

    (folder / "dev" / "qrels").mkdir(parents=True)
    write_lines(folder / "dev" / "corpus.jsonl", [{"_id": "d", "text": given[0]["text"]}])
    write_lines(folder / "dev" / "queries.jsonl", [{"_id": "q", "text": given[1]["text"]}])
    (folder / "dev" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    assert len(load(folder, {**task, "exclude": "dev"}).dataset) == 38

    assert [len(sample) for sample in samples] == [9] * 3 and len(set.union(*samples)) > 15
    assert {int(row["anchor"].split()[1]) for row in left.dataset} == {0, 1, 2, *range(30, 40)}
    assert left.reports[0].dropped == {"in an evaluation set": 27}


def test_half_similar_sentences_are_no_random_negatives(folder: Path) -> None:
    given = [("a", "b", 5), ("a", "half", 3), ("other", "half", 0)]
    write_lines(folder / "sts.jsonl", ({"sentence1": a, "sentence2": b, "score": score} for a, b, score in given))

    made = {row["anchor"]: row for row in rows(load(folder, STS, num_negatives=2))}

    assert {made["a"]["negative_1"], made["a"]["negative_2"]} == {"other"}
    assert {made["b"]["negative_1"], made["b"]["negative_2"]} == {"other", "half"}


def test_where_and_symmetric(folder: Path) -> None:
    given = [{"anchor": f"q{n}", "positive": f"d{n}", "label": n % 3} for n in range(9)]
    given[3]["label"] = 0.0
    write_lines(folder / "rows.jsonl", given)
    task = {"name": "t", "type": "pairs", "source": "rows.jsonl", "instruction": "Find it", "symmetric": True}

    one = load(folder, {**task, "where": {"label": 1}})
    two = load(folder, {**task, "where": {"label": [0, "1"]}})

    assert [row["anchor"] for row in rows(one)] == ["q1", "q4", "q7"]
    assert {row["document_prompt"] for row in rows(one)} == {query_prompt("Find it")}
    assert len(two.dataset) == 6
    assert one.reports[0].dropped == {"excluded by where": 6}


def test_data_sets(folder: Path) -> None:
    (folder / "saved").mkdir()
    Dataset.from_dict({"query": ["q0", "q1"], "answer": ["d0", "d1"]}).to_parquet(str(folder / "saved/train.parquet"))
    task = {"name": "t", "type": "pairs", "source": f"hf:{folder / 'saved'}"}
    task |= {"columns": {"anchor": "query", "positive": "answer"}}

    made = rows(load(folder, {**task, "split": "train"}))

    expected = [("q0", "d0", "d1"), ("q1", "d1", "d0")]
    assert [(row["anchor"], row["positive"], row["negative_1"]) for row in made] == expected
    with pytest.raises(UserError, match="no split 'dev'; the splits are train"):
        load(folder, {**task, "split": "dev"})


# --- stages, proportions, seeds


def test_stages(folder: Path) -> None:
    only_one = {**QUESTIONS, "name": "only one", "stages": [1]}
    tasks = [QUESTIONS, only_one, COLOURS, STS]

    assert [task.name for task in load(folder, *tasks, stage=1).tasks] == ["questions", "only one"]
    assert [task.name for task in load(folder, *tasks, stage=2).tasks] == ["questions", "colours", "sts"]
    assert len(load(folder, *tasks).tasks) == 4
    left = load(folder, *tasks, without_tasks=["only*", "sts"])
    assert [task.name for task in left.tasks] == ["questions", "colours"]
    with pytest.raises(UserError, match="no task is named colour; the tasks are questions, colours"):
        load(folder, QUESTIONS, COLOURS, without_tasks=["colour"])
    with pytest.raises(UserError, match=r"no task is for stage 1 \(the tasks are sts\); add stages: \[1\]"):
        load(folder, STS, stage=1)


def counts(mixture: Mixture) -> Counter[str]:
    return Counter(mixture.dataset["task"])


def test_rows_depend_on_the_seed_not_on_processes_or_other_tasks(folder: Path) -> None:
    tasks = [QUESTIONS, COLOURS, STS]

    one = load(folder, *tasks, num_negatives=3)
    fresh = load_mixture(tasks, root=folder, cache_dir=folder.parent / "fresh", num_negatives=3, num_proc=3)
    assert one.dataset.to_list() == fresh.dataset.to_list()
    assert one.dataset.to_list() != load(folder, *tasks, num_negatives=3, seed=1).dataset.to_list()
    assert [row for row in rows(one) if row["task"] == "colours"] == rows(load(folder, COLOURS, num_negatives=3))
    assert len({row["task"] for row in one.dataset.select(range(10))}) > 1


def test_the_cache_follows_files_and_settings(folder: Path) -> None:
    before = load(folder, QUESTIONS)
    made = sorted((folder.parent / "cache" / "revela_hub").glob("generator/*mixture-*/*/*.arrow"))
    again = load(folder, {**QUESTIONS, "stages": [1]})
    assert sorted((folder.parent / "cache" / "revela_hub").glob("generator/*mixture-*/*/*.arrow")) == made
    assert again.dataset.to_list() == before.dataset.to_list()
    assert str(again) == str(before)

    write_lines(folder / "passages.jsonl.gz", ({"_id": id_, "text": f"New {id_}"} for id_ in PASSAGES))
    assert rows(load(folder, QUESTIONS))[0]["positive"] == "New p0"
    assert rows(load(folder, {**QUESTIONS, "instruction": ""}))[0]["anchor_prompt"] == ""
    beir = {"name": "beir", "type": "retrieval", "source": "beir", "split": "train"}
    assert len(load(folder, beir).dataset) == 3
    with (folder / "beir/qrels/train.tsv").open("a") as qrels:  # not only the corpus of a BEIR folder
        qrels.write("q2\tp4\t1\n")
    assert len(load(folder, beir).dataset) == 4


# --- descriptions


def test_the_root_and_environment_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "mixture.yaml"
    path.write_text(f"root: $SOURCES\ntasks:\n- {json.dumps(COLOURS)}\n")
    monkeypatch.setenv("SOURCES", str(folder))
    assert parse_mixture(path)[0].source == Source(f"{folder}/colours.jsonl")
    assert parse_mixture(path, root="x")[0].source == Source("x/colours.jsonl")
    [task] = parse_mixture([{**COLOURS, "source": "hf:owner/name:en", "split": "train"}], root="x")
    assert task.source == Source("hf:owner/name", name="en", split="train")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instructions": "x"}, "the keys are name, type, source"),
        ({"type": "clasification"}, "wrong type"),
        ({"columns": {"txt": "x"}}, "columns.*text, label"),
        ({"columns": {"label": "text"}}, "columns"),  # the text as its own label
        ({"source": {"path": "x", "colour": 1}}, "colour"),
    ],
)
def test_a_task_that_is_not_well_written(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_mixture([{**COLOURS, **change}])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "task:\n- {}",
        "- {name: a, type: pairs, source: x}\n- {name: a, type: pairs, source: y}",
    ],
)
def test_a_file_that_is_not_well_written(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mixture.yaml"
    path.write_text(content)
    with pytest.raises(UserError):
        parse_mixture(path)


# --- sources that do not fit


NO_CORPUS = {key: value for key, value in QUESTIONS.items() if key != "corpus"}
BEIR = {"name": "t", "type": "retrieval", "source": "beir", "split": "train"}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({**QUESTIONS, "source": "numbers.jsonl", "columns": {"anchor": "question", "positive": "document"}}, r"no positives for training in .*9 passage is not in the corpus"),
        ({**COLOURS, "source": "classes.jsonl", "mode": "label"}, r"classes\.jsonl:1: task colours: the label is 0, but with mode: label it is the text"),
        (NO_CORPUS, r"questions\.jsonl:1: task questions: positive is the column passage_id, which contains ids"),
        ({**NO_CORPUS, "source": "numbers.jsonl", "columns": {"anchor": "question", "positive": "document"}}, "positive is the column document, which contains ids"),
        ({**QUESTIONS, "columns": {"anchor": "passage_id", "positive": "passage_id2"}, "source": "numbers.jsonl"}, r"anchor is the column passage_id, which contains ids .* \(queries: FILE\)"),
        ({"name": "t", "type": "pairs", "source": "empty.jsonl"}, r"task t: no positives for training in .*empty\.jsonl \(no rows\)"),
    ],
)  # fmt: skip
def test_a_source_that_does_not_fit(folder: Path, task: dict[str, Any], message: str) -> None:
    (folder / "empty.jsonl").write_text("")
    write_lines(folder / "classes.jsonl", ({"text": f"red {n}", "label": n} for n in range(12)))
    numbers = [{"question": f"Where is {n}?", "document": f"MED-{n}"} for n in range(9)]
    ids = ({**row, "passage_id": row["document"], "passage_id2": "p1"} for row in numbers)
    write_lines(folder / "numbers.jsonl", ids)
    with pytest.raises(UserError, match=message):
        load(folder, task)


# --- the recipes
