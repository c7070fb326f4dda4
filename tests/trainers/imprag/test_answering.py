"""Answering over a collection: what is retrieved and read, mistakes."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_imprag_trainer import PASSAGES, model
from transformers import PreTrainedTokenizerFast

from revela_hub.cli.commands import evaluate
from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.dense import ExactIndex
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.passages import Hit
from revela_hub.trainers.imprag import answer_command
from revela_hub.trainers.imprag.answering import Answer, Answerer
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder

PROMPTS = ["Which town has the river Dart?", "Which town has the river Kenn?", "Where is Alba"]


class InMemory:
    """A collection as `PassageStore` is one."""

    def __init__(self, encoder: ImpRAGEncoder, texts: list[str]) -> None:
        self.texts, self.vectors, self.searches = texts, encoder.encode_document(texts), 0

    def search(self, vectors: np.ndarray, k: int) -> Hits:
        self.searches += 1
        return ExactIndex(self.vectors).search(vectors, k)

    def found(self, hits: Hits) -> Any:
        pairs = zip(hits.scores_QK, hits.rows_QK, strict=True)
        return [
            [SimpleNamespace(score=float(s), text=self.texts[n], location=f"p:{n}") for s, n in zip(*p, strict=True)]
            for p in pairs
        ]


def together(tokenizer: PreTrainedTokenizerFast) -> tuple[ImpRAGForCausalLM, PreTrainedTokenizerFast, InMemory]:
    built = model(tokenizer, t=2).eval()
    return built, tokenizer, InMemory(ImpRAGEncoder(built, tokenizer), PASSAGES)


def test_answers_are_those_of_generate_on_the_best_passages(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    built, _, collection = together(bpe_tokenizer)
    answers = list(Answerer(built, bpe_tokenizer, collection).answer(PROMPTS, max_new_tokens=6, batch_size=2))
    assert collection.searches == 1
    passages = bpe_tokenizer([text + "<|endoftext|>" for text in PASSAGES], padding=True, return_tensors="pt")
    vectors = built.embed_passages(passages["input_ids"], passages["attention_mask"])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = bpe_tokenizer(prompt, return_tensors="pt")["input_ids"]
        scores = (built.embed_queries(ids) @ vectors.T)[0]
        best = scores.topk(2)
        assert [read.score for read in answer.passages] == pytest.approx(best.values.tolist(), rel=1e-4)
        assert [read.text for read in answer.passages] == [PASSAGES[n] for n in best.indices.tolist()]
        ended = built.generate(
            ids,
            passage_input_ids=passages["input_ids"][best.indices][None],
            passage_attention_mask=passages["attention_mask"][best.indices][None],
            max_new_tokens=6,
            do_sample=False,
        )
        assert answer.text == bpe_tokenizer.decode(ended[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_a_prompt_for_which_an_index_finds_less_reads_only_its_own_passages(
    bpe_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, tokenizer, collection = together(bpe_tokenizer)
    found = collection.found
    monkeypatch.setattr(collection, "found", lambda hits: [row[: 1 + n % 2] for n, row in enumerate(found(hits))])
    answerer = Answerer(built, tokenizer, collection)
    rows = tokenizer([*PROMPTS, "Where?"])["input_ids"]
    read = collection.found(answerer._search([*PROMPTS, "Where?"], 3))
    inputs = answerer._inputs([*PROMPTS, "Where?"], rows, read)
    ids, mask = inputs["passage_input_ids"], inputs["passage_attention_mask"].bool()
    assert mask.any(-1).tolist() == 2 * [[True, False], [True, True]]
    decoded = [tokenizer.decode(ids[row, 0][mask[row, 0]], skip_special_tokens=True) for row in range(4)]
    assert decoded == [hits[0].text for hits in read]


def test_prompts_that_do_not_fit_are_errors(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    answerer = Answerer(*together(bpe_tokenizer))
    with pytest.raises(UserError, match=r"prompt 2 has \d+ tokens, .* there is room for"):
        list(answerer.answer(["a", "x y z " * 100], max_new_tokens=6))
    with pytest.raises(UserError, match="prompt 1 has 0 tokens"):
        list(answerer.answer([""]))


class Recorder:
    """An answerer whose answers are the prompts; keeps whether it has a collection, for each call."""

    def __init__(self) -> None:
        self.collection: object = "passages"
        self.asked: list[tuple[bool, list[str]]] = []

    def answer(self, prompts: list[str], **options: Any) -> Iterator[Answer]:
        self.asked.append((self.collection is not None, prompts))
        read = () if self.collection is None else (Hit(1.0, "first and second", "p", None, 1, 1),)
        return iter([Answer(prompt, read) for prompt in prompts])


def test_questions_that_do_not_retrieve_are_evaluated_without_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["first", "second", "third"]
    rows = [{"prompt": text, "answer": text, "retrieve": text != "first"} for text in texts]
    file = tmp_path / "dev.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answerer = Recorder()
    method = SimpleNamespace(answerer="any")
    monkeypatch.setattr("revela_hub.checkpoints.resolve", lambda name: SimpleNamespace(method=method))
    monkeypatch.setattr(evaluate, "resolve_name", lambda name: lambda *given, **options: answerer)
    evaluate.run(evaluate.Arguments(models=["m"], task="qa", data=[str(file)], index="i"))
    assert answerer.asked == [(True, ["second", "third"]), (False, ["first"])]
    out = capsys.readouterr().out
    assert "3 questions, 1 passage each (1 without passages)" in out and "1.000   1.000      0.500" in out


@pytest.mark.parametrize(("task", "retrieves"), [("question_answering", True), ("instruction", False)])
def test_tasks_that_do_not_retrieve_are_answered_without_passages(
    task: str, retrieves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answerer = Recorder()
    monkeypatch.setattr("revela_hub.trainers.imprag.answering.open_answerer", lambda *given, **options: answerer)
    answer_command.run(answer_command.Arguments(model="m", index="i", prompt="Where is Alba?", task=task))
    assert [has for has, _ in answerer.asked] == [retrieves]
