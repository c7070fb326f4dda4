"""NV-Embed's ablations with a small backbone: pooling and mask, stages, negatives, and pairs made of classes.

All rows of the tables are trained with the same number of steps, batch size and seeds, and measured on the same tasks
(`nvembed_scores.py`). Finished runs are kept in --output, so an interrupted script continues when it is run again.
Variants of one seed are compared with a paired bootstrap over the queries, pairs and texts. --report only prints the
tables of the finished runs.

    python benchmarks/nvembed_ablations.py --data $REVELA_HUB_DATA --output outputs/nvembed-ablations
"""

import json
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nvembed_data import INSTRUCTIONS, Mining, mine, mixture, option
from nvembed_scores import Scores, Sizes, difference, load_tasks, score
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging as transformers_logging

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.data.mixture.mixture import load_mixture
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.modeling import NVEmbedModel
from revela_hub.trainers.nvembed.checkpoint import export_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.data import NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.trainer import NVEmbedTrainer

REPOSITORY = Path(__file__).resolve().parents[1]
Stage = Literal["one", "two", "all, in-batch negatives on", "all, in-batch negatives off"]


@dataclass(frozen=True)
class Variant:
    """A row of the tables.

    Attributes:
        stages: training stages in order. "one" trains on retrieval with in-batch negatives, "two" on all tasks without
            them; "all" trains on all tasks at once, with as many steps as both stages together. Without stages, the
            backbone is only evaluated.
        pooling: pooling of the model.
        mask: attention mask.
        negatives: "mined" by a retriever, "random", or "random first": random in stage one, then mined.
        mode: how pairs are made of classes.
    """

    stages: tuple[Stage, ...] = ("one", "two")
    pooling: Literal["latent", "mean", "eos", "self_attention"] = "latent"
    mask: Literal["bidirectional", "causal"] = "bidirectional"
    negatives: Literal["mined", "random", "random first"] = "mined"
    mode: Literal["example", "label"] = "example"

    @property
    def before(self) -> "Variant":
        """The row without its last stage."""
        return replace(self, stages=self.stages[:-1], negatives=self.negatives.removesuffix(" first"))

    def key(self, seed: int, updates: int) -> str:
        """Return the name of the row's folder."""
        mode = self.mode if set(self.stages) - {"one"} else "example"  # stage one has no classes
        parts = [
            *(self.stages or ("untrained",)),
            self.pooling,
            self.mask,
            self.negatives,
            mode,
            str(updates),
            str(seed),
        ]
        return "-".join(parts).replace(", in-batch negatives ", "-").replace(" ", "-")


@dataclass
class Setting(Mining):
    """Settings that all runs share."""

    backbone: str = option(
        str(REPOSITORY / "examples" / "quickstart" / "lm"), "decoder to start from: folder or Hub id"
    )
    updates: int = option(60, "steps per stage")
    batch_size: int = option(16, "rows per step")
    learning_rate: float = option(3e-4, "peak learning rate")
    latents: int = option(64, "latents of the latent attention")
    lora_rank: int = option(0, "rank of LoRA adapters; 0 trains all weights")


