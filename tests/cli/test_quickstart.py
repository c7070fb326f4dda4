"""`revela-hub quickstart` from end to end on a small code base and tiny random models."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
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


@pytest.fixture
def models(tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "models"
    prompts = {"query": "Query: ", "document": "Passage: "}
    export_retriever(tiny_llama.model, bpe_tokenizer, folder / "retriever", pooling="mean", prompts=prompts)
    tiny_llama.save_pretrained(folder / "lm")
    bpe_tokenizer.save_pretrained(folder / "lm")
    recipe = "max_steps: 1\nlora_rank: 0\ngroup_size: 4\nmax_words: 20\nsave_strategy: 'no'\nreport_to: none\n"
    (folder / "revela.yaml").write_text(recipe)
    return folder


@pytest.mark.slow
def test_the_whole_story(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "project", tmp_path / "out"
    source.mkdir()
    for file in range(4):
        functions = [FUNCTION.format(name=f"thing{file}x{i}", number=i) for i in range(20)]
        (source / f"code{file}.py").write_text("".join(functions))
    monkeypatch.chdir(tmp_path)
    words = ["--data", str(source), "--output_dir", "out", "--models_dir", "models", "--budget", "3s"]
    assert main(["quickstart", *words]) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "adapt.json").read_text())
    names = [system["name"] for system in report["systems"]]
    untrained = ["base retriever", "base + BM25", "base + BM25 + split identifiers"]
    untrained.append(f"{untrained[-1]} + late interaction")
    assert names == [*untrained, "trained with natural pairs", "trained with distillation"]
    assert all(0 <= mean <= 1 for mean in report["ndcg_at_10"].values())
    assert f"\nVERDICT: {report['verdict']}" in printed
    assert (out / "revela" / "lm" / "config.json").is_file()
    card = (out / "retriever" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert SentenceTransformer(str(out / "retriever"), device="cpu").encode_query("x").ndim == 1
    better = (
        report["trained"] or report["verdict"] == "BETTER"
    )  # else the folder has nothing that the base model has not
    assert main(["publish", "out", "me/x", "--dry_run"]) == (0 if better else 2)
    assert ("nothing was uploaded" in capsys.readouterr().out) == better
    assert (out / "retriever" / "model.safetensors").stat().st_mode & 0o044


def test_without_the_models_it_says_where_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart"]) == 2
    assert "checkout of the repository" in capsys.readouterr().err
