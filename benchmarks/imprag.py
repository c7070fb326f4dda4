"""Compare ImpRAG with RA-IT, RA-DIT and variants on SQuAD, with the quickstart's 7 M-parameter language model.

All rows of the tables see the same questions in the same batches, with the same number of steps and the same k passages
of at most l_max tokens. A model of this size must learn to retrieve before it learns to read: rows with a warm-up, and
the retriever of RA-DIT-Llama, start from a language model whose layers 0 to b were trained on the warm-up loss alone
(`--retrieval-rounds` times `--retrieval-steps` steps, trained once per seed and b). Self-distillation alone starts from
the language model unchanged. Finished runs are kept in --output, so an interrupted script continues when it is run
again; --report only prints the tables of the finished runs.

    python benchmarks/imprag.py --data path/to/data --output outputs/imprag-benchmark
    python benchmarks/imprag.py --output outputs/imprag-benchmark --report
"""

import argparse
import gzip
import json
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from revela_hub.data.prompts.rows import prompt_row
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import chunk_document
from revela_hub.evaluation.question_answering import holds_answer, score_answers
from revela_hub.evaluation.significance import paired_bootstrap
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.precision import bf16_is_fast
from revela_hub.retrieval.top_k import Hits
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments, RAITTrainingArguments
from revela_hub.trainers.baselines.pasted import RAITTrainer, paste, pasted_log_likelihoods, shortened
from revela_hub.trainers.baselines.ra_dit import RADITTrainer, Retriever, decoder_retriever, reader_likelihoods
from revela_hub.trainers.common.passages import tokenize_passages
from revela_hub.trainers.common.pseudo_labels import rank_passages, top_rows
from revela_hub.trainers.common.retrieval_loss import multi_label_nce
from revela_hub.trainers.imprag.arguments import ImpRAGTrainingArguments
from revela_hub.trainers.imprag.inference.answering import Answerer, left_padded
from revela_hub.trainers.imprag.inference.encoder import ImpRAGEncoder
from revela_hub.trainers.imprag.inference.stored_states import StoredStates, store_states
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer

REPOSITORY = Path(__file__).resolve().parents[1]
LM = REPOSITORY / "examples" / "quickstart" / "lm"
RETRIEVER = REPOSITORY / "examples" / "quickstart" / "retriever"
K, L_MAX, MAX_WORDS, BATCH, MAX_LENGTH = 2, 48, 24, 16, 96
DEV_QUESTIONS, DEV_PASSAGES = 160, 400
LEARNING_RATE = 1e-3
# For RA-DIT's retrievers: at the readers' rate, equation 6 makes them collapse (recall@2 fell from 21.9 to 3.1).
RETRIEVER_LEARNING_RATES = {"ra-dit-llama": 1e-4, "ra-dit": 2e-5}
# A reader of this size gives answers a hundredth of a large model's likelihood. At RA-DIT's 0.01 the softmax of
# equation 4 is nearly uniform (1.26 of 1.39 nats over four candidates), so the retriever gets almost no signal.
LIKELIHOOD_TEMPERATURE = 1e-4
RETRIEVAL_WEIGHT = 1.0
RETRIEVAL_BATCH = 64  # batches without the reader are cheap, and larger ones have more in-batch negatives
B, T = 2, 4
SWEEP = ((1, 4), (3, 4), (2, 2), (2, 5))


@dataclass
class Data:
    """Questions and passages of one split."""

    prompts: Dataset
    passages: list[str]
    gold: list[int]  # index of the passage with the answer, for each question
    bm25: NDArray[np.int32]  # (questions, 20)


def read(folder: Path, split: str, questions: int | None, collection: int | None, seed: int = 0) -> Data:
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
            chunks = chunk_document(Document(id_, paragraph["text"], None, "text"), MAX_WORDS)
            of_paragraph[id_] = range(len(passages), len(passages) + len(chunks))
            passages += [f"{paragraph['title']}: {' '.join(chunk.text.split())}" for chunk in chunks]
    kept, gold = [], []
    for number, row in enumerate(rows):
        numbers = of_paragraph.get(row["passage_id"], ())
        at = next((n for n in numbers if holds_answer([passages[n]], row["answers"])), None)
        if at is not None:
            kept.append(prompt_row(Row(f"{split}:{number + 1}", row), "question_answering"))
            gold.append(at)
    drawn = random.Random(seed)
    if questions is not None:
        chosen = sorted(drawn.sample(range(len(kept)), questions))
        kept, gold = [kept[n] for n in chosen], [gold[n] for n in chosen]
    numbers = set(gold)
    if collection is not None:
        others = [n for n in range(len(passages)) if n not in numbers]
        numbers |= set(drawn.sample(others, collection - len(numbers)))
    place = {number: at for at, number in enumerate(sorted(numbers))}
    passages, prompts = [passages[n] for n in place], Dataset.from_list(kept)
    return Data(
        prompts, passages, [place[n] for n in gold], rank_passages("bm25", prompts["input"], passages, depth=20)
    )


