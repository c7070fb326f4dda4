"""Texts on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval.texts import TextFile, write_texts


def test_the_lines_of_a_text_are_those_that_hold_it(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 60, 300)
    texts = write_texts((f"text {number}" for number in numbers), tmp_path)
    for row in range(len(texts)):
        [text] = texts.read([row])
        lines = [line for line, number in enumerate(numbers) if f"text {number}" == text]
        assert texts.lines_of(row) == lines == np.flatnonzero(texts.rows_L == row).tolist()


@pytest.mark.parametrize("name", ["arrow", "npz"])
def test_a_file_that_was_cut_is_noticed_when_it_is_opened(tmp_path: Path, name: str) -> None:
    texts = write_texts([f"text {number % 2000}" for number in range(3000)], tmp_path)
    file = texts.path.with_suffix(f".{name}")
    del texts
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"texts-.*\.arrow cannot be read .*repeat the command"):
        TextFile(next(tmp_path.glob("*.arrow")))


def test_texts_of_another_size_are_noticed(tmp_path: Path) -> None:
    first, second = write_texts(map(str, range(1024)), tmp_path), write_texts(map(str, range(1025)), tmp_path)
    second.path.replace(first.path)
    with pytest.raises(UserError, match="belong to other texts"):
        TextFile(first.path)


def test_lone_surrogates_are_written_and_read(tmp_path: Path) -> None:
    text = json.loads('"broken \\ud800 half"')
    assert write_texts([text], tmp_path).read([0]) == ["broken \ufffd half"]
