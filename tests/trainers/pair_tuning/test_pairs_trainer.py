"""Fine-tuning on pairs: the loss in loops, adapters, killed runs, and reading pairs."""

import json
import math
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from transformers import TrainerCallback

from revela_hub.data import RetrievalTask
from revela_hub.data.sources.beir import write_beir
from revela_hub.data.synthesis.synthesis import TASK_PREFIX
from revela_hub.data.text.same_text import text_key
from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembly
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.pair_tuning import command
from revela_hub.trainers.pair_tuning.data import read_labelled_pairs
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments
from revela_hub.trainers.revela.trainer import RevelaTrainer

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


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"anchor": [1, 2], "positive": ["a", "b"]}, "column 'anchor' has the type .*int64"),
        ({"anchor": ["a", "b"], "positive": [["c"], ["d"]]}, "column 'positive' has the type List"),
        ({"anchor": ["a", None], "positive": ["c", "d"]}, "train_dataset:1: 'anchor' is null"),
    ],
)
def test_columns_that_are_not_text(
    columns: dict[str, list[Any]], message: str, retriever_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, retriever_folder, Dataset.from_dict(columns))


def test_a_loaded_model_with_adapters_is_saved_with_them_merged(retriever_folder: Path, tmp_path: Path) -> None:
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    args = PairsTrainingArguments(
        str(tmp_path / "out"),
        lora_rank=4,
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        bf16=False,
    )
    PairsTrainer(model, args, train_dataset=pairs()).train()
    expected = model.eval().encode(WORDS)
    for save in (model.save, model.save_pretrained, model[0].auto_model.save_pretrained):
        save(str(tmp_path / "saved"))
        saved = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        assert abs(saved.encode(WORDS) - expected).max() < 1e-5
    assert abs(SentenceTransformer(str(retriever_folder), device="cpu").encode(WORDS) - expected).max() > 1e-3


def test_arguments_are_not_changed_and_losses_may_be_made_before(retriever_folder: Path, tmp_path: Path) -> None:
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False)
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    loss = MultipleNegativesRankingLoss(model)
    assert PairsTrainer(model, args, train_dataset=pairs(), loss=loss).loss is loss
    assert args.prompts is None
    with pytest.raises(UserError, match="the loss was made for another model"):
        PairsTrainer(str(retriever_folder), args, train_dataset=pairs(), loss=loss)
    with pytest.raises(UserError, match="train_dataset has the splits a: pass one of them"):
        PairsTrainer(model, args, train_dataset={"a": pairs()})


@pytest.mark.parametrize("query_only", [False, True])
def test_negatives_may_be_in_the_evaluation_data_only(query_only: bool, retriever_folder: Path, tmp_path: Path) -> None:
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False, query_only=query_only)
    more = pairs(negatives=2).add_column("source", ["wiki"] * 16)
    both = PairsTrainer(str(retriever_folder), args, train_dataset=more, eval_dataset=more)
    expected = both.evaluate()["eval_loss"]
    without = PairsTrainer(str(retriever_folder), args, train_dataset=pairs(), eval_dataset={"a": pairs(), "b": more})
    assert without.evaluate()["eval_b_loss"] == pytest.approx(expected)
    assert both.evaluate(pairs())["eval_loss"] < expected
    run = PairsTrainer(str(retriever_folder), args, train_dataset=pairs())
    assert run.evaluate(more)["eval_loss"] == pytest.approx(expected) == run.predict(more).metrics["test_loss"]
    assert run.args.prompts == {"anchor": "Query: ", "positive": "Passage: "} == without.args.prompts


@pytest.mark.parametrize("column", ["label", "score"])
def test_a_loss_gets_its_labels(column: str, retriever_folder: Path, tmp_path: Path) -> None:
    rows = pairs().add_column(column, [1.0] * 16).add_column("scores", [0.0] * 16)
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False)
    run = PairsTrainer(str(retriever_folder), args, train_dataset=rows, loss=CosineSimilarityLoss)
    assert run.train_dataset.column_names == ["anchor", "positive", column]
    assert run.evaluate(rows)["eval_loss"] > 0


