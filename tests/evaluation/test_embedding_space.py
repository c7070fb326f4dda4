"""Divergences between queries and passages, and the command that draws them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.evaluation.embedding_space import divergences, plane


def cloud(places: list[tuple[float, float]], each: int, seed: int = 0) -> np.ndarray:
    """Points around some places that are far apart."""
    noise = np.random.default_rng(seed).normal(scale=0.01, size=(len(places) * each, 2))
    return (np.repeat(np.array(places), each, axis=0) + noise).astype(np.float32)


def test_divergences_are_those_of_the_shares_in_each_cell() -> None:
    """Three far groups, so that the cells are known: 20 queries and 10 passages, 10 and 10, 0 and 20."""
    queries = np.concatenate([cloud([(0, 0)], 20), cloud([(9, 9)], 10)])
    passages = np.concatenate([cloud([(0, 0), (9, 9)], 10, 1), cloud([(0, 9)], 20, 2)])
    result = divergences(queries, passages, cells=3)
    p = np.array([20.5, 10.5, 0.5]) / 31.5
    q = np.array([10.5, 10.5, 20.5]) / 41.5
    kl = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in ((p, q), (q, p))]
    m = (p + q) / 2
    js = sum(0.5 * a * math.log(a / c) + 0.5 * b * math.log(b / c) for a, b, c in zip(p, q, m, strict=True))
    assert (result.kl_query_passage, result.kl_passage_query) == pytest.approx(kl)
    assert result.js == pytest.approx(js) and result.cells == 3


def test_the_ends_of_the_scale() -> None:
    same = cloud([(0, 0), (5, 5), (9, 0)], 40)
    assert divergences(same, same.copy()).js < 1e-12
    apart = divergences(cloud([(0, 0)], 500), cloud([(9, 9)], 500, 1), cells=2)
    assert apart.js == pytest.approx(math.log(2), abs=0.01)
    for wrong, message in (
        ((same[:5], same), "5 queries: at least 10 are needed"),
        ((same, same[:, :1]), "queries have 2 dimensions and passages 1"),
        ((same * np.nan, same), "the vectors of the queries are not all numbers"),
    ):
        with pytest.raises(UserError, match=message):
            divergences(*wrong)
    first, again = plane(same, same + 1), plane(same, same + 1)
    assert first[0].shape == first[1].shape == (120, 2) and np.array_equal(first[0], again[0])


def test_the_command_compares_two_models(
    tmp_path: Path, retriever_folder: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    queries, passages = tmp_path / "queries.jsonl", tmp_path / "passages.jsonl"
    queries.write_text("".join(json.dumps({"question": f"{text[:12]} {i}"}) + "\n" for i in range(3) for text in texts))
    passages.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(3) for text in texts))
    other = tmp_path / "other"
    other.symlink_to(retriever_folder)
    words = ["--queries", str(queries), "--query-column", "question", "--passages", str(passages)]
    out = tmp_path / "pictures" / "analysis"
    assert main(["analyze", str(retriever_folder), str(other), *words, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "18 queries, 18 passages" in printed
    found = json.loads((tmp_path / "pictures" / "analysis.json").read_text())["models"]
    assert list(found) == [str(retriever_folder), str(other)]
    assert found[str(other)] == found[str(retriever_folder)] and 0 <= found[str(other)]["js"] <= math.log(2)
    assert (tmp_path / "pictures" / "analysis.png").read_bytes().startswith(b"\x89PNG")
    assert main(["analyze", str(retriever_folder), *words, "--query-column", "text"]) == 2
    assert "text" in capsys.readouterr().err
    assert main(["analyze", *[str(retriever_folder)] * 2, *words]) == 2
    assert "give one model, or two to compare" in capsys.readouterr().err