@dataclass
class Experiment:
    """Data and settings that all runs share."""

    train: Data
    dev: Data
    tokenizer: PreTrainedTokenizerBase
    output: Path
    steps: int
    retrieval_steps: int
    retrieval_rounds: int

    def run_arguments(self, seed: int, **settings: Any) -> dict[str, Any]:
        """Return the training arguments that all trainers share."""
        return {
            "output_dir": str(self.output / "run"),
            "learning_rate": LEARNING_RATE,
            "warmup_steps": self.steps // 10,
            "max_steps": self.steps,
            "num_train_epochs": 1,
            "per_device_train_batch_size": BATCH,
            "save_strategy": "no",
            "logging_steps": 10,
            "report_to": "none",
            "bf16": False,
            "use_cpu": True,
            "seed": seed,
            "disable_tqdm": True,
            **settings,
        }

    def questions(self, seed: int) -> NDArray[np.int64]:
        """Return the training questions of a seed: in random order, repeated only if there are too few."""
        order = np.random.default_rng(seed).permutation(len(self.train.prompts))
        return np.resize(order, self.steps * BATCH)


# --- evaluation


def measured(
    experiment: Experiment,
    answers: Sequence[str],
    rankings: NDArray[np.int32] | None,
    likelihoods: dict[str, torch.Tensor],
    seconds: float,
) -> dict[str, Any]:
    """Results of one run, including each question's."""
    dev = experiment.dev
    accepted = [list(row) for row in dev.prompts["answers"]]
    scores = score_answers(answers, accepted)
    tokens = [
        len(ids) + 1
        for ids in experiment.tokenizer([f" {row[0]}" for row in accepted], add_special_tokens=False)["input_ids"]
    ]
    result: dict[str, Any] = {
        "exact_match": scores.per_question["exact_match"].tolist(),
        "f1": scores.per_question["f1"].tolist(),
        "tokens": tokens,
        "log_likelihood": {name: values.tolist() for name, values in likelihoods.items()},
        "training_cpu_seconds": round(seconds),
    }
    if rankings is not None:
        if rankings.shape[1] == len(dev.passages):
            result["gold_rank"] = (1 + (rankings == np.array(dev.gold)[:, None]).argmax(1)).tolist()
        for k in (K, 10):
            result[f"recall_at_{k}"] = [
                float(holds_answer([dev.passages[n] for n in row[:k] if n >= 0], wanted))
                for row, wanted in zip(rankings.tolist(), accepted, strict=True)
            ]
    return result


