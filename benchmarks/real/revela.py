"""Compare Revela, REPLUG and Contriever on a real language model, from the same start and with the same CPU time.

Retriever and language model are both SmolLM2-135M-Instruct (mean pooling, all weights, float32 or --bf16 autocast), trained on Wikipedia. Each
arm is trained by the package's own trainer for `--minutes` of CPU time. At the start and at a few points in between, nDCG@10
is measured on samples of four tasks (benchmarks/domains.py); evaluation and checkpoints do not count towards the time. Records,
checkpoints and trained retrievers are kept in --work: repeating the command skips finished arms, resumes interrupted ones from
their last point, and continues finished ones if --minutes has grown.

    python benchmarks/real/revela.py --data $REVELA_HUB_DATA --work outputs/real
    python benchmarks/real/revela_report.py --work outputs/real

On a GPU (`--device cuda`) the time is the wall-clock time of the training steps, in bf16 autocast.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

REPOSITORY = Path(__file__).resolve().parents[2]
DOMAINS = ("scifact", "squad", "cosqa", "stdlib")
QUERIES, PASSAGES, EVALUATION_TOKENS = 120, 200, 64
POINTS = (7.5, 15, 30, 60, 90, 120, 180, 240)
TEMPERATURE = 0.05
METRIC = "ndcg_at_10"
Record = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass
class Arm:
    """A method and its learning rate.

    `paper` is added reading at the paper's temperature, `both` adds Contriever's loss to `joint`. `_query` compares the first half of
    each chunk with the whole others, the other Revela arms whole chunks with each other. `contriever_paper` is the baseline of Revela's
    paper: LoRA, the last token (EOS), prompts, crops and inverse cloze, temperature 0.01; `revela_paper` is Revela in its authors'
    form: the same, with the query side, temperature 1e-4 and cosines in bf16.
    """

    method: str
    rate: float

    @property
    def name(self) -> str:
        """Name in the records and on the command line."""
        return f"{self.method}-{self.rate:.0e}".replace("e-0", "e-")


ARMS = {
    arm.name: arm
    for arm in (
        Arm("contriever", 2e-5),
        Arm("added", 2e-5),
        Arm("replug", 2e-5),
        Arm("joint", 2e-5),
        Arm("joint", 5e-5),
        Arm("contriever", 5e-5),
        Arm("added", 5e-5),
        Arm("joint", 1e-4),
        Arm("contriever", 1e-4),
        Arm("replug", 1e-4),
        Arm("added", 1e-4),
        Arm("paper", 1e-4),
        Arm("both", 1e-4),
        Arm("joint_query", 1e-4),
        Arm("added_query", 1e-4),
        Arm("contriever_paper", 1e-4),
        Arm("revela_paper", 1e-4),
    )
}


class Records:
    """The records of one arm: a JSON line for each point, and the CPU time at the last checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file, self.clock = file, file.with_suffix(".clock.json")
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.rows: list[Record] = [json.loads(line) for line in lines]

    def keep_until(self, step: int) -> float:
        """Drop the records after the checkpoint's step, whose weights were not saved. Return the CPU time at that step."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._write()
        saved = json.loads(self.clock.read_text()) if self.clock.exists() else {}
        return max(self.seconds, float(saved.get(str(step), 0.0)))

    def save_clock(self, step: int, seconds: float) -> None:
        """Keep the CPU time at a checkpoint, which a signal may cause between two points."""
        self.clock.write_text(json.dumps({step: round(seconds, 1)}))

    def add(self, row: Record) -> None:
        """Append a record."""
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        part.replace(self.file)

    @property
    def seconds(self) -> float:
        """CPU time of the training until the last record."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


class Judge:
    """Evaluates a retriever on the samples of the four tasks."""

    def __init__(self, given: argparse.Namespace, start: Path) -> None:
        from domains import load_domain

        self.device = given.device
        self.model = SentenceTransformer(str(start), device=given.device, model_kwargs={"dtype": torch.float32})
        self.model.max_seq_length = EVALUATION_TOKENS
        size = {"queries": given.queries, "passages": given.passages}
        self.tasks = {name: load_domain(name, given.data, given.work, **size).task for name in given.domains}

    def scores(self, weights: Weights | Path | None = None) -> dict[str, dict[str, float]]:
        """Return each query's nDCG@10, with the start's weights, the given ones, or of the model in a folder."""
        from revela_hub.evaluation import evaluate_retrieval

        model = self.model
        if isinstance(weights, Path):
            model = SentenceTransformer(str(weights), device=self.device, model_kwargs={"dtype": torch.float32})
            model.max_seq_length = EVALUATION_TOKENS
        elif weights is not None:
            transformer: Any = self.model[0]
            transformer.auto_model.load_state_dict(weights)
        model.eval()
        found = {name: evaluate_retrieval(model, task) for name, task in self.tasks.items()}
        return {name: {q: round(s, 5) for q, s in each.per_query[METRIC].items()} for name, each in found.items()}


