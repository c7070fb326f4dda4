"""ONNX files give the model's vectors, are verified, published and loaded as the card says."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from revela_hub.cli import main as cli
from revela_hub.errors import UserError
from revela_hub.hub_cards import ModelCardMetadata, onnx_export, write_card
from revela_hub.hub_cards.card import METADATA_FOLDER
from revela_hub.hub_cards.metadata import describe
from revela_hub.hub_cards.onnx_export import MODEL, OnnxModel, export_onnx
from revela_hub.retrieval import load_encoder

pytestmark = pytest.mark.slow  # an export takes seconds


TEXTS = ["Query: a", "the river carries sand", "", "Query: " + "many words " * 100]


@pytest.fixture(scope="module")
def exported(retriever_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with last-token pooling, in ONNX. Tests must not change it."""
    folder = tmp_path_factory.mktemp("onnx") / "retriever"
    write_card(shutil.copytree(retriever_folder, folder), ModelCardMetadata(license="mit"))
    export_onnx(folder)
    return folder


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of `exported` that the test may change."""
    return shutil.copytree(exported, tmp_path / "own")


@pytest.fixture
def bert_with_dense(bert_folder: Path, tmp_path: Path) -> Path:
    """A BERT with token types, mean pooling, a linear layer and normalization."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    modules = [Transformer(str(bert_folder)), Pooling(32, pooling_mode="mean"), Dense(32, 8), Normalize()]
    folder = tmp_path / "bert"
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    return folder


def vectors(folder: Path) -> Callable[[list[str]], np.ndarray]:
    model = load_encoder(str(folder), device="cpu")
    return OnnxModel(folder / MODEL, model.tokenizer, model.max_seq_length).encode


def test_any_batch_and_length_give_the_vectors_of_the_model(exported: Path) -> None:
    model, encode = load_encoder(str(exported), device="cpu"), vectors(exported)
    for batch in (TEXTS[:1], TEXTS[1:], TEXTS[3:], TEXTS * 3):
        expected = model.encode(batch, prompt="", batch_size=len(batch))
        np.testing.assert_allclose(encode(batch), expected, atol=1e-5)


def test_all_modules_are_in_the_graph_and_weights_may_have_their_own_file(
    bert_with_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "LARGEST_FILE", 0)
    file = export_onnx(bert_with_dense)
    assert (bert_with_dense / "onnx" / "model.onnx_data").is_file() and file.difference < 1e-5
    expected = load_encoder(str(bert_with_dense), device="cpu").encode(TEXTS)
    assert expected.shape == (4, 8)
    described = describe(bert_with_dense)  # sentence-transformers 6 saves the length with the tokenizer
    assert described.dimensions == 8 and described.max_length == load_encoder(str(bert_with_dense)).max_seq_length
    np.testing.assert_allclose(vectors(bert_with_dense)(TEXTS), expected, atol=1e-5)


def test_the_snippet_of_the_card_runs(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_card(own, ModelCardMetadata(), repo_id=str(own))
    card = (own / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import numpy.*?)```", card, re.DOTALL)
    assert "max_length=64" in code and "Query: What is" in code
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda folder, file: str(Path(folder) / file))
    names: dict[str, np.ndarray] = {}
    exec(code, names)
    model = load_encoder(str(own), device="cpu")
    np.testing.assert_allclose(names["queries"], model.encode_query(["What is the capital of France?"]), atol=1e-5)

    edit(own / "config_sentence_transformers.json", {"truncate_dim": 8})
    write_card(own, ModelCardMetadata(), repo_id=str(own))
    card = (own / "README.md").read_text(encoding="utf-8")
    assert "| Dimensions | 8 |" in card and "8-dimensional vectors" in card
    [code] = re.findall(r"```python\n(import numpy.*?)```", card, re.DOTALL)
    exec(code, names)
    model = load_encoder(str(own), device="cpu")
    queries, documents = model.encode_query(["What is the capital of France?"]), ["Paris is the capital of France."]
    expected = model.similarity(queries, model.encode_document(documents))
    np.testing.assert_allclose(names["queries"] @ names["documents"][:1].T, expected, atol=1e-5)
    shutil.rmtree(own / "onnx")
    write_card(own, ModelCardMetadata())
    assert "onnx" not in (own / "README.md").read_text(encoding="utf-8").lower()


def chat(folder: Path) -> None:
    """Programs that load the file do not apply a chat template, so their vectors would be others."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}user: {{ m['content'] }}{% endfor %}")
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = {"text": method, "message": method | {"format": "flat"}}
    change = {"module_output_name": "token_embeddings", "modality_config": modalities}
    edit(folder / "sentence_bert_config.json", change | {"transformer_task": "feature-extraction"})


def edit(file: Path, change: dict[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")


def test_what_gives_other_vectors_is_not_exported(own: Path, tmp_path: Path, tiny_sparse_folder: Path) -> None:
    without_prompt, with_chat = (shutil.copytree(own, tmp_path / name) for name in ("prompt", "chat"))
    edit(without_prompt / "1_Pooling" / "config.json", {"include_prompt": False})
    chat(with_chat)
    for folder in (without_prompt, with_chat, tiny_sparse_folder):
        with pytest.raises(UserError):
            export_onnx(folder)


def test_the_command_copies_a_model_with_its_card_and_compares_shortened_vectors(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(own / "onnx")
    edit(own / "config_sentence_transformers.json", {"truncate_dim": 8})
    new = tmp_path / "new"
    assert cli.main(["export", str(own), "--output_dir", str(new), "--format", "onnx"]) == 0
    assert re.search(
        r"onnx/model\.onnx: 0\.\d MB, vectors differ from the model's by \de-\d\d", capsys.readouterr().out
    )
    assert (new / "model.safetensors").is_file() and (new / METADATA_FOLDER / "README.md").is_file()
    assert not (own / "onnx").exists()
    assert load_encoder(str(new)).encode(["a fox"]).shape == (1, 8)
