"""Fine-tuning other kinds of models: static embeddings, a query and a document route, language models with a chat template."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router

from revela_hub.errors import UserError
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments

ROWS = Dataset.from_dict(
    {
        "anchor": ["the quick brown fox", "rivers carry sediment", "a lazy dog", "mountains to the sea"],
        "positive": ["jumps over a dog", "from mountains to the sea", "and the fox jumps", "the rivers carry a dog"],
    }
)


def trainer(model: Any, output: Path, **options: Any) -> PairsTrainer:
    given: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.1, "report_to": []}
    given |= {"quiet": True, "bf16": False, "save_strategy": "no"} | options
    return PairsTrainer(model, PairsTrainingArguments(output_dir=str(output), **given), train_dataset=ROWS)


@pytest.fixture
def routed(static_folder: Path, retriever_folder: Path, tmp_path: Path) -> Path:
    """Static embeddings for queries and a transformer for documents, as in sentence-transformers' asymmetric models."""
    query, document = (list(SentenceTransformer(str(f), device="cpu")) for f in (static_folder, retriever_folder))
    dim = document[0].get_embedding_dimension()
    if query[0].embedding_dim != dim:
        query[0] = type(query[0])(query[0].tokenizer, embedding_dim=dim)
    router = Router.for_query_document(query, document)
    model = SentenceTransformer(modules=[router], device="cpu")
    model.save(str(tmp_path / "routed"), create_model_card=False)
    return tmp_path / "routed"


def test_static_embeddings_are_trained_and_exported(static_folder: Path, tmp_path: Path) -> None:
    run = trainer(str(static_folder), tmp_path / "run")
    run.train()
    exported = SentenceTransformer(str(run.write_models(tmp_path / "out")[0]), device="cpu")
    texts = ["the fox and the rivers"]
    assert exported.prompts == {"query": "Query: ", "document": "Passage: "}
    assert np.array_equal(exported.encode_query(texts), run.retriever.encode_query(texts))
    base = SentenceTransformer(str(static_folder), device="cpu")
    assert not np.allclose(exported.encode_query(texts), base.encode_query(texts))


def test_the_length_of_an_asymmetric_model_is_that_of_its_transformer(routed: Path) -> None:
    model: Any = load_retriever(str(routed), max_length=7)
    assert model[0].sub_modules["document"][0].max_seq_length == 7
    with pytest.raises(UserError, match="positions, fewer than max_length"):
        load_retriever(str(routed), max_length=100_000)


def test_the_chat_template_of_a_language_model_is_not_used(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revela uses texts as they are; the baselines must train, and sentence-transformers load, the same model."""
    folder = shutil.copytree(llama_folder, tmp_path / "chat")
    plain = load_retriever(str(folder)).encode("the fox")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}a dog: {{ m['content'] }}{% endfor %}")
    model = load_retriever(str(folder))
    model.save(str(tmp_path / "saved"), create_model_card=False)
    for loaded in (model, load_retriever(str(tmp_path / "saved")), SentenceTransformer(str(tmp_path / "saved"))):
        assert np.array_equal(loaded.encode("the fox"), plain)
    monkeypatch.setattr("revela_hub.retrieval.encoder.model_place", str)  # a Hub id may be a plain language model
    first, second = (load_encoder(str(f), device="cpu").encode("the fox") for f in (llama_folder, folder))
    assert np.array_equal(first, second)
