"""Loading a model, and telling models apart."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers import (
    BertTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.retrieval import encoder
from revela_hub.retrieval.encoder import (
    Encoder,
    load_encoder,
    load_sparse_encoder,
    model_identity,
    similarity_of,
)
from revela_hub.trainers.base.retriever import load_retriever


def test_loads_a_folder(retriever_folder: Path) -> None:
    model = load_encoder(str(retriever_folder), device="cpu")
    assert isinstance(model, Encoder)
    assert model.encode_query(["rivers"]).shape == (1, 32)
    assert load_encoder(str(retriever_folder), device="cpu", max_seq_length=7).max_seq_length == 7
    assert similarity_of(model, "m") == "cosine"
    model.similarity_fn_name = "euclidean"
    with pytest.raises(UserError, match="m compares by euclidean distance"):
        similarity_of(model, "m")


def test_positions_of_roberta_begin_after_its_padding_token() -> None:
    assert encoder.text_positions({"model_type": "mpnet", "max_position_embeddings": 514}) == 512
    assert encoder.text_positions({"model_type": "bert", "max_position_embeddings": 512}) == 512
    assert encoder.text_positions(None) is encoder.text_positions({}) is None
    assert encoder.text_positions({"model_type": "xlnet", "max_position_embeddings": -1}) is None


@pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder, MultiVectorEncoder, SparseEncoder])
def test_long_texts_are_cut_to_the_positions_of_roberta(
    kind: type, tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast
) -> None:
    """Its tokenizer has no limit, and sentence-transformers takes 34 for one, where 32 tokens fit."""
    config = RobertaConfig(
        vocab_size=len(wordpiece_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=34,
        pad_token_id=1,
        num_labels=1,
    )
    architecture = {CrossEncoder: RobertaForSequenceClassification, SparseEncoder: RobertaForMaskedLM}
    architecture.get(kind, RobertaModel)(config).save_pretrained(tmp_path)
    wordpiece_tokenizer.model_max_length = int(1e30)
    wordpiece_tokenizer.save_pretrained(tmp_path)
    kind(str(tmp_path), device="cpu").save(str(tmp_path / "saved"))
    identity = model_identity(str(tmp_path / "saved"))
    assert kind(str(tmp_path / "saved"), device="cpu").max_seq_length == 34
    place = str(tmp_path / "saved")
    model = encoder.open_model(kind, place, place, device="cpu", trust_remote_code=False)
    assert model.max_seq_length == 32
    text = "river " * 50
    model.predict([(text, text)]) if kind is CrossEncoder else model.encode([text])
    assert model_identity(place) == identity


def test_a_checkpoint_is_not_a_retriever(bert_folder: Path) -> None:
    with pytest.raises(UserError, match=r"no modules\.json.*revela-hub export"):
        load_encoder(str(bert_folder))


def test_the_output_folder_of_a_training_is_its_retriever(retriever_folder: Path, tmp_path: Path) -> None:
    """For search, indexes, `check` and further training; not if it contains several models."""
    output = tmp_path / "output"
    shutil.copytree(retriever_folder, output / "retriever")
    shutil.copytree(retriever_folder, output / "checkpoint-2")  # as trainers of sentence-transformers write it
    (output / "checkpoint-2" / "trainer_state.json").write_text("{}")
    (output / "config.json").write_text("{}")
    expected = load_encoder(str(retriever_folder), device="cpu").encode(["river"])
    for load in (partial(load_encoder, device="cpu"), load_retriever):
        assert np.array_equal(load(str(output)).encode(["river"]), expected)
    assert model_identity(str(output)) == model_identity(str(output / "retriever"))
    assert main(["check", str(output)]) == 0
    shutil.copytree(retriever_folder, output / "sparse")
    with pytest.raises(UserError, match=f"pass {output}/retriever or {output}/sparse"):
        load_encoder(str(output))


def test_code_that_comes_with_a_model_needs_leave(retriever_folder: Path) -> None:
    config = json.loads((retriever_folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (retriever_folder / "config.json").write_text(json.dumps(config))
    marker = retriever_folder / "ran"
    (retriever_folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot load the model"):
        load_encoder(str(retriever_folder), device="cpu")
    assert not marker.exists()


def test_identity_follows_the_content(retriever_folder: Path, tmp_path: Path) -> None:
    identity = model_identity(str(retriever_folder))
    copy = tmp_path / "elsewhere"
    shutil.copytree(retriever_folder, copy)
    (copy / "README.md").write_text("A card changes nothing.")
    assert model_identity(str(copy)) == identity
    assert model_identity(str(copy), max_seq_length=64) != identity
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert model_identity(str(copy)) != identity


def test_a_sparse_model_that_compares_by_cosine_is_rejected(tiny_sparse_folder: Path) -> None:
    load_sparse_encoder(str(tiny_sparse_folder), device="cpu")
    settings = tiny_sparse_folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"similarity_fn_name": "cosine"}))
    with pytest.raises(UserError, match="tiny-sparse compares by cosine; mode sparse supports only the dot product"):
        load_sparse_encoder(str(tiny_sparse_folder), device="cpu")
