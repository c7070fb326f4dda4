"""The full check of an index, through the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.data.text.chunks import Chunk
from revela_hub.retrieval import PassageStore, RankerSettings, build_store, write_passages

Result = dict[str, tuple[bool, str]]


class Lengths:
    """An encoder of letters."""

    def encode_query(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        return np.array([[text.count(letter) for letter in "0123456789"] for text in inputs], dtype=np.float32) + 1

    encode_document = encode_query


@pytest.fixture
def index(tmp_path: Path) -> Path:
    chunks = [Chunk("a", f"text {number % 70}", "a", number + 1, number + 1) for number in range(90)]
    settings = RankerSettings(identity="folder@1")
    build_store(lambda folder: write_passages(chunks, folder), Lengths(), tmp_path / "index", settings, model="mine")
    return tmp_path / "index"


def checked(index: Path, capsys: pytest.CaptureFixture[str]) -> Result:
    capsys.readouterr()
    try:
        status = main(["check", str(index), "--json"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    result = json.loads(capsys.readouterr().out)
    assert status == (0 if result["ok"] else 1)
    return {row["name"]: (row["ok"], row["detail"]) for row in result["checks"]}


def test_a_good_index_passes(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = checked(index, capsys)
    assert rows["index"] == (True, "70 passages, 10 dimensions, of mine")
    assert list(rows) == ["index", "texts", "vectors", "places", "canary"] and all(ok for ok, _ in rows.values())
    assert main(["check", str(index)]) == 0
    assert "all 5 checks passed" in capsys.readouterr().out


def change_text(index: Path) -> None:
    [path] = index.glob("*.arrow")
    path.write_bytes(path.read_bytes().replace(b"text 33", b"text 34", 1))


def change_vector(index: Path) -> None:
    path = max(index.glob("vectors-*/*.npy"))
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def swap_places(index: Path) -> None:
    [path] = index.glob("vectors-*/layout-*/places.npy")
    places = np.load(path)
    places[[1, 2]] = places[[2, 1]]
    np.save(path, places)


def change_canary(index: Path) -> None:
    [path] = index.glob("canary-*")
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (change_text, "texts", "1 text changed: delete it, and run revela-hub index again"),
        (change_vector, "vectors", "1 of 2 shards are damaged, such as"),
        (swap_places, "places", "2 passages with the vector of another one: run revela-hub index again"),
        (change_canary, "places", "is damaged"),
        (lambda index: next(index.glob("*.lines.npy")).unlink(), "texts", "cannot be read"),
    ],
)
def test_damage_that_opening_does_not_see_is_found(
    index: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], name: str, message: str
) -> None:
    damage(index)
    found = checked(index, capsys)
    assert [each for each, (ok, _) in found.items() if not ok] == [name]
    assert message in found[name][1]


def test_an_index_has_no_server(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PassageStore(index)) == 70
    assert main(["check", str(index), "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "is an index: leave out --endpoint" in capsys.readouterr().err


def test_an_index_that_is_not_complete_is_no_model(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (index / "index.json").unlink()
    assert main(["check", str(index)]) == 2
    assert "an index that is not complete: `revela-hub index` with the same options" in capsys.readouterr().err
