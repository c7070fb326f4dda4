"""The exported routes of CoT-MoTE give the vectors of the model, for every family of encoders and every variant."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModelForMaskedLM, BertTokenizerFast, PreTrainedTokenizerFast, RobertaTokenizer

from revela_hub.checkpoints import export_checkpoint
from revela_hub.modeling import CoTMoTEForPreTraining, CoTMoTEModel

TEXTS = [
    "fox",
    "",
    "A retriever learns from raw text which chunks of a document help.",
    "東京 rivers",
    "what [SEP] and [CLS] are",
    "sediment " * 60,
]
MAX_LENGTH = 32
SIZES = {
    "Bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
}


def trained(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, variant: str = "experts") -> CoTMoTEModel:
    """A checkpoint of pre-training, with different weights in the two routes."""
    special_ids = tokenizer("")["input_ids"]  # as in training
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer) + 3, max_position_embeddings=40, **SIZES[family], **special
    )
    model = CoTMoTEForPreTraining.from_backbone(
        AutoModelForMaskedLM.from_config(config),
        variant=variant,
        max_seq_length=MAX_LENGTH,
        special_token_ids=special_ids,
    )
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.encoder.eval()


def expected(model: CoTMoTEModel, tokenizer: PreTrainedTokenizerFast, expert: str) -> Any:
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"], expert=expert)


@pytest.mark.parametrize(
    ("family", "variant"), [("DistilBert", "separate"), ("Roberta", "experts"), ("Bert", "siamese")]
)
def test_routes_of_other_families_and_variants(
    tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast, family: str, variant: str
) -> None:
    """Also if the first token is not [CLS], and with other positions."""
    tokenizer: Any = wordpiece_tokenizer
    if family == "Roberta":
        vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "<S>": 5} | {
            letter: 6 + number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyzĠA.")
        }
        tokenizer = RobertaTokenizer(vocab=vocabulary, merges=[])
    model = trained(tmp_path / "checkpoint", family, tokenizer, variant)
    # The sparse form must ignore [CLS] even if it has the highest score.
    first = tokenizer("")["input_ids"][0]
    for route in ("query", "passage"):
        model.route(route).get_input_embeddings().weight.data[first] *= 3
    CoTMoTEModel.save_pretrained(model, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    dense, sparse = SentenceTransformer(str(tmp_path / "out/dense")), SparseEncoder(str(tmp_path / "out/sparse"))
    for kind, expert in (("query", "query"), ("document", "passage")):
        vectors = expected(model, tokenizer, expert)
        got = torch.tensor(getattr(dense, f"encode_{kind}")(TEXTS))
        torch.testing.assert_close(got, vectors.pooler_output, rtol=0, atol=1e-5)
        got = getattr(sparse, f"encode_{kind}")(TEXTS, convert_to_sparse_tensor=False)
        torch.testing.assert_close(got, vectors.sparse, rtol=0, atol=1e-5)
    if variant != "siamese":
        with pytest.raises(ValueError, match="Could not determine route"):
            dense.encode(["whose expert?"])