@pytest.mark.parametrize("evaluation", [None, pairs(8), {"a": pairs(8), "b": pairs(12)}])
@pytest.mark.parametrize(
    "evaluator", [None, InformationRetrievalEvaluator({"a": "b"}, {"c": "d"}, {"a": {"c"}}, name="own")]
)
def test_retrieval_is_measured_once_next_to_the_loss(
    evaluator: Any, evaluation: Any, retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    ranked: list[None] = []

    class Watch(TrainerCallback):
        def on_evaluate(self, *args: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            seen.append(dict(metrics))

    def rank(*given: Any) -> Any:
        ranked.append(None)
        return rank_together(*given)

    monkeypatch.setattr("revela_hub.trainers.base.trainer.rank_together", rank)
    corpus = {str(number): text for number, text in enumerate(pairs()["positive"])}
    task = RetrievalTask(corpus, {"q": corpus["1"]}, {"q": {"1": 1}}, "tiny")
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False, eval_strategy="steps", eval_steps=1)
    given: dict[str, Any] = {"eval_dataset": evaluation, "evaluator": evaluator, "callbacks": [Watch()]}
    run = PairsTrainer(str(retriever_folder), args, train_dataset=pairs(), retrieval_task=task, **given)
    metrics = run.evaluate()
    assert len(ranked) == 1 and 0 < metrics["eval_ndcg_at_10"] <= 1
    assert [index for index, logged in enumerate(seen) if "eval_ndcg_at_10" in logged] == [0]
    assert [index for index, logged in enumerate(run.state.log_history) if "eval_ndcg_at_10" in logged] == [0]
    wanted = {"eval_a_loss", "eval_b_loss"} if isinstance(evaluation, dict) else {"eval_loss"} if evaluation else set()
    assert {name for name in metrics if name.endswith("loss")} == wanted
    assert any("own" in name for name in metrics) == (evaluator is not None)
    assert not any("ndcg_at_10" in name for name in run.predict(pairs(8)).metrics)


def test_resuming_without_a_usable_checkpoint_is_an_error(retriever_folder: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path, retriever_folder, pairs(), max_steps=1)
    with pytest.raises(UserError, match="has no complete checkpoint to resume from"):
        run.train(resume_from_checkpoint=True)


def test_models_of_peft_are_refused(retriever_folder: Path, llama_folder: Path, tmp_path: Path) -> None:
    inner = SentenceTransformer(str(retriever_folder), device="cpu")[0].auto_model
    adapted: Any = get_peft_model(inner, LoraConfig(target_modules=["query"]))
    args = PairsTrainingArguments(str(tmp_path), report_to=[], bf16=False)
    with pytest.raises(UserError, match="a loaded retriever must be a SentenceTransformer, not a PeftModel"):
        PairsTrainer(adapted, args, train_dataset=pairs())
    with pytest.raises(UserError, match="cannot train .*it has adapters already"):
        RevelaTrainer(adapted, lm=str(llama_folder), train_dataset=Dataset.from_dict({"text": ["a", "b"]}))


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


def test_sizes_that_the_model_does_not_have(retriever_folder: Path, tmp_path: Path) -> None:
    for dims, said in (
        ([64, 8], "--matryoshka_dims 64 8: the model's vectors have only 32"),
        ([8, 8], "8 8 contains a number twice"),
    ):
        with pytest.raises(UserError, match=said):
            trainer(tmp_path, retriever_folder, pairs(4), matryoshka_dims=dims)
    args = PairsTrainingArguments(output_dir=str(tmp_path), matryoshka_dims=[8])
    with pytest.raises(UserError, match="--matryoshka_dims changes the contrastive loss"):
        PairsTrainer(str(retriever_folder), args, train_dataset=pairs(4), loss=torch.nn.Identity)
    with pytest.raises(UserError, match="requires a model that compares by cosine, not by dot"):
        PairsTrainingArguments(output_dir=str(tmp_path), matryoshka_dims=[8]).checked_dims(32, "dot")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_ends_with_the_same_weights(rank: int, retriever_folder: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "lora_rank": rank, "learning_rate": 1e-3}
    for name in ("whole", "resumed"):
        run = trainer(tmp_path / name, retriever_folder, pairs(), **options)
        run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2") if name == "resumed" else None)
        run.export(Path(run.args.output_dir))
    whole, resumed = (load_file(tmp_path / name / "retriever" / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not any("lora" in name for name in whole)
    kept = SentenceTransformer(str(tmp_path / "whole" / "retriever"), device="cpu")
    expected = run.retriever.eval().encode_query(["a river"])
    assert kept.encode_query(["a river"]) == pytest.approx(expected, abs=1e-5)
    assert kept.encode_query(["a river"]) != pytest.approx(
        SentenceTransformer(str(retriever_folder), device="cpu").encode_query(["a river"]), abs=1e-5
    )


def test_a_run_without_a_batch_is_an_error_and_batches_have_no_text_twice(
    retriever_folder: Path, tmp_path: Path
) -> None:
    columns = {
        "anchor": [f"query {n}" for n in range(60)],
        "positive": [f"Passage {n % 4}{'!' * (n % 3)}" for n in range(60)],
    }
    rows = Dataset.from_dict(columns)
    with pytest.raises(UserError, match="only 4 different texts"):
        trainer(tmp_path, retriever_folder, rows, per_device_train_batch_size=5, dataloader_drop_last=True)
    loader = trainer(tmp_path, retriever_folder, rows, per_device_train_batch_size=4).get_train_dataloader()
    for batch in islice(loader.batch_sampler, len(loader)):
        texts = [text_key(text) for text in rows[batch]["positive"]]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("sampler", ["no_duplicates", "batch_sampler"])
def test_the_order_is_that_of_the_data_seed(sampler: str, retriever_folder: Path, tmp_path: Path) -> None:
    def order(**options: Any) -> list[list[int]]:
        run = trainer(tmp_path, retriever_folder, pairs(), batch_sampler=sampler, **options)
        return list(run.get_train_dataloader().batch_sampler)

    assert order(seed=1, data_seed=7) == order(seed=2, data_seed=7) != order(seed=2)


def test_an_interrupted_export_leaves_no_folder(
    retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("revela_hub.trainers.base.retriever.make_readable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, retriever_folder, pairs()).export(tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_what_is_published_is_what_is_in_memory(retriever_folder: Path, tmp_path: Path) -> None:
    """Not the folder of an earlier training, of which only a card that was edited is kept."""
    run = trainer(tmp_path / "out", retriever_folder, pairs())
    (exported,) = run.write_models(tmp_path / "out")
    (exported / "README.md").write_text("# Edited\n")
    before = {file.name: file.read_bytes() for file in exported.iterdir() if file.is_file()}
    run.train()
    made = run.assemble(tmp_path / "out", tmp_path / "published", Assembly())
    weights = load_file(tmp_path / "published" / "model.safetensors")
    now = run.retriever[0].auto_model.state_dict()
    assert weights.keys() == now.keys() and all(torch.equal(value, now[name]) for name, value in weights.items())
    assert made.keep_card and (tmp_path / "published" / "README.md").read_text() == "# Edited\n"
    assert before == {file.name: file.read_bytes() for file in exported.iterdir() if file.is_file()}


def test_an_export_keeps_the_files_of_the_user_in_an_earlier_one(retriever_folder: Path, tmp_path: Path) -> None:
    (exported,) = trainer(tmp_path, retriever_folder, pairs()).write_models(tmp_path / "out")
    own = {"LICENSE": "mine", "README.md": "my card", "notes/todo.txt": "mine"}
    for name, text in (
        own
        | {"onnx/model.onnx": "of the old weights", "model-00002-of-00002.safetensors": "", "3_Dense/config.json": "{}"}
    ).items():
        (exported / name).parent.mkdir(exist_ok=True)
        (exported / name).write_text(text)
    first = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    trainer(tmp_path, retriever_folder, pairs()).write_models(tmp_path / "out")
    left = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    assert first - left == {
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
    assert str(report) == "3 pairs with 1 hard negative each; skipped: 2 empty, 1 repeated"


def test_a_hard_negative_that_is_a_positive_is_not_trained_on(tmp_path: Path) -> None:
    rows = [
        {"anchor": "one", "positive": "first  answer", "negative_1": "wrong", "negative_2": "first\nanswer "},
        {"anchor": "one ", "positive": "second answer", "negative_1": "first answer", "negative_2": "wrong"},
        {"anchor": "one", "positive": "third answer", "negative_1": "wrong", "negative_2": "worse"},
        {"anchor": "two", "positive": "wrong", "negative_1": "first answer", "negative_2": "second answer"},
    ]
    found, report = read_labelled_pairs(write(tmp_path, rows))
    assert found.to_list() == rows[2:]
    assert str(report) == "2 pairs with 2 hard negatives each; skipped: 2 with a positive as a hard negative"


def test_labels_of_synthetic_examples_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"anchor": f"a {n}", "positive": f"b {n}", "kind": "other", "task": "own"} for n in range(2)]
    rows += [{**rows[0], "positive": "label", "task": f"{TASK_PREFIX}long-short"}]
    found, report = read_labelled_pairs(write(tmp_path, rows))
    assert found["positive"][:] == ["b 0", "b 1"]
    assert str(report) == "2 pairs; skipped: 1 with a label as the passage (kind: other)"


def test_text_that_a_probe_holds_out_is_removed_from_the_passages(tmp_path: Path) -> None:
    task = RetrievalTask({"p": "passage"}, {"q": "question 0"}, {"q": {"p": 1}}, "probe")
    write_beir(task, tmp_path)
    held = [{"document": "a.md", "text": text} for text in ("The Dart flows to the sea.", "River Dart")]
    (tmp_path / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in held))
    passages = ["one", "The River Dart. The Dart flows\nto the sea. It is long.", "two", "The Dart flows to the sea."]
    rows = [{"anchor": f"question {n}", "positive": text, "negative_1": "no"} for n, text in enumerate(passages)]
    columns = {"anchor_column": "anchor", "positive_column": "positive", "split": "train"}
    said: list[str] = []
    given: Any = SimpleNamespace(**columns, eval_corpus=None, probe=str(tmp_path), log=said.append)
    run: Any = SimpleNamespace(read=lambda what, work: work())
    given.pairs = write(tmp_path, rows)
    left, found, summary = command._read(given, run)
    assert [" ".join(text.split()) for text in left["positive"]] == ["The River Dart. It is long.", "two"]
    assert left["anchor"][:] == ["question 1", "question 2"] and left["negative_1"][:] == ["no", "no"] and found
    assert said == [
        "1 of 4 training rows are left out: --probe asks their queries",
        "2 texts of the probe held out of the training rows",
    ]
    assert summary == "4 pairs with 1 hard negative each, of which 2 are trained on"
    given.pairs = write(
        tmp_path, [{**row, "positive": passages[n]} for n, row in zip((3, 3, 2), rows[1:], strict=True)]
    )
    with pytest.raises(UserError, match="--probe holds out the passages of all but 1 training row: too few to train"):
        command._read(given, run)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"anchor": "a", "answer": "b"}], "pairs.jsonl:1: no column 'positive'; the columns are 'anchor', 'answer'"),
        ([{"anchor": "a", "positive": "b"}], "1 pair; training needs at least 2 pairs"),
        ([{"anchor": "a", "positive": text} for text in "bc"], "all queries are equal; training needs different ones"),
        ([{"anchor": text, "positive": "a"} for text in "bc"], "all passages are equal; training needs different ones"),
        ([{"anchor": "a", "positive": 3}], "holds int, not text"),
        (
            [{"anchor": "a", "positive": "b", "negative_1": "c"}, {"anchor": "d", "positive": "e", "negative_1": None}],
            "pairs.jsonl:2: 0 negatives, but 1 in the rows before",
        ),
        ([{"anchor": "a", "positive": "b", "negative_1": " "}], "pairs.jsonl:1: negative_1 is empty"),
        (
            [{"anchor": "a", "positive": "b", "negatives": ["c"]}],
            "'negatives' holds list",
        ),
    ],
)
def test_wrong_rows_are_one_line(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        read_labelled_pairs(write(tmp_path, rows))


def test_a_data_set_without_the_columns_is_named(retriever_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train_dataset has the columns query, text; it needs anchor, positive"):
        trainer(tmp_path, retriever_folder, Dataset.from_dict({"query": ["a"], "text": ["b"]}))
