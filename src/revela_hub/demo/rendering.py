"""HTML of the results. Everything that comes from a text, a query or a model is escaped."""

from collections.abc import Sequence
from html import escape

from revela_hub.demo.collection import Column, Result, source_of

CSS = """
.rh-columns {display: grid; grid-template-columns: repeat(var(--rh-count), minmax(0, 1fr)); gap: 1rem; align-items: start}
@media (max-width: 1100px) {.rh-columns {grid-template-columns: repeat(2, minmax(0, 1fr))}}
@media (max-width: 700px) {.rh-columns {grid-template-columns: none; grid-auto-flow: column; grid-auto-columns: 88%;
  overflow-x: auto; scroll-snap-type: x mandatory}
  .rh-column {scroll-snap-align: start}}
.rh-column {min-width: 0}
.rh-column h3 {margin: 0; font-size: 1rem; color: var(--body-text-color)}
.rh-source, .rh-nothing {font-size: .8rem; color: var(--body-text-color); opacity: .75; overflow-wrap: anywhere}
.rh-row {border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .6rem .7rem; margin-top: .6rem;
  background: var(--block-background-fill); color: var(--body-text-color)}
.rh-head {display: flex; gap: .5rem; align-items: baseline; justify-content: space-between}
.rh-rank {font-weight: 700; margin-right: .4rem}
.rh-text {white-space: pre-wrap; overflow-wrap: anywhere; font-size: .875rem; line-height: 1.45; margin-top: .3rem;
  max-height: 9rem; overflow-y: auto}
.rh-text mark {background: #fde68a; color: #1f2937; border-radius: .2rem; padding: 0 .1rem}
.rh-badge {font-size: .75rem; font-weight: 600; border-radius: 1rem; padding: .05rem .5rem; white-space: nowrap}
.rh-up {background: #dcfce7; color: #166534}
.rh-down {background: #fee2e2; color: #991b1b}
.rh-new {background: #dbeafe; color: #1e40af}
.rh-title {font-size: 1.5rem; font-weight: 700; color: var(--body-text-color); overflow-wrap: anywhere}
.rh-title a, .rh-note a {color: var(--link-text-color)}
.rh-note {color: var(--body-text-color); margin: .2rem 0}
.rh-same {opacity: .75}
"""


def results_html(columns: Sequence[Column]) -> str:
    """Return the columns side by side; a narrow screen shows the first, and the others by swiping."""
    return f'<div class="rh-columns" style="--rh-count: {len(columns)}">{"".join(map(_column, columns))}</div>'


def header_html(name: str, url: str | None, notes: Sequence[str]) -> str:
    """Return the title of the page, with a link to the model's page on the Hub, and notes such as the verdict of `adapt`."""
    title = f'<a href="{escape(url)}" target="_blank" rel="noopener">{escape(name)}</a>' if url else escape(name)
    return f'<div class="rh-title">{title}</div>' + "".join(f'<p class="rh-note">{escape(note)}</p>' for note in notes)


def message_html(text: str) -> str:
    """Return a line of text, such as why there are no results."""
    return f'<p class="rh-nothing">{escape(text)}</p>'


def _column(column: Column) -> str:
    rows = "".join(_row(rank, result) for rank, result in enumerate(column.results, start=1))
    body = rows or message_html("no passage has a word of the query")
    return f'<section class="rh-column"><h3>{escape(column.title)}</h3>{body}</section>'


def _row(rank: int, result: Result) -> str:
    kinds = {"▲": "up", "▼": "down", "n": "new", "=": "same"}
    change = result.change
    badge = f'<span class="rh-badge rh-{kinds[change[0]]}">{escape(change)}</span>' if change else ""
    return (
        f'<article class="rh-row"><div class="rh-head"><span><span class="rh-rank">{rank}</span>'
        f'<span class="rh-source">{escape(source_of(result.hit))} · {result.hit.score:.3f}</span></span>{badge}</div>'
        f'<div class="rh-text">{marked(result)}</div></article>'
    )


def marked(result: Result) -> str:
    """Return the passage as HTML with the matching words marked."""
    text, parts, at = result.hit.text, list[str](), 0
    for first, last in result.matches:
        parts += [escape(text[at:first]), "<mark>", escape(text[first:last]), "</mark>"]
        at = last
    return "".join([*parts, escape(text[at:])])
