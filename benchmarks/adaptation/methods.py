"""Adaptation methods compared by `adapt.py`. Each trains a sentence-transformers model in place on a domain's text.

All methods share the budget, precision, seed and batch size (`Setting`), and the learning rate of the command unless a
comment says otherwise. Preparation before the training (chunks, pairs, a teacher's scores, a language model trained on
the domain) is stored in `Setting.prepared` and does not count towards the budget.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from recipes import rows_of, teacher_rows, train
from sentence_transformers import SentenceTransformer
from sentence_transformers import SentenceTransformerTrainingArguments as SentenceTransformerArguments
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from revela_hub.data import GroupSettings, build_groups, build_spans
from revela_hub.data.text.passages import build_passages
from revela_hub.retrieval.bm25 import BM25

MAX_TOKENS = 48
BATCH = 16
GROUP, CHUNK_WORDS = 32, 20  # Revela's settings in the quickstart's recipe
MOST_GROUPS = 500  # groups tokenised for Revela and REPLUG: more than a budget of minutes can use
LM_SECONDS = 20  # CPU time for training the language model on the domain first


class Budget(TrainerCallback):
    """Stop training after `seconds` of CPU time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.updates = seconds, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the CPU time at the start."""
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop once the CPU time is used up."""
        self.updates = state.global_step
        control.should_training_stop = time.process_time() - self.began > self.seconds


@dataclass
class Setting:
    """Settings shared by all methods.

    Attributes:
        text: sources of the domain, without the queries of the task.
        common: training arguments of transformers.
        budget: callback that stops the training.
        prepared: folder for data prepared from this domain's text.
        start: name of the base model, part of the names of data that depend on it.
        lm: folder of the language model for Revela and REPLUG.
        asked: queries of the probe, which are excluded from training.
    """

    text: list[dict[str, Any]]
    common: dict[str, Any]
    budget: Budget
    prepared: Path
    start: str
    lm: Path
    asked: frozenset[str] = frozenset()

    def rows(self, name: str, make: Callable[[], Dataset]) -> Dataset:
        """Return the prepared rows with this name, building them on the first call."""
        folder = self.prepared / name
        if not folder.exists():
            make().save_to_disk(str(folder))
        return load_from_disk(str(folder))


Method = Callable[[SentenceTransformer, Setting], None]


def by_recipe(recipe: str, batch: int = BATCH) -> Method:
    """Return a method that trains with a loss of sentence-transformers (examples/adaptation)."""

    def trained(model: SentenceTransformer, given: Setting) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=given.common["bf16"]):
            name = f"{recipe}-{given.start}" if recipe == "teacher" else recipe
            rows = given.rows(name, lambda: make_rows(recipe, model, given))
        if "anchor" in rows.column_names:
            rows = rows.select([i for i, text in enumerate(rows["anchor"]) if text not in given.asked])
        if recipe == "simcse":  # a Llama has no dropout by default, so both views would be identical
            for layer in model.modules():
                if hasattr(layer, "attention_dropout"):
                    layer.attention_dropout = 0.1
        arguments = SentenceTransformerArguments(**given.common, per_device_train_batch_size=batch)
        train(recipe, model, rows, arguments, [given.budget])

    return trained


def make_rows(recipe: str, model: SentenceTransformer, given: Setting) -> Dataset:
    """Build more rows than the budget can use, fewer for the teacher, which has to score them."""
    if recipe == "teacher":
        return teacher_rows(model, given.text, queries=300, passages=800)
    return rows_of(recipe, model, given.text)


def by_pairs_lora(model: SentenceTransformer, given: Setting) -> None:
    """Train the recipe `pairs` with LoRA (rank 16, ten times the learning rate), merged at the end."""
    rows = given.rows("pairs", lambda: rows_of("pairs", model, given.text))
    layers = [n for n, m in model[0].auto_model.named_modules() if isinstance(m, nn.Linear) and "pooler" not in n]
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=layers))
    rate = {"learning_rate": 10 * given.common["learning_rate"]}
    arguments = SentenceTransformerArguments(**(given.common | rate), per_device_train_batch_size=BATCH)
    train("pairs", model, rows, arguments, [given.budget])
    for module in list(model.modules()):
        if hasattr(module, "merge") and hasattr(module, "lora_A"):
            module.merge()


