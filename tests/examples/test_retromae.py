"""The fine-tuning recipes of examples/retromae, end to end on a tiny encoder."""

import gzip
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from revela_hub.errors import UserError

TOPICS = ("fox", "dog", "river", "mountain", "France", "Japan", "width", "height", "layer", "model")


@pytest.fixture
def finetune(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported by its path."""
    path = repository / "examples" / "retromae" / "finetune.py"
    spec = importlib.util.spec_from_file_location("retromae_finetune", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """Ten topics with two passages each; two training questions and one dev question about each."""
    folder = tmp_path / "data"
    folder.mkdir()
    passages, train, dev = [], [], []
    for number, topic in enumerate(TOPICS):
        for part, verb in enumerate(("jumps over", "settles on")):
            key = f"{number}-{part}"
            passages.append(
                {"_id": key, "title": topic, "text": f"The {topic} {verb} the {TOPICS[number - 1]} to the sea."}
            )
            train.append({"_id": key, "question": f"what {verb} the {topic}", "passage_id": key})
        dev.append({"_id": topic, "question": f"which {topic} jumps", "passage_id": f"{number}-0"})
    for name, rows in (("passages", passages), ("train", train), ("dev", dev)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def test_the_three_recipes_give_loadable_retrievers(
    finetune: ModuleType,
    bert_folder: Path,
    data_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "output"
    command = (
        f"finetune.py {bert_folder} --data {data_folder} --output {output} --steps 2 --batch-size 4 --max-length 32"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    finetune.main()
    assert {line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[-3:]} == {
        "| dpr",
        "| ance",
        "| distil",
    }

    start = finetune.load_retriever(bert_folder, 32).encode_query(["the fox"])
    vectors = []
    for name in ("dpr", "ance", "distil"):
        retriever = SentenceTransformer(str(output / name))
        assert retriever.max_seq_length == 32
        tokens = retriever.encode("the fox", output_value="token_embeddings")
        (vector,) = retriever.encode_query(["the fox"], convert_to_tensor=True)
        torch.testing.assert_close(vector, torch.nn.functional.normalize(tokens[0], dim=0))  # CLS, length 1
        vectors.append(vector)
    assert len({tuple(vector.tolist()) for vector in (torch.tensor(start[0]), *vectors)}) == 4
    assert CrossEncoder(str(output / "teacher")).predict([("the fox", "the dog")]).shape == (1,)


def test_questions_of_the_same_words_are_one_query(finetune: ModuleType, data_folder: Path) -> None:
    with gzip.open(data_folder / "dev.jsonl.gz", "at", encoding="utf-8") as file:
        file.write(json.dumps({"_id": "again", "question": "which fox jumps", "passage_id": "0-1"}) + "\n")
    questions = finetune.read_questions(data_folder)
    assert len(questions.dev.queries) == len(TOPICS)
    assert questions.dev.qrels["which fox jumps"] == {"0-0": 1, "0-1": 1}


def test_a_sampled_question_brings_all_its_passages(finetune: ModuleType, data_folder: Path) -> None:
    questions = finetune.read_questions(data_folder)
    doubled = finetune.Questions(questions.anchors * 2, questions.positives + questions.corpus[::-1], questions.dev)
    anchors, positives = finetune.sample_questions(doubled, 6, seed=3)
    assert len(anchors) == len(positives) == 6
    assert [anchors[row] for row in (0, 2, 4)] == [anchors[row] for row in (1, 3, 5)]
    assert len(set(zip(anchors, positives, strict=True))) == 6


class TeacherOfLengths:
    """Its logit is the number of characters of the passage."""

    def predict(self, pairs: list[tuple[str, str]], batch_size: int, activation_fn: torch.nn.Module) -> np.ndarray:
        assert isinstance(activation_fn, torch.nn.Identity)  # logits, not probabilities
        return np.array([float(len(passage)) for _, passage in pairs])


def test_the_teacher_scores_the_positive_first(finetune: ModuleType) -> None:
    """One list of logits per row, in the order of the columns, as DistillKLDivLoss reads them."""
    rows = {"anchor": ["a", "b"], "positive": ["p", "qqqq"], "negative_1": ["nn", "m"], "negative_2": ["xxx", "yy"]}
    labelled = finetune.with_teacher_scores(finetune.Dataset.from_dict(rows), TeacherOfLengths(), 3)
    assert list(labelled["label"]) == [[1.0, 2.0, 3.0], [4.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "dev.jsonl.gz").unlink(), "no dev.jsonl or dev.jsonl.gz in .*--data"),
        (
            lambda folder: (folder / "train.jsonl").write_text('{"question": "q", "passage_id": "none"}\n'),
            "passage none",
        ),
    ],
    ids=["missing file", "unknown passage"],
)
def test_bad_data_is_named(
    finetune: ModuleType, data_folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(data_folder)
    with pytest.raises(UserError, match=message):
        finetune.read_questions(data_folder)


def test_without_data_the_command_says_how_to_give_it(
    finetune: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REVELA_HUB_DATA", raising=False)
    with pytest.raises(SystemExit):
        finetune.parse_arguments(["encoder", "--output", "out"])
    assert "give --data, or set REVELA_HUB_DATA" in capsys.readouterr().err
    monkeypatch.setenv("REVELA_HUB_DATA", "somewhere")
    assert finetune.parse_arguments(["encoder", "--output", "out"]).data == Path("somewhere/medquad")