class Timed(TrainerCallback):
    """Counts the time of the training, evaluates and saves at each point, and stops at the last."""

    def __init__(
        self,
        records: Records,
        judge: Judge,
        weights: Callable[[], Weights | Path],
        given: argparse.Namespace,
        spent: float,
    ) -> None:
        self.records, self.judge, self.weights = records, judge, weights
        self.points = [60 * point for point in (*(p for p in given.points if p < given.minutes), given.minutes)]
        self.clock = CLOCKS[given.device]
        self.spent, self.mark = spent, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock. After a kill, the checkpoint may be later than the last record: its steps took the mean time."""
        if self.records.rows and (last := self.records.rows[-1]["step"]):
            self.spent += (state.global_step - last) * self.spent / last
        self.mark = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate if a point has been passed."""
        now = self.clock()
        self.spent, self.mark = self.spent + now - self.mark, now
        due = [point for point in self.points if self.records.seconds < point <= self.spent]
        if state.global_step in (1, 2, 5) or state.global_step % 20 == 0:
            print(f"  step {state.global_step}: {self.spent:.0f} s {last_log(state)}", flush=True)
        if due:
            scores = self.judge.scores(self.weights())
            seconds = self.clock() - now
            row = {"step": state.global_step, "seconds": round(self.spent, 1), "evaluation": round(seconds, 1)}
            self.records.add(row | {"log": last_log(state), "scores": scores})
            print(f"  {self.spent / 60:.1f} min, {means(scores)}; evaluated in {seconds:.0f} s", flush=True)
            control.should_save = True
            control.should_training_stop = self.spent >= self.points[-1]
            self.mark = self.clock()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do not count the time of the checkpoint."""
        self.records.save_clock(state.global_step, self.spent)
        self.mark = self.clock()


def gpu_time() -> float:
    """Return the wall-clock time in seconds at which the GPU has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "cuda": gpu_time}


def last_log(state: Any) -> Record:
    """Return what the trainer logged last."""
    logged = [row for row in state.log_history if "loss" in row]
    return {k: float(f"{v:.4g}") for k, v in logged[-1].items() if isinstance(v, float)} if logged else {}


def means(scores: dict[str, dict[str, float]]) -> str:
    """Return the mean score of each task in one line."""
    return ", ".join(f"{name} {sum(each.values()) / len(each):.3f}" for name, each in scores.items())