def readings(dev: Data, ranking: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    """Return the passage sets for which the gold answer's likelihood is measured."""
    rng = np.random.default_rng(0)
    random_rows = rng.integers(0, len(dev.passages), (len(dev.gold), K)).astype(np.int32)
    gold_rows = random_rows.copy()
    gold_rows[:, 0] = dev.gold
    return {"gold": gold_rows, "retrieved": ranking[:, :K], "random": random_rows}


@torch.no_grad()
def measure_pasted(experiment: Experiment, reader: PreTrainedModel, ranking: NDArray[np.int32] | None) -> Any:
    """Return greedy answers and likelihoods of a reader with passages in its prompt (none without a ranking)."""
    dev, tokenizer = experiment.dev, experiment.tokenizer
    passages = shortened(dev.passages, tokenizer, L_MAX)
    prompts, gold = list(dev.prompts["prompt"]), [row[0] for row in dev.prompts["answers"]]

    def pasted(rows: NDArray[np.int32]) -> list[str]:
        return [paste(p, [passages[n] for n in row if n >= 0]) for p, row in zip(prompts, rows.tolist(), strict=True)]

    texts = {"none": prompts} if ranking is None else {n: pasted(r) for n, r in readings(dev, ranking).items()}
    likelihoods = {n: pasted_log_likelihoods(reader, tokenizer, t, gold) for n, t in texts.items()}
    answers = []
    rows = tokenizer(texts["none" if ranking is None else "retrieved"])["input_ids"]
    for start in range(0, len(rows), 20):
        ids, mask = left_padded(rows[start : start + 20])
        ended = reader.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        answers += tokenizer.batch_decode(ended[:, ids.shape[1] :], skip_special_tokens=True)
    return [answer.strip().split("\n")[0] for answer in answers], likelihoods


@torch.no_grad()
def measure_imprag(experiment: Experiment, model: ImpRAGForCausalLM, states: StoredStates | None = None) -> Any:
    """Return answers, rankings and likelihoods of an ImpRAG model. Passage states are read from `states`, if given."""
    dev, tokenizer = experiment.dev, experiment.tokenizer
    model.eval()
    encoder = ImpRAGEncoder(model, tokenizer)
    vectors = encoder.encode_document(dev.passages)
    queries = encoder.encode_query(list(dev.prompts["prompt"]))
    ranking = top_rows(queries, vectors, len(dev.passages))

    class Ranked:
        """Exact index over the precomputed ranking."""

        def search(self, query_vectors: NDArray[np.float32], k: int) -> Any:
            rows = top_rows(query_vectors, vectors, k)
            return Hits(np.take_along_axis(query_vectors @ vectors.T, rows, axis=1), rows)

        def found(self, hits: Hits) -> Any:
            return [
                [SimpleNamespace(score=0.0, text=dev.passages[n], location="") for n in row] for row in hits.rows_QK
            ]

        def __len__(self) -> int:
            return len(dev.passages)

    answerer = Answerer(model, tokenizer, Ranked(), states=states)
    found = answerer.answer(list(dev.prompts["prompt"]), max_new_tokens=10, batch_size=20)
    answers = [answer.text.split("\n")[0] for answer in found]
    tokens = tokenize_passages(tokenizer, dev.passages, L_MAX)
    prompt_ids = tokenizer(list(dev.prompts["prompt"]))["input_ids"]
    gold = tokenizer([f" {row[0]}" for row in dev.prompts["answers"]], add_special_tokens=False)["input_ids"]
    likelihoods = {}
    for name, rows in readings(dev, ranking).items():
        parts = []
        for number, (prompt, answer) in enumerate(zip(prompt_ids, gold, strict=True)):
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            if states is None:
                passage_ids, mask = tokens.batch(rows[number : number + 1])
                read_Bk = model.encode_passages(passage_ids, mask)
            else:
                read_Bk = states.read(rows[number : number + 1])
            logits = model(ids, passage_states=read_Bk).logits[0]
            log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
            parts.append(log_p.gather(-1, ids[0, len(prompt) :, None]).sum())
        likelihoods[name] = torch.stack(parts)
    return answers, ranking, likelihoods


# --- training


def retrieving_lm(experiment: Experiment, seed: int, b: int, rounds: int | None = None) -> str:
    """Train layers 0 to b of the language model on the warm-up loss alone, once, and return its folder."""
    rounds = experiment.retrieval_rounds if rounds is None else rounds
    if not rounds:
        return str(LM)
    folder = experiment.output / f"start-b{b}-{seed}-{rounds}"
    if (folder / "config.json").is_file():
        return str(folder)
    start = retrieving_lm(experiment, seed, b, rounds - 1)
    train, tokenizer = experiment.train, experiment.tokenizer
    set_seed(seed)
    model = ImpRAGForCausalLM.from_backbone(start, b=b, t=b, k=K, l_max=L_MAX).train()
    passages = tokenize_passages(tokenizer, train.passages, L_MAX)
    questions = tokenize_passages(tokenizer, list(train.prompts["prompt"]), MAX_LENGTH, end=False)
    steps, drawn = experiment.retrieval_steps, np.random.default_rng(seed + 1000 * (rounds - 1))
    order = np.concatenate(
        [drawn.permutation(len(questions)) for _ in range(1 + steps * RETRIEVAL_BATCH // len(questions))]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 20, steps)
    half = bf16_is_fast("cpu")
    losses = []
    for step in range(steps):
        rows = order[step * RETRIEVAL_BATCH : (step + 1) * RETRIEVAL_BATCH]
        positives = train.bm25[rows, 0]  # the pseudo-label; passage 0 for a question without one
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            queries = model.embed_queries(*questions.batch(rows))
            vectors = model.embed_passages(*passages.batch(np.maximum(positives, 0)))
        scores = model.score(queries.float(), vectors.float()) / math.sqrt(vectors.shape[1])
        known = train.bm25[rows][:, :4]
        negative = torch.from_numpy(~(positives[None, :, None] == known[:, None, :]).any(-1))
        loss = multi_label_nce(scores, torch.eye(len(rows), dtype=torch.bool), negative).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"b={b}, round {rounds}, step {step + 1}: retrieval loss {np.mean(losses[-50:]):.3f}", flush=True)
    model.backbone.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train_imprag(experiment: Experiment, seed: int, warm_up: float, steps: int, **config: Any) -> ImpRAGForCausalLM:
    """Train ImpRAG, with a fraction of the steps as warm-up."""
    train, chosen = experiment.train, experiment.questions(seed)
    fields: dict[str, Any] = {"b": B, "t": T, "k": K, "l_max": L_MAX} | config
    start = retrieving_lm(experiment, seed, fields["b"]) if warm_up else str(LM)
    model = ImpRAGForCausalLM.from_backbone(start, **fields)
    arguments = ImpRAGTrainingArguments(
        **experiment.run_arguments(
            seed,
            max_steps=steps,
            retrieval_warmup_epochs=2.0 if warm_up == 1 else warm_up * steps / experiment.steps,
            retrieval_weight=RETRIEVAL_WEIGHT,
            num_positives=2,
            num_negatives=3,
            first_negative_rank=5,
            last_negative_rank=20,
            num_candidates=4,
            index_steps=max(1, steps // 4),
        )
    )
    trainer = ImpRAGTrainer(
        model,
        arguments,
        tokenizer=experiment.tokenizer,
        train_dataset=train.prompts.select(chosen),
        passages=train.passages,
        pseudo_labels=train.bm25[chosen],
        max_length=MAX_LENGTH,
    )
    trainer.train()
    return model


def train_pasted(experiment: Experiment, seed: int, k: int) -> PreTrainedModel:
    """Train RA-IT, or with k = 0 the same reader without passages."""
    train, chosen = experiment.train, experiment.questions(seed)
    trainer = RAITTrainer(
        AutoModelForCausalLM.from_pretrained(LM, dtype=torch.float32),
        RAITTrainingArguments(**experiment.run_arguments(seed)),
        tokenizer=experiment.tokenizer,
        train_dataset=train.prompts.select(chosen),
        passages=train.passages,
        pseudo_labels=train.bm25[chosen],
        num_passages=k,
        max_passage_length=L_MAX,
        max_length=MAX_LENGTH,
    )
    trainer.train()
    return trainer.model


def train_retriever(
    experiment: Experiment, seed: int, retriever: Retriever, reader: PreTrainedModel, learning_rate: float
) -> None:
    """Train RA-DIT's retriever on the reader's likelihoods over the best passages of BM25."""
    train, chosen = experiment.train, experiment.questions(seed)
    prompts, candidates = train.prompts.select(chosen), np.maximum(train.bm25[chosen][:, [0, 1, 5, 10]], 0)
    passages = shortened(train.passages, experiment.tokenizer, L_MAX)
    file = experiment.output / f"likelihoods-{seed}.npy"  # the same for both rows of a seed
    if not file.is_file():
        np.save(file, reader_likelihoods(reader, experiment.tokenizer, prompts, passages, candidates).numpy())
    RADITTrainer(
        retriever,
        RADITTrainingArguments(
            **experiment.run_arguments(seed, learning_rate=learning_rate, likelihood_temperature=LIKELIHOOD_TEMPERATURE)
        ),
        train_dataset=prompts,
        passages=train.passages,
        pseudo_labels=candidates,
        log_likelihoods=torch.from_numpy(np.load(file)),
        max_length=MAX_LENGTH,
        max_passage_length=L_MAX,
    ).train()


def run(experiment: Experiment, name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one row of the tables."""
    started = time.process_time()
    torch.manual_seed(seed)
    if name == "base":
        reader = AutoModelForCausalLM.from_pretrained(LM, dtype=torch.float32)
        answers, likelihoods = measure_pasted(experiment, reader, None)
        return measured(experiment, answers, None, likelihoods, 0)
    if name in ("tuned", "ra-it", "ra-dit", "ra-dit-llama"):
        folder = experiment.output / f"reader-{'tuned' if name == 'tuned' else 'ra-it'}-{seed}"
        if not folder.is_dir():
            train_pasted(experiment, seed, 0 if name == "tuned" else K).save_pretrained(folder)
        reader = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ranking = None if name == "tuned" else experiment.dev.bm25
        if name.startswith("ra-dit"):
            retriever = _retriever(experiment, name, seed)
            train_retriever(experiment, seed, retriever, reader, RETRIEVER_LEARNING_RATES[name])
            ranking = retriever.rank(
                list(experiment.dev.prompts["prompt"]),
                experiment.dev.passages,
                len(experiment.dev.passages),
                query_length=MAX_LENGTH,
                passage_length=L_MAX,
            )
        seconds = time.process_time() - started
        answers, likelihoods = measure_pasted(experiment, reader, ranking)
        return measured(experiment, answers, ranking, likelihoods, seconds)
    settings = name.split(":")  # imprag:warm-up[:b=1,t=4][:independent]
    warm_up = {"warm-up": 1.0, "distillation": 0.0, "both": 2 / 3}[settings[1]]
    config: dict[str, Any] = {}
    for setting in settings[2:]:
        if "=" in setting:
            config |= {key: int(value) for key, value in (pair.split("=") for pair in setting.split(","))}
        else:
            config["passage_encoding"] = setting
    model = train_imprag(experiment, seed, warm_up, experiment.steps, **config)
    seconds = time.process_time() - started
    if "independent" in settings:
        model.save_pretrained(experiment.output / f"model-independent-{seed}")
    answers, ranking, likelihoods = measure_imprag(experiment, model)
    return measured(experiment, answers, ranking, likelihoods, seconds)


def _retriever(experiment: Experiment, name: str, seed: int) -> Retriever:
    if name == "ra-dit-llama":
        return decoder_retriever(retrieving_lm(experiment, seed, B), B, experiment.tokenizer)
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(RETRIEVER), device="cpu", model_kwargs={"dtype": torch.float32})
    return Retriever(encoder, encoder.tokenizer, decoder=False)


def run_stored(experiment: Experiment, seed: int) -> None:
    """Evaluate the model of the row `independent` with stored states, and measure their size."""
    model = ImpRAGForCausalLM.from_pretrained(experiment.output / f"model-independent-{seed}", dtype=torch.float32)
    tokens = tokenize_passages(experiment.tokenizer, experiment.dev.passages, L_MAX)
    file = experiment.output / "results" / f"stored@{seed}.json"
    if file.is_file():
        return
    with TemporaryDirectory() as folder:
        states = store_states(model.eval(), tokens, Path(folder) / "s", fingerprint="x")
        answers, ranking, likelihoods = measure_imprag(experiment, model, states)
        result = measured(experiment, answers, ranking, likelihoods, 0)
        file.write_text(json.dumps(result | {"bytes": states.bytes}), encoding="utf-8")


# --- the tables

MAIN = ("base", "tuned", "ra-it", "imprag:both", "imprag:warm-up", "imprag:distillation", "ra-dit-llama", "ra-dit")
BOUNDARIES = ("imprag:warm-up", *(f"imprag:warm-up:b={b},t={t}" for b, t in SWEEP))
ENCODINGS = ("imprag:warm-up", *(f"imprag:warm-up:{encoding}" for encoding in ("independent", "segmented")))


def load(output: Path, name: str) -> list[dict[str, Any]]:
    """Return the finished runs of a row by seed."""
    files = sorted((output / "results").glob(f"{name.replace(':', '+')}@*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def perplexity(run: dict[str, Any], reading: str) -> float | None:
    """Return the perplexity of the gold answers' tokens, EOS included."""
    values = run["log_likelihood"].get(reading)
    return None if values is None else math.exp(-sum(values) / sum(run["tokens"]))


def mean(runs: list[dict[str, Any]], score: Any) -> str:
    """Return the mean over seeds, with the range if there are several."""
    values = [value for run in runs if (value := score(run)) is not None]
    if not values:
        return "-"
    digits = 1 if max(values) >= 1 else 3
    span = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.{digits}f}{span}"


def table(output: Path, names: Sequence[str]) -> str:
    """Return a Markdown table with one row per finished run."""
    head = "| run | seeds | EM % | F1 % | recall@2 % | recall@10 % | median rank of gold | ppl gold | ppl retrieved | ppl random |"
    lines = [head, "|" + " --- |" * 10]

    def share(key: str) -> Any:
        return lambda run: 100 * float(np.mean(run[key])) if key in run else None

    for name in names:
        runs = load(output, name)
        if runs:
            cells = [mean(runs, share(key)) for key in ("exact_match", "f1", "recall_at_2", "recall_at_10")]
            cells.append(mean(runs, lambda run: float(np.median(run["gold_rank"])) if "gold_rank" in run else None))
            for reading in ("gold", "retrieved", "random"):
                cells.append(mean(runs, lambda run, reading=reading: perplexity(run, reading)))
            if "none" in runs[0]["log_likelihood"]:
                cells[-3:] = ["", mean(runs, lambda run: perplexity(run, "none")) + " (no passages)", ""]
            lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparisons(output: Path) -> str:
    """Return a paired bootstrap over questions, with each question's value averaged over the seeds of both runs."""
    pairs = (
        ("imprag:warm-up", "imprag:both"),
        ("imprag:warm-up:independent", "imprag:warm-up"),
        ("imprag:warm-up:segmented", "imprag:warm-up"),
        ("imprag:distillation", "imprag:both"),
        *((a, b) for a in ("ra-it", "ra-dit-llama", "ra-dit") for b in ("imprag:warm-up", "imprag:both")),
        ("ra-it", "ra-dit-llama"),
    )
    lines = [
        "| a | b | F1 % b - a | log-likelihood per token b - a (retrieved) | recall@2 % b - a |",
        "|" + " --- |" * 5,
    ]
    for a, b in pairs:
        runs = list(zip(load(output, a), load(output, b), strict=False))
        if not runs:
            continue
        cells = []
        for value in (
            lambda run: 100 * np.array(run["f1"]),
            lambda run: np.array(run["log_likelihood"]["retrieved"]) / np.array(run["tokens"]),
            lambda run: 100 * np.array(run["recall_at_2"]),
        ):
            ends = (np.mean([value(pair[side]) for pair in runs], axis=0) for side in (0, 1))
            cells.append(str(paired_bootstrap(*ends)))
        lines.append(f"| {a} | {b} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that contains squad/")
    parser.add_argument("--output", type=Path, default=Path("outputs/imprag-benchmark"))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument(
        "--retrieval-steps", type=int, default=160, help="steps of 64 questions in each retrieval round before training"
    )
    parser.add_argument(
        "--retrieval-rounds",
        type=int,
        default=2,
        help="retrieval rounds, each with a learning rate that decays to zero",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", nargs="+", help="rows to run, such as imprag:both (default: all)")
    parser.add_argument("--report", action="store_true", help="only print the tables of the finished runs")
    options = parser.parse_args()
    if not options.report:
        transformers_logging.set_verbosity_error()
        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(LM)
        train = read(options.data, "train", None, None)
        dev = read(options.data, "dev", DEV_QUESTIONS, DEV_PASSAGES)
        sizes = f"{len(train.prompts)} training questions over {len(train.passages)} passages"
        print(f"{sizes}, {len(dev.prompts)} test questions over {len(dev.passages)} passages", flush=True)
        experiment = Experiment(
            train, dev, tokenizer, options.output, options.steps, options.retrieval_steps, options.retrieval_rounds
        )
        (options.output / "results").mkdir(parents=True, exist_ok=True)
        jobs = [(name, 0) for name in dict.fromkeys((*MAIN, *ENCODINGS, "stored", *BOUNDARIES))]
        jobs += [(name, seed) for seed in range(1, options.seeds) for name in MAIN[1:]]
        if options.runs:
            jobs = [(name, seed) for name in options.runs for seed in range(options.seeds)]
        for name, seed in jobs:
            file = options.output / "results" / f"{name.replace(':', '+')}@{seed}.json"
            if name == "stored":
                run_stored(experiment, seed)
            elif not file.is_file():
                result = run(experiment, name, seed)
                file.write_text(json.dumps(result), encoding="utf-8")
                used = resource.getrusage(resource.RUSAGE_SELF)
                print(f"{name} seed {seed}: {used.ru_utime + used.ru_stime:.0f} CPU seconds so far", flush=True)
    stored = ("imprag:warm-up:independent", "stored")
    for title, names in (("Main", MAIN), ("Boundaries", BOUNDARIES), ("Encodings", ENCODINGS), ("Stored", stored)):
        print(f"\n{title}\n\n{table(options.output, names)}")
    for run_ in load(options.output, "stored"):
        print(f"stored: {run_['bytes'] / 1e6:.2f} MB")
    print(f"\nPaired\n\n{comparisons(options.output)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
