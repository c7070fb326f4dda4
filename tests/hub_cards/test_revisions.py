"""Models by name and revision, from repositories that have only pickled weights."""

from pathlib import Path

import torch
from loopback_hub import LoopbackHub, Repository
from test_pickles import pickle_weights
from transformers import BertForMaskedLM

from revela_hub.loading import hub_name
from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder


def test_a_model_is_loaded_by_name_and_revision(hub: LoopbackHub, mlm_folder: Path) -> None:
    """As Shitao/RetroMAE: the only weights are a pickle; its safetensors are in a pull request."""
    files = {path.name: path.read_bytes() for path in mlm_folder.iterdir()}
    pickle_weights(mlm_folder)
    repository = hub.repositories["org/model"] = Repository()
    repository.commit("refs/pr/1", files, "safetensors")
    commit = repository.commit("main", {path.name: path.read_bytes() for path in mlm_folder.iterdir()}, "pickle")
    weights = BertForMaskedLM.from_pretrained(mlm_folder).bert.embeddings.word_embeddings.weight
    for name in ("org/model", "org/model@refs/pr/1", f"org/model@{commit}"):
        encoder = load_retromae_encoder(name).model.encoder
        assert torch.equal(encoder.get_input_embeddings().weight, weights)
    assert hub_name(encoder.name_or_path) == f"org/model@{commit}"
