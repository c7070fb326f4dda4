"""Fine-tuning on pairs: the loss in loops, adapters, killed runs, and reading pairs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss

from revela_hub.data.mixture.labelled import read_labelled_pairs
from revela_hub.data.synthesis.synthesis import TASK_PREFIX
from revela_hub.errors import UserError
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments

WORDS = "the quick brown fox jumps over a lazy dog and rivers carry sediment from mountains to the sea".split()


def pairs(number: int = 16, negatives: int = 0) -> Dataset:
    def text(n: int, size: int) -> str:
        return " ".join(WORDS[(5 * n + 3 * i) % len(WORDS)] for i in range(size)) + f" {n}"

    columns = {"anchor": [text(n, 4) for n in range(number)], "positive": [text(n, 12) for n in range(number)]}
    columns |= {f"negative_{k + 1}": [text(n + 100 * (k + 1), 9) for n in range(number)] for k in range(negatives)}
    return Dataset.from_dict(columns)


def trainer(folder: Path, retriever: Path, rows: Dataset, **options: Any) -> PairsTrainer:
    given = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "report_to": [], "quiet": True}
    given["bf16"] = False  # after training, accelerate's autocast stays around the model's forward pass
    args = PairsTrainingArguments(output_dir=str(folder), **(given | {"save_strategy": "no"} | options))
    return PairsTrainer(str(retriever), args, train_dataset=rows)


@pytest.mark.parametrize("mini_batch_size", [3, 64])
def test_the_loss_is_the_equation_with_the_prompts_and_hard_negatives(
    mini_batch_size: int, retriever_folder: Path, tmp_path: Path
) -> None:
    run = trainer(tmp_path, retriever_folder, pairs(4, negatives=2), temperature=0.1, mini_batch_size=mini_batch_size)
    model = run.retriever.double().eval()
    columns = {name: list(pairs(4, negatives=2)[name]) for name in pairs(1, negatives=2).column_names}
    prompts = {name: "Query: " if name == "anchor" else "Passage: " for name in columns}
    vectors = {n: model.encode([prompts[n] + text for text in texts]).tolist() for n, texts in columns.items()}
    candidates = [vector for name in ("positive", "negative_1", "negative_2") for vector in vectors[name]]
    expected = 0.0
    for row, query in enumerate(vectors["anchor"]):
        scores = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / 0.1) for key in candidates]
        expected -= math.log(scores[row] / sum(scores)) / 4
    batch = run.data_collator([{name: columns[name][row] for name in columns} for row in range(4)])
    assert float(run.compute_loss(run.retriever, batch)) == pytest.approx(expected, abs=1e-5)


def test_arguments_are_not_changed_and_losses_may_be_made_before(retriever_folder: Path, tmp_path: Path) -> None:
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False)
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    loss = MultipleNegativesRankingLoss(model)
    assert PairsTrainer(model, args, train_dataset=pairs(), loss=loss).loss is loss
    assert args.prompts is None
    with pytest.raises(UserError, match="the loss was made for another model"):
        PairsTrainer(str(retriever_folder), args, train_dataset=pairs(), loss=loss)


def test_an_encoder_is_trained_by_dot_product_of_cls_with_short_queries(bert_folder: Path, tmp_path: Path) -> None:
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False, temperature=1.0, save_strategy="no")
    options = {"model_init_kwargs": {"pooling": "cls", "similarity": "dot"}, "max_length": 9, "query_max_length": 5}
    args.max_length = 9  # as in the arguments of the command
    run = PairsTrainer(str(bert_folder), args, train_dataset=pairs(4), **options)
    batch = run.data_collator([dict(row) for row in pairs(4)])
    assert batch["anchor_input_ids"].shape[1] == 5 and batch["positive_input_ids"].shape[1] == 9
    exported = SentenceTransformer(str(run.write_models(tmp_path)[0]), device="cpu")
    query, passage = pairs(4)[1]["anchor"], pairs(4)[1]["positive"]
    vectors = [model.encode_query([query]) @ model.encode_document([passage]).T for model in (run.retriever, exported)]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-4) and exported.similarity_fn_name == "dot"


@pytest.mark.parametrize("column", ["label", "score"])
def test_a_loss_gets_its_labels(column: str, retriever_folder: Path, tmp_path: Path) -> None:
    rows = pairs().add_column(column, [1.0] * 16).add_column("scores", [0.0] * 16)
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False)
    run = PairsTrainer(str(retriever_folder), args, train_dataset=rows, eval_dataset=rows, loss=CosineSimilarityLoss)
    assert run.train_dataset.column_names == ["anchor", "positive", column]
    assert run.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("mini_batch_size", [3, 64])
def test_the_matryoshka_loss_is_the_mean_over_truncated_vectors(
    mini_batch_size: int, retriever_folder: Path, tmp_path: Path
) -> None:
    options = {"temperature": 0.1, "mini_batch_size": mini_batch_size, "matryoshka_dims": [8, 32, 3]}
    run = trainer(tmp_path, retriever_folder, pairs(4), **options)
    model = run.retriever.double().eval()
    rows = pairs(4)
    queries = model.encode(["Query: " + text for text in rows["anchor"]]).tolist()
    passages = model.encode(["Passage: " + text for text in rows["positive"]]).tolist()
    expected = 0.0
    for dims in (3, 8, 32):
        cut = [
            [[x / math.sqrt(sum(y * y for y in v[:dims])) for x in v[:dims]] for v in side]
            for side in (queries, passages)
        ]
        for row, query in enumerate(cut[0]):
            scores = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / 0.1) for key in cut[1]]
            expected -= math.log(scores[row] / sum(scores)) / 4 / 3
    batch = run.data_collator([dict(row) for row in rows])
    loss = run.compute_loss(run.retriever, batch)
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_ends_with_the_same_weights(rank: int, retriever_folder: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "lora_rank": rank, "learning_rate": 1e-3}
    for name in ("whole", "resumed"):
        run = trainer(tmp_path / name, retriever_folder, pairs(), **options)
        run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2") if name == "resumed" else None)
        run.write_models(run.args.output_dir)
    whole, resumed = (load_file(tmp_path / name / "retriever" / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not any("lora" in name for name in whole)
    kept = SentenceTransformer(str(tmp_path / "whole" / "retriever"), device="cpu")
    expected = run.retriever.eval().encode_query(["a river"])
    assert kept.encode_query(["a river"]) == pytest.approx(expected, abs=1e-5)
    assert kept.encode_query(["a river"]) != pytest.approx(
        SentenceTransformer(str(retriever_folder), device="cpu").encode_query(["a river"]), abs=1e-5
    )


def test_an_export_keeps_the_files_of_the_user_in_an_earlier_one(retriever_folder: Path, tmp_path: Path) -> None:
    (exported,) = trainer(tmp_path, retriever_folder, pairs()).write_models(tmp_path / "out")
    own = {"LICENSE": "mine", "README.md": "my card", "notes/todo.txt": "mine"}
    for name, text in (
        own
        | {"onnx/model.onnx": "of the old weights", "model-00002-of-00002.safetensors": "", "3_Dense/config.json": "{}"}
    ).items():
        (exported / name).parent.mkdir(exist_ok=True)
        (exported / name).write_text(text)
    first = {each.relative_to(exported).as_posix() for each in exported.rglob("*") if each.parts[-2] != ".revela_hub"}
    trainer(tmp_path, retriever_folder, pairs()).write_models(tmp_path / "out")
    left = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    assert first - left - {".revela_hub"} == {
        "onnx",
        "onnx/model.onnx",
        "model-00002-of-00002.safetensors",
        "3_Dense",
        "3_Dense/config.json",
    }
    assert {name: (exported / name).read_text() for name in own} == own


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def test_pairs_are_read_once_and_reported(tmp_path: Path) -> None:
    rows = [{"q": "one", "a": ["1", "I"], "negative": "2"}, {"q": "two", "a": "2", "negative": "1"}]
    rows += [rows[1], {"q": " ", "a": "3", "negative": "4"}, {"q": "three", "a": [], "negative": "4"}]
    found, report = read_labelled_pairs(write(tmp_path, rows), anchor_column="q", positive_column="a")
    assert found.to_dict() == {
        "anchor": ["one", "one", "two"],
        "positive": ["1", "I", "2"],
        "negative_1": ["2", "2", "1"],
    }
    assert report == "3 pairs with 1 hard negative each; skipped: 1 repeated, 2 empty"


def test_a_hard_negative_that_is_a_positive_is_not_trained_on(tmp_path: Path) -> None:
    rows = [
        {"anchor": "one", "positive": "first  answer", "negative_1": "wrong", "negative_2": "first\nanswer "},
        {"anchor": "one ", "positive": "second answer", "negative_1": "first answer", "negative_2": "wrong"},
        {"anchor": "one", "positive": "third answer", "negative_1": "wrong", "negative_2": "worse"},
        {"anchor": "two", "positive": "wrong", "negative_1": "first answer", "negative_2": "second answer"},
    ]
    found, report = read_labelled_pairs(write(tmp_path, rows))
    assert found.to_list() == rows[2:]
    assert report == "2 pairs with 2 hard negatives each; skipped: 2 with a positive as a hard negative"


def test_labels_of_synthetic_examples_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"anchor": f"a {n}", "positive": f"b {n}", "kind": "other", "task": "own"} for n in range(2)]
    rows += [{**rows[0], "positive": "label", "task": f"{TASK_PREFIX}long-short"}]
    found, report = read_labelled_pairs(write(tmp_path, rows))
    assert found["positive"][:] == ["b 0", "b 1"]
    assert report == "2 pairs; skipped: 1 with a label as the passage (kind: other)"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"anchor": "a", "answer": "b"}], "pairs.jsonl:1: no column 'positive'; the columns are 'anchor', 'answer'"),
        ([{"anchor": "a", "positive": "b"}], "1 pair; training needs"),
        ([{"anchor": "a", "positive": text} for text in "bc"], "2 pairs; training needs different"),
        ([{"anchor": text, "positive": "a"} for text in "bc"], "2 pairs; training needs different"),
        ([{"anchor": "a", "positive": 3}], "holds int, not text"),
        (
            [{"anchor": "a", "positive": "b", "negative_1": "c"}, {"anchor": "d", "positive": "e", "negative_1": None}],
            "pairs.jsonl:2: 0 negatives, but 1 in the rows before",
        ),
        ([{"anchor": "a", "positive": "b", "negative_1": " "}], "pairs.jsonl:1: a hard negative is empty"),
        (
            [{"anchor": "a", "positive": "b", "negatives": ["c"]}],
            "'negatives' holds list",
        ),
    ],
)
def test_wrong_rows_are_one_line(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        read_labelled_pairs(write(tmp_path, rows))
