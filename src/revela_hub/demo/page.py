"""The page: gradio components around `collection.Collection`.

Nothing is sent from this machine: no analytics, no fonts of other sites, no shared link.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from revela_hub.demo.collection import Collection
from revela_hub.demo.rendering import CSS, header_html, message_html, results_html
from revela_hub.output import command_line

if TYPE_CHECKING:
    from gradio import Blocks

MOST_RESULTS = 20
MAX_QUERY = 2000
"""Maximum number of characters of a query."""
QUERY, PASSAGE = "how do birds find their way?", "Swallows navigate by the sun and the stars."
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def search_page(
    name: str,
    collection: Collection,
    bm25_weight: float,
    top_k: int,
    *,
    queries: Sequence[str] = (),
    url: str | None = None,
    notes: Sequence[str] = (),
    code: Mapping[str, str] | None = None,
) -> "Blocks":
    """Return the page of a model, which begins with a weight of BM25 and a number of results.

    Below the title is a link to the model's page on the Hub, if it has one, and notes; then example queries, and code to copy, by title.
    """
    gr = _gradio()
    most, size = max(MOST_RESULTS, top_k), f"{len(collection.passages):,}"

    def search(query: str | None, bm25_weight: float, top_k: float) -> str:
        query = (query or "").strip()[:MAX_QUERY]
        weight, count = min(max(bm25_weight, 0), 1), min(int(top_k), most)
        return results_html(collection.search(query, weight, count)) if query else ""

    page: Blocks
    with gr.Blocks(title=f"Search with {name}", analytics_enabled=False) as page:
        gr.HTML(header_html(name, url, notes))
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
        found = gr.HTML()  # above all else: a small screen shows the query with the first results
        examples = gr.Examples([[text] for text in queries], [query], label="Examples") if queries else None
        with gr.Accordion("Settings", open=False), gr.Row():
            slider = gr.Slider(0, 1, bm25_weight, step=0.1, label="BM25 weight in the hybrid", min_width=300)
            number = gr.Slider(1, most, top_k, step=1, label="Results per column", min_width=300)
        searched = f"Searching {collection.name}: {size} passages."
        gr.HTML(message_html(f"{searched} Badges compare ranks; scores of the hybrid are relative."))
        if code:
            with gr.Accordion("Use the model", open=False), gr.Tabs():
                for title, text in code.items():
                    with gr.Tab(title):
                        gr.Code(text, language="python", interactive=False, label=title)
        inputs = [query, slider, number]
        events = [button.click, query.submit, slider.release, number.release]
        gr.on(events, search, inputs, found, api_name="search")
        if examples is not None:
            examples.load_input_event.then(search, inputs, found, api_visibility="private")
    return page


def usage(name: str, *, remote_code: bool = False) -> dict[str, str]:
    """Return code to copy: the model in sentence-transformers, and the search of this page."""
    trust = ", trust_remote_code=True" if remote_code else ""
    python = f"""from sentence_transformers import SentenceTransformer

model = SentenceTransformer({json.dumps(name)}{trust})
queries = model.encode_query([{json.dumps(QUERY)}])
passages = model.encode_document([{json.dumps(PASSAGE)}])
print(model.similarity(queries, passages))"""
    search = command_line("search", name, QUERY, "--corpus", "my-documents")
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
