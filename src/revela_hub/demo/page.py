"""The page: gradio components around `search.Collection`, or around a model that answers questions.

Nothing is sent from this machine: no analytics, no fonts of other sites, no shared link. Uploaded files are deleted after
an hour, and when the page is closed.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import Document
from revela_hub.demo.code import Snippet
from revela_hub.demo.rendering import CSS, header_html, message_html, passages_html, report_html, results_html
from revela_hub.demo.report import Report
from revela_hub.demo.search import Collection
from revela_hub.demo.texts import (
    MAX_BYTES,
    MAX_PASSAGES,
    MAX_QUERY,
    UPLOAD_TYPES,
    documents_of_text,
    documents_of_upload,
    without_paths,
)
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from gradio import Blocks

MOST_RESULTS = 20
MINUTE, HOUR = 60, 3600
FONTS = ("system-ui", "sans-serif")
MONO = ("ui-monospace", "monospace")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
UPLOAD_LIMITS = (
    f"Text or {', '.join(UPLOAD_TYPES)} (JSON lines with the field text), up to {MAX_BYTES / 1e6:.0f} MB and {MAX_PASSAGES:,}"
    " passages. It is processed on the machine that runs this page, and deleted after an hour."
)


@dataclass(frozen=True)
class Shown:
    """Description of the model on the page."""

    name: str  # its Hub id, or the name of its folder
    code: Sequence[Snippet] = ()
    queries: Sequence[str] = ()
    report: Report | None = None
    url: str | None = None  # of its page on the Hub
    card: str = ""  # Markdown, of a model that is not on the Hub
    notes: Sequence[str] = ()  # under the title


def search_page(
    shown: Shown, collection: Collection, index: Callable[[list[Document], Path], Collection], weight: float, top_k: int
) -> "Blocks":
    """Return the page that compares systems.

    It begins with the collection, the weight of BM25 and the number of results; `index` indexes other documents in a folder.
    """
    gr = _gradio()
    most = max(MOST_RESULTS, top_k)
    fitted = f"{weight:.1f} was fitted on held-out queries" if shown.report else f"default: {weight:.1f}"

    def search(query: str, weight: float, top_k: float, own: Collection | None) -> str:
        with _errors():
            texts = collection if own is None else own
            return results_html(texts.search(_query(query), min(max(weight, 0), 1), min(int(top_k), most)))

    def search_again(query: str, *values: Any) -> str:
        return search(query, *values) if query and query.strip() else ""

    def use_text(text: str, file: str | None) -> tuple[Collection, str, None, str]:
        with _errors():
            own = _own_texts(index, text, file)
        return own, message_html(_searching(own)), None, ""

    def use_collection() -> tuple[None, str, str]:
        return None, message_html(_searching(collection)), ""

    page: Blocks
    with gr.Blocks(title=f"Search with {shown.name}", analytics_enabled=False, delete_cache=(MINUTE, HOUR)) as page:
        own = gr.State(None, time_to_live=HOUR)
        gr.HTML(header_html(shown.name, shown.url, shown.notes, shown.report))
        query, button = _query_row("Query", "Type a question or some words", "Search")
        found = gr.HTML(render=False)
        examples = _examples(shown, query)
        with gr.Row():
            slider = gr.Slider(0, 1, weight, step=0.1, label=f"BM25 weight in the hybrid ({fitted})", min_width=300)
            number = gr.Slider(1, most, top_k, step=1, label="Results per column", min_width=300)
        status = gr.HTML(message_html(_searching(collection)))
        found.render()
        with gr.Accordion("Search your own text", open=False):
            gr.HTML(message_html(UPLOAD_LIMITS))
            with gr.Row():
                text = gr.Textbox(label="Text", lines=6, max_lines=12, placeholder="Paste text here", scale=2)
                file = gr.File(
                    label="or a file", file_types=list(UPLOAD_TYPES), file_count="single", scale=1, height=180
                )
            with gr.Row():
                use_button = gr.Button("Search this text", variant="primary")
                back_button = gr.Button("Back to the first collection")
        _about(shown)
        inputs = [query, slider, number, own]
        gr.on([button.click, query.submit], search, inputs, found, api_name="search")
        gr.on([slider.release, number.release], search_again, inputs, found, api_visibility="private")
        if examples is not None:
            examples.load_input_event.then(search, inputs, found, api_visibility="private")
        used = use_button.click(use_text, [text, file], [own, status, file, found], api_name="use_text")
        used.success(search_again, inputs, found, api_visibility="private")
        returned = back_button.click(use_collection, None, [own, status, found], api_visibility="private")
        returned.success(search_again, inputs, found, api_visibility="private")
    return page


def answer_page(shown: Shown, answer: Callable[[str], Iterator[tuple[str, list[tuple[str, str, float]]]]]) -> "Blocks":
    """Return the page of a model that answers: `answer` yields the growing text with the passages (text, source, score) read."""
    gr = _gradio()

    def answer_question(question: str) -> Iterator[tuple[str, str]]:
        with _errors():
            for text, passages in answer(_query(question)):
                yield text, passages_html(passages)

    page: Blocks
    with gr.Blocks(title=f"Ask {shown.name}", analytics_enabled=False) as page:
        gr.HTML(header_html(shown.name, shown.url, shown.notes, None))
        question, button = _query_row("Question", "Type a question", "Answer")
        text = gr.Textbox(label="Answer", lines=2, interactive=False, render=False)
        passages = gr.HTML(render=False)
        examples = _examples(shown, question)
        text.render()
        passages.render()
        _about(shown)
        gr.on([button.click, question.submit], answer_question, question, [text, passages], api_name="answer")
        if examples is not None:
            examples.load_input_event.then(answer_question, question, [text, passages], api_visibility="private")
    return page


def launch(page: "Blocks", host: str, port: int | None) -> str:
    """Serve the page on a port (default: the first free one from 7860), and return its address.

    On a loopback address, requests that name another host are rejected: they come from a web page whose domain was pointed at
    this machine to read the texts (DNS rebinding).
    """
    gr = _gradio()
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)] if host in LOOPBACK else []
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            max_file_size=MAX_BYTES,
            ssr_mode=False,
            run_history=False,
            enable_monitoring=False,
            footer_links=["api", "settings"],
            app_kwargs={"middleware": trusted},
            theme=gr.themes.Default(font=FONTS, font_mono=MONO),
            css=CSS,
        )
    except OSError as error:
        where = host if port is None else f"{host}:{port}"
        raise UserError(
            f"cannot listen on {where}: the port is in use, or not allowed: choose another --port"
        ) from error
    return str(address)


def _gradio() -> Any:
    """Import gradio, which is an extra, without its reports of usage."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    return gradio


