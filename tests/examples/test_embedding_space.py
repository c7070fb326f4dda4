"""examples/cot-mote/embedding_space.py, and the divergence that it prints."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from revela_hub.evaluation import pair_divergence


def test_the_divergence_equals_plain_loops() -> None:
    """Equations 14 to 19 of appendix A.1."""
    queries, passages = np.random.default_rng(0).normal(size=(2, 5, 3))
    d = [
        [1 - sum(a * b for a, b in zip(q, p, strict=True)) / (math.hypot(*q) * math.hypot(*p)) for p in passages]
        for q in queries
    ]
    total = sum(math.exp(-each) for row in d for each in row)
    kl = js = 0.0
    for i in range(5):
        for j in range(5):
            p1, p2 = math.exp(-d[i][j]) / total, math.exp(-d[j][i]) / total
            kl += p1 * math.log(p1 / p2)
            js += (p1 * math.log(2 * p1 / (p1 + p2)) + p2 * math.log(2 * p2 / (p1 + p2))) / 2
    assert pair_divergence(queries, passages) == pytest.approx((kl, js), rel=1e-12)
    assert pair_divergence(queries, 3 * queries) == pytest.approx((0, 0), abs=1e-12)


def test_the_script_compares_two_models(
    repository: Path, tmp_path: Path, retriever_folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    spec = importlib.util.spec_from_file_location("script", repository / "examples" / "cot-mote" / "embedding_space.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pairs, other = tmp_path / "pairs.jsonl", tmp_path / "other"
    pairs.write_text("".join(json.dumps({"anchor": text[:12], "positive": text}) + "\n" for text in texts))
    other.symlink_to(retriever_folder)
    words = [
        str(retriever_folder),
        str(other),
        "--pairs",
        str(pairs),
        "--output",
        str(tmp_path / "pictures" / "analysis"),
    ]
    monkeypatch.setattr(sys, "argv", ["embedding_space.py", *words])
    script.main()
    found = json.loads((tmp_path / "pictures" / "analysis.json").read_text())
    assert found[str(other)] == found[str(retriever_folder)] and found[str(other)]["kl"] > 0
    assert (tmp_path / "pictures" / "analysis.png").read_bytes().startswith(b"\x89PNG")
