"""`revela-hub train cot-mote` as a user runs it: text in, pairs in, three forms of a retriever out, mistakes reported."""

import json
from pathlib import Path

import pytest
import yaml
from sentence_transformers import SentenceTransformer, SparseEncoder

from revela_hub.cli.main import main
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_checkpoint


@pytest.fixture
def files(tmp_path: Path, texts: list[str]) -> tuple[Path, Path]:
    """Documents, and pairs with two negatives."""
    documents, pairs = tmp_path / "documents.jsonl", tmp_path / "pairs.jsonl"
    documents.write_text("".join(json.dumps({"text": " ".join(texts[i:4] + texts[:i])}) + "\n" for i in range(4)))
    rows = [
        {"anchor": texts[i][:20], "positive": texts[i], "negative_1": texts[i - 1], "negative_2": texts[i - 2]}
        for i in range(4)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return documents, pairs


def words(encoder: Path, out: Path, *more: object) -> list[str]:
    options = {
        "--encoder": encoder, "--output_dir": out, "--max_length": 40, "--per_device_train_batch_size": 4,
        "--gradient_accumulation_steps": 1, "--max_steps": 2, "--bf16": "false", "--report_to": "none",
        "--cache_dir": out.parent / "cache", "--save_strategy": "no",
    }  # fmt: skip
    return ["train", "cot-mote", *(str(word) for pair in options.items() for word in pair), *map(str, more)]


def test_from_text_and_pairs_to_three_forms(
    tmp_path: Path, mlm_folder: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    documents, pairs = files
    first, second = tmp_path / "pretrained", tmp_path / "finetuned"
    assert main(words(mlm_folder, first, "--data", documents, "--attention_window", 3)) == 0
    printed = capsys.readouterr().out
    assert "4 documents" in printed and "pseudo-queries extracted" in printed
    model = load_cot_mote_checkpoint(first).model
    assert (model.config.attention_window, model.config.max_seq_length) == (3, 40)
    card = yaml.safe_load((first / "card.yaml").read_text())
    assert card["method"] == "cot_mote" and "extracted" in card["training_data"]
    assert card["command"].startswith("revela-hub train cot-mote")

    finetune = words(first, second, "--stage", "finetune", "--pairs", pairs, "--num_negatives", 2)
    finetune += ["--save_strategy", "steps", "--save_steps", "2"]
    assert main(finetune) == 0
    dense, sparse = SentenceTransformer(str(second / "dense")), SparseEncoder(str(second / "sparse"))
    assert dense.encode_query(["fox"]).shape == (1, 32) and sparse.encode_document(["fox"]).shape[0] == 1
    for name in ("dense", "sparse", "model"):
        readme = (second / name / "README.md").read_text()
        assert "2304.10195" in readme and str(tmp_path) not in readme
        assert "pairs: pairs.jsonl" in readme
    model = second / "model" / "model.safetensors"
    written = model.stat().st_mtime_ns
    capsys.readouterr()
    assert main([*finetune, "--resume_from_checkpoint", "last"]) == 0
    assert "nothing to do: the run in" in capsys.readouterr().out and model.stat().st_mtime_ns == written
    capsys.readouterr()
    for command, option in (("contriever", "--retriever"), ("retromae", "--encoder")):
        fused = ["train", command, "--data", str(documents), option, str(first), "--output_dir", str(tmp_path / "no")]
        assert main(fused) == 2
        assert str(first) in capsys.readouterr().err
    fused[fused.index(str(first))] = str(first / "model")
    (first / "model" / "config.json").write_text((first / "config.json").read_text())  # published with its decoder
    assert main(fused) == 2
    assert "is a CoTMoTEForPreTraining checkpoint with encoder and decoder" in capsys.readouterr().err
    search = ["search", str(second / "dense"), "fox", "--corpus", str(documents), "--mode", "sparse"]
    assert main([*search, "--cache-dir", str(tmp_path / "vectors")]) == 2
    assert "is not a sparse model" in capsys.readouterr().err
    search[1] = str(second / "sparse")
    assert main([*search, "--cache-dir", str(tmp_path / "vectors")]) == 0
    assert main(["export", str(second), "--output_dir", str(tmp_path / "again")]) == 0
    printed = capsys.readouterr().out
    assert 'SparseEncoder("' in printed and "trust_remote_code=True" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give either --data"),
        (["--data", "DOCUMENTS", "--contexts", "next"], "contexts must be one or more of neighbour"),
        (["--data", "DOCUMENTS", "--max_length", 64], "48 positions, fewer than max_length 64"),
        (["--pseudo_queries", "DOCUMENTS"], "no column 'queries'"),
        (["--pseudo_queries", "DOCUMENTS", "--contexts", "query"], "--contexts has no effect"),
        (["--stage", "finetune", "--pairs", "PAIRS", "--decoder", "ae"], "--decoder has no effect"),
        (["--stage", "finetune"], "no pairs to fine-tune on"),
        (["--stage", "finetune", "--pairs", "PAIRS"], "--num_negatives 15"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    mlm_folder: Path,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    more: list[object],
    message: str,
) -> None:
    places = {"DOCUMENTS": files[0], "PAIRS": files[1], "ENCODER": mlm_folder}
    assert main(words(mlm_folder, tmp_path / "out", *(places.get(str(word), word) for word in more))) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
