"""ImpRAG and the baselines on its data on the command line: train, index, answer, evaluate, search; errors in one line."""

import io
import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from revela_hub.cli.main import main

RIVERS = ("Alba", "Brent", "Corve", "Dart", "Esk", "Foss", "Gade", "Hodder", "Isla", "Kenn", "Lune", "Mole")
SHORT = "--max_steps 3 --per_device_train_batch_size 4 --max_passage_length 80 --max_length 200 --bf16 false --report_to none --quiet true"
IMPRAG = (
    "--num_passages 2 --retrieval_warmup_epochs 0.5 --num_positives 1 --num_negatives 2 --first_negative_rank 2"
    " --last_negative_rank 8 --num_candidates 3"
)


@pytest.fixture
def work(tmp_path: Path, llama_folder: Path) -> Path:
    """A folder with questions, passages and a decoder."""
    with (tmp_path / "train.jsonl").open("w") as stream:
        for name in RIVERS:
            row = {"question": f"Which town has the river {name}?", "answers": [f"{name.lower()}ford"]}
            stream.write(json.dumps(row) + "\n")
    (tmp_path / "docs").mkdir()
    for name in RIVERS:
        text = f"The river {name} flows past the town {name.lower()}ford. It rises in the hills and reaches the sea.\n"
        (tmp_path / "docs" / f"{name}.txt").write_text(text)
    return tmp_path


def train(work: Path, method: str, output: str, *options: str) -> int:
    where = ["--data", str(work / "train.jsonl"), "--corpus", str(work / "docs"), "--output_dir", str(work / output)]
    if method in ("imprag", "ra-it"):
        where += ["--backbone", str(work / "tiny-llama")]
    return main(["train", method, *where, *SHORT.split(), *(IMPRAG.split() if method == "imprag" else ()), *options])


def test_from_questions_to_answers(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(work, "imprag", "out", "--passage_encoding", "independent", "--denoising_fraction", "0.5") == 0
    model, index = str(work / "out" / "model"), str(work / "index")
    assert "revela-hub answer" in capsys.readouterr().out
    assert "retrieve with its lower layers" in (work / "out" / "model" / "README.md").read_text()
    assert main(["index", model, "--corpus", str(work / "docs"), "--output_dir", index]) == 0
    assert "12 passages" in capsys.readouterr().out
    answer = ["answer", model, "--index", index, "--task", "question_answering", "--max-new-tokens", "4"]
    assert main([*answer, "Which town has the river Dart?"]) == 0
    assert "  2. " in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is Alba?\n\nWhere is Mole?\n"))
    assert main([*answer, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Where is Alba?", "Where is Mole?"]
    first, second = rows[0]["passages"]
    assert first["score"] >= second["score"] and first["path"].endswith(".txt")
    evaluate = ["evaluate", model, "--task", "qa", "--data", str(work / "train.jsonl"), "--index", index]
    assert main([*evaluate, "--json", "--max-new-tokens", "4"]) == 0
    [scores] = json.loads(capsys.readouterr().out)
    assert scores["questions"] == 12
    assert 0 <= scores["exact_match"] <= scores["f1"] <= 1 and 0 < scores["answer_recall"] <= 1
    assert main([*evaluate, "--num_passages", "3"]) == 2
    assert "reads at most k=2" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\nWhere?\n" + "word " * 3000))
    assert main([*answer, "--batch-size", "1"]) == 2
    printed = capsys.readouterr()
    assert "line 3 of standard input has" in printed.err and "  1. " in printed.out  # the line before it is answered
    assert train(work, "imprag", "other", "--seed", "7") == 0
    assert main(["answer", str(work / "other" / "model"), "--index", index, "Where?"]) == 2
    assert "was built with model" in capsys.readouterr().err
    assert main(["answer", str(work / "tiny-llama"), "--index", index, "Where?"]) == 2
    assert "is not an ImpRAG model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--last_reading_layer", "2"], "0 <= b <= t < 2"),
        (["--max_passage_length", "1500"], "do not fit into the backbone's 2048"),
        (["--backbone", "tiny-bert"], "is an encoder: give a decoder"),
        (["--backbone", "./nowhere"], "'./nowhere': no such folder"),
    ],
)
def test_mistakes_are_one_line(
    work: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    options = [str(bert_folder) if option == "tiny-bert" else option for option in options]
    assert train(work, "imprag", "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]  # before it transformers' own progress bar
    assert "Traceback" not in error


def test_the_baselines_are_trained_on_the_same_data_and_load(
    work: Path, retriever_folder: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm, reader = str(work / "tiny-llama"), str(work / "ra-it" / "model")
    sentences = ["--retriever", str(retriever_folder)]
    assert train(work, "ra-it", "ra-it", "--num_passages", "2") == 0
    assert f"--reader {reader}" in capsys.readouterr().out
    assert type(AutoModelForCausalLM.from_pretrained(reader)).__name__ == "LlamaForCausalLM"
    folder = {"corpus": str(work / "docs"), "index": str(work / "index"), "data": str(work / "train.jsonl")}
    for retriever, query in ((str(retriever_folder), "prompt"), ("bm25", "input")):
        if retriever != "bm25":
            assert main(["index", retriever, "--corpus", folder["corpus"], "--output_dir", folder["index"]]) == 0
        evaluate = ["evaluate", reader, "--task", "qa", "--data", folder["data"], "--index", folder["index"], "--json"]
        capsys.readouterr()
        assert main([*evaluate, "--retriever", retriever, "--query_text", query, "--max_new_tokens", "4"]) == 0
        [scores] = json.loads(capsys.readouterr().out)
        assert (scores["questions"], scores["k"]) == (12, 2) and scores["answer_recall"] > 0.9 * (retriever == "bm25")
    card = (Path(reader) / "README.md").read_text()
    assert "RA-DIT" in card and str(work) not in card
    dit = ["--reader", reader, "--num_candidates", "4", "--num_positives", "1"]
    assert train(work, "ra-dit", "ra-dit", *dit, *sentences) == 0
    assert SentenceTransformer(str(work / "ra-dit" / "retriever"), device="cpu").encode_query(["Dart"]).shape[0] == 1
    layers = ["--backbone", lm, "--retrieval_layer"]
    assert train(work, "ra-dit", "llama", *dit, *layers, "1", "--retrieval_warmup_epochs", "0.3") == 0
    for folder in (work / "ra-dit" / "retriever", work / "llama" / "retriever"):
        assert str(work) not in "".join(file.read_text() for file in folder.glob("*.[mj][ds]*"))
    for wrong, message in (
        ([], "either --retriever, or --backbone"),
        ([*layers, "9"], "0 <= b <= t < 2"),
        (["--reader", str(bert_folder), *sentences], "is an encoder"),
        ([*sentences, "--output_dir", str(work / "docs" / "out")], "is inside"),
    ):
        assert train(work, "ra-dit", "wrong", *dit, *wrong) == 2
        assert message in capsys.readouterr().err
