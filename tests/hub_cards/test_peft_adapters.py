"""A retriever that is only a PEFT adapter on the Hub, as Revela's authors publish theirs."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from loopback_hub import LoopbackHub, Repository
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from revela_hub.checkpoints import resolve
from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.hub_cards.peft_adapters import export_adapter
from revela_hub.retrieval.encoder import load_encoder


@pytest.fixture
def adapter(tmp_path: Path, llama_folder: Path) -> Path:
    """An adapter of a decoder without its head, saved by PEFT; it names its base model."""
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(AutoModel.from_pretrained(llama_folder), LoraConfig(r=4, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def expected(adapter: Path, base: Path, text: str) -> np.ndarray:
    """The state of EOS after the text, of unit length, by PEFT alone."""
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(base), str(adapter)).eval()
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        state = model(input_ids=ids).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=-1).numpy()


def test_an_adapter_of_the_hub_becomes_a_retriever(
    hub: LoopbackHub, adapter: Path, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/Revela-1b"] = Repository()
    files = {file.name: file.read_bytes() for file in adapter.iterdir() if file.is_file()}
    for name in [name for name in files if name.endswith(".safetensors")]:
        hub.large[hashlib.sha256(files[name]).hexdigest()] = files[name]
    hub.repositories["org/Revela-1b"].commit("main", files, "adapter")
    out = tmp_path / "revela-1b"

    assert main(["export", "org/Revela-1b", "--output_dir", str(out)]) == 0

    model = SentenceTransformer(str(out), device="cpu")
    for encode, prompt in ((model.encode_query, "query: "), (model.encode_document, "passage: ")):
        np.testing.assert_allclose(encode("the fox"), expected(adapter, llama_folder, f"{prompt}the fox"), atol=1e-5)
    assert load_encoder(str(out)).prompts == {"query": "query: ", "document": "passage: "}


def test_an_adapter_is_searched_and_evaluated_as_the_retriever_that_it_becomes(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("A fox.\n")
    (text / "b.txt").write_text("Rivers reach the sea.\n")
    assert main(["export", str(adapter), "--output_dir", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    for name in (adapter, tmp_path / "merged", adapter):  # the second time from the cache
        assert main(["search", str(name), "fox", "--corpus", str(text), "--json", "--device", "cpu"]) == 0
    lines = [json.loads(line)["hits"] for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and lines[0] == lines[1] == lines[2]
    [cached] = (tmp_path / "cache" / "revela-hub" / "adapters").iterdir()
    assert resolve(adapter).path == str(cached)


def test_an_adapter_that_does_not_fit_is_rejected(adapter: Path, tmp_path: Path) -> None:
    """PEFT warns, and gives the vectors of the base model."""
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name.replace("layers.1", "layers.7"): value for name, value in weights.items()},
        adapter / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match=r"layers\.[17]"):
        export_adapter(adapter, tmp_path / "out")