@dataclass
class Chosen:
    """What to run."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "seeds"})
    variants: list[str] | None = option(None, "rows of the tables, such as 'mean, causal' (default: all)")
    report: bool = option(False, "only print the tables of the finished runs")


FULL = Variant()
STAGES = {
    "stage one": replace(FULL, stages=("one",)),
    "stage one, then two": FULL,
    "two, then one (reversed)": replace(FULL, stages=("two", "one")),
    "all at once, in-batch negatives on": replace(FULL, stages=("all, in-batch negatives on",)),
    "all at once, in-batch negatives off": replace(FULL, stages=("all, in-batch negatives off",)),
}
NEGATIVES = {
    f"{negatives}, {name}": replace(FULL, stages=stages, negatives=negatives)
    for name, stages in (("stage one", ("one",)), ("both stages", ("one", "two")))
    for negatives in ("mined", "random")
} | {
    "random, stage one, causal": replace(FULL, stages=("one",), mask="causal", negatives="random"),
    "random, then mined": replace(FULL, negatives="random first"),
}
MODES = {"example": FULL, "label": replace(FULL, mode="label")}
POOLINGS = {
    f"{pooling}, {mask}": replace(FULL, stages=("one",), pooling=pooling, mask=mask)
    for pooling in ("mean", "latent", "eos", "self_attention")
    for mask in ("bidirectional", "causal")
} | {f"untrained, mean, {mask}": Variant((), "mean", mask) for mask in ("bidirectional", "causal")}
TABLES = {
    "stages": ("Stages", STAGES),
    "negatives": ("Negatives", NEGATIVES),
    "classes": ("Pairs of classes, both stages", MODES),
    "pooling": ("Pooling and mask, stage one", POOLINGS),
}
# (table, a, b): the report compares b with a.
COMPARED = (
    *((POOLINGS, f"{pooling}, causal", f"{pooling}, bidirectional") for pooling in ("mean", "latent")),
    *((POOLINGS, f"mean, {mask}", f"latent, {mask}") for mask in ("bidirectional", "causal")),
    *((POOLINGS, f"untrained, mean, {mask}", f"mean, {mask}") for mask in ("bidirectional", "causal")),
    (STAGES, "stage one", "stage one, then two"),
    (STAGES, "two, then one (reversed)", "stage one, then two"),
    (NEGATIVES, "random, stage one", "random, both stages"),
    (NEGATIVES, "random, stage one", "random, then mined"),
    (NEGATIVES, "random, stage one, causal", "random, stage one"),
    *((NEGATIVES, f"random, {stages}", f"mined, {stages}") for stages in ("stage one", "both stages")),
    (MODES, "label", "example"),
)


def main() -> None:
    parser = HfArgumentParser((Setting, Sizes, Chosen), description=__doc__.split("\n\n")[0])
    setting, sizes, chosen = parser.parse_args_into_dataclasses()
    setting.output.mkdir(parents=True, exist_ok=True)
    named = {name: variant for _, table in TABLES.values() for name, variant in table.items()}
    if unknown := set(chosen.variants or ()) - named.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}. The rows: {'; '.join(named)}")
    if not chosen.report:
        transformers_logging.set_verbosity_error()
        runner = Runner(setting, sizes)
        for seed in chosen.seeds:
            for name in chosen.variants or named:
                runner.run(named[name], seed)
    print_report(setting, sizes, chosen.seeds)


class Runner:
    """Trains and evaluates each variant once."""

    def __init__(self, setting: Setting, sizes: Sizes) -> None:
        self.setting = setting
        self.tasks = load_tasks(setting.data, sizes)
        self.prompts = {name: query_prompt(text) for name, text in INSTRUCTIONS.items()}
        self.tokenizer = with_eos(AutoTokenizer.from_pretrained(setting.backbone))
        mine(setting)

    def run(self, variant: Variant, seed: int) -> None:
        """Train the stages of the variant that are missing, and write its scores."""
        file = self._folder(variant, seed) / "scores.json"
        if file.is_file():
            return
        before = variant.before
        if before.stages:
            self.run(before, seed)
        start = self._folder(before, seed) / "model" if before.stages else None
        file.parent.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        torch.manual_seed(seed)
        model = self._train(variant, seed, start) if variant.stages else self._model(variant, None)
        seconds = time.process_time() - began
        scores, items = score(self._encoder(model.eval()), self.tasks, self.prompts, batch_size=16)
        result = scores._asdict() | {"seconds": seconds, "items": items}
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")
        evaluation = time.process_time() - began - seconds
        name = variant.key(seed, self.setting.updates)
        print(f"{name}: {scores}, CPU time: {seconds:.0f} s training, {evaluation:.0f} s evaluation", flush=True)

    def _model(self, variant: Variant, start: Path | None) -> NVEmbedModel:
        if start is not None:
            return NVEmbedModel.from_pretrained(start)
        setting = self.setting
        shape: dict[str, Any] = {"pooling": variant.pooling, "mask": variant.mask, "num_latents": setting.latents}
        return NVEmbedModel.from_backbone(setting.backbone, **shape)

    def _encoder(self, model: NVEmbedModel) -> SentenceTransformer:
        prompts = {"query": "", "document": ""}
        return nvembed_encoder(model, self.tokenizer, max_length=self.setting.max_length, prompts=prompts)

    def _train(self, variant: Variant, seed: int, start: Path | None) -> NVEmbedModel:
        """Train the last stage, write the model, and return it with adapters merged."""
        setting, stage = self.setting, variant.stages[-1]
        folder = self._folder(variant, seed)
        arguments = NVEmbedTrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=setting.updates * (2 if stage.startswith("all") else 1),
            per_device_train_batch_size=setting.batch_size,
            mini_batch_size=3 * setting.batch_size,  # all texts of a batch in one forward pass
            learning_rate=setting.learning_rate,
            warmup_steps=10,
            lora_rank=setting.lora_rank,
            lora_dropout=0.0,  # saves a seventh of the time on a CPU
            in_batch_negatives=stage in ("one", "all, in-batch negatives on"),
            seed=seed,
            save_strategy="no",
            report_to="none",
            logging_steps=25,
        )
        dataset = load_mixture(
            mixture(setting, "mined" if variant.negatives == "random first" else variant.negatives, variant.mode),
            num_negatives=1,
            seed=seed,
            stage=1 if stage == "one" else 2,
        ).dataset
        trainer = NVEmbedTrainer(self._encoder(self._model(variant, start)), arguments, train_dataset=dataset)
        trainer.train()
        model = trainer.exportable().model
        prompts = {"query": self.prompts["squad"], "document": ""} | self.prompts
        export_nvembed(model, self.tokenizer, folder / "model", max_length=setting.max_length, prompts=prompts)
        shutil.rmtree(folder / "run", ignore_errors=True)
        return model

    def _folder(self, variant: Variant, seed: int) -> Path:
        return self.setting.output / variant.key(seed, self.setting.updates)


def print_report(setting: Setting, sizes: Sizes, seeds: list[int]) -> None:
    """Print the tables: mean and standard deviation over the finished seeds, and the paired comparisons of the first."""
    print(f"\n{torch.get_num_threads()} CPU threads, torch {torch.__version__}; settings: ", end="")
    shown = {key: value for key, value in (asdict(setting) | asdict(sizes)).items() if isinstance(value, int | float)}
    print(", ".join(f"{key} {value}" for key, value in shown.items()))
    columns = ("retrieval", *Scores._fields)

    def results(variant: Variant, seeds: list[int] = seeds) -> list[dict[str, Any]]:
        files = [setting.output / variant.key(seed, setting.updates) / "scores.json" for seed in seeds]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]

    for title, variants in TABLES.values():
        rows = []
        for name, variant in variants.items():
            scores = [Scores(*(values[field] for field in Scores._fields)) for values in results(variant)]
            if scores:
                cells = [_cell([getattr(entry, column) for entry in scores]) for column in columns]
                rows.append(f"| {name} | {' | '.join(cells)} | {len(scores)} |")
        if rows:
            print(f"\n{title}:\n\n| | {' | '.join(columns)} | seeds |\n|---|{'---|' * (len(columns) + 1)}")
            print("\n".join(rows))
    print(f"\nDifferences, seed {seeds[0]}:\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for table, a, b in COMPARED:
        pair = [values[0].get("items") for name in (a, b) if (values := results(table[name], seeds[:1]))]
        if len(pair) == 2 and all(pair):
            print(f"| {b}, against {a} | {' | '.join(difference(*pair, column) for column in columns)} |")


def _cell(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
