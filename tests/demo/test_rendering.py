"""The HTML of the page: escaped, with marked words and rank changes."""

from html.parser import HTMLParser

from revela_hub.demo.collection import ResultColumn, ResultRow
from revela_hub.demo.rendering import MAX_EXCERPT, excerpt, header_html, marked, message_html, results_html

SCRIPT = "<script>alert('x')</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements and the text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def row(text: str, matches: tuple[tuple[int, int], ...] = (), change: str = "", source: str = "a.txt") -> ResultRow:
    return ResultRow(1, 0.5, text, source, change, matches)


def test_everything_is_escaped() -> None:
    rows = (row(SCRIPT, ((1, 7),), source=SCRIPT), row(SCRIPT * 20, ((500, 506),)))
    columns = [ResultColumn(SCRIPT, rows, 1.0), ResultColumn("BM25", (), 1.0, nothing=SCRIPT)]
    pages = [
        results_html(columns),
        message_html(SCRIPT),
        header_html(SCRIPT, f'https://x/"{SCRIPT}', [SCRIPT]),
    ]
    for html in pages:
        page = Page(html)
        assert not {"script", "img"} & set(page.tags)
        assert "alert" in "".join(page.words)
    assert "<mark>script</mark>" in pages[0]


def test_changes_of_rank_have_a_colour() -> None:
    rows = tuple(row("text", change=change) for change in ("▲2", "▼1", "new", "="))
    html = results_html([ResultColumn("hybrid", rows, 1.25)])
    for kind, change in (("up", "▲2"), ("down", "▼1"), ("new", "new"), ("same", "=")):
        assert f'rh-{kind}">{change}<' in html
    assert "1.2 ms" in html


def test_long_passages_are_cut_around_the_first_match_and_can_be_opened() -> None:
    text = "word " * 200 + "needle " + "word " * 200
    start = text.index("needle")
    found = row(text, ((start, start + 6),))
    first, last = excerpt(found)
    assert first < start < last <= first + MAX_EXCERPT
    assert text[first - 1] == " " and text[last] == " "
    html = results_html([ResultColumn("x", (found,), 1.0)])
    assert html.count("<mark>needle</mark>") == 2 and "whole passage" in html
    assert excerpt(row(text)) == (0, text.rfind(" ", 0, MAX_EXCERPT))
    assert excerpt(row("short")) == (0, 5) and "whole passage" not in results_html(
        [ResultColumn("x", (row("short"),), 1)]
    )


def test_words_that_the_cut_divides() -> None:
    found = row("abcdefgh", ((0, 3), (4, 8)))
    assert marked(found, 2, 6) == "<mark>c</mark>d<mark>ef</mark>"
