"""NV-Embed's ablations with a small backbone: pooling and mask, stages, negatives, and pairs made of classes.

All rows of the tables are trained with the same number of steps, batch size and seeds, and measured on the same tasks
(`nvembed_scores.py`). Finished runs are kept in --output, so an interrupted script continues when it is run again;
--report only prints the tables of the finished runs.

    python benchmarks/nvembed_ablations.py --data path/to/data --output outputs/nvembed-ablations
"""

import argparse
import json
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from nvembed_scores import Scores, encode, load_tasks, passage_text, read, score
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.data.mixture.mixture import load_mixture
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.modeling import NVEmbedModel
from revela_hub.retrieval.mining.mining import MiningSettings, mine_negatives
from revela_hub.trainers.nvembed.arguments import NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.export import export_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.trainer import NVEmbedTrainer

REPOSITORY = Path(__file__).resolve().parents[1]
INSTRUCTIONS = {
    "medquad": "Given a medical question, retrieve passages that answer the question",
    "squad": "Given a question, retrieve passages that answer the question",
    "scifact": "Given a scientific claim, retrieve documents that support or refute the claim",
    "cosqa": "Given a web search query, retrieve Python functions that answer it",
    "stsb": "Retrieve semantically similar text",
    "banking77": "Given an online banking query, find queries with the same intent",
}
Stage = Literal["one", "two", "all, in-batch negatives on", "all, in-batch negatives off"]


@dataclass(frozen=True)
class Variant:
    """A row of the tables.

    Attributes:
        stages: training stages in order. "one" trains on retrieval with in-batch negatives, "two" on all tasks without
            them; "all" trains on all tasks at once, with as many steps as both stages together.
        pooling: pooling of the model.
        mask: attention mask.
        negatives: "mined" by a retriever, or "random".
        mode: how pairs are made of classes.
    """

    stages: tuple[Stage, ...] = ("one", "two")
    pooling: Literal["latent", "mean", "eos", "self_attention"] = "latent"
    mask: Literal["bidirectional", "causal"] = "bidirectional"
    negatives: Literal["mined", "random"] = "mined"
    mode: Literal["example", "label"] = "example"

    def key(self, seed: int, updates: int) -> str:
        """Return the name of the row's folder."""
        mode = "example" if self.stages == ("one",) else self.mode  # stage one has no classes
        parts = [*self.stages, self.pooling, self.mask, self.negatives, mode, str(updates), str(seed)]
        return "-".join(parts).replace(", in-batch negatives ", "-").replace(" ", "-")


@dataclass(frozen=True)
class Setting:
    """Settings that all runs share."""

    data: Path
    output: Path
    backbone: Path
    teacher: str | None
    updates: int
    batch_size: int
    max_length: int
    learning_rate: float
    latents: int


FULL = Variant()
STAGES = {
    "stage one": replace(FULL, stages=("one",)),
    "stage one, then two": FULL,
    "two, then one (reversed)": replace(FULL, stages=("two", "one")),
    "all at once, in-batch negatives on": replace(FULL, stages=("all, in-batch negatives on",)),
    "all at once, in-batch negatives off": replace(FULL, stages=("all, in-batch negatives off",)),
}
NEGATIVES = {"mined": FULL, "random": replace(FULL, negatives="random")}
MODES = {"example": FULL, "label": replace(FULL, mode="label")}
POOLINGS = {
    f"{pooling}, {mask}": replace(FULL, stages=("one",), pooling=pooling, mask=mask)
    for pooling in ("mean", "latent", "eos", "self_attention")
    for mask in ("bidirectional", "causal")
}
TABLES = {
    "Stages": STAGES,
    "Negatives, both stages": NEGATIVES,
    "Pairs of classes, both stages": MODES,
    "Pooling and mask, stage one": POOLINGS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with medquad, squad, cosqa, beir, stsb, banking77"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/nvembed-ablations"))
    parser.add_argument("--backbone", type=Path, default=REPOSITORY / "examples" / "quickstart" / "lm")
    parser.add_argument("--teacher", help="retriever that mines the negatives (default: BM25)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=60, help="steps per stage")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--latents", type=int, default=64)
    parser.add_argument("--report", action="store_true", help="only print the tables of the finished runs")
    options = vars(parser.parse_args())
    seeds, report_only = options.pop("seeds"), options.pop("report")
    setting = Setting(**options)
    setting.output.mkdir(parents=True, exist_ok=True)
    if not report_only:
        transformers_logging.set_verbosity_error()
        runner = Runner(setting)
        # The last table takes longest, so it comes after all seeds of the others.
        for tables in (list(TABLES.values())[:-1], [POOLINGS]):
            for seed in seeds:
                for variant in (variant for table in tables for variant in table.values()):
                    runner.run(variant, seed)
    print_report(setting, seeds)


