"""The length of training texts, which a model without a maximum does not have."""

from pathlib import Path

from sentence_transformers import SentenceTransformer

from revela_hub.adaptation.adapt import training_length
from revela_hub.retrieval.encoder import length_limit


def test_slow_machines_cut_training_texts() -> None:
    assert training_length(256, seconds=1e6, each=0.01) == 256
    assert training_length(256, seconds=1.0, each=0.1) == 64


def test_a_model_without_a_maximum_has_no_training_length(static_folder: Path, retriever_folder: Path) -> None:
    assert length_limit(SentenceTransformer(str(static_folder), device="cpu")) is None
    assert length_limit(SentenceTransformer(str(retriever_folder), device="cpu")) == 128
