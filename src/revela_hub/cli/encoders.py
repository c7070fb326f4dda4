"""Opens the encoder that makes a model's vectors: sentence-transformers', or that of the model's method."""

from pkgutil import resolve_name
from typing import Any

from revela_hub.errors import UserError


def load_dense(
    model: str, *, device: str | None, trust_remote_code: bool, max_seq_length: int | None, prompt: str | None = None
) -> Any:  # noqa: ANN401 (an `Encoder` with its device)
    """Loads it; its `similarity_fn_name` says how its vectors are compared.

    Args:
        model: a sentence-transformers model, or one of a method with an encoder of its own: folder or Hub id.
        device: by default the fastest there is.
        trust_remote_code: run code that comes with a sentence-transformers model; a method's is in this package.
        max_seq_length: cut texts at this many tokens.
        prompt: replaces the model's own.

    Raises:
        UserError: it cannot be loaded, compares by a distance, or does not support an option.
    """
    from revela_hub.checkpoints import method_of_model
    from revela_hub.retrieval.encoder import load_encoder, similarity_of

    method = method_of_model(model)
    if method is not None and method.encoder:
        if prompt or max_seq_length:
            raise UserError(
                f"{model} was trained with {method.title}, which reads texts as they are: leave this option out"
            )
        return resolve_name(method.encoder)(model, device)
    encoder = load_encoder(model, device=device, trust_remote_code=trust_remote_code, max_seq_length=max_seq_length)
    similarity_of(encoder, model)  # here, where the message can name the model
    return encoder
