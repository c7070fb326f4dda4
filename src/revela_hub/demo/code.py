"""Code to copy: how to use the model of the page in sentence-transformers, text-embeddings-inference, vLLM and this package."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from revela_hub.retrieval.bm25 import BM25Settings

QUERY, PASSAGE = "how do birds find their way?", "Swallows navigate by the sun and the stars."


@dataclass(frozen=True)
class Snippet:
    """Code to copy: the title of its tab, its language, and the code."""

    title: str
    language: str
    code: str


def snippets(
    name: str,
    prompts: Mapping[str, str],
    weight: float,
    token_weight: float = 0.0,
    *,
    bm25: BM25Settings | None = None,
    remote_code: bool = False,
) -> list[Snippet]:
    """Return code that embeds a query and a passage, and a search with these weights of BM25 and of late interaction.

    There is no code for servers if the model has remote code, which they do not run.
    """
    trust = ", trust_remote_code=True" if remote_code else ""
    python = f"""from sentence_transformers import SentenceTransformer

model = SentenceTransformer({json.dumps(name)}{trust})
queries = model.encode_query([{json.dumps(QUERY)}])
passages = model.encode_document([{json.dumps(PASSAGE)}])
print(model.similarity(queries, passages))"""
    found = [Snippet("sentence-transformers", "python", python)]
    if not remote_code:
        found += _server_snippets(name, prompts)
    default = asdict(BM25Settings())
    changed = {key: value for key, value in asdict(bm25 or BM25Settings()).items() if value != default[key]}
    search = (
        f"revela-hub search {shlex.quote(name)} {shlex.quote(QUERY)} --corpus my-documents --mode hybrid"
        f" --weights {1 - weight:.1f} {weight:.1f}"
        + "".join(f" --bm25_{key} {shlex.quote(str(value).lower())}" for key, value in changed.items())
        + (f" --rerank self --rerank_weight {token_weight:.1f}" if token_weight else "")
    )
    return [*found, Snippet("revela-hub", "shell", search)]


def answer_snippets(name: str) -> list[Snippet]:
    """Return the commands that answer a question with a model that reads passages."""
    quoted = shlex.quote(name)
    code = f"""revela-hub index {quoted} --corpus my-documents --output_dir my-index
revela-hub answer {quoted} --index my-index --task question_answering {shlex.quote(QUERY)}"""
    return [Snippet("revela-hub", "shell", code)]


def _server_snippets(name: str, prompts: Mapping[str, str]) -> list[Snippet]:
    """Return code that embeds the query, and the passage, on servers, which do not know the model's prompts."""
    quoted, prompt = shlex.quote(name), prompts.get("query") or ""
    passage_prompt = next((prompts[key] for key in ("document", "passage", "corpus") if key in prompts), "")
    body = {"model": name, "input": [prompt + QUERY]}
    comment = "# The text starts with the model's prompt for queries. Passages have another one, or none.\n"
    tei = f"""# text-embeddings-inference: https://github.com/huggingface/text-embeddings-inference
text-embeddings-router --model-id {quoted} --port 8080
{comment if prompt else ""}curl http://localhost:8080/v1/embeddings -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}
# Compare the server's vectors with the model's:
revela-hub check {quoted} --endpoint http://localhost:8080"""
    note = "  # with the model's prompts" if prompt or passage_prompt else ""
    vllm = f"""# Start the server: vllm serve {quoted} --runner pooling
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
texts = {json.dumps([prompt + QUERY, passage_prompt + PASSAGE])}{note}
answer = client.embeddings.create(model={json.dumps(name)}, input=texts)
vectors = [item.embedding for item in answer.data]
# Compare the server's vectors with the model's: revela-hub check {quoted} --endpoint http://localhost:8000"""
    return [Snippet("TEI", "shell", tei), Snippet("vLLM", "python", vllm)]