def by_contriever(views: Any) -> Method:
    """Return a method that trains Contriever on two views of each passage."""

    def trained(model: SentenceTransformer, given: Setting) -> None:
        from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments

        arguments = ContrieverTrainingArguments(
            **given.common, quiet=True, views=views, per_device_train_batch_size=BATCH
        )
        rows = build_passages(given.text, max_words=100)
        ContrieverTrainer(model, arguments, train_dataset=rows, callbacks=[given.budget]).train()

    return trained


def by_replug(model: SentenceTransformer, given: Setting) -> None:
    """Train with REPLUG on a frozen language model, with higher temperatures than the paper (0.001)."""
    from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments

    groups = some(build_groups(given.text, GroupSettings(group_size=8, max_words=40)))
    arguments = ReplugTrainingArguments(
        **given.common, quiet=True, gradient_accumulation_steps=2, temperature=0.02, lm_temperature=0.02
    )
    lm = AutoModelForCausalLM.from_pretrained(given.lm, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.lm)
    options: dict[str, Any] = {"lm_tokenizer": tokenizer, "max_length": MAX_TOKENS, "train_dataset": groups}
    ReplugTrainer(model, arguments, lm=lm, **options, callbacks=[given.budget]).train()


def by_revela(*, neighbours: bool = False, lm_on_domain: bool = False) -> Method:
    """Return a method that trains both models in full with Revela, the retriever after four steps."""

    def trained(model: SentenceTransformer, given: Setting) -> None:
        from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones

        start = given.prepared / f"start-{given.start}"
        model.save_pretrained(str(start), create_model_card=False)
        lm = _lm_of(given) if lm_on_domain else given.lm
        settings = {"group_size": GROUP, "temperature": 0.03, "v_normalization": True, "similarity_tolerance": 0.05}
        backbones = load_backbones(str(start), str(lm), **settings)
        groups = build_groups(given.text, GroupSettings(group_size=GROUP, run_length=2, max_words=CHUNK_WORDS))
        groups = given.rows("neighbours", lambda: neighbour_groups(groups)) if neighbours else some(groups)
        arguments = RevelaTrainingArguments(
            **(given.common | {"learning_rate": 1e-3, "warmup_steps": 2}),
            quiet=True,
            lora_rank=0,
            retriever_learning_rate=given.common["learning_rate"],
            retriever_start_step=4,
            gradient_accumulation_steps=1,
        )
        RevelaTrainer(
            backbones.model,
            arguments,
            retriever_tokenizer=backbones.retriever_tokenizer,
            lm_tokenizer=backbones.lm_tokenizer,
            max_length=MAX_TOKENS,
            train_dataset=groups,
            callbacks=[given.budget],
        ).train()
        _take(model, backbones.model.retriever.state_dict())

    return trained


def by_pretrained_lm(reading: str) -> Method:
    """Return a method that trains with Revela and a pre-trained `--lm`: joint with a frozen LM, added with a trained one."""

    def trained(model: SentenceTransformer, given: Setting) -> None:
        from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments

        start = given.prepared / f"start-{given.start}"
        model.save_pretrained(str(start), create_model_card=False)
        joint = reading == "joint"
        trainer = RevelaTrainer(
            str(start),
            RevelaTrainingArguments(
                **given.common,
                quiet=True,
                lora_rank=0,
                lm_training="frozen" if joint else None,
                gradient_accumulation_steps=1,
            ),
            lm=str(given.lm),
            max_length=MAX_TOKENS,
            model_init_kwargs={"temperature": 0.05, "reading": reading} | ({} if joint else {"v_normalization": True}),
            train_dataset=some(build_groups(given.text, GroupSettings(group_size=8, max_words=40))),
            callbacks=[given.budget],
        )
        trainer.train()
        _take(model, trainer.revela.retriever.state_dict())

    return trained


def some(groups: Dataset) -> Dataset:
    """Return `MOST_GROUPS` groups sampled from the whole text, the same for every seed."""
    return groups.shuffle(seed=0).select(range(min(len(groups), MOST_GROUPS)))


