"""NV-Embed in sentence-transformers, in memory and exported, gives the vectors of the model."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import reader
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerBase

from revela_hub.hub_cards.metadata import describe
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction
from revela_hub.trainers.nvembed.checkpoint import export_nvembed, nvembed_encoder, nvembed_tokenizer

PROMPTS = {
    "query": "Instruct: answer\nQuery: ",
    "document": "",
    "sts": "Instruct: alike\nQuery: ",
}
TEXTS = [
    "What is the capital of France?",
    "",
    "東京は日本の首都です。 Москва",
    "river sediment " * 30,
    "fox",
    "42 rivers ",
]
MAX_LENGTH = 64

# Runs where this package cannot be imported: what a reader of the Hub has.
READER = """
import sys
sys.modules["revela_hub"] = None
import json
import numpy as np
from sentence_transformers import SentenceTransformer
from transformers import AutoModel
folders, texts, prompts, out = json.loads(sys.argv[1])
arrays = {}
for name, folder in folders.items():
    model = SentenceTransformer(folder, device="cpu", trust_remote_code=True)
    assert model.max_seq_length == 64, model.max_seq_length
    assert model.similarity_fn_name == "cosine"
    arrays[f"{name} query"] = model.encode_query(texts)
    arrays[f"{name} document"] = model.encode_document(texts)
    arrays[f"{name} sts"] = model.encode(texts, prompt_name="sts")
    arrays[f"{name} prompt"] = model.encode_query(texts, prompt=prompts["sts"])
    arrays[f"{name} single"] = np.concatenate([model.encode_query([text]) for text in texts])
    arrays[f"{name} pairs"] = model.encode_query(texts, batch_size=2)
    bare = AutoModel.from_pretrained(folder, trust_remote_code=True)
    arrays[f"{name} encode"] = bare.encode(texts, prompts["query"]).numpy()
np.savez(out, **arrays)
"""


@pytest.fixture
def tokenizer(bpe_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer with BOS, which pooling excludes together with the prompt."""
    bpe_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", pair="<|pad|> $A <|pad|> $B", special_tokens=[("<|pad|>", bpe_tokenizer.pad_token_id)]
    )
    return bpe_tokenizer


def build(backbone: LlamaForCausalLM, pooling: str = "latent") -> NVEmbedModel:
    return NVEmbedModel.from_backbone(backbone, pooling=pooling, num_latents=5, num_heads=2).eval()


def own_vectors(model: NVEmbedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], prompt: str) -> np.ndarray:
    """Pool each text alone with the model: without BOS and the prompt, with EOS."""
    left_out = len(tokenizer(prompt.rstrip())["input_ids"]) if prompt else 0
    vectors = []
    for text in texts:
        whole = tokenizer((prompt + text).rstrip())["input_ids"]
        whole = [*whole[: MAX_LENGTH - 1], tokenizer.eos_token_id]
        ids_1L = torch.tensor([whole])
        mask = torch.ones_like(ids_1L)
        with torch.no_grad():
            vectors.append(model(ids_1L, mask, exclude_instruction(mask, left_out)).pooler_output[0])
    return torch.stack(vectors).numpy()


