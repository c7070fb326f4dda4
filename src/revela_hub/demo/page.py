"""The page: gradio components around `collection.Collection`.

Nothing is sent from this machine: no analytics, no fonts of other sites, no shared link.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from revela_hub.demo.collection import Collection
from revela_hub.demo.rendering import CSS, header_html, message_html, results_html
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from gradio import Blocks

MOST_RESULTS = 20
MAX_QUERY = 2000
"""Maximum number of characters of a query."""
QUERY, PASSAGE = "how do birds find their way?", "Swallows navigate by the sun and the stars."
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Shown:
    """Description of the model on the page."""

    name: str  # its Hub id, or the name of its folder
    queries: Sequence[str] = ()
    url: str | None = None  # of its page on the Hub
    notes: Sequence[str] = ()  # under the title
    code: Mapping[str, str] | None = None  # by title


def search_page(shown: Shown, collection: Collection, weight: float, top_k: int) -> "Blocks":
    """Return the page; it begins with this weight of BM25 and number of results."""
    gr = _gradio()
    most = max(MOST_RESULTS, top_k)

    def search(query: str, weight: float, top_k: float) -> str:
        with _errors():
            return results_html(collection.search(_query(query), min(max(weight, 0), 1), min(int(top_k), most)))

    def search_again(query: str, weight: float, top_k: float) -> str:
        return search(query, weight, top_k) if query and query.strip() else ""

    page: Blocks
    with gr.Blocks(title=f"Search with {shown.name}", analytics_enabled=False) as page:
        gr.HTML(header_html(shown.name, shown.url, shown.notes))
        with gr.Row(equal_height=True):
            query = gr.Textbox(
                container=False,
                placeholder="Type a question or some words",
                max_length=MAX_QUERY,
                scale=5,
                autofocus=True,
                label="Query",
            )
            button = gr.Button("Search", variant="primary", scale=1, min_width=120)
        examples = gr.Examples([[text] for text in shown.queries], [query], label="Examples") if shown.queries else None
        with gr.Accordion("Settings", open=False), gr.Row():
            slider = gr.Slider(0, 1, weight, step=0.1, label="BM25 weight in the hybrid", min_width=300)
            number = gr.Slider(1, most, top_k, step=1, label="Results per column", min_width=300)
        found = gr.HTML()
        gr.HTML(
            message_html(f"Searching {collection.name}: {len(collection.passages):,} passages. Badges compare ranks.")
        )
        if shown.code:
            with gr.Accordion("Use the model", open=False), gr.Tabs():
                for title, code in shown.code.items():
                    with gr.Tab(title):
                        gr.Code(code, language="python", interactive=False, label=title)
        inputs = [query, slider, number]
        gr.on([button.click, query.submit], search, inputs, found, api_name="search")
        gr.on([slider.release, number.release], search_again, inputs, found, api_visibility="private")
        if examples is not None:
            examples.load_input_event.then(search, inputs, found, api_visibility="private")
    return page


def usage(name: str, weight: float, token_weight: float, *, remote_code: bool = False) -> dict[str, str]:
    """Return code to copy: the model in sentence-transformers, and the search of this page with these weights."""
    trust = ", trust_remote_code=True" if remote_code else ""
    python = f"""from sentence_transformers import SentenceTransformer

model = SentenceTransformer({json.dumps(name)}{trust})
queries = model.encode_query([{json.dumps(QUERY)}])
passages = model.encode_document([{json.dumps(PASSAGE)}])
print(model.similarity(queries, passages))"""
    rerank = f" --rerank self --rerank_weight {token_weight:.1f}" if token_weight else ""
    search = (
        f"revela-hub search {shlex.quote(name)} {shlex.quote(QUERY)} --corpus my-documents --mode hybrid"
        f" --parts dense bm25 --weights {1 - weight:.1f} {weight:.1f}{rerank}"
    )
    return {"sentence-transformers": python, "revela-hub": search}


def launch(page: "Blocks", host: str, port: int | None) -> str:
    """Serve the page on a port (default: the first free one from 7860), and return its address.

    On a loopback address, requests that name another host are rejected: they come from a web page whose domain was pointed at
    this machine to read the texts (DNS rebinding).
    """
    gr = _gradio()
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)] if host in LOOPBACK else []
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=0,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=["api", "settings"],
        app_kwargs={"middleware": trusted},
        theme=gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        css=CSS,
    )
    return str(address)


def _gradio() -> Any:
    """Import gradio, which is an extra, without its reports of usage."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    return gradio


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Show a `UserError` as a message."""
    try:
        yield
    except UserError as error:
        raise _gradio().Error(escape(str(error)), print_exception=False) from error


def _query(query: str | None) -> str:
    query = (query or "").strip()
    if not query:
        raise UserError("the query is empty: type a question or some words")
    if len(query) > MAX_QUERY:
        raise UserError(f"the query has {len(query):,} characters, more than {MAX_QUERY:,}: shorten it")
    return query
