"""Checks of a pre-trained model before a method builds on it: all of its weights, and attention that is reached."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import small_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM, NVEmbedModel, RevelaForCausalLM
from revela_hub.modeling.backbones import some_tokens
from revela_hub.trainers import load_backbones
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.baselines.ra_dit import decoder_retriever
from revela_hub.trainers.imprag.checkpoint import load_imprag


def decoder(family: str, **settings: object) -> PreTrainedModel:
    return small_models.decoder(family, **({"bos_token_id": 1, "eos_token_id": 2} | settings))


@pytest.fixture
def headless(tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: transformers.PreTrainedTokenizerFast) -> str:
    """A decoder as retrievers come: saved by its body, without the weights of an output projection."""
    folder = tmp_path / "headless"
    tiny_llama.model.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return str(folder)


LOADERS: dict[str, Callable[[str, str], object]] = {
    "revela": lambda lm, retriever: load_backbones(retriever, lm),
    "replug": lambda lm, _: load_lm(lm),
    "imprag": lambda lm, _: load_imprag(lm),
    "ra-dit": lambda lm, _: decoder_retriever(lm, 0),
}


@pytest.mark.parametrize("method", LOADERS)
def test_a_language_model_without_a_head_is_rejected(method: str, headless: str, retriever_folder: Path) -> None:
    with pytest.raises(
        (UserError, ValueError),
        match=r"headless.* has no weights for lm_head\.weight, which would be initialised at random",
    ):
        LOADERS[method](headless, str(retriever_folder))


def test_models_in_memory_need_a_head_too(tiny_llama: LlamaForCausalLM, tiny_bert: PreTrainedModel) -> None:
    for build in (RevelaForCausalLM.from_backbones, lambda _, lm: ImpRAGForCausalLM.from_backbone(lm)):
        with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
            build(tiny_bert, tiny_llama.model)


def test_a_head_that_is_the_embeddings_needs_no_weights(tmp_path: Path, tiny_bert: PreTrainedModel) -> None:
    decoder("Llama", tie_word_embeddings=True).model.save_pretrained(tmp_path)
    assert RevelaForCausalLM.from_backbones(tiny_bert, str(tmp_path)).lm.lm_head.weight.isfinite().all()


def test_a_layer_that_is_missing_is_named(llama_folder: Path, bert_folder: Path) -> None:
    file = llama_folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "layers.1.mlp" not in k}, file, {"format": "pt"})
    for build in (NVEmbedModel.from_backbone, lambda lm: RevelaForCausalLM.from_backbones(str(bert_folder), lm)):
        with pytest.raises(ValueError, match=r"no weights for (model\.)?layers\.1\.mlp\.down_proj\.weight and 2 more"):
            build(str(llama_folder))


def test_a_pooler_may_be_missing(bert_folder: Path, llama_folder: Path) -> None:
    RevelaForCausalLM.from_backbones(str(bert_folder), str(llama_folder), pooling="mean")


def test_a_mask_that_is_not_the_methods_is_rejected(tiny_bert: PreTrainedModel) -> None:
    """Also where a single layer has it."""
    for build in (
        lambda: RevelaForCausalLM.from_backbones(tiny_bert, decoder("Bert")),
        lambda: NVEmbedModel.from_backbone(tiny_bert, mask="causal"),
    ):
        with pytest.raises(ValueError, match="is not a causal decoder"):
            build()
    lm = decoder("Llama")
    attention = lm.model.layers[1].self_attn
    forward, causal = attention.forward, torch.ones(4, 4, dtype=torch.bool).tril()
    attention.forward = lambda *args, **options: forward(*args, **options | {"attention_mask": causal[None, None]})
    with pytest.raises(ValueError, match="stays causal in some layer"):
        NVEmbedModel.from_backbone(lm)


def test_foreign_attention_is_rejected(tiny_bert: PreTrainedModel) -> None:
    xlnet = transformers.XLNetConfig(vocab_size=61, d_model=32, n_layer=1, n_head=2, d_inner=32)
    for build in (RevelaForCausalLM.from_backbones, lambda _, lm: ImpRAGForCausalLM.from_backbone(lm)):
        with pytest.raises(ValueError, match="attention interface"):
            build(tiny_bert, transformers.AutoModelForCausalLM.from_config(xlnet))


@pytest.mark.parametrize(("family", "layer"), [("DiffLlama", 0), ("Lfm2", 1), ("Llama", 1)])
def test_a_layer_that_cannot_read_passages_is_an_error(family: str, layer: int) -> None:
    """Two calls a layer, a layer without attention, and one that does not pass the argument on."""
    options = {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]}
    model = ImpRAGForCausalLM.from_backbone(
        decoder(family, **(options if family == "Lfm2" else {})), b=0, t=1, k=1, l_max=8
    )
    ids = torch.arange(3, 8)[None]
    if family == "Llama":
        attention = model.get_decoder().layers[1].self_attn
        plain = attention.forward
        attention.forward = lambda *args, imprag=None, **options: plain(*args, **options)
    with pytest.raises(ValueError, match=f"layer {layer} does not call"):
        model(ids, passage_input_ids=ids[:, None])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_does_not_receive_the_other_chunks_is_an_error(tiny_bert: PreTrainedModel, frozen: bool) -> None:
    """Else the model would be trained as a plain language model; the next pass of another model is not affected."""
    ids = torch.arange(16).view(2, 8) + 3
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "similarity": 1 - torch.eye(2)[None]}
    model = RevelaForCausalLM.from_backbones(tiny_bert, decoder("Nemotron"), group_size=2)
    model.lm.requires_grad_(not frozen)
    with pytest.raises(ValueError, match="NemotronAttention"):
        model(**batch)
    assert model.lm(input_ids=ids).logits.isfinite().all()
    silent = RevelaForCausalLM.from_backbones(tiny_bert, decoder("Llama"), group_size=2)
    silent.lm.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="attention interface"):
        silent(**batch)


def test_the_check_leaves_no_trace(tiny_bert: PreTrainedModel) -> None:
    lm = decoder("Llama", attn_implementation="eager", attention_dropout=0.5).train()
    lm.model.layers[0].eval()
    state = torch.get_rng_state()
    for build in (RevelaForCausalLM.from_backbones, lambda _, lm: ImpRAGForCausalLM.from_backbone(lm)):
        build(tiny_bert, lm)
    assert torch.equal(torch.get_rng_state(), state)
    assert lm.config._attn_implementation == "eager"
    assert lm.training and lm.model.layers[1].training and not lm.model.layers[0].training
    assert all(parameter.grad is None for parameter in lm.parameters())


def test_a_loaded_decoder_can_be_given_to_imprag_twice() -> None:
    """Each model uses its own layer b, also after the decoder was given to another one."""
    lm = decoder("Llama", initializer_range=0.2).eval()
    copies = [deepcopy(lm), deepcopy(lm), deepcopy(lm)]
    layers = [{"b": 0, "t": 0}, {"b": 1, "t": 1}, {"b": 1, "t": 1}]
    shared = [ImpRAGForCausalLM.from_backbone(lm, k=3, l_max=8, **at) for at in layers]
    alone = [ImpRAGForCausalLM.from_backbone(own, k=3, l_max=8, **at) for own, at in zip(copies, layers, strict=True)]
    ids, candidates = some_tokens(lm, 2, 6), some_tokens(lm, 6, 4).view(2, 3, 4)
    batch = (ids, torch.ones_like(ids), ids.clone(), candidates, torch.ones_like(candidates))
    for got, want in zip(shared, alone, strict=True):
        assert torch.equal(got.embed_passages(ids), want.embed_passages(ids))
        assert torch.equal(got.answer_log_likelihoods(*batch), want.answer_log_likelihoods(*batch))
