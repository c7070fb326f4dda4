"""Compare ImpRAG with RA-IT, RA-DIT and variants on SQuAD, with the quickstart's language model or another decoder.

All rows of the tables see the same questions in the same batches, with the same number of steps and the same k passages
of at most l_max tokens. A small model must learn to retrieve before it learns to read: rows with a warm-up, and the
retriever of RA-DIT-Llama, start from a language model whose layers 0 to b were trained on the warm-up loss alone
(`--retrieval_rounds` times `--retrieval_steps` steps, trained once per seed and b). Self-distillation alone starts from
the language model unchanged. Finished runs are kept in --output, so an interrupted script continues when it is run
again; --report only prints the tables of the finished runs.

    python benchmarks/imprag.py --data $REVELA_HUB_DATA --output outputs/imprag-benchmark
    python benchmarks/imprag.py --output outputs/imprag-benchmark --report

Rows: `base` (untrained, no passages), `base:bm25` (untrained, passages in the prompt), `tuned` (no passages), `ra-it`,
`ra-dit`, `ra-dit-llama`, `imprag:untrained` (the language model as it is, reading through its own attention), and
imprag:STAGES[:b=1,t=4][:ENCODING] with the stages warm-up, distillation or both.
"""

import json
import math
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from imprag_measures import Questions, Test, measure_imprag, measure_pasted, read
from imprag_report import print_report
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from revela_hub.loading import bf16_is_fast
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.dense import ExactIndex
from revela_hub.trainers.baselines.ra_dit import (
    RADITTrainer,
    RADITTrainingArguments,
    decoder_retriever,
    reader_likelihoods,
)
from revela_hub.trainers.baselines.ra_it import RAITTrainer, RAITTrainingArguments, shortened
from revela_hub.trainers.imprag.data import ImpRAGTrainingArguments, padded, tokenize_passages
from revela_hub.trainers.imprag.retrieval import multi_label_nce
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# For RA-DIT's retrievers: at the readers' rate, equation 6 makes them collapse (recall@2 fell from 21.9 to 3.1).
RETRIEVER_LEARNING_RATES = {"ra-dit-llama": 1e-4, "ra-dit": 2e-5}
MAX_LENGTH = 96
WARM_UP = {"warm-up": 1.0, "distillation": 0.0, "both": 2 / 3}  # stages: fraction of the steps
READERS = ("base", "tuned", "ra-it")
IMPRAG = ("imprag:both", "imprag:warm-up", "imprag:distillation")
ENCODINGS = ("imprag:warm-up:independent", "imprag:warm-up:segmented")
BOUNDARIES = tuple(f"imprag:warm-up:b={b},t={t}" for b, t in ((1, 4), (3, 4), (2, 2), (2, 5)))
MAIN = (*READERS, *IMPRAG, "ra-dit-llama", "ra-dit")
NOT_SIZES = ("data", "output", "device", "seeds", "runs", "report")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Setting:
    """Options; the defaults suit the quickstart's language model of 7 M parameters and six layers."""

    data: Path | None = option(None, "folder that contains squad/")
    output: Path = option(Path("outputs/imprag-benchmark"), "folder of the results")
    backbone: str = option(str(EXAMPLES / "quickstart" / "lm"), "decoder: folder or Hub id")
    retriever: str = option(str(EXAMPLES / "quickstart" / "retriever"), "sentence-transformers model that RA-DIT tunes")
    b: int = option(2, "retrieval layer")
    t: int = option(4, "last reading layer")
    k: int = option(2, "passages to read")
    l_max: int = option(48, "tokens of a passage")
    max_words: int = option(24, "words of a passage")
    questions: int = option(160, "test questions")
    passages: int = option(400, "passages of the test articles")
    train_questions: int | None = option(None, "training questions, with their passages (default: all)")
    steps: int = option(48, "training steps of each row")
    batch: int = option(16, "questions per step")
    learning_rate: float = option(1e-3, "learning rate of readers and ImpRAG")
    lora_rank: int = option(0, "rank of their LoRA adapters; 0 trains all weights")
    retrieval_steps: int = option(160, "steps of each retrieval round before training")
    # Batches without the reader are cheap, and larger ones have more in-batch negatives.
    retrieval_batch: int = option(64, "questions per step of a retrieval round")
    retrieval_rounds: int = option(2, "retrieval rounds, each with a learning rate that decays to zero")
    retrieval_learning_rate: float = option(1e-3, "learning rate of the retrieval rounds")
    # A reader of 7 M parameters gives answers a hundredth of a large model's likelihood. At RA-DIT's 0.01 the softmax of
    # equation 4 is nearly uniform (1.26 of 1.39 nats over four candidates), so the retriever gets almost no signal.
    retrieval_only_steps: int = option(
        0, "first training steps of ImpRAG that train retrieval alone (the product's option)"
    )
    likelihood_temperature: float = option(1e-4, "temperature of RA-DIT's likelihoods")
    freeze_embeddings: bool = option(False, "keep the token embeddings in the retrieval rounds")
    device: str = option("cpu", "cpu or cuda")
    seeds: int = option(3, "number of seeds")
    runs: list[str] | None = option(None, "rows to run, such as imprag:both (default: all)")
    report: bool = option(False, "only print the tables of the finished runs")


