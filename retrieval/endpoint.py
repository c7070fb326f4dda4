"""Vectors from a server with OpenAI's embeddings API: vLLM, text-embeddings-inference, infinity, or a provider.

Prompts, the maximum length and the similarity are those of the model's folder and are applied here, because most servers know
none of them. Whether the server computes the folder's vectors is compared by `revela-hub check FOLDER --endpoint URL`.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.openai_server import concurrently, openai_client, server_errors, server_name
from revela_hub.errors import UserError
from revela_hub.loading import model_json, module_types
from revela_hub.retrieval.encoder import model_place, similarity_of, text_positions


class OpenAIEncoder:
    """Encodes texts on a server, with or without `/v1` in its URL, as `Encoder` does; the model's weights are not loaded.

    The server may know the model, a folder or Hub id, by another name. The API key is sent as a bearer token.
    """

    device = "cpu"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        served_name: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoTokenizer

        place = model_place(model)
        types = module_types(place)
        pooling = next((path for path, kind in types.items() if kind.endswith(".Pooling")), None)
        if not pooling or any(kind.endswith(("Router", "Asym")) for kind in types.values()):
            raise UserError(f"{model}: servers compute dense vectors of one encoder only; leave out endpoint")
        # Pooling without the prompt's tokens (as in INSTRUCTOR) needs to know where the prompt ends.
        self._pools_prompt = (model_json(place, f"{pooling}/config.json") or {}).get("include_prompt", True)
        settings = model_json(place, "config_sentence_transformers.json") or {}
        self.prompts = {key: text or "" for key, text in (settings.get("prompts") or {}).items()}
        self.similarity_fn_name = similarity_of(SimpleNamespace(**settings), model)
        self._dimensions = settings.get("truncate_dim")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        own = (model_json(place, "sentence_bert_config.json") or {}).get("max_seq_length")
        limits = [own or self._tokenizer.model_max_length, text_positions(model_json(place, "config.json") or {})]
        self._max_length = max_length or min(int(limit) for limit in limits if limit and limit > 0)
        self._url, self._key, self._model, self._concurrency = url, api_key, served_name or model, concurrency
        self._client = openai_client(url, api_key)
        self.description = f"{self._model} at {server_name(url)}"
        self.served_identity = f":served:{self._model}"

    def encode_query(self, inputs: list[str], /, **options: Any) -> NDArray[np.float32]:
        """Return the vectors (N, D) of N queries; `prompt` replaces the model's own."""
        return self._encode(inputs, "query", **options)

    def encode_document(self, inputs: list[str], /, **options: Any) -> NDArray[np.float32]:
        """Return the vectors (N, D) of N documents; `prompt` replaces the model's own."""
        return self._encode(inputs, "document", **options)

    def _encode(
        self, texts: list[str], kind: str, *, batch_size: int = 32, prompt: str | None = None, **_: Any
    ) -> NDArray[np.float32]:
        prompt = self.prompts.get(kind, "") if prompt is None else prompt
        if prompt and not self._pools_prompt:
            raise UserError("servers cannot leave the prompt out of pooling (include_prompt: false): use no endpoint")
        sent = [self._cut(prompt + text) for text in texts]
        batches = [sent[start : start + batch_size] for start in range(0, len(sent), batch_size)]
        with server_errors(self._url, self._key):
            vectors = [vectors_ND for _, vectors_ND in concurrently(self._vectors, batches, self._concurrency)]
        return np.concatenate(vectors)[:, : self._dimensions] if vectors else np.empty((0, 0), dtype=np.float32)

    def _vectors(self, texts: list[str]) -> NDArray[np.float32]:
        answer = self._client.embeddings.create(model=self._model, input=texts, encoding_format="float")
        rows = {row.index: row.embedding for row in getattr(answer, "data", None) or ()}
        if sorted(rows) != list(range(len(texts))):
            raise UserError(f"{self.description} does not return one vector for each text: check the URL")
        vectors_ND = np.asarray([rows[number] for number in range(len(texts))], dtype=np.float32)
        if not np.isfinite(vectors_ND).all():  # null is how some servers write NaN
            raise UserError(f"{self.description}: a vector contains NaN or infinity: its precision may be too low")
        return vectors_ND

    def _cut(self, text: str) -> str:
        """Return the part of a text that fits the maximum length; servers may read more, or reject the text."""
        found = self._tokenizer(text, truncation=True, max_length=self._max_length, return_offsets_mapping=True)
        kept = [(start, end) for start, end in found["offset_mapping"] if end > start]
        if len(found["input_ids"]) < self._max_length or not kept:
            return text
        return text[kept[0][0] : kept[-1][1]]
