"""ImpRAG on the command line: train, index, answer, evaluate, check; errors in one line."""

import io
import json
from pathlib import Path

import pytest

from revela_hub.cli.main import main

RIVERS = ("Alba", "Brent", "Corve", "Dart", "Esk", "Foss", "Gade", "Hodder", "Isla", "Kenn", "Lune", "Mole")


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


def train(work: Path, output: str = "out", *options: str) -> int:
    words = ["train", "imprag", "--data", str(work / "train.jsonl"), "--corpus", str(work / "docs")]
    words += [
        "--backbone",
        str(work / "tiny-llama"),
        "--output_dir",
        str(work / output),
        "--max_steps",
        "3",
        "--num_passages",
        "2",
    ]
    words += [
        "--max_passage_length",
        "80",
        "--per_device_train_batch_size",
        "4",
        "--retrieval_warmup_epochs",
        "0.5",
        "--bf16",
        "false",
    ]
    words += ["--num_positives", "1", "--num_negatives", "2", "--first_negative_rank", "2", "--last_negative_rank", "8"]
    words += ["--num_candidates", "3", "--report_to", "none", "--quiet", "true", "--max_length", "200"]
    return main([*words, *options])


def test_from_questions_to_answers(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(work, "out", "--passage_encoding", "independent", "--denoising_fraction", "0.5") == 0
    model, index = str(work / "out" / "model"), str(work / "index")
    assert "revela-hub answer" in capsys.readouterr().out
    assert "retrieve with its lower layers" in (work / "out" / "model" / "README.md").read_text()
    build = ["index", model, "--corpus", str(work / "docs"), "--output_dir", index]
    assert main(build) == 0
    assert "12 passages" in capsys.readouterr().out
    answer = ["answer", model, "--index", index, "--task", "question_answering", "--max-new-tokens", "4"]
    assert main([*answer, "Which town has the river Dart?"]) == 0
    assert "  2. " in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is Alba?\n\nWhere is Mole?\n"))
    assert main([*answer, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Where is Alba?", "Where is Mole?"]
    assert len(rows[0]["passages"]) == 2
    assert rows[0]["passages"][0]["score"] >= rows[0]["passages"][1]["score"]
    assert ".txt:1-1" in rows[0]["passages"][0]["place"]
    evaluate = ["evaluate", model, "--task", "qa", "--data", str(work / "train.jsonl"), "--index", index]
    assert main([*evaluate, "--json", "--max-new-tokens", "4"]) == 0
    [scores] = json.loads(capsys.readouterr().out)
    assert scores["questions"] == 12
    assert 0 <= scores["exact_match"] <= scores["f1"] <= 1
    assert 0 < scores["answer_recall"] <= 1
    assert main([*evaluate, "--num_passages", "13"]) == 2
    assert "--num_passages 13 is more than the 2 passages that the model reads" in capsys.readouterr().err
    assert main(["answer", model, "--index", index, "x " * 2000]) == 2
    assert "there is room for" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\nWhere?\n" + "word " * 3000))
    assert main([*answer, "--batch-size", "1"]) == 2
    printed = capsys.readouterr()
    assert "line 3 of standard input has" in printed.err and "  1. " in printed.out  # the line before it is answered
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(answer) == 2
    assert "there is no prompt" in capsys.readouterr().err

    assert train(work, "other") == 0
    other = str(work / "other" / "model")
    capsys.readouterr()
    assert main(["answer", other, "--index", index, "Where?"]) == 2
    assert "was built with model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--num_passages", "20"],
            "the model reads 20 passages, but the collection has only 12: lower --num_passages",
        ),
        (
            ["--retrieval_layer", "1", "--last_reading_layer", "0"],
            "the retrieval layer (b=1) is above the last reading layer (t=0)",
        ),
        (
            ["--last_reading_layer", "2"],
            "the last reading layer (t=2) is beyond the last layer: the backbone has layers 0 to 1",
        ),
        (["--max_passage_length", "1500"], "do not fit into the backbone's 2048"),
        (["--backbone", "./nowhere"], "'./nowhere': no such folder"),
        (["--corpus", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    work: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert train(work, "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]  # before it transformers' own progress bar
    assert "Traceback" not in error


def test_an_answer_without_tokens_and_an_encoder_are_refused(
    work: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(work, "out", "--backbone", str(bert_folder)) == 2
    assert "is an encoder: give a decoder" in capsys.readouterr().err
    with (work / "train.jsonl").open("a") as stream:
        stream.write('{"question": "Which?", "answers": [" "]}\n')
    assert train(work) == 2
    assert "train.jsonl:13: an answer is empty" in capsys.readouterr().err
    assert main(["answer", str(work / "tiny-llama"), "--index", "x", "Where?"]) == 2
    assert "is not an ImpRAG model" in capsys.readouterr().err
    assert main(["answer", "./nowhere", "--index", "x", "Where?"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_baselines_are_trained_on_the_same_data_and_load(
    work: Path, retriever_folder: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForCausalLM

    common = [
        "--data",
        str(work / "train.jsonl"),
        "--corpus",
        str(work / "docs"),
        "--max_steps",
        "2",
        "--max_passage_length",
        "80",
    ]
    common += ["--per_device_train_batch_size", "4", "--bf16", "false", "--report_to", "none", "--quiet", "true"]
    common += ["--max_length", "200"]
    lm, reader = str(work / "tiny-llama"), str(work / "ra-it" / "model")
    assert (
        main(["train", "ra-it", *common, "--backbone", lm, "--num_passages", "2", "--output_dir", str(work / "ra-it")])
        == 0
    )
    assert f"--reader {reader}" in capsys.readouterr().out
    assert type(AutoModelForCausalLM.from_pretrained(reader)).__name__ == "LlamaForCausalLM"
    card = (Path(reader) / "README.md").read_text()
    assert "RA-DIT" in card and str(work) not in card
    dit = ["train", "ra-dit", *common, "--reader", reader, "--num_candidates", "4", "--num_positives", "1"]
    assert main([*dit, "--retriever", str(retriever_folder), "--output_dir", str(work / "ra-dit")]) == 0
    assert SentenceTransformer(str(work / "ra-dit" / "retriever"), device="cpu").encode_query(["Dart"]).shape[0] == 1
    llama = [
        *dit,
        "--backbone",
        lm,
        "--retrieval_layer",
        "1",
        "--retrieval_warmup_epochs",
        "0.3",
        "--output_dir",
        str(work / "llama"),
    ]
    assert main(llama) == 0
    retriever = str(work / "llama" / "retriever")
    for folder in (work / "ra-dit" / "retriever", Path(retriever)):
        assert str(work) not in "".join(file.read_text() for file in folder.glob("*.[mj][ds]*"))
    assert main(["index", retriever, "--corpus", str(work / "docs"), "--output_dir", str(work / "index")]) == 0
    assert "12 passages" in capsys.readouterr().out
    assert main(["search", retriever, "--index", str(work / "index"), "Which town has the river Dart?"]) == 0
    assert "1. " in capsys.readouterr().out
    assert main(["search", retriever, "--corpus", str(work / "docs"), "--query", "Dart", "--max_length", "9"]) == 2
    assert "was trained with ImpRAG, which has no prompts and a fixed length" in capsys.readouterr().err
    for wrong, message in (
        ([], "either --retriever, or --backbone"),
        (["--backbone", lm], "--backbone with --retrieval_layer"),
        (["--backbone", lm, "--retrieval_layer", "9"], "layers 0 to 1"),
        (["--backbone", str(bert_folder), "--retrieval_layer", "1"], "is an encoder"),
        (["--reader", str(bert_folder), "--retriever", str(retriever_folder)], "is an encoder"),
        (["--reader", "./nowhere", "--retriever", str(retriever_folder)], "'./nowhere': no such folder"),
        (
            ["--retriever", str(retriever_folder), "--push_to_hub", "true", "--hub_model_id", "a/b"],
            "no --push_to_hub",
        ),
    ):
        assert main([*dit, *wrong, "--output_dir", str(work / "wrong")]) == 2
        assert message in capsys.readouterr().err
    inside = ["--output_dir", str(work / "docs" / "out")]
    for command in ([*dit, "--retriever", str(retriever_folder)], ["train", "ra-it", *common, "--backbone", lm]):
        assert main([*command, *inside]) == 2
        assert "is inside" in capsys.readouterr().err
