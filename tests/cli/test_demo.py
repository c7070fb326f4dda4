"""`revela-hub demo`, through the command line and its page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from adapt_report import adapt_report

from revela_hub.cli.commands import demo

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
    (folder / "retriever" / "hybrid.json").write_text(json.dumps(adapt_report()))
    (folder / "settings.json").write_text(json.dumps({"retriever": str(folder / "retriever")}))
    (folder / "work" / "probe").mkdir(parents=True)
    passages = [{"_id": "p0", "text": "A passage of the evaluation set."}, {"_id": "p1", "text": "Another river."}]
    queries = [{"_id": "q0", "text": "which passage?"}, {"_id": "q1", "text": "long " * 30}]
    queries.append({"_id": "q2", "text": "return the ``river``"})
    for name, rows in (("corpus", passages), ("queries", queries)):
        (folder / "work" / "probe" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def config(*words: Any) -> tuple[str, str]:
    """The configuration of the page of a command, and the HTML of a search for "river"."""
    pytest.importorskip("gradio", reason="the page needs the extra demo")
    values = {"model": words[0], "device": "cpu"} | dict(zip(words[1::2], words[2::2], strict=True))
    values = {key: [value] if key == "corpus" else value for key, value in values.items()}
    with demo.demo_page(demo.Arguments(**values)) as page:
        search = next(each.fn for each in page.fns.values() if each.api_name == "search")
        return json.dumps(page.get_config_file(), ensure_ascii=False, default=str), search("river", 0.3, 3)


def titles(html: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", html)


def test_the_output_of_adapt(adapted: Path) -> None:
    page, html = config("adapted")
    assert titles(html) == ["hybrid, BM25 weight 0.3", "adapted", "base", "BM25"]
    for text in ("adapted/retriever", "Better: +0.050 [+0.030, +0.070]", "which passage?"):
        assert text in page
    assert '"value": 0.2' in page and "--mode hybrid" not in page
    assert "long long" not in page and "``river``" not in page
    assert "the passages of the evaluation set: 2 passages" in page
    assert str(adapted.parent) not in page + html


def test_the_base_model_is_gone(adapted: Path) -> None:
    (adapted / "settings.json").write_text(json.dumps({"retriever": "./gone"}))
    page, html = config("adapted")
    assert titles(html) == ["hybrid, BM25 weight 0.3", "adapted", "BM25"]
    assert "The base model is not available on this machine" in page


def test_the_base_model_was_exported(adapted: Path) -> None:
    (adapted / "retriever" / "hybrid.json").write_text(json.dumps(adapt_report("NO DIFFERENCE", trained=False)))
    page, html = config("adapted")
    assert titles(html) == ["hybrid, BM25 weight 0.3", "retriever", "BM25"]
    assert "The retriever is the base model, unchanged." in page


def test_any_retriever_and_files(work: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "docs" / "notes.bin").write_bytes(b"\0")
    page, html = config(str(retriever_folder), "corpus", "docs")
    assert "1 binary (.bin 1)" in capsys.readouterr().err
    assert titles(html) == ["hybrid, BM25 weight 0.3", "retriever", "BM25"]
    assert html.count('<article class="rh-row">') == 9
    assert "docs: 6 passages" in page
    assert re.search(r"\b(Alba|Brent|Corve|Dart|Esk|Foss)\.txt:1-1\b", html)
    assert str(work) not in page + html
    page, html = config(str(retriever_folder), "corpus", "docs", "base", str(retriever_folder), "top_k", 30)
    assert '"maximum": 30' in page
    assert titles(html)[1:3] == ["retriever", "base"]
