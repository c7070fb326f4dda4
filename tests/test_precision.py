"""Commands compute in float32 on a CPU without bf16 instructions, whatever type a folder names."""

import json
from pathlib import Path

import pytest
import torch

from revela_hub.data.sources.source import Document
from revela_hub.loading import bf16_is_fast, in_fast_precision, loading_dtype, varying_shapes
from revela_hub.retrieval import RankerSettings, build_store, model_identity, read_passages
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.trainers.imprag.answering import open_answerer
from revela_hub.trainers.imprag.checkpoint import load_imprag, load_imprag_encoder


@pytest.fixture(params=[False, True])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU with, and one without them."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: request.param, raising=False)
    return bool(request.param)


def test_a_folder_in_bf16_is_computed_in_float32_unless_the_cpu_has_the_instructions(
    retriever_folder: Path, instructions: bool
) -> None:
    model = load_encoder(str(retriever_folder), device="cpu")
    model.bfloat16().save(str(retriever_folder), create_model_card=False)
    assert json.loads((retriever_folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_encoder(str(retriever_folder), device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16 if instructions else torch.float32}
    assert loading_dtype("cpu") == ("auto" if instructions else "float32")
    assert bf16_is_fast("cpu") == instructions


def test_what_is_on_another_device_stays_as_it_is(instructions: bool) -> None:
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16, device="meta")
    assert in_fast_precision(layer) is layer
    assert layer.weight.dtype == torch.bfloat16
    assert loading_dtype("cuda") == "auto"
    assert not bf16_is_fast("mps")


def test_the_models_that_come_with_the_quickstart_say_float32(repository: Path) -> None:
    """Because sentence-transformers and transformers compute in the type that the folder names."""
    for part in ("retriever", "lm"):
        config = json.loads((repository / "examples" / "quickstart" / part / "config.json").read_text())
        assert config["dtype"] == "float32"


def test_an_imprag_model_in_bf16_answers_in_float32_unless_the_cpu_has_the_instructions(
    tmp_path: Path, llama_folder: Path, instructions: bool
) -> None:
    loaded = load_imprag(str(llama_folder), k=1, l_max=32)
    loaded.model.bfloat16().save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    folder, expected = str(tmp_path / "model"), torch.bfloat16 if instructions else torch.float32
    encoder = load_imprag_encoder(folder, "cpu")
    settings = RankerSettings(identity=model_identity(folder))
    documents = [Document("a", "The river Dart flows past Totnes.", None, "a")]
    write = lambda target: read_passages(documents, target, max_words=20)  # noqa: E731
    build_store(write, encoder, tmp_path / "index", settings, model=folder)
    answerer = open_answerer(folder, str(tmp_path / "index"), device="cpu")
    for model in (encoder.model, answerer.model):
        assert {p.dtype for p in model.parameters()} == {expected}
    assert len(list(answerer.answer(["Where is it?"], max_new_tokens=2))) == 1
    assert {p.dtype for p in load_imprag(folder).model.parameters()} == {torch.float32}  # training keeps float32


def test_batches_of_varying_shape_do_not_use_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)  # searches in two threads of an earlier test may have left it off
    with pytest.raises(KeyError), varying_shapes():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()