def neighbour_groups(groups: Dataset, chunks: int = 4000, cluster: int = 4) -> Dataset:
    """Return groups made of clusters: a chunk and the chunks that BM25 finds for it, instead of consecutive chunks."""
    texts = list(
        dict.fromkeys(text for row in groups.select(range(min(len(groups), chunks // GROUP))) for text in row["text"])
    )
    texts = [text for text in texts if text.strip()]
    rows_QK = BM25(texts).search(texts, 16).rows_QK
    free, clusters = set(range(len(texts))), []
    for chunk in random.Random(0).sample(range(len(texts)), len(texts)):
        found = [chunk, *(row for row in rows_QK[chunk].tolist() if row in free and row != chunk)][:cluster]
        if chunk in free and len(found) == cluster:
            free -= set(found)
            clusters.append([texts[row] for row in found])
    per_group = GROUP // cluster
    whole = [clusters[i : i + per_group] for i in range(0, len(clusters) - per_group + 1, per_group)]
    made = {name: [row[name] for row in groups.select(range(len(whole)))] for name in groups.column_names}
    return Dataset.from_dict(made | {"text": [[text for each in group for text in each] for group in whole]})


def _lm_of(given: Setting) -> Path:
    """Return the folder of the language model trained on the domain's text, training it on the first call."""
    folder = given.prepared / "lm"
    if (folder / "model.safetensors").exists():
        return folder
    lm: Any = AutoModelForCausalLM.from_pretrained(given.lm, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.lm)
    texts = build_passages(given.text, max_words=100)["text"][:]
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-4)
    draw, began = random.Random(0), time.process_time()
    while time.process_time() - began < LM_SECONDS:
        batch = tokenizer(draw.sample(texts, 16), truncation=True, max_length=128, padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=given.common["bf16"]):
            loss = lm(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def by_retromae(model: SentenceTransformer, given: Setting) -> None:
    """Continue RetroMAE pre-training from the base model's encoder. Retrieval keeps the base model's mean pooling."""
    from revela_hub.trainers import RetroMAETrainer, RetroMAETrainingArguments
    from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder

    folder = given.prepared / f"encoder-{given.start}"
    transformer: Any = model[0]
    transformer.auto_model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    loaded = load_retromae_encoder(str(folder), decoder="enhanced")
    spans = given.rows(f"spans-{given.start}", lambda: build_spans(given.text, loaded.tokenizer, max_length=MAX_TOKENS))
    arguments = RetroMAETrainingArguments(**given.common, quiet=True, per_device_train_batch_size=BATCH)
    options: dict[str, Any] = {"processing_class": loaded.tokenizer, "train_dataset": spans}
    RetroMAETrainer(loaded.model, arguments, **options, callbacks=[given.budget]).train()
    _take(model, loaded.model.encoder.state_dict())


def _take(model: SentenceTransformer, weights: dict[str, torch.Tensor]) -> None:
    """Load trained weights into the sentence-transformers model, matching the ends of their names."""
    transformer: Any = model[0]
    own = transformer.auto_model.state_dict()
    found = {name: value for name in own for key, value in weights.items() if key == name or key.endswith(f".{name}")}
    assert len(found) > 0.9 * len(own), f"{len(found)} of {len(own)} weights"
    transformer.auto_model.load_state_dict(found, strict=False)


METHODS: dict[str, Method] = {
    "pairs of the text": by_recipe("pairs"),
    "hybrid as teacher": by_recipe("teacher", batch=4),  # rows of five texts
    "Contriever, crops": by_contriever("cropping"),
    "Revela": by_revela(),
    "SimCSE": by_recipe("simcse"),
    "TSDAE": by_recipe("tsdae", batch=8),
    "RetroMAE, continued": by_retromae,
    "REPLUG": by_replug,
    "inverse cloze": by_contriever("inverse_cloze"),
    "pairs of the text, LoRA": by_pairs_lora,
    "Revela, neighbours": by_revela(neighbours=True),
    "Revela, LM first on the domain": by_revela(lm_on_domain=True),
    "Revela, pre-trained LM, joint": by_pretrained_lm("joint"),
    "Revela, pre-trained LM, added": by_pretrained_lm("added"),
}
ENCODERS_ALONE = ("TSDAE", "RetroMAE, continued")
"""Methods that need a masked-LM encoder and do not run on a decoder."""
