"""The page, through gradio's client on this machine."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from word_encoder import WORDS, Encoder

pytest.importorskip("gradio", reason="the page needs the extra demo")

import httpx
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from revela_hub.data.sources.source import Document
from revela_hub.demo.code import snippets
from revela_hub.demo.page import MOST_RESULTS, Shown, answer_page, launch, search_page
from revela_hub.demo.search import Collection, LoadedRetriever
from revela_hub.demo.texts import MAX_BYTES, MAX_PASSAGES, MAX_QUERY
from revela_hub.errors import UserError

HARMFUL = "<script>alert(1)</script>"
TEXTS = [f"{' '.join(WORDS[place : place + 3])} {HARMFUL}" for place in range(len(WORDS) - 2)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page over a few passages, and the folders of the text that visitors gave."""
    retrievers = [LoadedRetriever("base", Encoder(), "base"), LoadedRetriever("adapted", Encoder(), "words")]
    documents = [Document(str(place), text, None, "text") for place, text in enumerate(TEXTS)]
    collection = Collection(documents, retrievers, tmp_path_factory.mktemp("demo"), name="the sample")
    folders: list[Path] = []

    def index(documents: list[Document], folder: Path) -> Collection:
        folders.append(folder)
        return Collection(documents, retrievers, folder, most=MAX_PASSAGES)

    code = snippets("org/x", {}, 0.3)
    shown = Shown(f"org/x {HARMFUL}", code, ["river sea"], url="https://huggingface.co/org/x", card="# Card")
    page = search_page(shown, collection, index, 0.3, 5)
    address = launch(page, "127.0.0.1", None)
    yield SimpleNamespace(address=address, folders=folders)
    page.close()


@pytest.fixture
def client(served: SimpleNamespace) -> Client:
    return Client(served.address, verbose=False)


def search(client: Client, query: str, weight: float = 0.3, number: int = 5) -> str:
    return str(client.predict(query, weight, number, api_name="/search"))


def message(error: pytest.ExceptionInfo[AppError]) -> str:
    return str(error.value)


def test_only_two_functions_can_be_called(client: Client) -> None:
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/search", "/use_text"}


def test_a_search(client: Client) -> None:
    html = search(client, "river sea", 0.3, 2)
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["base", "adapted", "BM25", "hybrid, BM25 weight 0.3"]
    assert html.count('<article class="rh-row">') == 8
    assert "<mark>river</mark> <mark>sea</mark>" in html
    assert "<script" not in html and "&lt;script&gt;" in html


def test_empty_and_long_queries(client: Client) -> None:
    for query in ("", "  ", None):
        with pytest.raises(AppError) as error:
            search(client, query)  # type: ignore[arg-type]
        assert message(error) == "The query is empty: type a question or some words"
    with pytest.raises(AppError) as error:
        search(client, "x" * (MAX_QUERY + 1))
    assert "2,001 characters, more than 2,000" in message(error)


def test_values_out_of_range_are_rejected_or_cut(client: Client) -> None:
    for weight, number in ((7, 5), (-1, 5), (0.3, 10**9)):
        try:
            html = search(client, "river", weight, number)
        except AppError as error:
            assert "minimum" in str(error) or "maximum" in str(error) or "upstream" in str(error)
        else:
            assert html.count('<article class="rh-row">') <= 4 * MOST_RESULTS


def test_pasted_text_is_searched_by_its_visitor_only(served: SimpleNamespace, client: Client) -> None:
    client.predict(f"lamp road {HARMFUL}", None, api_name="/use_text")
    html = search(client, "lamp")
    assert html.count('<article class="rh-row">') == 4 and "your text" in html
    assert "<script" not in html
    other = search(Client(served.address, verbose=False), "lamp", 0.3, 5)
    assert "your text" not in other