def _query_row(label: str, placeholder: str, button: str) -> tuple[Any, Any]:
    """Render a box for the query and its button, side by side, and return both."""
    gr = _gradio()
    with gr.Row(equal_height=True):
        box = gr.Textbox(
            label=label, container=False, placeholder=placeholder, max_length=MAX_QUERY, scale=5, autofocus=True
        )
        return box, gr.Button(button, variant="primary", scale=1, min_width=120)


def _examples(shown: Shown, box: Any) -> Any:
    """Render the example queries, which fill the box; None without any."""
    if not shown.queries:
        return None
    return _gradio().Examples([[query] for query in shown.queries], [box], label="Examples")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Show a `UserError` as a message, without paths of this machine."""
    try:
        yield
    except UserError as error:
        message = without_paths(error.message)
        raise _gradio().Error(escape(message[0].upper() + message[1:]), print_exception=False) from error


def _query(query: str | None) -> str:
    query = (query or "").strip()
    if not query:
        raise UserError("the query is empty: type a question or some words")
    if len(query) > MAX_QUERY:
        raise UserError(f"the query has {len(query):,} characters, more than {MAX_QUERY:,}: shorten it")
    return query


def _own_texts(index: Callable[[list[Document], Path], Collection], text: str, file: str | None) -> Collection:
    """Index the pasted text and the uploaded file."""
    documents = documents_of_text(text) if (text or "").strip() or not file else []
    if file:
        documents += documents_of_upload(Path(file))
    folder = tempfile.TemporaryDirectory(prefix="revela-hub-demo-")
    own = index(documents, Path(folder.name))
    own.folder = folder  # deleted together with the collection
    return own


def _searching(collection: Collection) -> str:
    return (
        f"Searching {collection.name}: {counted(len(collection), 'passage')}. Ranks are compared with the first column."
    )


def _about(shown: Shown) -> None:
    """Render the report, the code to copy and the card."""
    gr = _gradio()
    if shown.report:
        with gr.Accordion("Gain and cost of training", open=False):
            gr.HTML(report_html(shown.report))
    if shown.code:
        with gr.Accordion("Use the model", open=False), gr.Tabs():
            for snippet in shown.code:
                with gr.Tab(snippet.title):
                    gr.Code(snippet.code, language=snippet.language, interactive=False, label=snippet.title)
    if shown.card:
        with gr.Accordion("Model card", open=False):
            gr.Markdown(shown.card)
    if os.environ.get("SPACE_ID"):
        gr.DuplicateButton("Duplicate this Space")
