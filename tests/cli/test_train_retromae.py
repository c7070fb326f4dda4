"""`revela-hub train retromae` as a user runs it: text in, a plain encoder and a checkpoint out, and mistakes reported."""

import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from processes import reader

from revela_hub.cli.main import main
from revela_hub.trainers.retromae.checkpoint import load_retromae_checkpoint


def words(encoder: Path, documents: Path, out: Path, *more: str) -> list[str]:
    options = {
        "--data": documents, "--encoder": encoder, "--output_dir": out, "--max_length": 40,
        "--per_device_train_batch_size": 4, "--max_steps": 4, "--save_steps": 2, "--learning_rate": 1e-3,
        "--bf16": "false", "--cache_dir": out.parent / "cache", "--report_to": "none", "--disable_tqdm": "true",
        "--logging_steps": 1,
    }  # fmt: skip
    return ["train", "retromae", *(str(word) for pair in options.items() for word in pair), *more]


def test_the_encoder_comes_out_plain_and_the_checkpoint_with_its_decoder(
    tmp_path: Path, mlm_folder: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(mlm_folder, documents, out, "--decoder", "basic")) == 0
    printed = capsys.readouterr().out
    assert "4 documents" in printed and "spans" in printed
    trained = load_retromae_checkpoint(out)
    assert trained.model.config.decoder == "basic" and trained.model.decoder is not None
    texts = ["The river.", "", "word " * 300]
    rows = [trained.tokenizer(text, truncation=True, max_length=40, return_tensors="pt") for text in texts]
    with torch.no_grad():
        states = [trained.model.encoder(**row).last_hidden_state[0, 0] for row in rows]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1)
    torch.save({"texts": texts, "expected": expected}, tmp_path / "expected.pt")
    code = f"""
import sys; sys.modules["revela_hub"] = None
import torch
from sentence_transformers import SentenceTransformer
saved = torch.load({str(tmp_path / "expected.pt")!r})
model = SentenceTransformer({str(out / "encoder")!r}, device="cpu")
for encode in (model.encode_query, model.encode_document):
    torch.testing.assert_close(encode(saved["texts"], convert_to_tensor=True), saved["expected"], rtol=0, atol=1e-5)
print(model.max_seq_length)
"""
    done = subprocess.run(reader(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "40"
    assert not list((out / "encoder").rglob("*.py"))
    for file in (*(out / "encoder").rglob("*.json"), out / "encoder" / "README.md", out / "card.yaml"):
        assert str(tmp_path) not in file.read_text(), file
    metadata = yaml.safe_load((out / "card.yaml").read_text())
    assert metadata["method"] == "retromae"
    assert yaml.safe_load(metadata["config"])["decoder"] == "basic"
    assert metadata["training_run"].startswith("Trained for ")
    assert "2205.12035" in (out / "encoder" / "README.md").read_text()


def test_a_sentence_transformers_folder_and_an_earlier_run_are_starts(
    tmp_path: Path, retriever_folder: Path, documents: Path
) -> None:
    """The first has no masked-LM head, which the output says; the second continues with its decoder."""
    out = tmp_path / "first"
    with pytest.warns(UserWarning, match="initialised at random"):
        assert main(words(retriever_folder, documents, out, "--max_steps", "1")) == 0
    decoder = load_retromae_checkpoint(out).model.decoder.state_dict()
    second = words(out, documents, tmp_path / "second", "--max_steps", "1", "--learning_rate", "0")
    assert main(second) == 0
    after = load_retromae_checkpoint(tmp_path / "second").model.decoder.state_dict()
    assert decoder and all(torch.equal(after[name], value) for name, value in decoder.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere/at/all"], "nowhere/at/all"),
        (["--encoder", "nowhere/model"], "nowhere/model"),
        (["--max_length", "64"], "48 positions, fewer than max_length 64"),
        (["--decoder_layers", "2"], "decoder_layers must be exactly 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path,
    mlm_folder: Path,
    documents: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main(words(mlm_folder, documents, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("revela-hub: error:") and message in error
