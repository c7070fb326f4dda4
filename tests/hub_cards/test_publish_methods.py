"""Publish models of the other methods."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from loopback_hub import LoopbackHub
from sentence_transformers import SentenceTransformer
from transformers import BertForMaskedLM, BertModel, BertTokenizerFast, LlamaForCausalLM, PreTrainedTokenizerBase

from revela_hub.checkpoints import export_checkpoint, publish
from revela_hub.errors import UserError
from revela_hub.hub_cards import Assembly, Destination, ModelCardMetadata
from revela_hub.hub_cards.assemble import assemble_part
from revela_hub.hub_cards.verify.verify import as_table, verify
from revela_hub.modeling import ImpRAGForCausalLM, NVEmbedModel, RetroMAEForPreTraining
from revela_hub.trainers.imprag import IMPRAG
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.export import export_nvembed


@pytest.fixture
def retromae_checkpoint(tmp_path: Path, tiny_bert: BertModel, wordpiece_tokenizer: BertTokenizerFast) -> Path:
    folder = tmp_path / "retromae"
    RetroMAEForPreTraining.from_encoder(BertForMaskedLM(tiny_bert.config)).save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    return folder


def test_retromae_encoder_needs_no_remote_code(
    retromae_checkpoint: Path, hub: LoopbackHub, tmp_path: Path, texts: list[str]
) -> None:
    published = publish(retromae_checkpoint, Destination("org/retromae"), keep=tmp_path / "work")
    assert published.commit and all(check.ok for check in published.checks)
    names = set(hub.repositories["org/retromae"].files("main"))
    assert not any(name.endswith(".py") for name in names)
    card = (tmp_path / "work" / "model" / "README.md").read_text()
    assert "2205.12035" in card and "first token" in card
    here = SentenceTransformer(str(tmp_path / "work" / "model"), device="cpu").encode_document(texts)
    exported = export_checkpoint(retromae_checkpoint, tmp_path / "exported") / "encoder"
    np.testing.assert_allclose(here, SentenceTransformer(str(exported), device="cpu").encode_query(texts), atol=1e-6)


def test_retromae_with_its_decoder(retromae_checkpoint: Path, hub: LoopbackHub) -> None:
    publish(retromae_checkpoint, Destination("org/both"), Assembly(part="model"))
    names = set(hub.repositories["org/both"].files("main"))
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_retromae.py"} <= names
    assert not any("revela" in name for name in names)


def test_the_maximum_length_is_an_error_for_the_whole_model(retromae_checkpoint: Path) -> None:
    assembly = Assembly(part="model", max_length=32)
    with pytest.raises(UserError, match="--max_length has no effect on the part model of RetroMAE: leave it out"):
        publish(retromae_checkpoint, Destination("org/x"), assembly, dry_run=True)


@pytest.mark.parametrize("assembly", [Assembly(part="lm"), Assembly(adapter_only=True)])
def test_retromae_has_no_language_model_and_no_adapter(
    retromae_checkpoint: Path, tmp_path: Path, assembly: Assembly
) -> None:
    with pytest.raises(UserError, match="trained with RetroMAE: its (parts are retriever, model, not lm|adapter)"):
        publish(retromae_checkpoint, Destination("org/x"), assembly, dry_run=True)
    with pytest.raises(UserError, match="its parts are retriever, model, not lm"):
        export_checkpoint(retromae_checkpoint, tmp_path / "out", lm=True)


def test_remote_code_must_be_allowed(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = NVEmbedModel.from_backbone(tiny_llama, num_latents=4)
    folder = export_nvembed(model, bpe_tokenizer, tmp_path / "embedder", max_length=32, prompts={})
    with pytest.raises(UserError, match="remote code|trust"):
        publish(folder, Destination("org/other"), Assembly(metadata=ModelCardMetadata(method=NVEMBED)), dry_run=True)


def test_imprag_card_describes_the_index_and_the_model_loads_without_this_package(
    tmp_path: Path, hub: LoopbackHub, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "imprag"
    ImpRAGForCausalLM.from_backbone(tiny_llama, b=0, t=1, k=2, l_max=32).save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    published = publish(folder, Destination("org/reader"), Assembly(part="model"), keep=tmp_path / "work")
    assert published.commit and all(check.ok for check in published.checks)
    names = set(hub.repositories["org/reader"].files("main"))
    assert {"model.safetensors", "modeling_imprag.py", "reading_decoder.py", "passage_attention.py"} <= names
    card = (tmp_path / "work" / "model" / "README.md").read_text()
    assert "revela-hub index org/reader --corpus" in card and "2506.02279" in card
    compared = {check.name: check.detail for check in published.checks}["same as checkpoint"]
    assert "on 6 texts" in compared
    with pytest.raises(UserError, match="--max_length has no effect on the part model of ImpRAG"):
        export_checkpoint(folder, tmp_path / "out", max_length=16)
    with pytest.raises(UserError, match="was trained with ImpRAG: its parts are model, not lm"):
        publish(folder, Destination("org/x"), Assembly(part="lm"), dry_run=True)


def test_imprag_with_an_unlimited_tokenizer_is_published(
    tmp_path: Path, hub: LoopbackHub, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Export and check use the same maximum length: the number of positions."""
    folder = tmp_path / "imprag"
    ImpRAGForCausalLM.from_backbone(tiny_llama, b=0, t=1, k=2, l_max=32).save_pretrained(folder)
    bpe_tokenizer.model_max_length = int(1e30)
    bpe_tokenizer.save_pretrained(folder)
    published = publish(folder, Destination("org/reader"), Assembly(part="model"), dry_run=True)
    assert all(check.ok for check in published.checks)


def test_imprag_folders_with_other_vectors_or_answers_fail(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    checkpoint = tmp_path / "imprag"
    ImpRAGForCausalLM.from_backbone(tiny_llama, b=0, t=0, k=2, l_max=32).save_pretrained(checkpoint)
    bpe_tokenizer.save_pretrained(checkpoint)
    good = assemble_part(IMPRAG, checkpoint, tmp_path / "good", Assembly(part="model"))
    folders = [good.folder]
    for change in ({"b": 1, "t": 1}, {"t": 1}, {"k": 3}, {"l_max": 16}):
        folder = tmp_path / "-".join(change)
        shutil.copytree(good.folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        folders.append(folder)
    (checkpoint / "config.json").write_text(json.dumps(config | {"k": 1000}))
    with pytest.raises(UserError, match="cannot read passages: a prompt of .* does not fit"):
        assemble_part(IMPRAG, checkpoint, tmp_path / "never", Assembly(part="model"))
    first, *others = (
        verify(folder, trust_remote_code=True, reference=good.reference, vectors=IMPRAG.vectors) for folder in folders
    )
    assert all(check.ok for check in first), as_table(first)
    for checks in others:
        assert [check.name for check in checks if not check.ok] == ["same as checkpoint"], as_table(checks)
