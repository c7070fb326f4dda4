"""Drift between two texts: the three answers, and mistakes."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.evaluation.drift import MIN_DISTANCE_EXCESS, Change, Drift, _energies, compare_texts
from revela_hub.evaluation.probe import ProbeSettings

SETTINGS = ProbeSettings(queries=40, passages=60, kinds=("sentence",))


def write(folder: Path, name: str, vocabulary: list[str], seed: int, documents: int = 60) -> str:
    """Write documents of three sentences of random words."""
    drawn = random.Random(seed)
    rows = []
    for number in range(documents):
        topic = drawn.sample(vocabulary, 8)
        sentences = [" ".join(drawn.choices(topic, k=12)).capitalize() + "." for _ in range(3)]
        rows.append({"_id": f"{name}{number}", "text": " ".join(sentences)})
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def vocabulary(start: str) -> list[str]:
    return [f"{start}{a}{b}" for a in "bdfgklmnprst" for b in "aeiou"]


class Words:
    """Encodes texts as sums of the vectors of the words that it knows; of other words it sees the number only."""

    similarity_fn_name = "cosine"

    def __init__(self, *known: str) -> None:
        self.known = known

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return np.stack(
            [sum((self._vector(word) for word in text.lower().strip(".").split()), np.zeros(64)) for text in texts]
        )

    encode_document = encode_query

    def _vector(self, word: str) -> np.ndarray:
        seed = (
            sum((index + 1) * ord(letter) for index, letter in enumerate(word.strip(".")))
            if word.startswith(self.known)
            else 0
        )
        return np.random.default_rng(seed).normal(size=64)


def test_parts_of_one_text_show_no_drift(tmp_path: Path) -> None:
    old, new = (write(tmp_path, name, vocabulary("o"), seed) for seed, name in enumerate(("old", "new")))
    found = compare_texts(old, new, Words("o"), SETTINGS)
    assert found.answer.startswith("NO DRIFT"), str(found)
    assert found.p_value > 0.01
    assert found.by_chance[0] < 0 < found.by_chance[1]


def test_new_words_that_the_retriever_handles_need_a_new_index(tmp_path: Path) -> None:
    old, new = write(tmp_path, "old", vocabulary("o"), 0), write(tmp_path, "new", vocabulary("n"), 1)
    found = compare_texts(old, new, Words("o", "n"), SETTINGS)
    assert found.answer.startswith("RE-INDEX"), str(found)
    assert found.unseen[0] < 0.1 and found.unseen[1] == 1
    assert found.p_value <= 0.01


def test_texts_of_one_document_each(tmp_path: Path) -> None:
    """Sections of a long document are exchanged: exchanging whole documents would give only the observed division."""
    files = []
    for seed, start in enumerate("oon"):
        rows = Path(write(tmp_path, f"{start}{seed}", vocabulary(start), seed)).read_text().splitlines()
        files.append(tmp_path / f"{seed}.md")
        files[-1].write_text("".join(f"# Part {n}\n\n{json.loads(row)['text']}\n\n" for n, row in enumerate(rows)))
    same, other = (compare_texts(str(files[0]), str(file), Words("o", "n"), SETTINGS) for file in files[1:])
    assert same.passages == other.passages == 60
    assert same.answer.startswith("NO DRIFT") and same.p_value > 0.01, str(same)
    assert other.distance - other.by_chance[1] > MIN_DISTANCE_EXCESS and other.p_value <= 0.01, str(other)


def test_a_retriever_that_fails_on_new_text_needs_training(tmp_path: Path) -> None:
    old, new = write(tmp_path, "old", vocabulary("o"), 0), write(tmp_path, "new", vocabulary("n"), 1)
    found = compare_texts(old, new, Words("o"), SETTINGS)
    assert found.answer.startswith("RE-TRAIN"), str(found)
    assert found.retriever.high < 0
    assert str(found).splitlines()[-1] == found.answer


def test_text_that_is_harder_for_bm25_too_is_no_reason_to_train() -> None:
    fell, as_much = Change(0.9, 0.7, -0.3, -0.1), Change(0.0, 0.01, -0.05, 0.06)
    found = Drift(60, 40, fell, fell, as_much, (0.1, 0.11), 0.001, (-0.01, 0.01), 0.4)
    assert found.answer.startswith("NO DRIFT") and found.answer.endswith("quality fell, but as much for BM25")


def test_the_energy_distance_is_the_definition() -> None:
    points = np.random.default_rng(0).normal(size=(7, 3))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1).astype(np.float32)
    groups = np.array([[1, 1, 1, 0, 0, 0, 0]], np.float32).T
    one, other = range(3), range(3, 7)
    across = np.mean([distances[i, j] for i in one for j in other])
    inside = [np.mean([distances[i, j] for i in part for j in part if i != j]) for part in (one, other)]
    assert _energies(distances, groups)[0] == pytest.approx(2 * across - sum(inside), abs=1e-5)


def test_text_that_was_not_read_is_reported(
    tmp_path: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "text", vocabulary("o"), 0)
    (tmp_path / "new" / "b.bin").write_bytes(b"\0")
    compared = [str(tmp_path / name) for name in ("old", "new")]
    assert main(["probe", "--compare", *compared, "--retriever", str(retriever_folder)]) == 0
    assert "new text: skipped: 1 binary (.bin 1)\n" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path, "old", vocabulary("o"), 0)
    short = write(tmp_path, "short", vocabulary("o"), 0, documents=3)
    with pytest.raises(UserError, match="the new text is too short to compare: the text has 3 candidate queries"):
        compare_texts(old, short, Words("o"), SETTINGS)
    for words, message in (
        (["--compare", old], "--compare needs two texts, OLD and NEW, and nothing else"),
        (["--compare", old, old], "--compare needs --retriever MODEL"),
        (["--compare", old, str(tmp_path / "none"), "--retriever", "x"], "none"),
        ([], "name the text to make the probe from, or compare two texts"),
    ):
        assert main(["probe", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
