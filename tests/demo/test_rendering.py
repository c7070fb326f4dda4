"""The HTML of the page: escaped, with marked words and rank changes."""

from collections.abc import Sequence

from revela_hub.demo.collection import Column, Result
from revela_hub.demo.rendering import header_html, marked, message_html, results_html
from revela_hub.retrieval.passages import Hit

SCRIPT = "<script>alert('x')</script><img src=x onerror=alert(1)>"


def result(text: str, matches: Sequence[tuple[int, int]] = (), change: str = "", source: str = "a.txt") -> Result:
    return Result(Hit(0.5, text, source, None, 1, 1), change, matches)


def test_everything_is_escaped() -> None:
    columns = [
        Column(SCRIPT, [result(SCRIPT, [(1, 7)], source=SCRIPT)]),
        Column("BM25", []),
    ]
    pages = [results_html(columns), message_html(SCRIPT), header_html(SCRIPT, f'https://x/"{SCRIPT}', [SCRIPT])]
    for html in pages:
        assert "<script" not in html and "<img" not in html and "alert" in html
    assert "<mark>script</mark>" in pages[0]


def test_changes_of_rank_have_a_colour_and_matches_are_marked() -> None:
    html = results_html([Column("hybrid", [result("text", change=change) for change in ("▲2", "▼1", "new", "=")])])
    for kind, change in (("up", "▲2"), ("down", "▼1"), ("new", "new"), ("same", "=")):
        assert f'rh-{kind}">{change}<' in html
    assert marked(result("abcdefgh", [(0, 3), (4, 8)])) == "<mark>abc</mark>d<mark>efgh</mark>"
