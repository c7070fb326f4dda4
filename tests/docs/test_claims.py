"""The numbers of verdicts on the papers' claims, as stated in the README and above the tables, are those of the tables."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = "benchmarks/claims.md"
SENTENCE = re.compile(r"of (\d+) tests, (\d+) [^.]*?(\d+) [^.]*?(\d+) ")


def verdicts() -> Iterator[str]:
    """Yield the column "verdict" of each table with that column."""
    place = None
    for line in (ROOT / CLAIMS).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            place = None
        elif "verdict" in cells:
            place = cells.index("verdict")
        elif place is not None and not line.startswith("|---"):
            yield cells[place]


def group(verdict: str) -> str:
    """Return whether a claim holds at least in part, is contradicted and holds nowhere, or neither."""
    if re.search(r"\b(holds|mixed)\b", verdict):
        return "holds"
    return "contradicted" if "does not hold" in verdict else "inconclusive"


@pytest.mark.parametrize("page", ["README.md", CLAIMS])
def test_the_verdicts_are_counted(page: str) -> None:
    found = list(verdicts())
    assert all(re.match("holds|does not hold|inconclusive|mixed|dense", verdict) for verdict in found)
    counts = Counter(map(group, found))
    expected = (len(found), counts["holds"], counts["contradicted"], counts["inconclusive"])
    sentence = SENTENCE.search((ROOT / page).read_text(encoding="utf-8"))
    assert sentence and tuple(map(int, sentence.groups())) == expected