@pytest.mark.parametrize("name", ["notes.md", "notes.txt", "rows.jsonl"])
def test_an_upload(client: Client, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text('{"text": "salt wind bird"}\n' if name == "rows.jsonl" else "salt wind bird\n")
    status = client.predict("", handle_file(file), api_name="/use_text")
    assert "your text: 1 passage" in str(status)
    html = search(client, "bird")
    assert name in html and str(tmp_path) not in html and "/tmp" not in html


def test_an_upload_can_be_used_again_and_is_deleted_at_the_end(tmp_path: Path) -> None:
    """After an error, the page still shows the file."""
    read: list[str] = []

    def index(documents: list[Document], folder: Path) -> Collection:
        read.append(documents[0].text)
        raise UserError("the text has too many passages")

    documents = [Document("x", TEXTS[0], None, "text")]
    collection = Collection(documents, [LoadedRetriever("base", Encoder(), "base")], tmp_path)
    page = search_page(Shown("x"), collection, index, 0.3, 5)
    address = launch(page, "127.0.0.1", None)
    try:
        sent = httpx.post(f"{address}gradio_api/upload", files={"files": ("a.txt", b"salt wind")}).json()
        upload = {"path": sent[0], "meta": {"_type": "gradio.FileData"}}
        for _ in range(2):
            with pytest.raises(AppError, match="The text has too many passages"):
                Client(address, verbose=False).predict("", upload, api_name="/use_text")
    finally:
        page.close()
    assert read == ["salt wind"] * 2
    assert not Path(sent[0]).exists()


def test_web_pages_of_other_hosts_cannot_read_the_texts(served: SimpleNamespace) -> None:
    """Not even if their domain is pointed at this machine (DNS rebinding)."""
    port = served.address.rstrip("/").rpartition(":")[2]
    for host, status in (("evil.com", 400), (f"evil.com:{port}", 400), (f"localhost:{port}", 200), ("127.0.0.1", 200)):
        for method, place in (("GET", ""), ("GET", "config"), ("POST", "gradio_api/call/search")):
            sent = {"data": ["river", 0.3, 1]} if method == "POST" else None
            answer = httpx.request(method, f"{served.address}{place}", headers={"host": host}, json=sent)
            assert answer.status_code == status
    page = answer_page(Shown("imprag"), lambda question: iter(()))
    try:
        address = launch(page, "0.0.0.0", None)
        assert httpx.get(f"{address}config", headers={"host": "demo.example.com"}).status_code == 200
    finally:
        page.close()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.pkl", b"\x80\x04.", "Invalid file type"),
        ("run.py", b"print(1)", "Invalid file type"),
        ("a.txt", b"\xff\xfe\0", "A.txt is not UTF-8 text"),
        ("a.txt", b"  ", "The text is empty"),
        ("a.jsonl", b"[]", "A.jsonl:1: no field text"),
        ("<b>.jsonl", b"[]", ":1: no field text"),
    ],
)
def test_uploads_that_cannot_be_read(client: Client, tmp_path: Path, name: str, content: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(AppError) as error:
        client.predict("", handle_file(file), api_name="/use_text")
    assert told in message(error)
    assert "/tmp" not in message(error) and "<b>" not in message(error)


def test_large_uploads_are_refused_by_the_server(served: SimpleNamespace) -> None:
    sent = {"files": ("a.txt", b"x" * (MAX_BYTES + 1))}
    assert httpx.post(f"{served.address}gradio_api/upload", files=sent).status_code == 413


def test_too_many_passages(client: Client) -> None:
    with pytest.raises(AppError) as error:
        client.predict(
            "\n\n".join(f"{n} " + "word " * 119 for n in range(MAX_PASSAGES + 1)), None, api_name="/use_text"
        )
    assert "allowed here: shorten it" in message(error)


def test_files_of_this_machine_cannot_be_read(served: SimpleNamespace, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    for path in (str(secret), "/etc/hostname", "pyproject.toml"):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        sent = httpx.post(f"{served.address}gradio_api/call/use_text", json={"data": ["", file]}).json()
        told = httpx.get(f"{served.address}gradio_api/call/use_text/{sent['event_id']}").text
        assert "event: error" in told and "secret" not in told.replace(path, "")
        assert httpx.get(f"{served.address}gradio_api/file={path}").status_code in (403, 404)
    assert secret.exists()


def test_the_page_has_no_path_and_no_script_of_a_name(served: SimpleNamespace) -> None:
    html = httpx.get(served.address).text
    config = httpx.get(f"{served.address}config").text
    assert "<script>alert" not in html
    for folder in (*map(str, served.folders), str(Path.home() / "x"), str(Path.cwd()), "revela-hub-demo-"):
        assert folder not in html + config
    for text in (
        "SentenceTransformer",
        "text-embeddings-router",
        "vllm serve",
        "https://huggingface.co/org/x",
        "river sea",
    ):
        assert text in config


def test_the_port_is_in_use(served: SimpleNamespace) -> None:
    import gradio

    port = int(served.address.rstrip("/").rpartition(":")[2])
    with gradio.Blocks() as other:
        gradio.Textbox()
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
        launch(other, "127.0.0.1", port)


def test_answers_are_streamed() -> None:
    def answer(question: str) -> Iterator[tuple[str, list[tuple[str, str, float]]]]:
        if question == "too long":
            raise UserError("/home/me/x: the question is too long")
        for end in (1, 2, 3):
            yield " ".join(["a", "b", "c"][:end]), [(f"river {HARMFUL}", "a.txt", 0.5)]

    page = answer_page(Shown("imprag", queries=["what?"]), answer)
    address = launch(page, "127.0.0.1", None)
    try:
        client = Client(address, verbose=False)
        job = client.submit("who?", api_name="/answer")
        text, passages = job.result(timeout=60)
        assert [output[0] for output in job.outputs()] == ["a", "a b", "a b c"]
        assert text == "a b c" and "&lt;script&gt;" in passages and "<script" not in passages
        with pytest.raises(AppError) as error:
            client.predict("too long", api_name="/answer")
        assert message(error) == "X: the question is too long"
    finally:
        page.close()