class Runner:
    """Trains and evaluates each variant once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tasks = load_tasks(setting.data)
        self.prompts = {name: query_prompt(text) for name, text in INSTRUCTIONS.items()}
        self.mined = setting.output / "mined"
        self.tokenizer = with_eos(AutoTokenizer.from_pretrained(setting.backbone))
        self._mine()

    def run(self, variant: Variant, seed: int) -> None:
        """Train the stages of the variant that are missing, and write its scores."""
        file = self._folder(variant, seed) / "scores.json"
        if file.is_file():
            return
        before = replace(variant, stages=variant.stages[:-1])
        if before.stages:
            self.run(before, seed)
        start = self._folder(before, seed) / "model" if before.stages else None
        began = time.perf_counter()
        torch.manual_seed(seed)
        encoder = self._train(variant, seed, start)
        seconds = time.perf_counter() - began
        encoder.eval()
        scores = score(encoder, self.tasks, self.prompts)
        file.write_text(json.dumps(scores._asdict() | {"seconds": seconds}) + "\n", encoding="utf-8")
        print(f"{variant.key(seed, self.setting.updates)}: {scores}, {seconds:.0f} s of training", flush=True)

    def _train(self, variant: Variant, seed: int, start: Path | None) -> SentenceTransformer:
        setting, stage = self.setting, variant.stages[-1]
        if start is None:
            model = NVEmbedModel.from_backbone(
                str(setting.backbone), pooling=variant.pooling, mask=variant.mask, num_latents=setting.latents
            )
        else:
            model = NVEmbedModel.from_pretrained(start)
        encoder = nvembed_encoder(
            model, self.tokenizer, max_length=setting.max_length, prompts={"query": "", "document": ""}
        )
        folder = self._folder(variant, seed)
        arguments = NVEmbedTrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=setting.updates * (2 if stage.startswith("all") else 1),
            per_device_train_batch_size=setting.batch_size,
            mini_batch_size=3 * setting.batch_size,  # all texts of a batch in one forward pass
            learning_rate=setting.learning_rate,
            warmup_steps=10,
            lora_rank=0,
            in_batch_negatives=stage in ("one", "all, in-batch negatives on"),
            seed=seed,
            save_strategy="no",
            report_to="none",
            logging_steps=25,
        )
        dataset = load_mixture(
            self._mixture(variant), num_negatives=1, seed=seed, stage=1 if stage == "one" else 2
        ).dataset
        NVEmbedTrainer(encoder, arguments, train_dataset=dataset).train()
        export_nvembed(
            model,
            self.tokenizer,
            folder / "model",
            max_length=setting.max_length,
            prompts={"query": "", "document": ""},
        )
        shutil.rmtree(folder / "run", ignore_errors=True)
        return encoder

    def _folder(self, variant: Variant, seed: int) -> Path:
        return self.setting.output / variant.key(seed, self.setting.updates)

    def _mixture(self, variant: Variant) -> dict[str, Any]:
        """Return the tasks of the blend. A task's weight is its number of rows after `max_samples`."""
        root, most = self.setting.data, {"medquad": 4000, "squad": 4000, "scifact": None, "cosqa": None}
        tasks: list[dict[str, Any]] = []
        for name, limit in most.items():
            source = self.mined / f"{name}-{variant.negatives}.jsonl"
            tasks.append({"name": name, "type": "retrieval", "source": str(source.resolve()), "max_samples": limit})
        tasks.append({"name": "stsb", "type": "sts", "source": str(root / "stsb" / "train.jsonl"), "max_samples": 2000})
        tasks.append(
            {
                "name": "banking77",
                "type": "classification",
                "source": str(root / "banking77" / "train.jsonl"),
                "columns": {"label": "label_name"},
                "mode": variant.mode,
                "max_samples": 4000,
            }
        )
        return {"tasks": [task | {"instruction": INSTRUCTIONS[task["name"]]} for task in tasks]}

    def _mine(self) -> None:
        """Write the pairs of each task with a mined negative, and the same pairs with a random one."""
        if (self.mined / "done").is_file():
            return
        self.mined.mkdir(exist_ok=True)
        ranker: Any = "bm25"
        if self.setting.teacher:
            ranker = _Teacher(self.setting.teacher, self.setting.max_length)
        for name, (pairs, corpus) in training_pairs(self.setting.data).items():
            found = mine_negatives(
                [anchor for anchor, _ in pairs],
                [positive for _, positive in pairs],
                corpus,
                ranker,
                MiningSettings(num_negatives=1, relative_margin=0.05, range_max=50, sampling="random"),
            )
            print(f"{name}\n{found.report}", flush=True)
            found.dataset.to_json(self.mined / f"{name}-mined.jsonl")
            drawn = torch.randint(len(corpus), (len(found.dataset),), generator=torch.Generator().manual_seed(0))
            rows = [row | {"negative_1": corpus[int(at)]} for row, at in zip(found.dataset, drawn, strict=True)]
            Dataset.from_list(rows).to_json(self.mined / f"{name}-random.jsonl")
        (self.mined / "done").touch()


