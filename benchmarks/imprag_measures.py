"""Data and evaluation for `imprag.py`: questions of SQuAD, answers, recall, and the likelihood of gold answers."""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.prompts import prompt_row
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import chunk_document
from revela_hub.evaluation.question_answering import holds_answer, score_answers
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.dense import ExactIndex
from revela_hub.retrieval.hits import Hits
from revela_hub.trainers.baselines.ra_it import paste, pasted_log_likelihoods, shortened
from revela_hub.trainers.imprag.answering import Answerer, left_padded
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder
from revela_hub.trainers.imprag.data import padded, tokenize_passages
from revela_hub.trainers.imprag.retrieval import rank_passages


@dataclass
class Questions:
    """Questions and passages of one split."""

    prompts: Dataset
    passages: list[str]
    gold: list[int]  # index of the passage with the answer, for each question
    bm25: NDArray[np.int32]  # (questions, 20)


def read(folder: Path, split: str, questions: int | None, collection: int | None, max_words: int) -> Questions:
    """Return questions whose answer lies within one passage, these passages, and others up to `collection`."""

    def lines(name: str) -> list[dict[str, Any]]:
        with gzip.open(folder / "squad" / name, "rt", encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]

    rows = lines(f"{split}.jsonl.gz")
    paragraphs = {entry["_id"]: entry for entry in lines("passages.jsonl.gz")}
    wanted = {paragraphs[row["passage_id"]]["article_index"] for row in rows}
    passages, of_paragraph = [], {}
    for id_, paragraph in paragraphs.items():
        if paragraph["article_index"] in wanted:
            chunks = chunk_document(Document(id_, paragraph["text"], None, "text"), max_words)
            of_paragraph[id_] = range(len(passages), len(passages) + len(chunks))
            passages += [f"{paragraph['title']}: {' '.join(chunk.text.split())}" for chunk in chunks]
    kept, gold = [], []
    for number, row in enumerate(rows):
        numbers = of_paragraph.get(row["passage_id"], ())
        at = next((n for n in numbers if holds_answer([passages[n]], row["answers"])), None)
        if at is not None:
            kept.append(prompt_row(Row(f"{split}:{number + 1}", row), "question_answering"))
            gold.append(at)
    drawn = random.Random(0)
    if questions is not None:
        chosen = sorted(drawn.sample(range(len(kept)), questions))
        kept, gold = [kept[n] for n in chosen], [gold[n] for n in chosen]
    numbers = set(gold)
    if collection is not None:
        others = [n for n in range(len(passages)) if n not in numbers]
        numbers |= set(drawn.sample(others, max(0, collection - len(numbers))))
    place = {number: at for at, number in enumerate(sorted(numbers))}
    passages, prompts = [passages[n] for n in place], Dataset.from_list(kept)
    bm25 = rank_passages("bm25", prompts["input"], passages, depth=20)
    return Questions(prompts, passages, [place[n] for n in gold], bm25)