@dataclass
class Experiment:
    """Data and settings that all runs share."""

    setting: Setting
    train: Questions
    test: Test

    def run_arguments(self, seed: int, **settings: Any) -> dict[str, Any]:
        """Return the training arguments that all trainers share."""
        given = self.setting
        return {
            "output_dir": str(given.output / "run"),
            "learning_rate": given.learning_rate,
            "warmup_steps": given.steps // 10,
            "max_steps": given.steps,
            "num_train_epochs": 1,
            "per_device_train_batch_size": given.batch,
            "save_strategy": "no",
            "logging_steps": 10,
            "report_to": "none",
            "bf16": False,
            "use_cpu": given.device == "cpu",
            "seed": seed,
            "disable_tqdm": True,
            **settings,
        }

    def chosen(self, seed: int) -> NDArray[np.int64]:
        """Return the training questions of a seed: in random order, repeated only if there are too few."""
        order = np.random.default_rng(seed).permutation(len(self.train.prompts))
        return np.resize(order, self.setting.steps * self.setting.batch)


def retrieving_lm(experiment: Experiment, seed: int, b: int, rounds: int) -> str:
    """Train layers 0 to b of the language model on the warm-up loss alone, once, and return its folder."""
    given, train, tokenizer = experiment.setting, experiment.train, experiment.test.tokenizer
    if not rounds:
        return given.backbone
    folder = given.output / f"start-b{b}-{seed}-{rounds}"
    if (folder / "config.json").is_file():
        return str(folder)
    start = retrieving_lm(experiment, seed, b, rounds - 1)
    set_seed(seed)
    model = ImpRAGForCausalLM.from_backbone(start, b=b, t=b, k=given.k, l_max=given.l_max).train()
    model.to(given.device)  # type: ignore[arg-type]  # its decorator hides the argument types
    model.get_input_embeddings().requires_grad_(not given.freeze_embeddings)
    passages, _ = tokenize_passages(tokenizer, train.passages, given.l_max)
    prompts = tokenizer(list(train.prompts["prompt"]), truncation=True, max_length=MAX_LENGTH)["input_ids"]
    steps, batch = given.retrieval_steps, given.retrieval_batch
    drawn = np.random.default_rng(seed + 1000 * (rounds - 1))
    order = np.concatenate([drawn.permutation(len(prompts)) for _ in range(1 + steps * batch // len(prompts))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.retrieval_learning_rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, min(20, steps // 5), steps)
    half, losses, every = bf16_is_fast(given.device), [], min(50, max(1, steps // 4))
    for step in range(steps):
        rows = order[step * batch : (step + 1) * batch]
        positives = train.bm25[rows, 0]  # the pseudo-label; passage 0 for a question without one
        with torch.autocast(given.device, torch.bfloat16, enabled=half):
            asked, read = padded(prompts[n] for n in rows), padded(passages[max(0, n)] for n in positives)
            queries = model.embed_queries(*(x.to(given.device) for x in asked))
            vectors = model.embed_passages(*(x.to(given.device) for x in read))
        scores = model.score(queries.float(), vectors.float()) / math.sqrt(vectors.shape[1])
        known = train.bm25[rows][:, :4]
        negative = torch.from_numpy(~(positives[None, :, None] == known[:, None, :]).any(-1))
        loss = multi_label_nce(
            scores, torch.eye(len(rows), dtype=torch.bool, device=scores.device), negative.to(scores.device)
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            print(f"b={b}, round {rounds}, step {step + 1}: retrieval loss {np.mean(losses[-every:]):.3f}", flush=True)
    model.backbone.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train_imprag(experiment: Experiment, seed: int, stages: str, **config: Any) -> ImpRAGForCausalLM:
    """Train ImpRAG in the stages that WARM_UP lists, or return the language model untrained."""
    given, train, chosen = experiment.setting, experiment.train, experiment.chosen(seed)
    fields: dict[str, Any] = {"b": given.b, "t": given.t, "k": given.k, "l_max": given.l_max} | config
    warm_up = WARM_UP.get(stages, 0)
    start = retrieving_lm(experiment, seed, fields["b"], given.retrieval_rounds) if warm_up else given.backbone
    model = ImpRAGForCausalLM.from_backbone(start, **fields)
    if stages not in WARM_UP:
        return model
    arguments = ImpRAGTrainingArguments(
        **experiment.run_arguments(seed, lora_rank=given.lora_rank),
        retrieval_warmup_epochs=2.0 if warm_up == 1 else warm_up,
        retrieval_only_steps=given.retrieval_only_steps,
        num_positives=2,
        num_negatives=3,
        first_negative_rank=5,
        last_negative_rank=20,
        num_candidates=4,
        index_steps=max(1, given.steps // 4),
    )
    trainer = ImpRAGTrainer(
        model,
        arguments,
        processing_class=experiment.test.tokenizer,
        train_dataset=train.prompts.select(chosen),
        passages=train.passages,
        pseudo_labels=train.bm25[chosen],
        max_length=MAX_LENGTH,
    )
    trainer.train()
    return trainer.exportable().model


def reader(experiment: Experiment, seed: int, k: int) -> PreTrainedModel:
    """Return RA-IT, or with k = 0 the same reader without passages; trained once."""
    given, train, chosen = experiment.setting, experiment.train, experiment.chosen(seed)
    folder = given.output / f"reader-{'ra-it' if k else 'tuned'}-{seed}"
    if not (folder / "config.json").is_file():
        trainer = RAITTrainer(
            AutoModelForCausalLM.from_pretrained(given.backbone, dtype=torch.float32),
            RAITTrainingArguments(**experiment.run_arguments(seed, lora_rank=given.lora_rank)),
            processing_class=experiment.test.tokenizer,
            train_dataset=train.prompts.select(chosen),
            passages=train.passages,
            pseudo_labels=train.bm25[chosen],
            num_passages=k,
            max_passage_length=given.l_max,
            max_length=MAX_LENGTH,
        )
        trainer.train()
        (folder,) = trainer.write_models(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(given.device)


def tuned_ranking(experiment: Experiment, name: str, seed: int, model: PreTrainedModel) -> NDArray[np.int32]:
    """Train RA-DIT's retriever on the reader's likelihoods over the best passages of BM25. Return its test ranking."""
    given, train, test = experiment.setting, experiment.train, experiment.test
    chosen = experiment.chosen(seed)
    vectors: dict[str, Any] = {}
    retriever: Any
    if name == "ra-dit-llama":
        start = retrieving_lm(experiment, seed, given.b, given.retrieval_rounds)
        retriever = decoder_retriever(start, given.b, test.tokenizer, given.l_max)
    else:
        retriever = SentenceTransformer(given.retriever, device=given.device, model_kwargs={"dtype": torch.float32})
        vectors["normalize_embeddings"] = True
    prompts, candidates = train.prompts.select(chosen), np.maximum(train.bm25[chosen][:, [0, 1, 5, 10]], 0)
    file = given.output / f"likelihoods-{seed}.npy"  # the same for both rows of a seed
    if not file.is_file():
        passages = shortened(train.passages, test.tokenizer, given.l_max)
        np.save(file, reader_likelihoods(model, test.tokenizer, prompts, passages, candidates).numpy())
    options = {"learning_rate": RETRIEVER_LEARNING_RATES[name], "likelihood_temperature": given.likelihood_temperature}
    RADITTrainer(
        retriever,
        RADITTrainingArguments(**experiment.run_arguments(seed, **options)),
        train_dataset=prompts,
        passages=train.passages,
        pseudo_labels=candidates,
        log_likelihoods=torch.from_numpy(np.load(file)),
        max_length=MAX_LENGTH,
        max_passage_length=given.l_max,
    ).train()
    passages = test.questions.passages
    queries_QE = retriever.encode_query(test.prompts, **vectors)
    return ExactIndex(retriever.encode_document(passages, **vectors)).search(queries_QE, len(passages)).rows_QK


def run(experiment: Experiment, name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one row of the tables."""
    given, test, started = experiment.setting, experiment.test, time.process_time()
    torch.manual_seed(seed)
    if name.startswith("imprag:"):
        _, stages, *rest = name.split(":")
        pairs = [pair.split("=") for part in rest if "=" in part for pair in part.split(",")]
        config: dict[str, Any] = {key: int(value) for key, value in pairs}
        for encoding in (part for part in rest if "=" not in part):
            config["passage_encoding"] = encoding
        model = train_imprag(experiment, seed, stages, **config)
        seconds = time.process_time() - started
        if "independent" in rest:
            model.save_pretrained(given.output / f"model-independent-{seed}")
        return measure_imprag(test, model.to(given.device)) | {"training_cpu_seconds": round(seconds)}
    ranking = None if name in ("base", "tuned") else test.questions.bm25
    if name.startswith("base"):
        lm = AutoModelForCausalLM.from_pretrained(given.backbone, dtype=torch.float32).to(given.device)
    else:
        lm = reader(experiment, seed, 0 if name == "tuned" else given.k)
    if name.startswith("ra-dit"):
        ranking = tuned_ranking(experiment, name, seed, lm)
    seconds = time.process_time() - started
    return measure_pasted(test, lm, ranking) | {"training_cpu_seconds": round(seconds)}


def check_sizes(setting: Setting) -> None:
    """Reject an --output whose results were made with other options."""
    file = setting.output / "setting.json"
    sizes = {name: value for name, value in asdict(setting).items() if name not in NOT_SIZES}
    # An option that is newer than the results had its default.
    before = asdict(Setting()) | json.loads(file.read_text(encoding="utf-8")) if file.is_file() else sizes
    if changed := [
        f"--{name} {value}, before {before[name]}" for name, value in sizes.items() if before[name] != value
    ]:
        raise SystemExit(
            f"{setting.output} has results with other options: {'; '.join(changed)}. Give another --output."
        )
    (setting.output / "results").mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def run_all(setting: Setting, jobs: list[tuple[str, int]]) -> None:
    """Run the jobs that have no result yet."""
    check_sizes(setting)
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    train = read(setting.data, "train", setting.train_questions, None, setting.max_words)
    held_out = read(setting.data, "dev", setting.questions, setting.passages, setting.max_words)
    test = Test(held_out, AutoTokenizer.from_pretrained(setting.backbone), setting.k, setting.l_max)
    sizes = f"{len(train.prompts)} training questions over {len(train.passages)} passages"
    print(f"{sizes}, {len(held_out.prompts)} test questions over {len(held_out.passages)} passages", flush=True)
    experiment = Experiment(setting, train, test)
    for name, seed in jobs:
        file = setting.output / "results" / f"{name.replace(':', '+')}@{seed}.json"
        if not file.is_file():
            file.write_text(json.dumps(run(experiment, name, seed)), encoding="utf-8")
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(f"{name} seed {seed}: {used.ru_utime + used.ru_stime:.0f} CPU seconds so far", flush=True)


def main() -> None:
    setting: Setting = HfArgumentParser(Setting, description=__doc__).parse_args_into_dataclasses()[0]
    jobs = [(name, 0) for name in (*MAIN, *ENCODINGS, *BOUNDARIES)]
    jobs += [(name, seed) for seed in range(1, setting.seeds) for name in MAIN[1:]]
    if setting.runs:
        jobs = [(name, seed) for name in setting.runs for seed in range(setting.seeds)]
    if not setting.report:
        run_all(setting, jobs)
    print_report(setting.output, ["base", "base:bm25", *MAIN[1:], "imprag:untrained", *ENCODINGS, *BOUNDARIES])


if __name__ == "__main__":
    main()
