"""Options that have been renamed. The old names still work on the command line, in YAML files and in stored settings."""

from collections.abc import Container
from typing import Any

# Old name: new name. A command accepts the old name if it has the new option and no other option of the old name.
RENAMED = {
    "b": "retrieval_layer",
    "t": "last_reading_layer",
    "k": "num_passages",
    "l_max": "max_passage_length",
    "passages": "corpus",
    "text": "plain_text",
    "plain_text_share": "plain_text_fraction",
    "denoising_share": "denoising_fraction",
    "sentence_share": "sentence_fraction",
    "likelihood_block_size": "likelihood_batch_size",
    "output": "output_dir",
    "keep": "output_dir",
    "max_seq_length": "max_length",
    "passage_prompt": "document_prompt",
    "kinds": "query_kinds",
    "models": "models_dir",
}


def old_names(options: Container[str]) -> dict[str, str]:
    """Return the old names that a command with these options accepts, with their new names.

    >>> old_names({"corpus", "top_k"})
    {'passages': 'corpus'}
    """
    return {old: new for old, new in RENAMED.items() if new in options and old not in options}


def with_new_names(settings: dict[str, Any], options: Container[str]) -> dict[str, Any]:
    """Return stored settings under the names that a command with these options has today.

    >>> with_new_names({"l_max": 160, "seed": 0}, {"max_passage_length", "seed"})
    {'max_passage_length': 160, 'seed': 0}
    """
    renamed = old_names(options)
    return {renamed.get(name, name): value for name, value in settings.items()}
