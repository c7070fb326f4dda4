"""`revela-hub train revela` as a user runs it: text in, a sentence-transformers folder out, and mistakes reported."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from processes import reader
from safetensors.torch import load_file

from revela_hub.cli.main import main
from revela_hub.trainers.revela.checkpoint import load_checkpoint


def words(llama: Path, documents: Path, out: Path, *more: str) -> list[str]:
    options = {
        "--data": documents, "--retriever": llama, "--lm": llama, "--output_dir": out, "--max_words": 20,
        "--group_size": 4, "--max_length": 24, "--temperature": 0.1, "--lora_rank": 4, "--learning_rate": 1e-3,
        "--max_steps": 4, "--save_steps": 2, "--gradient_accumulation_steps": 1, "--bf16": "false",
        "--cache_dir": out.parent / "cache", "--report_to": "none", "--disable_tqdm": "true", "--logging_steps": 1,
    }  # fmt: skip
    return ["train", "revela", *(str(word) for pair in options.items() for word in pair), *more]


def test_what_is_exported_gives_the_trainers_embeddings_with_sentence_transformers_alone(
    tmp_path: Path, llama_folder: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(llama_folder, documents, out)) == 0
    printed = capsys.readouterr().out
    assert "4 documents" in printed
    assert "groups" in printed
    assert "; added reading, LM trained\n" in printed
    texts = ["The river.", "def f(x):\n    return x", "", "word " * 3000, "Москва и 東京"]
    trained = load_checkpoint(out)
    expected = {}
    for name, prompt in (("query", "Query: "), ("document", "Passage: ")):
        rows = [
            trained.retriever_tokenizer(prompt + text, truncation=True, max_length=2048, return_tensors="pt")
            for text in texts
        ]
        assert all(row["input_ids"][0, -1] == trained.retriever_tokenizer.eos_token_id for row in rows)
        with torch.no_grad():
            expected[name] = torch.cat([trained.model.embed(r["input_ids"], r["attention_mask"]) for r in rows])
    torch.save({"texts": texts} | expected, tmp_path / "expected.pt")
    code = f"""
import sys; sys.modules["revela_hub"] = None; sys.modules["peft"] = None
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
saved = torch.load({str(tmp_path / "expected.pt")!r})
model = SentenceTransformer({str(out / "retriever")!r}, device="cpu")
assert model.max_seq_length == 2048, model.max_seq_length
for name, encode in (("query", model.encode_query), ("document", model.encode_document)):
    got = encode(saved["texts"], convert_to_tensor=True, batch_size=5)
    torch.testing.assert_close(got, saved[name], rtol=0, atol=1e-5)
assert type(AutoModel.from_pretrained({str(out / "retriever")!r})).__name__ == "LlamaModel"
lm = AutoModelForCausalLM.from_pretrained({str(out / "lm")!r})
tokenizer = AutoTokenizer.from_pretrained({str(out / "lm")!r})
print(lm.generate(**tokenizer("The river", return_tensors="pt"), max_new_tokens=3).shape[1] > 2)
"""
    done = subprocess.run(reader(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "True"
    for file in (*(out / "retriever").rglob("*.json"), *(out / "lm").rglob("*.json")):
        assert str(tmp_path) not in file.read_text(), file


def test_frozen_weights_in_bfloat16(tmp_path: Path, llama_folder: Path, documents: Path) -> None:
    """The retriever is exported in float32: base weights that bfloat16 holds, plus adapters that were trained in float32."""
    out = tmp_path / "out"
    form = "--similarity_sides query_passage --similarity_span first_half --similarity_dtype bfloat16".split()
    frozen = "--dtype bfloat16 --bf16 true --lora_alpha 2 --lora_dropout 0.1 --export last".split()
    assert main(words(llama_folder, documents, out, *form, *frozen)) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["similarity_sides"], config["similarity_dtype"]) == ("query_passage", "bfloat16")
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["lora_alpha"], adapter["lora_dropout"]) == (2, 0.1)
    base, exported = (load_file(folder / "model.safetensors") for folder in (llama_folder, out / "retriever"))
    for name in ("layers.0.self_attn.q_proj.weight", "layers.0.input_layernorm.weight"):
        before, after = base[f"model.{name}"].bfloat16().float(), exported[name]
        assert after.dtype == torch.float32
        assert torch.equal(before, after) != ("proj" in name)
        torch.testing.assert_close(before, after, rtol=0, atol=0.02)
        assert torch.equal(after, after.bfloat16().float()) != ("proj" in name)  # the merge was not rounded


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere/at/all"], "nowhere/at/all"),
        (["--lm", "nowhere/model"], "nowhere/model"),
        (["--temperature", "0"], "temperature"),
        (["--eval_strategy", "steps", "--probe", "none"], "--eval_corpus"),
        (["--query_prompt", "q: "], "both --query_prompt and --document_prompt"),
        (["--run_length", "3"], "run_length"),
        (["--dtype", "bfloat16"], "--bf16"),
        (["--dtype", "bfloat16", "--lora_rank", "0"], "--lora_rank"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path,
    llama_folder: Path,
    documents: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    status = main(words(llama_folder, documents, tmp_path / "out", *more))
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.strip().splitlines()[-1].startswith("revela-hub: error:")
    assert "Traceback" not in error
