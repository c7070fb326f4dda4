"""Checks of a pre-trained model before a method builds on it: all of its weights, and attention that is reached."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, LlamaForCausalLM, PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM, NVEmbedModel, RetroMAEForPreTraining, RevelaForCausalLM
from revela_hub.modeling.backbones import recorded_attention, some_tokens, use_attention
from revela_hub.trainers import load_backbones
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.baselines.ra_dit import decoder_retriever
from revela_hub.trainers.imprag.checkpoint import load_imprag
from revela_hub.trainers.nvembed.checkpoint import load_nvembed

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def decoder(family: str, **settings: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    return transformers.AutoModelForCausalLM.from_config(config)


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
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        RevelaForCausalLM.from_backbones(tiny_bert, tiny_llama.model)
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        ImpRAGForCausalLM.from_backbone(tiny_llama.model)


def test_a_head_that_is_the_embeddings_needs_no_weights(tmp_path: Path, tiny_bert: PreTrainedModel) -> None:
    decoder("Llama", tie_word_embeddings=True).model.save_pretrained(tmp_path)
    assert RevelaForCausalLM.from_backbones(tiny_bert, str(tmp_path)).lm.lm_head.weight.isfinite().all()


def without(folder: Path, part: str) -> str:
    """The folder, its weights without those of a part."""
    file = folder / "model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if part not in name}, file, {"format": "pt"})
    return str(folder)


def test_a_layer_that_is_missing_is_named(llama_folder: Path, bert_folder: Path, tmp_path: Path) -> None:
    lacking = without(llama_folder, "layers.1.mlp")
    message = r"tiny-llama'? has no weights for (model\.)?layers\.1\.mlp\.down_proj\.weight and 2 more"
    with pytest.raises(ValueError, match=message):
        NVEmbedModel.from_backbone(lacking)
    with pytest.raises(UserError, match=message):
        load_nvembed(lacking)
    with pytest.raises(ValueError, match=message):
        RevelaForCausalLM.from_backbones(lacking, lacking)
    BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path / "mlm")
    with pytest.raises(ValueError, match=r"no weights for bert\.encoder\.layer\.1"):
        RetroMAEForPreTraining.from_encoder(without(tmp_path / "mlm", "layer.1."))


def test_a_pooler_may_be_missing(bert_folder: Path, llama_folder: Path) -> None:
    RevelaForCausalLM.from_backbones(str(bert_folder), str(llama_folder), pooling="mean")


REJECTED = {
    "Revela, a bidirectional model": (
        lambda bert: RevelaForCausalLM.from_backbones(bert, decoder("Bert")),
        "BertLMHeadModel cannot be used for Revela: it is not a causal decoder",
    ),
    "NV-Embed, a causal mask on a bidirectional model": (
        lambda bert: NVEmbedModel.from_backbone(bert, mask="causal"),
        'BertModel cannot be used for NV-Embed with mask="causal": it is not a causal decoder',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_a_family_in_which_a_method_would_be_wrong_is_rejected(case: str, tiny_bert: PreTrainedModel) -> None:
    build, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        build(tiny_bert)


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
    if family == "Llama":
        attention.forward = plain
        states = model.encode_passages(ids[:, None])
        attention.forward = lambda *args, imprag=None, **options: plain(*args, **options)
        with pytest.raises(ValueError, match="layer 1 does not call"):
            model(ids, passage_states=states)


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


def test_a_loaded_lm_can_be_given_to_revela_twice(tiny_bert: PreTrainedModel) -> None:
    lm = decoder("Llama")
    first, second = (RevelaForCausalLM.from_backbones(tiny_bert, lm, group_size=2) for _ in range(2))
    ids = some_tokens(lm, 2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "similarity": 1 - torch.eye(2)[None]}
    assert first(**batch).logits.shape == (2, 8, 61)
    assert torch.equal(first(**batch).logits, second(**batch).logits)


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


def test_eager_attention_stays_eager_in_another_method() -> None:
    lm = decoder("Llama", attn_implementation="eager")
    use_attention(lm, "revela")
    use_attention(lm, "imprag")
    assert lm.config._attn_implementation == "imprag_eager"


def test_loading_a_saved_model_runs_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NVEmbedModel.from_backbone(decoder("Llama")).save_pretrained(tmp_path / "nvembed")
    ImpRAGForCausalLM.from_backbone(decoder("Llama")).save_pretrained(tmp_path / "imprag")
    ran: list[str] = []
    monkeypatch.setattr(transformers.LlamaModel, "forward", lambda *_, **__: ran.append("forward"))
    NVEmbedModel.from_pretrained(tmp_path / "nvembed")
    ImpRAGForCausalLM.from_pretrained(tmp_path / "imprag")
    assert not ran


def test_calls_are_recorded_with_their_layer_and_their_mask() -> None:
    lm = decoder("Llama")
    with recorded_attention(lm) as calls, torch.no_grad():
        lm(some_tokens(lm, 1, 4))
    assert [call.layer for call in calls] == [0, 1]
    assert not any(call.reads_later for call in calls)
