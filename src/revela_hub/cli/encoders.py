"""Which encoder makes a model's vectors: sentence-transformers', or an ImpRAG decoder itself."""

from typing import Any

from revela_hub.errors import UserError


def load_dense(
    model: str, *, device: str | None, trust_remote_code: bool, max_seq_length: int | None, prompt: str | None = None
) -> Any:  # noqa: ANN401 (an `Encoder` with its device)
    """Loads it; how its vectors are compared is its `similarity_fn_name`.

    Args:
        model: a sentence-transformers or ImpRAG model: folder or Hub id.
        device: by default the fastest there is.
        trust_remote_code: run code that comes with a sentence-transformers model; ImpRAG's is in this package.
        max_seq_length: cut texts at this many tokens.
        prompt: one that the user gave in place of the model's own.

    Raises:
        UserError: it cannot be loaded or compares by a distance, or an option is not for it.
    """
    from revela_hub.retrieval.encoder import load_encoder, similarity_of
    from revela_hub.trainers.imprag.answering import load_imprag_encoder
    from revela_hub.trainers.imprag.checkpoint import is_imprag

    if is_imprag(model):
        if prompt or max_seq_length:
            raise UserError(
                "an ImpRAG model reads texts as they are, passages up to its own l_max tokens: no such option"
            )
        return load_imprag_encoder(model, device)
    encoder = load_encoder(model, device=device, trust_remote_code=trust_remote_code, max_seq_length=max_seq_length)
    similarity_of(encoder, model)  # here, where the message can name the model
    return encoder
