"""A tiny retriever, exported, and the tiny checkpoints it could have come from."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

PROMPTS = {"query": "Query: ", "document": "Passage: "}


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory: pytest.TempPathFactory, _bpe_json: str) -> Path:
    """A random two-layer Llama as `export_retriever` writes it, for texts of at most 64 tokens. Not to be changed."""
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    from revela_hub.hub_cards import export_retriever

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe_json), eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    folder = tmp_path_factory.mktemp("hub_cards") / "retriever"
    return export_retriever(
        LlamaModel(config).eval(), tokenizer, folder, pooling="last", prompts=PROMPTS, max_length=64
    )
