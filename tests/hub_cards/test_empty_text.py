"""All methods export models that can encode an empty text, which many corpora contain."""

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertForMaskedLM, BertModel, BertTokenizerFast, LlamaForCausalLM, PreTrainedTokenizerFast

from revela_hub.checkpoints import export_checkpoint
from revela_hub.modeling import NVEmbedModel, RetroMAEForPreTraining
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments
from revela_hub.trainers.nvembed.checkpoint import export_nvembed
from revela_hub.trainers.revela.checkpoint import load_backbones

NO_PROMPTS = {"query": "", "document": ""}


def vectors_of_nothing(folder: Path) -> None:
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=any(folder.glob("*.py")))
    for encode in (model.encode, model.encode_query, model.encode_document):
        alone, beside = encode(""), encode(["", "a fox"])
        assert np.isfinite(alone).all() and alone.any()
        np.testing.assert_allclose(beside[0], alone, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_revela(
    pooling: str, tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    """If the tokenizer of a decoder adds no tokens, texts end with EOS, also with mean pooling."""
    assert bpe_tokenizer("")["input_ids"] == []
    tiny_llama.save_pretrained(tmp_path / "llama")
    bpe_tokenizer.save_pretrained(tmp_path / "llama")
    name = str(tmp_path / "llama")
    start = load_backbones(name, name, group_size=2, pooling=pooling, prompts=NO_PROMPTS)
    checkpoint = tmp_path / "checkpoint"
    start.model.save_pretrained(checkpoint)
    start.retriever_tokenizer.save_pretrained(checkpoint / "retriever_tokenizer")
    start.lm_tokenizer.save_pretrained(checkpoint / "lm_tokenizer")
    vectors_of_nothing(export_checkpoint(checkpoint, tmp_path / "out") / "retriever")


def test_retromae(tmp_path: Path, tiny_bert: BertModel, wordpiece_tokenizer: BertTokenizerFast) -> None:
    RetroMAEForPreTraining.from_encoder(BertForMaskedLM(tiny_bert.config)).save_pretrained(tmp_path / "checkpoint")
    wordpiece_tokenizer.save_pretrained(tmp_path / "checkpoint")
    vectors_of_nothing(export_checkpoint(tmp_path / "checkpoint", tmp_path / "out") / "encoder")


def test_nvembed(tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    model = NVEmbedModel.from_backbone(tiny_llama, num_latents=4)
    vectors_of_nothing(export_nvembed(model, bpe_tokenizer, tmp_path / "out", max_length=32, prompts={}))


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
    vectors_of_nothing(trainer.export(tmp_path))

    plain = Transformer(str(llama_folder))
    old = SentenceTransformer(modules=[plain, Pooling(plain.get_embedding_dimension(), "mean")], device="cpu")
    old.save(str(tmp_path / "old"))
    loaded = load_retriever(str(tmp_path / "old"))
    np.testing.assert_array_equal(loaded.encode("a fox"), old.encode("a fox"))
    assert len(load_retriever(str(llama_folder)).tokenizer("a fox")["input_ids"]) == 1 + len(
        old.tokenizer("a fox")["input_ids"]
    )
