"""The report of an adaptation on the page."""

import json
from pathlib import Path

import pytest
from adapt_report import adapt_report

from revela_hub.demo.rendering import report_html
from revela_hub.demo.report import read_report
from revela_hub.errors import UserError


def write(folder: Path, report: object) -> Path:
    file = folder / "adapt.json"
    file.write_text(json.dumps(report))
    return file


def test_the_verdict_the_table_and_the_cost(tmp_path: Path) -> None:
    report = read_report(write(tmp_path, adapt_report()))
    assert report.bm25_weight == 0.2 and not report.is_base
    assert report.verdict == (
        "Better: +0.050 [+0.030, +0.070] nDCG@10 compared with the base retriever with BM25 (182 test queries)."
    )
    assert [row[:2] for row in report.table] == [
        ("BM25", "0.522"),
        ("base retriever", "0.701"),
        ("base retriever, with BM25", "0.712"),
        ("natural pairs, with BM25 (exported)", "0.766"),
    ]
    assert report.table[-1][2:] == ("0.2", "3.0 min", "+0.050 [+0.030, +0.070]")
    assert report.cost == (
        "Training all candidates took 3.0 min. The exported one took 3.0 min. The budget was 6m, including the evaluation."
    )
    cost = "Training all candidates took 5:00 on CPU (1 thread, AVX2)."
    assert read_report(write(tmp_path, adapt_report() | {"cost": cost})).cost.startswith(
        f"{cost} The exported one took"
    )
    html = report_html(report)
    assert html.count("<tr>") == 5 and "The exported one took 3.0 min." in html


def test_late_interaction_is_named(tmp_path: Path) -> None:
    values = adapt_report()
    system, means = values["systems"][-1], values["ndcg_at_10"]
    system["token_weight"] = values["token_weight"] = 0.4
    means["natural pairs, with BM25 and late interaction"] = means.pop("natural pairs, with BM25")
    report = read_report(write(tmp_path, values))
    assert report.token_weight == 0.4
    assert report.table[-1][:2] == ("natural pairs, with BM25 and late interaction (exported)", "0.766")


def test_the_base_was_exported(tmp_path: Path) -> None:
    report = read_report(write(tmp_path, adapt_report("NO DIFFERENCE", "base retriever", 0.0)))
    assert report.is_base
    assert report.verdict.startswith("No difference: no training was better than the base retriever")
    report = read_report(write(tmp_path, adapt_report("NO DIFFERENCE", "base retriever", 0.01)))
    assert report.verdict.startswith("No difference: +0.010 [-0.010, +0.030] nDCG@10")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"ndcg_at_10": 3, "systems": []}', "null"])
def test_a_damaged_report(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapt.json").write_text(content)
    with pytest.raises(UserError, match=r"adapt\.json is not a report of `revela-hub adapt`, or is damaged"):
        read_report(tmp_path / "adapt.json")
    with pytest.raises(UserError, match="no such file"):
        read_report(tmp_path / "other.json")