def test_the_folder_gives_the_models_vectors_without_this_package(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Exported or saved by sentence-transformers, with latent attention or last-token pooling."""
    expected, folders = {}, {}
    for pooling in ("latent", "eos"):
        model = build(tiny_llama, pooling)
        for kind, prompt in PROMPTS.items():
            expected[f"{pooling} {kind}"] = own_vectors(model, tokenizer, TEXTS, prompt)
        folders[pooling] = str(tmp_path / pooling)
        export_nvembed(model, tokenizer, folders[pooling], max_length=MAX_LENGTH, prompts=PROMPTS)
    model = build(tiny_llama)
    for kind, prompt in PROMPTS.items():
        expected[f"saved {kind}"] = own_vectors(model, tokenizer, TEXTS, prompt)
    folders["saved"] = str(tmp_path / "saved")
    nvembed_encoder(model, tokenizer, max_length=MAX_LENGTH, prompts=PROMPTS).save(folders["saved"])
    pooled = {
        "latent": "latent attention, then mean",
        "eos": "last token (EOS)",
        "saved": "latent attention, then mean",
    }
    assert {name: describe(folder).pooling for name, folder in folders.items()} == pooled
    out = tmp_path / "vectors.npz"
    task = json.dumps([folders, TEXTS, PROMPTS, str(out)])
    subprocess.run(reader(READER, task), check=True, stdin=subprocess.DEVNULL)
    got = np.load(out)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, err_msg=name)
    for name in folders:
        np.testing.assert_allclose(got[f"{name} prompt"], expected[f"{name} sts"], atol=1e-5)
        for way in ("single", "pairs", "encode"):
            np.testing.assert_allclose(got[f"{name} {way}"], expected[f"{name} query"], atol=1e-5, err_msg=way)
        assert abs(expected[f"{name} query"] - expected[f"{name} sts"]).max() > 1e-3


@pytest.mark.parametrize("pooling", ["latent", "mean", "eos", "self_attention"])
def test_the_live_encoder_is_the_model_itself(
    pooling: str, tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = build(tiny_llama, pooling)
    encoder = nvembed_encoder(model, tokenizer, max_length=MAX_LENGTH, prompts=PROMPTS)
    assert [type(module) for module in encoder] == [Transformer, Pooling, Normalize]
    assert encoder[0].model is model
    assert encoder.prompts == PROMPTS
    for kind, prompt in PROMPTS.items():
        expected = own_vectors(model, tokenizer, TEXTS, prompt)
        np.testing.assert_allclose(encoder.encode(TEXTS, prompt_name=kind), expected, atol=1e-5, err_msg=kind)
    features = encoder.preprocess(["fox"], prompt=PROMPTS["query"])
    encoder(features)["sentence_embedding"].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_only_tokens_of_the_prompt_are_excluded(tokenizer: PreTrainedTokenizerBase) -> None:
    """A space at the end of a prompt is a separate token, but joins the first word of a text."""
    prompt = PROMPTS["query"]
    assert len(tokenizer(prompt)["input_ids"]) == len(tokenizer(prompt.rstrip())["input_ids"]) + 1
    ours = nvembed_tokenizer(tokenizer)
    left_out = len(ours(prompt)["input_ids"]) - 1  # without EOS, as sentence-transformers counts
    for text in ("fox", "42", "(a)", "", "two words  "):
        ids = ours(prompt + text)["input_ids"]
        assert ours.decode(ids[left_out:-1]) == (" " + text).rstrip(), text
        assert ids[-1] == ours.eos_token_id
    twice = nvembed_tokenizer(ours)
    assert twice.backend_tokenizer.to_str() == ours.backend_tokenizer.to_str()


def test_the_normalizer_survives_the_llama_class(tmp_path: Path) -> None:
    """The tokenizer class of Mistral and Llama 2 ignores the normalizer in tokenizer.json."""
    vocabulary = ["<unk>", "<s>", "</s>", *"▁qfox:", "▁f", "▁fo", "▁fox"]
    merges = [("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    llama = LlamaTokenizer(vocab={token: number for number, token in enumerate(vocabulary)}, merges=merges)
    assert llama.tokenize("q: ")[-1] == "▁"
    nvembed_tokenizer(llama).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text, tokens in {"q: ": ["▁", "q", ":", "</s>"], "q: fox ": ["▁", "q", ":", "▁fox", "</s>"]}.items():
        assert again.convert_ids_to_tokens(again(text)["input_ids"]) == tokens


def test_chat_templates_are_not_applied(tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    model = build(tiny_llama)
    plain = nvembed_encoder(model, tokenizer, max_length=MAX_LENGTH, prompts=PROMPTS).encode_query(TEXTS)
    tokenizer.chat_template = "{% for message in messages %}fox {{ message.content }}{% endfor %}"
    chat = nvembed_encoder(model, tokenizer, max_length=MAX_LENGTH, prompts=PROMPTS)
    np.testing.assert_array_equal(chat.encode_query(TEXTS), plain)


def test_an_instruction_that_leaves_no_room_for_text_is_an_error_when_it_is_used(
    tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = PROMPTS | {"query": "Instruct: " + "answer " * 40 + "\nQuery: "}
    encoder = nvembed_encoder(build(tiny_llama), tokenizer, max_length=MAX_LENGTH, prompts=prompts)
    with pytest.raises(ValueError, match="no room for text"):
        encoder.encode_query(["fox"])
