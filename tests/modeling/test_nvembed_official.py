"""A checkpoint as NVIDIA published it, tiny: read as it is, its vectors those of the official code, to 1e-5."""

import json
from pathlib import Path

import pytest
import torch
from nvembed_reference import Sizes, reference_vector
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from revela_hub.modeling.modeling_nvembed import NVEmbedModel

INSTRUCTION = "Instruct: answer\nQuery: "
TEXTS = ["are judo throws allowed", "", "rivers carry sediment to the sea", "fox"]
SIZES = Sizes(heads=4, kv_heads=2, latent_heads=8, rope_theta=500.0)
WIDTH, LAYERS, HEAD = 16, 2, 4


@pytest.fixture
def tokenizer(bpe_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """As Mistral's: BOS before every text, no EOS after it, no padding token."""
    bpe_tokenizer.add_special_tokens({"bos_token": "<s>"})
    bpe_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bpe_tokenizer.bos_token_id)]
    )
    bpe_tokenizer.pad_token = None
    return bpe_tokenizer


def official_weights(vocabulary: int) -> dict[str, Tensor]:
    """Random tensors under the official names; 512 latents and 8 heads are the class's defaults."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding_model.embed_tokens.weight": (vocabulary, WIDTH),
        "embedding_model.norm.weight": (WIDTH,),
    }
    for number in range(LAYERS):
        layer = f"embedding_model.layers.{number}."
        for name, out in (("q", 4 * HEAD), ("k", 2 * HEAD), ("v", 2 * HEAD)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, WIDTH)
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (WIDTH, 4 * HEAD),
            f"{layer}mlp.gate_proj.weight": (24, WIDTH),
            f"{layer}mlp.up_proj.weight": (24, WIDTH),
            f"{layer}mlp.down_proj.weight": (WIDTH, 24),
            f"{layer}input_layernorm.weight": (WIDTH,),
            f"{layer}post_attention_layernorm.weight": (WIDTH,),
        }
    latent, inner = "latent_attention_model.", 8 * 6
    blocks = latent + "cross_attend_blocks."
    shapes |= {
        f"{latent}latents": (512, WIDTH),
        f"{blocks}0.fn.to_q.weight": (inner, WIDTH),
        f"{blocks}0.fn.to_kv.weight": (2 * inner, WIDTH),
        f"{blocks}0.fn.to_out.weight": (WIDTH, inner),
        f"{blocks}1.fn.net.0.weight": (8 * WIDTH, WIDTH),
        f"{blocks}1.fn.net.0.bias": (8 * WIDTH,),
        f"{blocks}1.fn.net.2.weight": (WIDTH, 4 * WIDTH),
        f"{blocks}1.fn.net.2.bias": (WIDTH,),
    }
    for norm in ("0.norm", "0.norm_context", "1.norm"):
        shapes |= {f"{blocks}{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
    return {name: 0.4 * torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def official(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder in the official layout, its tokenizer in another one that only `text_config` names."""
    folder, tokenizer_folder = tmp_path / "NV-Embed", tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save_pretrained(tokenizer_folder)
    save_file(official_weights(len(tokenizer)), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "_name_or_path": "nvidia/NV-Embed-v2",
        "add_eos": True,
        "add_pad_token": True,
        "architectures": ["NVEmbedModel"],
        "auto_map": {
            "AutoConfig": "configuration_nvembed.NVEmbedConfig",
            "AutoModel": "modeling_nvembed.NVEmbedModel",
        },
        "hidden_size": WIDTH,
        "is_mask_instruction": True,
        "latent_attention_config": {
            "model_type": "latent_attention",
            "hidden_dim": WIDTH,
            "latent_dim": WIDTH,
            "cross_dim_head": 6,
        },
        "mask_type": "b",
        "model_type": "nvembed",
        "padding_side": "right",
        "text_config": {
            "_name_or_path": str(tokenizer_folder),
            "architectures": ["MistralModel"],
            "hidden_size": WIDTH,
            "intermediate_size": 24,
            "max_position_embeddings": 128,
            "model_type": "bidir_mistral",
            "num_attention_heads": 4,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": 2,
            "rope_theta": 500.0,
            "sliding_window": 3,
            "torch_dtype": "float32",
            "vocab_size": len(tokenizer),
        },
        "torch_dtype": "float32",
        "transformers_version": "4.42.4",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_nvembed.py", "modeling_nvembed.py"):
        (folder / name).write_text("raise ImportError('the official code does not import under transformers 5')\n")
    return folder


def expected(folder: Path, rows: list[list[int]], left_out: int) -> Tensor:
    from safetensors.torch import load_file

    weights = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    return torch.stack([reference_vector(weights, SIZES, row, left_out) for row in rows])


def official_rows(tokenizer: PreTrainedTokenizerFast, instruction: str) -> list[list[int]]:
    """Tokens as the official `encode` makes them: EOS is appended to the string."""
    return [tokenizer(instruction + text + tokenizer.eos_token)["input_ids"] for text in TEXTS]


def test_every_tensor_is_read(official: Path) -> None:
    model, report = NVEmbedModel.from_pretrained(official, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.official_instruction_mask
    assert model.config.text_config.model_type == "mistral"
    assert model.config.latent_attention_config.num_latents_value == 512
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("instruction", ["", INSTRUCTION])
def test_encode_gives_the_official_vectors(
    official: Path, tokenizer: PreTrainedTokenizerFast, instruction: str, batch_size: int
) -> None:
    model = NVEmbedModel.from_pretrained(official).eval()
    rows = official_rows(tokenizer, instruction)
    left_out = len(tokenizer.tokenize(instruction))
    got = model.encode(TEXTS, instruction=instruction, max_length=100, batch_size=batch_size)
    torch.testing.assert_close(got.double(), expected(official, rows, left_out), rtol=0, atol=1e-5)


def test_forward_gives_the_official_vectors(official: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """With the arguments that the official code's callers give, and what they read of the result."""
    model = NVEmbedModel.from_pretrained(official).eval()
    rows = official_rows(tokenizer, INSTRUCTION)
    left_out = len(tokenizer.tokenize(INSTRUCTION))
    ids, mask = (
        torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long),
        torch.zeros(len(rows), max(map(len, rows))),
    )
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
    pool_mask = mask.clone()
    pool_mask[:, :left_out] = 0
    want = expected(official, rows, left_out)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, pool_mask=pool_mask)
        (vectors, _) = model(input_ids=ids, attention_mask=mask, pool_mask=pool_mask, return_dict=False)
    for got in (output["sentence_embeddings"], output.pooler_output, vectors):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_the_official_mask_does_not_count_bos_and_the_correct_one_does(
    official: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    instruction = INSTRUCTION.strip()  # a final space would be a separate token
    rows = official_rows(tokenizer, instruction)
    tokens = tokenizer(instruction)["input_ids"]
    assert all(row[: len(tokens)] == tokens for row in rows), "the instruction's tokens must not depend on the text"
    model = NVEmbedModel.from_pretrained(official).eval()
    assert model.instruction_length(instruction) == len(tokens) - 1
    correct = NVEmbedModel.from_pretrained(official, official_instruction_mask=False).eval()
    assert correct.instruction_length(instruction) == len(tokens)
    got = model.encode(TEXTS, instruction), correct.encode(TEXTS, instruction)
    torch.testing.assert_close(got[0].double(), expected(official, rows, len(tokens) - 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1].double(), expected(official, rows, len(tokens)), rtol=0, atol=1e-5)
    assert (got[0] - got[1]).abs().max() > 1e-3, "the test would pass with either mask"


def test_the_last_space_of_an_instruction_belongs_to_the_text(
    official: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    correct = NVEmbedModel.from_pretrained(official, official_instruction_mask=False).eval()
    with_text = tokenizer(INSTRUCTION + TEXTS[0])["input_ids"]
    length = correct.instruction_length(INSTRUCTION)
    assert tokenizer.decode(with_text[length:]) == " " + TEXTS[0]
    assert len(tokenizer(INSTRUCTION)["input_ids"]) == length + 1, "alone, the space is a token"


def test_a_text_that_is_cut_loses_its_eos_as_in_the_official_code(
    official: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = NVEmbedModel.from_pretrained(official).eval()
    rows = [row[:12] for row in official_rows(tokenizer, "")]
    assert tokenizer.eos_token_id not in rows[2]
    got = model.encode(TEXTS, max_length=12)
    torch.testing.assert_close(got.double(), expected(official, rows, 0), rtol=0, atol=1e-5)


def test_an_instruction_longer_than_the_maximum_length_is_rejected(official: Path) -> None:
    model = NVEmbedModel.from_pretrained(official).eval()
    with pytest.raises(ValueError, match="no room for text"):
        model.encode(TEXTS, INSTRUCTION, max_length=16)


def test_a_tokenizer_in_the_folder_comes_first(official: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As on the Hub, where `_name_or_path` is the repository's own name and may not be reached."""
    config = json.loads((official / "config.json").read_text())
    config["text_config"]["_name_or_path"] = "nvidia/NV-Embed-v2"
    (official / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(official)
    rows = official_rows(tokenizer, "")
    got = NVEmbedModel.from_pretrained(official).eval().encode(TEXTS)
    torch.testing.assert_close(got.double(), expected(official, rows, 0), rtol=0, atol=1e-5)
