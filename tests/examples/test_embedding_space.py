"""examples/cot-mote/embedding_space.py: divergences between queries and passages, and the picture."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    path = repository / "examples" / "cot-mote" / "embedding_space.py"
    spec = importlib.util.spec_from_file_location("embedding_space", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cloud(places: list[tuple[float, float]], each: int, seed: int = 0) -> np.ndarray:
    """Points around some places that are far apart."""
    noise = np.random.default_rng(seed).normal(scale=0.01, size=(len(places) * each, 2))
    return (np.repeat(np.array(places), each, axis=0) + noise).astype(np.float32)


def test_divergences_are_those_of_the_shares_in_each_cell(script: ModuleType) -> None:
    """Three far groups, so that the cells are known: 20 queries and 10 passages, 10 and 10, 0 and 20."""
    queries = np.concatenate([cloud([(0, 0)], 20), cloud([(9, 9)], 10)])
    passages = np.concatenate([cloud([(0, 0), (9, 9)], 10, 1), cloud([(0, 9)], 20, 2)])
    result = script.divergences(queries, passages, cells=3)
    p = np.array([20.5, 10.5, 0.5]) / 31.5
    q = np.array([10.5, 10.5, 20.5]) / 41.5
    kl = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in ((p, q), (q, p))]
    m = (p + q) / 2
    js = sum(0.5 * a * math.log(a / c) + 0.5 * b * math.log(b / c) for a, b, c in zip(p, q, m, strict=True))
    assert list(result.values()) == pytest.approx([*kl, js])


def test_the_ends_of_the_scale(script: ModuleType) -> None:
    same = cloud([(0, 0), (5, 5), (9, 0)], 40)
    assert script.divergences(same, same.copy())["js"] < 1e-12
    apart = script.divergences(cloud([(0, 0)], 500), cloud([(9, 9)], 500, 1), cells=2)
    assert apart["js"] == pytest.approx(math.log(2), abs=0.01)


def test_the_script_compares_two_models(
    script: ModuleType, tmp_path: Path, retriever_folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, passages = tmp_path / "queries.jsonl", tmp_path / "passages.jsonl"
    queries.write_text("".join(json.dumps({"question": f"{text[:12]} {i}"}) + "\n" for i in range(3) for text in texts))
    passages.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(3) for text in texts))
    other = tmp_path / "other"
    other.symlink_to(retriever_folder)
    words = [str(retriever_folder), str(other), "--queries", str(queries), "--query-column", "question"]
    words += ["--passages", str(passages), "--output", str(tmp_path / "pictures" / "analysis")]
    monkeypatch.setattr(sys, "argv", ["embedding_space.py", *words])
    script.main()
    found = json.loads((tmp_path / "pictures" / "analysis.json").read_text())
    assert list(found) == [str(retriever_folder), str(other)]
    assert found[str(other)] == found[str(retriever_folder)] and 0 <= found[str(other)]["js"] <= math.log(2)
    assert (tmp_path / "pictures" / "analysis.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["embedding_space.py", *words, "--max-texts", "10", "--query-column", "text"])
    with pytest.raises(Exception, match="text"):
        script.main()
