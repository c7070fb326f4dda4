"""The three exported forms of CoT-MoTE load without this package, and give the vectors of the model."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fork_server import python
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModelForMaskedLM, BertTokenizerFast, PreTrainedTokenizerFast, RobertaTokenizer

from revela_hub.checkpoints import export_checkpoint, publish
from revela_hub.errors import UserError
from revela_hub.hub_cards import Assembly, Destination, ModelCardMetadata, check, write_card
from revela_hub.hub_cards.assemble import assemble_part
from revela_hub.modeling import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.methods import METHODS

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

# Runs where this package cannot be imported: what a reader of the Hub has.
READER = """
import sys
sys.modules["revela_hub"] = None
import json, numpy as np, torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModel, AutoTokenizer
folder, texts, out = json.loads(sys.argv[1])
dense, sparse = SentenceTransformer(folder + "/dense", device="cpu"), SparseEncoder(folder + "/sparse", device="cpu")
model = AutoModel.from_pretrained(folder + "/model", trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder + "/model", trust_remote_code=True)
batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
arrays = {}
for task, expert in (("query", "query"), ("document", "passage")):
    arrays[task + " dense"] = getattr(dense, "encode_" + task)(texts)
    arrays[task + " sparse"] = getattr(sparse, "encode_" + task)(texts, convert_to_sparse_tensor=False).numpy()
    arrays[task + " alone"] = np.concatenate([getattr(dense, "encode_" + task)([text]) for text in texts])
    with torch.no_grad():
        output = model(batch["input_ids"], batch["attention_mask"], expert=expert)
    arrays[task + " model dense"], arrays[task + " model sparse"] = output.pooler_output.numpy(), output.sparse.numpy()
np.savez(out, **arrays)
"""


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


def test_forms_do_not_depend_on_the_order_of_export(tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast) -> None:
    """The checkpoint is also loaded only once for all three."""
    trained(tmp_path / "checkpoint", "Bert", wordpiece_tokenizer)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    for name, part in COT_MOTE.folders.items():
        alone = assemble_part(COT_MOTE, tmp_path / "checkpoint", tmp_path / "alone" / name, Assembly(part=part)).folder
        folder = tmp_path / "out" / name
        written = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert written == {file.relative_to(alone): file.read_bytes() for file in alone.rglob("*") if file.is_file()}


def test_all_three_forms_give_the_vectors_of_the_model(tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast) -> None:
    model = trained(tmp_path / "checkpoint", "Bert", wordpiece_tokenizer)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert not list((tmp_path / "out" / "dense").rglob("*.py")) + list((tmp_path / "out" / "sparse").rglob("*.py"))
    out = tmp_path / "vectors.npz"
    task = json.dumps([str(tmp_path / "out"), TEXTS, str(out)])
    done = subprocess.run([*python("readers"), "-c", READER, task], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    arrays = np.load(out)
    for kind, expert in (("query", "query"), ("document", "passage")):
        vectors = expected(model, wordpiece_tokenizer, expert)
        for name in ("dense", "alone", "model dense"):
            np.testing.assert_allclose(arrays[f"{kind} {name}"], vectors.pooler_output.numpy(), rtol=0, atol=1e-5)
        for name in ("sparse", "model sparse"):
            np.testing.assert_allclose(arrays[f"{kind} {name}"], vectors.sparse.numpy(), rtol=0, atol=1e-5)
    assert not np.allclose(arrays["query dense"], arrays["document dense"], atol=0.1)
    # shared weights are stored once, so the attention of the model has half the size of that of the two routes
    sizes = {name: sum(f.stat().st_size for f in (tmp_path / "out" / name).rglob("*.safetensors")) for name in
             ("sparse", "model")}  # fmt: skip
    assert sizes["model"] < 0.75 * sizes["sparse"]
    for file in (tmp_path / "out").rglob("*.json"):
        assert str(tmp_path) not in file.read_text(encoding="utf-8"), file


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


def test_check_and_publish_know_the_three_forms(tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast) -> None:
    trained(tmp_path / "checkpoint", "Bert", wordpiece_tokenizer)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    for folder in ("dense", "sparse", "model"):
        checks = check(tmp_path / "out" / folder, trust_remote_code=folder == "model", methods=METHODS)
        assert [row for row in checks if not row.ok] == []
        compared = next(row.detail for row in checks if row.name == "weights")
        assert "(0 compared)" not in compared
    destination = Destination("someone/cot-mote")
    for part in ("retriever", "sparse", "model"):
        published = publish(tmp_path / "checkpoint", destination, Assembly(part=part), dry_run=True)
        same = next(row for row in published.checks if row.name == "same as checkpoint")
        assert same.ok and same.detail == "to 1e-05 on 6 texts"
    with pytest.raises(UserError, match="was trained with CoT-MoTE: its parts are retriever, sparse, model, not lm"):
        publish(tmp_path / "checkpoint", destination, Assembly(part="lm"), dry_run=True)


def test_the_code_in_each_card_runs(
    tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of each form shows how to load that form."""
    trained(tmp_path / "checkpoint", "Bert", wordpiece_tokenizer)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    loaders = {"dense": "SentenceTransformer", "sparse": "SparseEncoder", "model": "AutoModel"}
    for name, loader in loaders.items():
        card = write_card(tmp_path / "out" / name, ModelCardMetadata(method=COT_MOTE)).read_text()
        assert f"{loader}" in card and ("sparse-encoder" in card) == (name == "sparse")
        if name != "model":
            assert "| Maximum length | 32 tokens |" in card and "separate routes (query, document)" in card
        (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        exec(compile(block, name, "exec"), {})


def test_check_finds_a_sparse_folder_that_includes_the_first_token(
    tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast
) -> None:
    """Without the weights [CLS] would be part of the maximum, unlike in the reference vectors."""
    trained(tmp_path / "checkpoint", "Bert", wordpiece_tokenizer)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    file = tmp_path / "out" / "sparse" / "router_config.json"
    router = json.loads(file.read_text())
    router["structure"] = {
        route: [name for name in modules if "WordWeights" not in name] for route, modules in router["structure"].items()
    }
    router["types"] = {name: kind for name, kind in router["types"].items() if "WordWeights" not in name}
    file.write_text(json.dumps(router))
    for folder in file.parent.glob("*WordWeights"):
        shutil.rmtree(folder)
    with pytest.raises(UserError, match="same as checkpoint: .* differs"):
        publish(tmp_path / "out" / "sparse", Destination("someone/x"), Assembly(), dry_run=True)
