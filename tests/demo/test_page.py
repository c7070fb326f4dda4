"""The page, through gradio's client on this machine."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from word_encoder import WORDS, Encoder

pytest.importorskip("gradio", reason="the page needs the extra demo")

import httpx
from gradio_client import Client

from revela_hub.data.sources.source import Document
from revela_hub.demo.collection import Collection, LoadedRetriever
from revela_hub.demo.page import launch, search_page, usage

HARMFUL = "<script>alert(1)</script>"
TEXTS = [f"{' '.join(WORDS[place : place + 3])} {HARMFUL}" for place in range(len(WORDS) - 2)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page over a few passages."""
    folder = tmp_path_factory.mktemp("demo")
    retrievers = [LoadedRetriever("base", Encoder(), "base"), LoadedRetriever("adapted", Encoder(), "words")]
    documents = [Document(str(place), text, None, "text") for place, text in enumerate(TEXTS)]
    collection = Collection(documents, retrievers, folder, cache=folder, name="the sample")
    shown = {"queries": ["river sea"], "url": "https://huggingface.co/org/x", "notes": ["a verdict"]}
    page = search_page(f"org/x {HARMFUL}", collection, 0.3, 5, code=usage("org/x"), **shown)  # type: ignore[arg-type]
    yield SimpleNamespace(address=launch(page, "127.0.0.1", None), folder=folder)
    page.close()


@pytest.fixture
def client(served: SimpleNamespace) -> Client:
    return Client(served.address, verbose=False)


def search(client: Client, query: str, weight: float = 0.3, number: int = 5) -> str:
    return str(client.predict(query, weight, number, api_name="/search"))


def test_a_search(client: Client) -> None:
    html = search(client, "river sea", 0.3, 2)
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["hybrid, BM25 weight 0.3", "adapted", "base", "BM25"]
    assert html.count('<article class="rh-row">') == 8
    assert "<mark>river</mark> <mark>sea</mark>" in html
    assert "<script" not in html and "&lt;script&gt;" in html
    assert search(client, " ") == ""
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/search"}


def test_web_pages_of_other_hosts_cannot_read_the_texts(served: SimpleNamespace) -> None:
    """Not even if their domain is pointed at this machine (DNS rebinding)."""
    port = served.address.rstrip("/").rpartition(":")[2]
    for host, status in (("evil.com", 400), (f"evil.com:{port}", 400), (f"localhost:{port}", 200), ("127.0.0.1", 200)):
        for method, place in (("GET", ""), ("GET", "config"), ("POST", "gradio_api/call/search")):
            sent = {"data": ["river", 0.3, 1]} if method == "POST" else None
            answer = httpx.request(method, f"{served.address}{place}", headers={"host": host}, json=sent)
            assert answer.status_code == status


def test_files_of_this_machine_cannot_be_read(served: SimpleNamespace, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    for path in (str(secret), "/etc/hostname", "pyproject.toml"):
        assert httpx.get(f"{served.address}gradio_api/file={path}").status_code in (403, 404)
    sent = {"files": ("a.txt", b"x")}
    assert httpx.post(f"{served.address}gradio_api/upload", files=sent).status_code == 413


def test_the_page_has_no_path_and_no_script_of_a_name(served: SimpleNamespace) -> None:
    html = httpx.get(served.address).text
    config = httpx.get(f"{served.address}config").text
    assert "<script>alert" not in html
    for folder in (str(served.folder), str(Path.home() / "x"), str(Path.cwd())):
        assert folder not in html + config
    for text in (
        "SentenceTransformer",
        "revela-hub search org/x",
        "https://huggingface.co/org/x",
        "river sea",
        "a verdict",
    ):
        assert text in config
