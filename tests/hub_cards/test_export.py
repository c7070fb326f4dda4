"""Exported folders have stock modules, and give the vectors of the trained model without this package."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import reader
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertModel,
    ByT5Tokenizer,
    CodeLlamaTokenizer,
    GPTNeoXTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    XGLMTokenizer,
)

from revela_hub.errors import UserError
from revela_hub.hub_cards.export import export_retriever, save_tokenizer
from revela_hub.hub_cards.tokenizers import ends_texts, with_eos

PROMPTS = {"query": "Query: ", "document": "Passage: "}
QUERIES = ["What is the capital of France?", "", "東京は日本の首都です。 Москва", "river sediment " * 60, "fox"]
MAX_LENGTH = 32

# Runs where this package cannot be imported: what a reader of the Hub has.
READER = """
import sys
sys.modules["revela_hub"] = None
import json
import numpy as np
from sentence_transformers import SentenceTransformer
folders, texts, out = json.loads(sys.argv[1])
arrays = {}
for name, folder in folders.items():
    model = SentenceTransformer(folder, device="cpu")
    model.eval()
    assert model.max_seq_length == 32, model.max_seq_length
    assert model.tokenizer.padding_side == "right"
    assert model.similarity_fn_name == "cosine"
    arrays[f"{name} query"] = model.encode_query(texts)
    arrays[f"{name} document"] = model.encode_document(texts)
    arrays[f"{name} single"] = np.concatenate([model.encode_query([text]) for text in texts])
    model.tokenizer.padding_side = "left"
    arrays[f"{name} left"] = model.encode_query(texts)
np.savez(out, **arrays)
"""


def vectors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], pooling: str) -> np.ndarray:
    """Return the trainer's vectors (n, d) of texts, truncated to MAX_LENGTH and padded on the right."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.no_grad():
        hidden = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    if pooling == "last":
        pooled = hidden[torch.arange(len(texts)), batch.attention_mask.sum(1) - 1]
    else:
        mask = batch.attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
    return F.normalize(pooled, dim=-1).numpy()


def test_the_folder_gives_the_trainers_vectors_without_this_package(
    tmp_path: Path,
    tiny_llama: LlamaForCausalLM,
    bpe_tokenizer: PreTrainedTokenizerBase,
    tiny_bert: BertModel,
    wordpiece_tokenizer: PreTrainedTokenizerBase,
) -> None:
    models = {"last": (tiny_llama.model, with_eos(bpe_tokenizer)), "mean": (tiny_bert, wordpiece_tokenizer)}
    expected = {
        f"{pooling} {kind}": vectors(model, tokenizer, [PROMPTS[kind] + text for text in QUERIES], pooling)
        for pooling, (model, tokenizer) in models.items()
        for kind in PROMPTS
    }
    for pooling, (model, tokenizer) in models.items():
        export_retriever(model, tokenizer, tmp_path / pooling, pooling=pooling, prompts=PROMPTS, max_length=MAX_LENGTH)
    folders = {pooling: str(tmp_path / pooling) for pooling in models}
    out = tmp_path / "vectors.npz"
    subprocess.run(reader(READER, json.dumps([folders, QUERIES, str(out)])), check=True)
    got = np.load(out)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, err_msg=name)
    for pooling in models:
        np.testing.assert_allclose(got[f"{pooling} single"], expected[f"{pooling} query"], atol=1e-5)
    # BERT has absolute positions, so only vectors of the decoder are independent of the padding side.
    np.testing.assert_allclose(got["last left"], expected["last query"], atol=1e-5)


