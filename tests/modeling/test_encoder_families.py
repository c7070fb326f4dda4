"""Every family of masked language models with RetroMAE and CoT-MoTE: correct, or rejected when the model is built.

Correct means: the loss is that of the family's own head, a step of training works, and a reloaded checkpoint and the exported
folder return the trained model's vectors.
"""

import copy
from functools import cache
from pathlib import Path
from traceback import walk_tb

import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from test_families import SIZES, close
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    BertTokenizerFast,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from revela_hub.hub_cards.assemble import Assembly
from revela_hub.modeling import CoTMoTEForPreTraining, RetroMAEForPreTraining
from revela_hub.modeling.modeling_cot_mote import CoTMoTEModel
from revela_hub.trainers.cot_mote.checkpoint import CoTMoTECheckpoint, assemble_cot_mote
from revela_hub.trainers.retromae.checkpoint import RetroMAECheckpoint, assemble_retromae

VOCABULARY, LENGTH = 256, 64
ENCODER_SIZES = SIZES | {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": 0, "num_hidden_layers": 2},
    **{"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "embedding_size": 32, "emb_dim": 32},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("attention_dropout", "activation_dropout", "mlp_dropout", "embedding_dropout"), 0.0),
}
OTHERS: dict[str, dict[str, object]] = {
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 4, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
# Every run has these and each twentieth of the others.
SAMPLE = ("bert", "distilbert", "electra", "modernbert", "mpnet", "xlm-roberta", "deberta-v2", "albert")
FAMILIES = [
    family if family in SAMPLE or place % 20 == 0 else pytest.param(family, marks=pytest.mark.exhaustive)
    for place, family in enumerate(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
]
# Correct with both methods, and never rejected.
ACCEPTED = (*[family for family in SAMPLE if family != "albert"], "roberta", "camembert", "deberta", "roformer")


@cache
def small(family: str) -> PreTrainedConfig | str:
    """Return the configuration of a model of two layers, or the reason why it cannot be made."""
    kind = CONFIG_MAPPING[family]
    try:
        default = kind()
        given = {name: size for name, size in ENCODER_SIZES.items() if hasattr(default, name)}
        given = {name: size for name, size in given.items() if getattr(default, name) is not None}
        config: PreTrainedConfig = kind(**(given | OTHERS.get(family, {})))
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in AutoModelForMaskedLM.from_config(config).parameters())
        if weights > 2e6:
            return f"a small {family} has {weights} weights"
        AutoModelForMaskedLM.from_config(config)(input_ids=tokens(1, 4))
    except Exception as error:
        return f"no small {family}: {error!r}"
    return config


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, 60, shape)


def masked_lm(family: str) -> PreTrainedModel:
    """Return a random model in eval mode; skip the test if the family has no small configuration."""
    config = small(family)
    if isinstance(config, str):
        pytest.skip(config)
    lm: PreTrainedModel = AutoModelForMaskedLM.from_config(copy.deepcopy(config)).eval()
    return lm


def step(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Train for one step, with finite gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model.train()(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    model.eval()


def check_encoder(lm: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two texts with what the family's own model makes of them, having checked padding, length and attention."""
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 0, 0
    labels = ids.masked_fill((torch.arange(8) % 2 == 0) | (mask == 0), -100)
    with torch.no_grad():
        own = lm(input_ids=ids, attention_mask=mask).logits
        expected = torch.nn.functional.cross_entropy(own.flatten(0, 1), labels.flatten())
        hidden = lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert close(
            lm.base_model(input_ids=ids[1:, :5], attention_mask=mask[1:, :5]).last_hidden_state, hidden[1:, :5]
        )
        longest = tokens(1, model.max_length)
        assert (
            lm.base_model(input_ids=longest, attention_mask=torch.ones_like(longest)).last_hidden_state.isfinite().all()
        )
        other = ids.clone()
        other[0, 7] = ids[0, 7] % 50 + 5
        changed = lm.base_model(input_ids=other, attention_mask=mask).last_hidden_state
        assert not close(changed[0, 0], hidden[0, 0], 1e-5), "the first token does not read the last"
    return {"ids": ids, "mask": mask, "labels": labels, "expected": expected, "first": hidden[:, 0]}


def check_retromae(family: str, lm: PreTrainedModel, tokenizer: BertTokenizerFast, folder: Path) -> None:
    model = RetroMAEForPreTraining.from_encoder(lm).eval()
    own = check_encoder(lm, model)
    visible = own["mask"][:, None, :].repeat(1, 8, 1).bool() & ~torch.eye(8, dtype=torch.bool)
    batch = {
        "encoder_input_ids": own["ids"],
        "encoder_attention_mask": own["mask"],
        "encoder_labels": own["labels"],
        "decoder_input_ids": own["ids"],
        "decoder_attention_mask": visible,
        "decoder_labels": own["ids"].masked_fill(own["mask"] == 0, -100),
        "return_logits": False,
    }
    with torch.no_grad():
        output = model(**batch)
        assert close(output.encoder_loss, own["expected"]), (output.encoder_loss, own["expected"])
        assert close(output.sentence_embedding, own["first"])
        assert close(model(**batch | {"return_logits": True}).loss, output.loss)
    step(model, batch)
    model.save_pretrained(folder / "checkpoint")
    loaded = RetroMAEForPreTraining.from_pretrained(folder / "checkpoint").eval()
    with torch.no_grad():
        trained = model(**batch)
        assert torch.equal(loaded(**batch).loss, trained.loss)
    assert not close(trained.sentence_embedding, output.sentence_embedding, 1e-5)
    assembly = Assembly(max_length=32)
    assemble_retromae(RetroMAECheckpoint(loaded, tokenizer), folder / "checkpoint", folder / "out", assembly)
    encode = SentenceTransformer(str(folder / "out"), device="cpu").encode
    for text in ("a fox", "the river " * 40):
        tokens_1L = tokenizer([text], truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            vector = model.encoder(tokens_1L["input_ids"], attention_mask=tokens_1L["attention_mask"])[0][:, 0]
        got = encode([text, "a"], convert_to_tensor=True)[:1]
        assert close(got, torch.nn.functional.normalize(vector, dim=-1))


def check_cot_mote(family: str, lm: PreTrainedModel, tokenizer: BertTokenizerFast, folder: Path) -> None:
    model = CoTMoTEForPreTraining.from_backbone(lm).eval()
    own = check_encoder(lm, model)
    batch = {
        "input_ids": own["ids"],
        "attention_mask": own["mask"],
        "labels": own["labels"],
        "decoder_input_ids": own["ids"],
        "decoder_attention_mask": own["mask"],
        "expert": torch.tensor([0, 1]),
    }
    with torch.no_grad():
        output = model(**batch)
        assert close(output.encoder_loss, own["expected"]), (output.encoder_loss, own["expected"])
        assert close(output.pooler_output, own["first"])
    step(model, batch)
    model.save_pretrained(folder / "checkpoint")
    loaded = CoTMoTEForPreTraining.from_pretrained(folder / "checkpoint").eval()
    encoder: CoTMoTEModel = model.encoder.eval()
    text = tokenizer(["the river"], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**batch).loss, model(**batch).loss)
        query, passage = (encoder(text["input_ids"], text["attention_mask"], expert=e) for e in ("query", "passage"))
    assert not close(query.pooler_output, passage.pooler_output, 1e-6), "the experts are one"
    checkpoint = CoTMoTECheckpoint(loaded, tokenizer)
    for part, name, kind in (("retriever", "pooler_output", SentenceTransformer), ("sparse", "sparse", SparseEncoder)):
        assemble_cot_mote(checkpoint, folder / "checkpoint", folder / part, Assembly(part=part, max_length=32))
        exported = kind(str(folder / part), device="cpu")
        for encode, expected in ((exported.encode_query, query), (exported.encode_document, passage)):
            got = encode(["the river", "a"], convert_to_tensor=True)
            assert close((got.to_dense() if got.is_sparse else got)[:1], expected[name])


CHECKS = {"RetroMAE": check_retromae, "CoT-MoTE": check_cot_mote}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_correct_or_rejected(
    family: str, check: str, tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast
) -> None:
    lm = masked_lm(family)
    try:
        CHECKS[check](family, lm, wordpiece_tokenizer, tmp_path)
    except ValueError as error:
        built = any(frame.f_code.co_name.startswith("from_") for frame, _ in walk_tb(error.__traceback__))
        if not built or family in ACCEPTED:
            raise
