"""Loads the encoder of a model: a sentence-transformers model, or the encoder of the model's method."""

import weakref
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from revela_hub.search.endpoint_options import EndpointOptions


def load_dense(
    model: str,
    *,
    device: str | None,
    trust_remote_code: bool,
    max_seq_length: int | None,
    prompt: str | None = None,
    server: "EndpointOptions | None" = None,
) -> Any:  # noqa: ANN401 (an `Encoder` with its device)
    """Return the encoder of a model; its `similarity_fn_name` names the similarity of its vectors.

    `prompt` replaces the model's own. With a server (`--endpoint`), the model's weights are not loaded.
    """
    from revela_hub.checkpoints import method_of_model
    from revela_hub.retrieval.encoder import load_encoder, similarity_of

    method = method_of_model(model)
    served = server is not None and server.endpoint is not None
    if method is not None and method.encoder:
        if served:
            raise UserError(
                f"{model} was trained with {method.title}, which servers cannot encode with: leave out --endpoint"
            )
        if prompt or max_seq_length:
            raise UserError(
                f"{model} was trained with {method.title}, which has no prompts and a fixed length: leave out --query_prompt,"
                " --document_prompt and --max_length"
            )
        return resolve_name(method.encoder)(model, device)
    if server is not None and server.endpoint is not None:
        from revela_hub.data.openai_server import api_key
        from revela_hub.retrieval.endpoint import OpenAIEncoder

        return OpenAIEncoder(
            server.endpoint,
            model,
            served_name=server.endpoint_model,
            api_key=api_key(server.api_key_env),
            concurrency=server.concurrency,
            max_length=max_seq_length,
            trust_remote_code=trust_remote_code,
        )
    encoder = load_encoder(model, device=device, trust_remote_code=trust_remote_code, max_seq_length=max_seq_length)
    similarity_of(encoder, model)  # raises an error that names the model
    return encoder


class OnDevices:
    """A sentence-transformers model on several devices, each in a process of its own, which share the texts of a call."""

    def __init__(self, model: "SentenceTransformer", devices: list[str]) -> None:
        import torch

        for device in devices:
            torch.empty(0, device=device)  # raises its error here, not in a process
        self.device = devices[0]
        self.similarity_fn_name = model.similarity_fn_name
        self.get_embedding_dimension = model.get_embedding_dimension
        pool = model.start_multi_process_pool(devices)
        self.encode_query = partial(model.encode_query, pool=pool)
        self.encode_document = partial(model.encode_document, pool=pool)
        weakref.finalize(self, model.stop_multi_process_pool, pool)


def encoder_identity(encoder: Any, model: str, max_seq_length: int | None) -> str:  # noqa: ANN401 (an `Encoder`)
    """Return `model_identity` of a model; that of a server's vectors also names the model there."""
    from revela_hub.retrieval.encoder import model_identity

    return model_identity(model, max_seq_length) + str(getattr(encoder, "served_identity", ""))