def test_no_origin_is_saved(llama_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModel.from_pretrained(llama_folder), AutoTokenizer.from_pretrained(llama_folder)
    tokenizer(
        ["a b c", "d"], padding=True, truncation=True, max_length=2
    )  # sets padding and truncation, as a training batch does
    export_retriever(model, tokenizer, tmp_path / "out", pooling="last", prompts=PROMPTS)
    for path in (tmp_path / "out").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(llama_folder.parent) not in text, path
        assert "is_local" not in text, path
    stored = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    assert stored["truncation"] is None
    assert stored["padding"] is None


def test_another_type_similarity_and_length(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    before = tiny_llama.model.norm.weight.clone()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "similarity_fn_name": "dot", "max_length": 10**6}
    export_retriever(tiny_llama.model, bpe_tokenizer, tmp_path, pooling="last", prompts=PROMPTS, **options)
    limit = tiny_llama.config.max_position_embeddings
    assert json.loads((tmp_path / "sentence_bert_config.json").read_text())["max_seq_length"] == limit
    assert json.loads((tmp_path / "config_sentence_transformers.json").read_text())["similarity_fn_name"] == "dot"
    assert AutoModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(tiny_llama.model.norm.weight, before)


def test_weights_have_the_permissions_of_the_umask(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    before = os.umask(0o027)
    try:
        for dtype in (None, torch.bfloat16):
            folder = tmp_path / str(dtype)
            export_retriever(tiny_llama.model, bpe_tokenizer, folder, pooling="last", prompts=PROMPTS, dtype=dtype)
            modes = {file.name: file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}
            assert set(modes.values()) == {0o640}, modes
    finally:
        os.umask(before)


def test_mistakes(tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="'document'"):
        export_retriever(tiny_llama.model, bpe_tokenizer, tmp_path, pooling="last", prompts={"query": "Q: "})
    bpe_tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-sequence"):
        export_retriever(tiny_llama.model, bpe_tokenizer, tmp_path, pooling="last", prompts=PROMPTS)
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_llama.model, LoraConfig(r=2, target_modules=["q_proj"])).base_model.model
    with pytest.raises(UserError, match="merge"):
        export_retriever(adapted, bpe_tokenizer, tmp_path, pooling="last", prompts=PROMPTS)
    assert not list(tmp_path.iterdir())


def processors(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return a post-processor that tokenizers of decoders have."""
    pad = tokenizer.pad_token_id
    bos = TemplateProcessing(single="<|pad|> $A", pair="<|pad|> $A <|pad|> $B:1", special_tokens=[("<|pad|>", pad)])
    return {
        "none (Qwen)": None,
        "byte level (GPT-2)": ByteLevel(trim_offsets=False),
        "BOS (Llama 2)": bos,
        "byte level and BOS (Llama 3)": Sequence([ByteLevel(trim_offsets=False), bos]),
    }


@pytest.mark.parametrize("kind", ["none (Qwen)", "byte level (GPT-2)", "BOS (Llama 2)", "byte level and BOS (Llama 3)"])
def test_with_eos(kind: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    bpe_tokenizer.backend_tokenizer.post_processor = processors(bpe_tokenizer)[kind]
    bpe_tokenizer.padding_side = "left"
    before = {text: bpe_tokenizer(text)["input_ids"] for text in ("the fox", "", "a longer text about rivers")}
    once = with_eos(bpe_tokenizer)
    assert not ends_texts(bpe_tokenizer), "the tokenizer that was given has changed"
    once.save_pretrained(tmp_path)
    for tokenizer in (once, with_eos(once), AutoTokenizer.from_pretrained(tmp_path)):
        eos = tokenizer.eos_token_id
        assert tokenizer.padding_side == "right"
        for text, ids in before.items():
            assert tokenizer(text)["input_ids"] == [*ids, eos]
        cut = tokenizer("a longer text about rivers", truncation=True, max_length=5)["input_ids"]
        assert cut == [*before["a longer text about rivers"][:4], eos]
        pair = tokenizer("the fox", "the fox")["input_ids"]
        assert pair == 2 * [*before["the fox"], eos]
        assert tokenizer("the fox", add_special_tokens=False)["input_ids"][-1] != eos


def test_classes_that_make_their_own_post_processor(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    bpe_tokenizer.save_pretrained(tmp_path / "given")
    tokenizer = GPTNeoXTokenizer.from_pretrained(tmp_path / "given")
    with_eos(tokenizer).save_pretrained(tmp_path / "saved")
    found = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert found("the fox")["input_ids"] == [*tokenizer("the fox")["input_ids"], tokenizer.eos_token_id]
    assert list(found("the fox")) == list(tokenizer("the fox"))


@pytest.mark.parametrize("kind", [CodeLlamaTokenizer, XGLMTokenizer])
def test_classes_that_make_their_own_beginning(kind: type[PreTrainedTokenizerBase], tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", *"▁thefox"]
    bpe = kind is CodeLlamaTokenizer
    vocabulary = (
        {word: i for i, word in enumerate(words)} if bpe else [(word, -float(i)) for i, word in enumerate(words)]
    )
    tokenizer = kind(vocab=vocabulary, model_max_length=32)
    with_eos(tokenizer).save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the fox", ""):
        assert found(text)["input_ids"] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    cut = found("the fox", truncation=True, max_length=5)["input_ids"]
    assert cut == [*tokenizer("the fox")["input_ids"][:4], tokenizer.eos_token_id]
    assert (found.padding_side, found.model_max_length, found.unk_token) == ("right", 32, "<unk>")
    assert found(["the", "the fox"], padding=True)["attention_mask"][0] == [1] * 6 + [0] * 4


def test_a_slow_tokenizer_is_saved(tmp_path: Path) -> None:
    save_tokenizer(ByT5Tokenizer(), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a fox")["input_ids"] == ByT5Tokenizer()("a fox")["input_ids"]


def test_with_eos_keeps_another_end_and_pads_with_eos_without_a_padding_token(
    bpe_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Qwen3-Embedding ends texts with its padding token, which is not its EOS."""
    before, bpe_tokenizer.pad_token = bpe_tokenizer.pad_token_id, None
    batch = with_eos(bpe_tokenizer)(["the fox jumps", "a"], padding=True)
    lengths = [len(bpe_tokenizer(text)["input_ids"]) + 1 for text in ("the fox jumps", "a")]
    assert [sum(mask) for mask in batch["attention_mask"]] == lengths
    bpe_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|pad|>", pair="$A <|pad|> $B:1 <|pad|>:1", special_tokens=[("<|pad|>", before)]
    )
    assert with_eos(bpe_tokenizer)("the fox")["input_ids"] == bpe_tokenizer("the fox")["input_ids"]


def test_weights_that_are_not_finite_are_not_exported(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    for value, dtype in ((torch.inf, None), (1e5, torch.float16)):
        tiny_llama.model.layers[0].mlp.up_proj.weight.data[0, 0] = value
        with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj\.weight"):
            export_retriever(
                tiny_llama.model, bpe_tokenizer, tmp_path / "out", pooling="last", prompts=PROMPTS, dtype=dtype
            )
    assert not (tmp_path / "out" / "model.safetensors").exists()
