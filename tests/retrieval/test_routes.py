"""Dense, sparse and hybrid search with the folders that one CoT-MoTE checkpoint is published as: models of two routes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertTokenizerFast

from revela_hub.checkpoints import export_checkpoint
from revela_hub.modeling import CoTMoTEForPreTraining
from revela_hub.retrieval import RankerSettings, TextList, build_ranker, load_encoder
from revela_hub.retrieval.encoder import load_sparse_encoder


def test_the_hybrid_is_the_sum_of_the_models_own_scores(
    tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast, texts: list[str]
) -> None:
    config = BertConfig(
        vocab_size=len(wordpiece_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=40, pad_token_id=wordpiece_tokenizer.pad_token_id,
    )  # fmt: skip
    model = CoTMoTEForPreTraining.from_backbone(
        AutoModelForMaskedLM.from_config(config), variant="experts", max_seq_length=32
    )
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "checkpoint")
    wordpiece_tokenizer.save_pretrained(tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    dense = load_encoder(str(tmp_path / "out" / "dense"), device="cpu")
    sparse = load_sparse_encoder(str(tmp_path / "out" / "sparse"), device="cpu")
    queries = ["capital of Japan", "lazy dog"]
    expected_dense = dense.encode_query(queries) @ dense.encode_document(texts).T
    terms = sparse.encode_query(queries).to_dense(), sparse.encode_document(texts).to_dense()
    expected_sparse = (terms[0] @ terms[1].T).numpy()
    for mode, scores in (
        ("dense", expected_dense),
        ("sparse", expected_sparse),
        ("hybrid", expected_dense + expected_sparse),
    ):
        settings = RankerSettings(mode=mode, parts=("dense", "sparse"), fusion="sum", identity="d", sparse_identity="s")
        ranker = build_ranker(TextList(texts), settings, tmp_path / "cache", dense=dense, sparse=sparse)
        hits = ranker.search(queries, 3)
        np.testing.assert_array_equal(hits.rows_QK, np.argsort(-scores, axis=1, kind="stable")[:, :3])
        assert hits.scores_QK == pytest.approx(-np.sort(-scores, axis=1)[:, :3], rel=1e-4, abs=1e-4)