def smollm2(work: Path) -> Path:
    """Return a folder with SmolLM2's weights and tokenizer, dequantised once; in `--work`, which keeps its name short."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from smollm2 import convert

    return convert(work / "SmolLM2-135M-Instruct")


def starting_point(given: argparse.Namespace) -> Path:
    """Return the folder of the retriever that all arms start from: `--start`, or SmolLM2 with mean pooling."""
    from revela_hub.trainers.base.retriever import load_retriever

    folder: Path = given.start or given.work / "start"
    if not (folder / "modules.json").exists():
        load_retriever(str(smollm2(given.work)), max_length=given.tokens).save_pretrained(str(folder))
    return folder


def prepared(given: argparse.Namespace, name: str) -> Dataset:
    """Return groups of chunks, or passages, of the Wikipedia articles in `--parts` of four files, in a fixed order."""
    from revela_hub.data import GroupSettings, build_groups
    from revela_hub.data.text.passages import build_passages

    folder = given.work / name
    if not folder.exists():
        source = [str(given.data / "text" / "wikipedia" / f"part-0{n}.jsonl.gz") for n in range(given.parts)]
        settings = GroupSettings(group_size=given.group, max_words=given.words)
        rows = build_groups(source, settings) if name == "groups" else build_passages(source, max_words=given.words)
        rows.shuffle(seed=0).select(range(min(len(rows), 24_000))).save_to_disk(str(folder))
    return load_from_disk(str(folder))


def trainer_of(arm: Arm, given: argparse.Namespace, folder: Path) -> tuple[Any, Callable[[], Weights | Path]]:
    """Return the product's trainer for an arm, and a function that returns the retriever's weights."""
    start, lm = starting_point(given), smollm2(given.work)
    rows = prepared(given, "passages" if arm.method.startswith("contriever") else "groups")
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "learning_rate": arm.rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "max_steps": given.max_steps,
        "gradient_accumulation_steps": 1,
        "logging_steps": 10,
        "save_strategy": "no",
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "quiet": True,
        "use_cpu": given.device == "cpu",
        "bf16": given.bf16 or given.device == "cuda",
        "seed": given.seed,
    }
    if arm.method == "contriever_paper":
        return contriever_paper(common, folder, str(lm), rows, given)
    if arm.method == "revela_paper":
        return revela_paper(common, folder, str(lm), rows, given)
    if arm.method not in ("contriever", "replug"):
        return revela(arm, common, str(start), str(lm), rows, given.tokens)
    retriever = SentenceTransformer(str(start), device=given.device, model_kwargs={"dtype": torch.float32})
    trainer: Any
    if arm.method == "contriever":
        from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments

        arguments = ContrieverTrainingArguments(
            **common, per_device_train_batch_size=given.batch, temperature=TEMPERATURE
        )
        trainer = ContrieverTrainer(retriever, arguments, train_dataset=rows)
    else:
        from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments

        both = {"temperature": TEMPERATURE, "lm_temperature": TEMPERATURE}
        options: dict[str, Any] = {"max_length": given.tokens, "train_dataset": rows}
        trainer = ReplugTrainer(retriever, ReplugTrainingArguments(**common, **both), lm=str(lm), **options)
    return trainer, lambda: trainer.retriever[0].auto_model.state_dict()


PROMPTS = {"query": "Query: ", "document": "Passage: "}
LORA = {"lora_rank": 256, "lora_alpha": 64, "lora_dropout": 0.1}


def revela_paper(
    common: dict[str, Any], folder: Path, lm: str, rows: Dataset, given: argparse.Namespace
) -> tuple[Any, Callable[[], Weights | Path]]:
    """Return the trainer of Revela in its authors' form, and a function that exports the retriever."""
    from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments

    config = {"temperature": 1e-4, "similarity_dtype": "bfloat16", "v_normalization": True, "prompts": PROMPTS}
    config |= {"similarity_sides": "query_passage", "similarity_span": "first_half", "pooling": "last"}
    trainer: Any = RevelaTrainer(
        lm,
        RevelaTrainingArguments(**common, **LORA),
        lm=lm,
        max_length=given.tokens,
        model_init_kwargs=config,
        train_dataset=rows,
    )
    return trainer, lambda: trainer.write_models(folder / "exported")[0]


def contriever_paper(
    common: dict[str, Any], folder: Path, lm: str, rows: Dataset, given: argparse.Namespace
) -> tuple[Any, Callable[[], Weights | Path]]:
    """Return the trainer of Contriever in the form of Revela's paper (appendix C.1), and a function that exports the retriever."""
    from revela_hub.trainers.base.retriever import load_retriever
    from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments

    retriever = load_retriever(lm, max_length=given.tokens, pooling="last", prompts=PROMPTS)
    batch = given.batch
    arguments = ContrieverTrainingArguments(
        **common, **LORA, per_device_train_batch_size=batch, temperature=0.01, views="both"
    )
    trainer: Any = ContrieverTrainer(retriever, arguments, train_dataset=rows)
    return trainer, lambda: trainer.write_models(folder / "exported")[0]


def revela(
    arm: Arm, common: dict[str, Any], start: str, lm: str, rows: Dataset, tokens: int
) -> tuple[Any, Callable[[], Weights | Path]]:
    """Return Revela's trainer: `added` reading as in the paper, at its temperature or ours, or `joint` with a frozen language model."""
    from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments

    joint = arm.method.startswith("joint") or arm.method == "both"
    temperature = 1e-4 if arm.method == "paper" else TEMPERATURE
    config: dict[str, Any] = {"temperature": temperature, "v_normalization": True}
    training = dict(common)
    if joint:
        config = {"temperature": TEMPERATURE, "reading": "joint"}
        training["lm_training"] = "frozen"
    if arm.method.endswith("_query"):
        config |= {"similarity_sides": "query_passage", "similarity_span": "first_half"}
    trainer: Any = (with_crops(RevelaTrainer) if arm.method == "both" else RevelaTrainer)(
        start,
        RevelaTrainingArguments(**training, lora_rank=0),
        lm=lm,
        max_length=tokens,
        model_init_kwargs=config,
        train_dataset=rows,
    )
    return trainer, lambda: trainer.revela.retriever.state_dict()


