"""`revela-hub quickstart` from end to end on a small code base and tiny random models."""

import json
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from revela_hub.cli.main import main
from revela_hub.hub_cards import export_retriever

FUNCTION = '''
def make_{name}(value):
    """Builds the {name} of a value and returns it."""
    result = value + {number}
    log(result)
    return result
'''
SETTINGS = """
group_size: 4
run_length: 2
max_words: 30
max_length: 48
temperature: 0.1
lora_rank: 0
learning_rate: 1.0e-3
max_steps: 3
gradient_accumulation_steps: 1
logging_steps: 1
bf16: false
disable_tqdm: true
report_to: none
"""
PAIRS = """
per_device_train_batch_size: 4
learning_rate: 1.0e-3
max_steps: 3
bf16: false
report_to: none
"""


@pytest.fixture
def models(tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "models"
    prompts = {"query": "Query: ", "document": "Passage: "}
    export_retriever(tiny_llama.model, bpe_tokenizer, folder / "retriever", pooling="mean", prompts=prompts)
    tiny_llama.save_pretrained(folder / "lm")
    bpe_tokenizer.save_pretrained(folder / "lm")
    (folder / "adapt.yaml").write_text(SETTINGS)
    (folder / "pairs.yaml").write_text(PAIRS)
    return folder


@pytest.mark.parametrize("name", ["report.json", "retriever/config.json", "revela/config.json", "text/notes.txt"])
def test_files_of_the_user_stay(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    (models / "lm" / "area.py").write_text(FUNCTION.format(name="area", number=1))
    command = ["quickstart", "--models_dir", str(models), "--data", str(models / "lm"), "--queries", "1"]
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 2
    assert file.read_text() == "{}" and Path(name).parts[0] in capsys.readouterr().err


def test_the_whole_story(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "project", tmp_path / "out"
    source.mkdir()
    for file in range(4):
        functions = [FUNCTION.format(name=f"thing{file}x{i}", number=i) for i in range(20)]
        (source / f"code{file}.py").write_text("".join(functions))
    monkeypatch.chdir(tmp_path)
    status = main(
        ["quickstart", "--data", str(source), "--output_dir", "out", "--models_dir", "models", "--queries", "10"]
    )
    printed = capsys.readouterr().out
    assert status == 0
    report = json.loads((out / "report.json").read_text())
    assert set(report["scores"]) == {
        *("start", "revela", "retriever", "bm25", "start_hybrid", "revela_hybrid", "retriever_hybrid")
    }
    for row in report["scores"].values():
        assert (row["queries"], row["documents"]) == (10, 80)
        assert 0 <= row["ndcg_at_10"] <= 1
        assert f"{row['ndcg_at_10']:7.3f}  {row['recall_at_100']:10.3f}" in printed
    assert report["steps"] == 3
    assert json.loads((out / "outcome.json").read_text())["last_step"] == 3
    probe = (out / "probe" / "queries.jsonl").read_text().splitlines()
    assert len(probe) == 35  # half of the docstrings that are left; the pairs are the others
    assert report["last_log"]["similarity_entropy"] > 0
    card = (out / "retriever" / "README.md").read_text()
    assert f"{report['scores']['retriever']['ndcg_at_10']:.4f}" in card
    assert str(tmp_path) not in card
    queries = [json.loads(line)["text"] for line in (out / "task" / "queries.jsonl").read_text().splitlines()]
    text = "".join(path.read_text() for path in (out / "text").rglob("*.py"))
    assert len(queries) == 10
    assert not any(query in text for query in queries)
    for picture in ("training_curve.png", "similarity_map.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert "revela-hub train revela --config" in printed and "revela-hub train pairs --config" in printed
    assert "revela-hub search" in printed
    assert main(["publish", "out/retriever", "me/x", "--dry-run"]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    assert (out / "retriever" / "model.safetensors").stat().st_mode & 0o044


def test_without_the_models_it_says_where_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart"]) == 2
    assert "run from a checkout of the repository" in capsys.readouterr().err
