"""Texts on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval.texts import Texts, write_texts


def test_the_lines_of_a_text_are_those_that_hold_it(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 60, 300)
    texts = write_texts((f"text {number}" for number in numbers), tmp_path)
    for row in range(len(texts)):
        [text] = texts.read([row])
        lines = [line for line, number in enumerate(numbers) if f"text {number}" == text]
        assert texts.lines_of(row) == lines == np.flatnonzero(texts.rows_L == row).tolist()


def test_numbers_of_other_texts_are_named(tmp_path: Path) -> None:
    first, second = write_texts(["one", "two"], tmp_path), write_texts(["three"], tmp_path)
    second.path.with_suffix(".npz").replace(first.path.with_suffix(".npz"))
    with pytest.raises(UserError, match=f"{first.path.name} cannot be read .*the .npz file belongs to other texts"):
        Texts(first.path)


def test_lone_surrogates_are_written_and_read(tmp_path: Path) -> None:
    text = json.loads('"broken \\ud800 half"')
    assert write_texts([text], tmp_path).read([0]) == ["broken \ufffd half"]
