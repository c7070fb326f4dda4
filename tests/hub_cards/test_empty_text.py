"""All methods export models that can encode an empty text, which many corpora contain."""

from pathlib import Path

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments


def vectors_of_nothing(folder: Path) -> None:
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=any(folder.glob("*.py")))
    for encode in (model.encode, model.encode_query, model.encode_document):
        alone, beside = encode(""), encode(["", "a fox"])
        assert np.isfinite(alone).all() and alone.any()
        np.testing.assert_allclose(beside[0], alone, atol=1e-5)


def test_baselines_of_a_plain_decoder(tmp_path: Path, llama_folder: Path) -> None:
    """Contriever, REPLUG and RA-DIT load their retriever with the same function; a trained one keeps its tokenizer."""
    args = ContrieverTrainingArguments(
        str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, report_to=[], quiet=True, use_cpu=True
    )
    trainer = ContrieverTrainer(
        str(llama_folder),
        args,
        train_dataset=Dataset.from_dict({"text": ["a fox runs far over the hills and the rivers to the sea"] * 8}),
    )
    trainer.train()
    vectors_of_nothing(trainer.write_models(tmp_path)[0])

    plain = Transformer(str(llama_folder))
    old = SentenceTransformer(modules=[plain, Pooling(plain.get_embedding_dimension(), "mean")], device="cpu")
    old.save(str(tmp_path / "old"))
    loaded = load_retriever(str(tmp_path / "old"))
    np.testing.assert_array_equal(loaded.encode("a fox"), old.encode("a fox"))
    assert len(load_retriever(str(llama_folder)).tokenizer("a fox")["input_ids"]) == 1 + len(
        old.tokenizer("a fox")["input_ids"]
    )
