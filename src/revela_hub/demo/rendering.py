"""HTML of the results. Everything that comes from a text, a query or a model is escaped."""

from collections.abc import Sequence
from html import escape

from revela_hub.demo.collection import ResultColumn, ResultRow

MAX_EXCERPT = 360
"""Characters of a passage that are shown before it is opened."""
CSS = """
.rh-columns {display: grid; grid-template-columns: repeat(var(--rh-count), minmax(0, 1fr)); gap: 1rem; align-items: start}
@media (max-width: 1100px) {.rh-columns {grid-template-columns: repeat(2, minmax(0, 1fr))}}
@media (max-width: 700px) {.rh-columns {grid-template-columns: none; grid-auto-flow: column; grid-auto-columns: 88%;
  overflow-x: auto; scroll-snap-type: x mandatory}
  .rh-column {scroll-snap-align: start}}
.rh-column {min-width: 0}
.rh-column h3 {margin: 0; font-size: 1rem; color: var(--body-text-color)}
.rh-time, .rh-source, .rh-nothing {font-size: .8rem; color: var(--body-text-color); opacity: .75; overflow-wrap: anywhere}
.rh-row {border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .6rem .7rem; margin-top: .6rem;
  background: var(--block-background-fill); color: var(--body-text-color)}
.rh-head {display: flex; gap: .5rem; align-items: baseline; justify-content: space-between}
.rh-rank {font-weight: 700; margin-right: .4rem}
.rh-text {white-space: pre-wrap; overflow-wrap: anywhere; font-size: .875rem; line-height: 1.45; margin-top: .3rem}
.rh-text mark {background: #fde68a; color: #1f2937; border-radius: .2rem; padding: 0 .1rem}
.rh-row details summary {font-size: .8rem; cursor: pointer; color: var(--body-text-color); opacity: .75; margin-top: .3rem}
.rh-badge {font-size: .75rem; font-weight: 600; border-radius: 1rem; padding: .05rem .5rem; white-space: nowrap}
.rh-up {background: #dcfce7; color: #166534}
.rh-down {background: #fee2e2; color: #991b1b}
.rh-new {background: #dbeafe; color: #1e40af}
.rh-title {font-size: 1.5rem; font-weight: 700; color: var(--body-text-color); overflow-wrap: anywhere}
.rh-title a, .rh-note a {color: var(--link-text-color)}
.rh-note {color: var(--body-text-color); margin: .2rem 0}
.rh-same {opacity: .75}
"""


def results_html(columns: Sequence[ResultColumn]) -> str:
    """Return the columns side by side; a narrow screen shows the first, and the others by swiping."""
    return f'<div class="rh-columns" style="--rh-count: {len(columns)}">{"".join(map(_column, columns))}</div>'


def header_html(name: str, url: str | None, notes: Sequence[str]) -> str:
    """Return the title of the page, with a link to the model's page on the Hub, and notes such as the verdict of `adapt`."""
    title = f'<a href="{escape(url)}" target="_blank" rel="noopener">{escape(name)}</a>' if url else escape(name)
    return f'<div class="rh-title">{title}</div>' + "".join(f'<p class="rh-note">{escape(note)}</p>' for note in notes)


def message_html(text: str) -> str:
    """Return a line of text, such as why there are no results."""
    return f'<p class="rh-nothing">{escape(text)}</p>'


def _column(column: ResultColumn) -> str:
    rows = "".join(map(_row, column.rows)) or message_html(column.nothing or "no results")
    return (
        f'<section class="rh-column"><h3>{escape(column.title)}</h3>'
        f'<div class="rh-time">{column.milliseconds:.1f} ms</div>{rows}</section>'
    )


def _row(row: ResultRow) -> str:
    kinds = {"▲": "up", "▼": "down", "n": "new", "=": "same"}
    badge = f'<span class="rh-badge rh-{kinds[row.change[0]]}">{escape(row.change)}</span>' if row.change else ""
    start, end = excerpt(row)
    whole = len(row.text) > end - start
    shown = ("… " if start else "") + marked(row, start, end) + (" …" if end < len(row.text) else "")
    more = (
        f'<details><summary>whole passage</summary><div class="rh-text">{marked(row, 0, len(row.text))}</div></details>'
        if whole
        else ""
    )
    return (
        f'<article class="rh-row"><div class="rh-head"><span><span class="rh-rank">{row.rank}</span>'
        f'<span class="rh-source">{escape(row.source)} · {row.score:.3f}</span></span>{badge}</div>'
        f'<div class="rh-text">{shown}</div>{more}</article>'
    )


def excerpt(row: ResultRow) -> tuple[int, int]:
    """Return the part of a passage to show: its beginning, or a part with the first matching word."""
    first = row.matches[0][0] if row.matches else 0
    start = 0
    if first > MAX_EXCERPT * 3 // 4:
        start = row.text.rfind(" ", 0, first - MAX_EXCERPT // 4) + 1
    end = start + MAX_EXCERPT
    if end >= len(row.text):
        return start, len(row.text)
    space = row.text.rfind(" ", start + MAX_EXCERPT // 2, end)
    return start, space if space > 0 else end


def marked(row: ResultRow, start: int, end: int) -> str:
    """Return a part of the passage as HTML with the matching words marked."""
    parts, at = [], start
    for first, last in row.matches:
        first, last = max(first, at), min(last, end)
        if first < last:
            parts += [escape(row.text[at:first]), "<mark>", escape(row.text[first:last]), "</mark>"]
            at = last
    return "".join([*parts, escape(row.text[at:end])])