class _Teacher:
    """Return the retriever for mining, in bf16 where that is fast."""

    def __init__(self, name: str, max_length: int) -> None:
        self.model = SentenceTransformer(name)
        self.model.max_seq_length = max_length

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        return encode(self.model, texts, "", **options)

    encode_document = encode_query


def training_pairs(data: Path) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """Return the (query, passage) pairs and the corpus of each retrieval task."""
    found = {}
    for name in ("medquad", "squad"):
        passages = {row["_id"]: passage_text(row) for row in read(data / name / "passages.jsonl.gz")}
        rows = read(data / name / "train.jsonl.gz")[:8000]
        found[name] = ([(row["question"], passages[row["passage_id"]]) for row in rows], list(passages.values()))
    scifact = data / "beir" / "scifact"
    abstracts = {row["_id"]: passage_text(row) for row in read(scifact / "corpus.jsonl.gz")}
    claims = {row["_id"]: row["text"] for row in read(scifact / "queries.jsonl")}
    judged = read(scifact / "qrels" / "train.tsv")
    pairs = [(claims[row["query-id"]], abstracts[row["corpus-id"]]) for row in judged if int(row["score"]) > 0]
    found["scifact"] = (pairs, list(abstracts.values()))
    rows = [row for row in read(data / "cosqa" / "labelled_pairs.jsonl.gz") if row["label"] == 1]
    functions = [passage_text(row) for row in read(data / "cosqa" / "corpus.jsonl.gz")]
    found["cosqa"] = ([(row["query"], row["code"]) for row in rows], functions)
    return found


def print_report(setting: Setting, seeds: list[int]) -> None:
    """Print the tables: mean and standard deviation over the finished seeds."""
    print(f"\n{torch.get_num_threads()} CPU threads, torch {torch.__version__}; settings: ", end="")
    shown = {key: value for key, value in asdict(setting).items() if isinstance(value, int | float)}
    print(", ".join(f"{key} {value}" for key, value in shown.items()))
    columns = ("retrieval", *Scores._fields)
    for title, variants in TABLES.items():
        print(f"\n{title}:\n\n| | {' | '.join(columns)} | seeds |\n|---|{'---|' * (len(columns) + 1)}")
        for name, variant in variants.items():
            files = [setting.output / variant.key(seed, setting.updates) / "scores.json" for seed in seeds]
            found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
            scores = [Scores(*(values[field] for field in Scores._fields)) for values in found]
            cells = [_cell([getattr(entry, column) for entry in scores]) for column in columns]
            print(f"| {name} | {' | '.join(cells)} | {len(scores)} |")


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
