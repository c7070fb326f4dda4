"""`revela-hub demo`, through the command line and its page."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from adapt_report import adapt_report

from revela_hub.cli.commands import demo
from revela_hub.cli.main import main

RIVERS = ("Alba", "Brent", "Corve", "Dart", "Esk", "Foss")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "docs").mkdir()
    for name in RIVERS:
        (tmp_path / "docs" / f"{name}.txt").write_text(f"The river {name} flows past the town {name.lower()}ford.\n")
    return tmp_path


@pytest.fixture
def adapted(work: Path, retriever_folder: Path) -> Path:
    """The output folder of an adaptation."""
    folder = work / "adapted"
    folder.mkdir()
    retriever_folder.rename(folder / "retriever")
    (folder / "adapt.json").write_text(json.dumps(adapt_report()))
    (folder / "settings.json").write_text(json.dumps({"retriever": str(folder / "retriever")}))
    (folder / "work" / "probe").mkdir(parents=True)
    passages = [{"_id": "p0", "text": "A passage of the evaluation set."}, {"_id": "p1", "text": "Another river."}]
    queries = [{"_id": "q0", "text": "which passage?"}, {"_id": "q1", "text": "long " * 30}]
    for name, rows in (("corpus", passages), ("queries", queries)):
        (folder / "work" / "probe" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def config(*words: Any) -> tuple[str, str]:
    """The configuration of the page of a command, and the HTML of a search for "river"."""
    pytest.importorskip("gradio", reason="the page needs the extra demo")
    values = {"model": words[0], "device": "cpu"} | dict(zip(words[1::2], words[2::2], strict=True))
    values = {key: [value] if key == "corpus" else value for key, value in values.items()}
    with demo.demo_page(demo.Arguments(**values)) as page:
        search = next((each.fn for each in page.fns.values() if each.api_name == "search"), None)
        return json.dumps(page.get_config_file(), ensure_ascii=False, default=str), search(
            "river", 0.3, 3, None
        ) if search else ""


def test_the_corpus_of_a_configuration_file(work: Path) -> None:
    (work / "rows.jsonl").write_text('{"body": "A row."}\n')
    (work / "docs" / "calls.jsonl").write_text('{"name": "river"}\n')
    corpus: list[Any] = ["docs", {"path": "rows.jsonl", "text_column": "body"}]
    documents, name = demo._documents(demo.Arguments(model="m", corpus=corpus, exclude=["docs/calls.jsonl"]), work)
    assert len(list(documents)) == len(RIVERS) + 1 and name == "docs, rows.jsonl"


def titles(html: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", html)


def test_the_output_of_adapt(adapted: Path) -> None:
    page, html = config("adapted")
    assert titles(html) == ["base", "adapted", "BM25", "hybrid, BM25 weight 0.3"]
    for text in (
        "adapted/retriever",
        "Better: +0.050 [+0.030, +0.070]",
        "The exported one took 3.0 min.",
        "which passage?",
    ):
        assert text in page
    assert '"value": 0.2' in page and "--weights 0.8 0.2" in page
    assert "long long" not in page
    assert "the passages of the evaluation set: 2 passages" in page
    assert str(adapted.parent) not in page + html


def test_an_adaptation_without_its_evaluation_set(adapted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo._documents(demo.Arguments(model="adapted"), adapted)[1] == "the passages of the evaluation set"
    assert not capsys.readouterr().err
    shutil.rmtree(adapted / "work")
    assert demo._documents(demo.Arguments(model="adapted"), adapted)[1] == "the built-in sample"
    assert (
        "has no evaluation set in work/probe: the page searches the built-in sample, or your text with --corpus\n"
        in (capsys.readouterr().err)
    )


def test_the_base_model_is_gone(adapted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (adapted / "settings.json").write_text(json.dumps({"retriever": "./gone"}))
    page, html = config("adapted")
    assert titles(html) == ["adapted", "BM25", "hybrid, BM25 weight 0.3"]
    assert "The base model is not available on this machine" in page
    assert "the base model is not shown: ./gone is not a folder" in capsys.readouterr().err


def test_the_base_model_was_exported(adapted: Path) -> None:
    report = json.loads((adapted / "adapt.json").read_text()) | {
        "exported": "base retriever",
        "verdict": "NO DIFFERENCE",
    }
    (adapted / "adapt.json").write_text(json.dumps(report))
    page, html = config("adapted")
    assert titles(html) == ["retriever", "BM25", "hybrid, BM25 weight 0.3"]
    assert "The exported retriever is the base model, unchanged." in page


def test_any_retriever_and_files(work: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "docs" / "notes.bin").write_bytes(b"\0")
    page, html = config(str(retriever_folder), "corpus", "docs")
    assert "skipped: 1 binary (.bin 1)\n" in capsys.readouterr().err
    assert titles(html) == ["retriever", "BM25", "hybrid, BM25 weight 0.3"]
    assert html.count('<article class="rh-row">') == 9
    assert "docs: 6 passages" in page
    assert re.search(r"\b(Alba|Brent|Corve|Dart|Esk|Foss)\.txt:1-1\b", html)
    assert str(work) not in page + html
    page, html = config(str(retriever_folder), "base", str(retriever_folder), "top_k", 30)
    assert '"maximum": 30' in page
    assert titles(html)[:2] == ["base", "retriever"]
    assert "the built-in sample: 24 passages" in page and "why do my eyes water" in page


def test_a_report_and_queries_that_are_given(adapted: Path) -> None:
    (adapted.parent / "queries.txt").write_text("which town?\n")
    page, _ = config("adapted/retriever", "report", "adapted/adapt.json", "example_queries", "queries.txt")
    assert "which town?" in page and "Better: +0.050" in page


def test_an_answering_model(work: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio", reason="the page needs the extra demo")
    (work / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"Where is {name}?", "answers": [name]}) + "\n" for name in RIVERS)
    )
    words = f"train imprag --data train.jsonl --corpus docs --backbone {llama_folder} --output_dir out --max_steps 1"
    words += " --num_passages 2 --max_passage_length 40 --per_device_train_batch_size 4 --retrieval_warmup_epochs 1 --bf16 false"
    words += " --num_positives 1 --num_negatives 1 --first_negative_rank 2 --last_negative_rank 4 --num_candidates 2"
    assert main([*words.split(), "--report_to", "none", "--quiet", "true", "--max_length", "120"]) == 0
    arguments = demo.Arguments(model="out/model", corpus=["docs"], device="cpu", max_new_tokens=4)
    with demo.demo_page(arguments) as page:
        ask = next(each.fn for each in page.fns.values() if each.api_name == "answer")
        outputs = list(ask("Where is Dart?"))
        assert outputs[-1][1].count('<article class="rh-row">') == 2
        assert ".txt" in outputs[-1][1] and str(work) not in outputs[-1][1]
        assert "revela-hub answer out/model --index my-index" in json.dumps(page.get_config_file(), default=str)
    for option in ("--base", "--cache_dir", "--top_k", "--trust_remote_code"):
        value = {"--top_k": "3", "--trust_remote_code": "true"}.get(option, "x")
        assert main(["demo", "out/model", option, value]) == 2
        assert f"{option} is for retrievers, but out/model was trained with ImpRAG" in capsys.readouterr().err
    assert main(["demo", "out/model", "--corpus", "docs", "--index", "x"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("bm25", "the demo needs a model besides BM25"),
        ("./nowhere", "./nowhere is not a folder"),
        ("docs", "docs is not a sentence-transformers folder"),
        ("RETRIEVER --corpus nowhere", "nowhere"),
        ("RETRIEVER --corpus empty", "empty"),
        ("RETRIEVER --index x", "--index is for models that answer questions"),
        ("RETRIEVER --report docs/Alba.txt", "docs/Alba.txt is not a report of `revela-hub adapt`"),
        ("RETRIEVER --report nowhere.json", "nowhere.json: no such file"),
        ("RETRIEVER --example_queries nowhere.txt", "no file nowhere.txt"),
        ("RETRIEVER --base ./nowhere", "./nowhere is not a folder"),
        ("RETRIEVER --port 0", "--port: must be at least 1"),
        ("RETRIEVER --port 70000", "--port: must be at least 1"),
    ],
)
def test_mistakes(
    work: Path, retriever_folder: Path, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--port" not in words:
        pytest.importorskip("gradio", reason="the page needs the extra demo")
    (work / "empty").mkdir()
    assert main(["demo", *words.replace("RETRIEVER", str(retriever_folder)).split()]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("revela-hub: error: ") and told in line


def test_without_gradio(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from revela_hub import errors

    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "docs"]) == 2
    told = 'the package gradio is not installed: pip install "revela-hub[demo]" (--debug shows the traceback)\n'
    assert capsys.readouterr().err.endswith(told)