def with_crops(trainer: type[Any]) -> type[Any]:
    """Return a trainer whose loss is the sum of Revela's and Contriever's (in-batch negatives, two crops of each chunk's tokens)."""

    class Both(trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            ids, mask = inputs["retriever_input_ids"], inputs["retriever_attention_mask"]
            texts = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True) if kept.sum() > 1]
            draw = random.Random(f"{self.args.seed}/{self.state.global_step}")
            first, second = (self.revela.embed(*crops(texts, draw)) for _ in range(2))
            loss = torch.nn.functional.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(texts)))
            own = super().compute_loss(model, inputs, *args, **kwargs)
            self.add_metric("contriever_loss", loss.detach())
            return own + loss

    return Both


def crops(texts: list[torch.Tensor], draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and the mask of a random crop of each text: 10 to 50% of its tokens, of which 10% are deleted."""
    rows = []
    for text in texts:
        length = max(1, round(len(text) * draw.uniform(0.1, 0.5)))
        place = draw.randrange(len(text) - length + 1)
        kept = [token for token in text[place : place + length].tolist() if draw.random() >= 0.1]
        rows.append(torch.tensor(kept or [int(text[place])]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)


def supported(arm: Arm) -> bool:
    """Return whether this version of the package has the arm's options."""
    from revela_hub.modeling import RevelaConfig
    from revela_hub.trainers import RevelaTrainingArguments

    reads = hasattr(RevelaConfig(), "reading") and hasattr(RevelaTrainingArguments, "lm_training")
    return arm.method not in ("joint", "both") or reads


def run(arm: Arm, given: argparse.Namespace, judge: Judge) -> None:
    """Train an arm for the rest of its time."""
    from transformers.trainer_utils import get_last_checkpoint

    records, folder = Records(given.work / f"{arm.name}.jsonl"), given.work / "runs" / arm.name
    folder.mkdir(parents=True, exist_ok=True)
    last = get_last_checkpoint(str(folder))
    spent = records.keep_until(int(last.rpartition("-")[2]) if last else -1)
    if records.seconds >= 60 * given.minutes:
        return
    print(f"{arm.name}: {'resumed from ' + last if last else 'from the start'}", flush=True)
    trainer, weights = trainer_of(arm, given, folder)
    trainer.add_callback(Timed(records, judge, weights, given, spent))
    trainer.train(resume_from_checkpoint=last)
    if given.device == "cuda":
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    trainer.write_models(given.work / "models" / arm.name)


def arms_of(given: argparse.Namespace) -> Iterator[Arm]:
    """Yield the chosen arms that this version of the package can run."""
    for name in given.arms:
        if supported(ARMS[name]):
            yield ARMS[name]
        else:
            print(f"{name}: skipped, this version of the package has no joint reading", flush=True)


def main() -> None:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with the data sets (REVELA_HUB_DATA).")
    parser.add_argument("--work", type=Path, default=Path("outputs/real"))
    parser.add_argument(
        "--minutes", type=float, default=30, help="CPU time of each arm's training; wall-clock time on a GPU."
    )
    parser.add_argument("--points", type=float, nargs="*", default=POINTS, help="Minutes after which to evaluate.")
    parser.add_argument("--max_steps", type=int, default=2000, help="Most steps of an arm.")
    parser.add_argument("--device", default="cpu", choices=CLOCKS)
    parser.add_argument("--start", type=Path, help="Retriever that all arms start from (default: SmolLM2).")
    parser.add_argument("--parts", type=int, default=1, help="Files of Wikipedia articles to train on, of four.")
    parser.add_argument("--group", type=int, default=8, help="Chunks of a group.")
    parser.add_argument("--words", type=int, default=45, help="Most words of a chunk or passage.")
    parser.add_argument("--tokens", type=int, default=80, help="Most tokens of a text in training.")
    # With the defaults, a step of Contriever takes about as long as one of Revela.
    parser.add_argument("--batch", type=int, default=12, help="Contriever's passages in a step.")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--passages", type=int, default=PASSAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="Train in bf16 autocast (CPUs with bf16 instructions).")
    given = parser.parse_args()
    torch.set_num_threads(1 if given.device == "cpu" else 4)
    given.work.mkdir(parents=True, exist_ok=True)
    judge = Judge(given, starting_point(given))
    first = Records(given.work / "start.jsonl")
    if not first.rows:
        clock = CLOCKS[given.device]
        began = clock()
        scores = judge.scores()
        first.add({"step": 0, "seconds": 0.0, "scores": scores})
        print(f"start: {means(scores)}; evaluated in {clock() - began:.0f} s", flush=True)
    for name in ("groups", "passages"):
        prepared(given, name)
    for arm in arms_of(given):
        run(arm, given, judge)


if __name__ == "__main__":
    main()