@dataclass
class Test:
    """Test questions, and how models read: `k` passages of at most `l_max` tokens."""

    questions: Questions
    tokenizer: PreTrainedTokenizerBase
    k: int
    l_max: int

    @property
    def prompts(self) -> list[str]:
        """Prompts of the questions."""
        return list(self.questions.prompts["prompt"])

    @property
    def answers(self) -> list[list[str]]:
        """Accepted answers of each question; the first one is the gold answer."""
        return [list(row) for row in self.questions.prompts["answers"]]

    def answer_ids(self) -> list[list[int]]:
        """Return the tokens of the gold answers, without EOS."""
        ids: list[list[int]] = self.tokenizer([f" {row[0]}" for row in self.answers], add_special_tokens=False)[
            "input_ids"
        ]
        return ids

    def readings(self, ranking: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Return the passages, (questions, k) each, under which the gold answer's likelihood is measured."""
        gold, rng = self.questions.gold, np.random.default_rng(0)
        random_rows = rng.integers(0, len(self.questions.passages), (len(gold), self.k)).astype(np.int32)
        gold_rows = random_rows.copy()
        gold_rows[:, 0] = gold
        return {"gold": gold_rows, "retrieved": ranking[:, : self.k], "random": random_rows}

    def result(
        self, answers: Sequence[str], ranking: NDArray[np.int32] | None, likelihoods: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return the results of one run, for each question."""
        test, scores = self.questions, score_answers(answers, self.answers)
        result: dict[str, Any] = {
            "exact_match": scores.per_question["exact_match"].tolist(),
            "f1": scores.per_question["f1"].tolist(),
            "tokens": [len(ids) + 1 for ids in self.answer_ids()],
            "log_likelihood": {name: values.tolist() for name, values in likelihoods.items()},
        }
        if ranking is not None:
            if ranking.shape[1] == len(test.passages):
                result["gold_rank"] = (1 + (ranking == np.array(test.gold)[:, None]).argmax(1)).tolist()
            for k in (self.k, 10):
                result[f"recall_at_{k}"] = [
                    float(holds_answer([test.passages[n] for n in row[:k] if n >= 0], wanted))
                    for row, wanted in zip(ranking.tolist(), self.answers, strict=True)
                ]
        return result


@torch.no_grad()
def measure_pasted(test: Test, reader: PreTrainedModel, ranking: NDArray[np.int32] | None) -> dict[str, Any]:
    """Evaluate a reader with passages in its prompt, or without passages if there is no ranking."""
    tokenizer, prompts = test.tokenizer, test.prompts
    passages, gold = shortened(test.questions.passages, tokenizer, test.l_max), [row[0] for row in test.answers]

    def pasted(rows: NDArray[np.int32]) -> list[str]:
        return [paste(p, [passages[n] for n in row if n >= 0]) for p, row in zip(prompts, rows.tolist(), strict=True)]

    texts = {"none": prompts} if ranking is None else {n: pasted(r) for n, r in test.readings(ranking).items()}
    likelihoods = {n: pasted_log_likelihoods(reader, tokenizer, t, gold) for n, t in texts.items()}
    answers = []
    rows = tokenizer(texts["none" if ranking is None else "retrieved"])["input_ids"]
    for start in range(0, len(rows), 20):
        ids, mask = (x.to(reader.device) for x in left_padded(rows[start : start + 20]))
        ended = reader.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        answers += tokenizer.batch_decode(ended[:, ids.shape[1] :], skip_special_tokens=True)
    return test.result([answer.strip().split("\n")[0] for answer in answers], ranking, likelihoods)


@torch.no_grad()
def measure_imprag(test: Test, model: ImpRAGForCausalLM) -> dict[str, Any]:
    """Evaluate an ImpRAG model."""
    passages, tokenizer, prompts = test.questions.passages, test.tokenizer, test.prompts
    model.eval()
    encoder = ImpRAGEncoder(model, tokenizer)
    vectors, queries = encoder.encode_document(passages), encoder.encode_query(prompts)
    ranking = ExactIndex(vectors).search(queries, len(passages)).rows_QK

    class Ranked:
        """Exact index over the passages' vectors."""

        def search(self, query_vectors: NDArray[np.float32], k: int) -> Any:
            rows = ExactIndex(vectors).search(query_vectors, k).rows_QK
            return Hits(np.take_along_axis(query_vectors @ vectors.T, rows, axis=1), rows)

        def found(self, hits: Hits) -> Any:
            return [[SimpleNamespace(score=0.0, text=passages[n], location="") for n in row] for row in hits.rows_QK]

    found = Answerer(model, tokenizer, Ranked()).answer(prompts, max_new_tokens=10, batch_size=20)
    answers = [answer.text.split("\n")[0] for answer in found]
    (tokens, _), prompt_ids = tokenize_passages(tokenizer, passages, test.l_max), tokenizer(prompts)["input_ids"]
    likelihoods = {}
    for name, rows in test.readings(ranking).items():
        parts = []
        for number, (prompt, answer) in enumerate(zip(prompt_ids, test.answer_ids(), strict=True)):
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]], device=model.device)
            own = padded(tokens[n] for n in rows[number])
            read_Bk = model.encode_passages(*(x[None].to(model.device) for x in own))
            log_p = model(ids, passage_states=read_Bk).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            parts.append(log_p.gather(-1, ids[0, len(prompt) :, None]).sum())
        likelihoods[name] = torch.stack(parts)
    return test.result(answers, ranking, likelihoods)
