"""A tiny exported retriever, and a local Hub."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, constants, hf_api
from loopback_hub import WRITER, LoopbackHub
from tokenizers import Tokenizer

PROMPTS = {"query": "Query: ", "document": "Passage: "}


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory: pytest.TempPathFactory, _bpe_json: str) -> Path:
    """A random two-layer Llama exported with `export_retriever`, with a maximum length of 64 tokens. Tests must not change it."""
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


@pytest.fixture
def verify_in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """The checks of `clean_process.verify` in this process, which takes no seconds but has all packages."""
    from transformers import PreTrainedModel

    from revela_hub.hub_cards.contents import Check
    from revela_hub.hub_cards.verify import checks

    def verify(
        folder: Path,
        *,
        trust_remote_code: bool = False,
        reference: Path | None = None,
        vectors: Path | None = None,
        **_: object,
    ) -> list[Check]:
        # The checks replace it; undone at the end of the test.
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", vars(PreTrainedModel)["from_pretrained"])
        rows, files = [], [str(file) if file else None for file in (reference, vectors)]
        try:
            for row in checks(folder, trust_remote_code, *files):
                rows.append(row)
        except Exception as error:  # as in the process
            rows.append(Check("encoding", False, str(error)))
        return rows

    return verify


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A local Hub for the client in this process and its child processes, with a token that has write access."""
    with LoopbackHub() as hub:
        in_process = {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }
        for name, value in in_process.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False}.items():
            monkeypatch.setattr(f"datasets.config.{name}", value)
        HfFileSystem.clear_instance_cache()
        # transformers has its own client, which keeps the address that it had when the first model was loaded.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        in_environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
        for name, text in (in_environment | {"HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, text)
        # no delay before the client retries; other modules keep the real time.sleep
        at_once = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.utils._http.time", at_once)
        yield hub
