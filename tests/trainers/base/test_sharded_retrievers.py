"""Retrievers trained by two processes that share their weights (FSDP2, settings of examples/accelerate/fsdp.yaml)."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from processes import launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.trainers.base.measuring import BestWeights
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.base.sharding import is_sharded
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments, RAITTrainingArguments
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments
from revela_hub.trainers.baselines.pasted import RAITTrainer
from revela_hub.trainers.baselines.ra_dit import RADITTrainer, decoder_retriever
from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments
from revela_hub.trainers.cot_mote.arguments import CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.finetuning import CoTMoTEFinetuner
from revela_hub.trainers.cot_mote.trainer import CoTMoTETrainer
from revela_hub.trainers.imprag.arguments import ImpRAGTrainingArguments
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer
from revela_hub.trainers.nvembed.arguments import NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.trainer import NVEmbedTrainer
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments
from revela_hub.trainers.retromae.arguments import RetroMAETrainingArguments
from revela_hub.trainers.retromae.trainer import RetroMAETrainer

WORDS = "the quick brown fox jumps over a lazy dog and rivers carry sediment from mountains to the sea".split()
TEXTS = [" ".join(WORDS[(5 * n + 3 * i) % len(WORDS)] for i in range(6 + n % 4)) for n in range(16)]
STEPS = 2


def trainer(name: str, folder: Path, models: dict[str, str], rows: int) -> MethodTrainer:
    """A trainer of a method, with SGD and without dropout, so that two processes take the steps of one."""
    given: dict[str, Any] = {"output_dir": str(folder), "per_device_train_batch_size": rows, "max_steps": STEPS}
    given |= {"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_steps": 0, "quiet": True}
    given |= {"logging_steps": 1, "save_steps": 1, "report_to": []}
    given |= {"optim_args": "momentum=0.9", "bf16": False, "gradient_accumulation_steps": 1}
    method, _, variant = name.partition("-")
    # The batch samplers of the others shuffle.
    given |= {} if method in ("pairs", "cotmote", "nvembed") else {"train_sampling_strategy": "sequential"}
    pairs = Dataset.from_dict({"anchor": [text[:12] for text in TEXTS], "positive": TEXTS, "negative_1": TEXTS[::-1]})
    if method == "pairs":
        options: dict[str, Any] = {"cached": {"mini_batch_size": 1}, "lora": {"lora_rank": 4}}.get(variant, {})
        args = PairsTrainingArguments(**given, batch_sampler="batch_sampler", **options)
        return PairsTrainer(_without_dropout(models["retriever"]), args, train_dataset=pairs)
    if method == "contriever":
        texts = Dataset.from_dict({"row": list(range(16)), "document": ["d"] * 16, "text": TEXTS})
        args = ContrieverTrainingArguments(**given, **({"queue_size": 8} if variant == "queue" else {}))
        return ContrieverTrainer(_without_dropout(models["retriever"]), args, train_dataset=texts)
    if method == "replug":
        texts = [TEXTS[n : n + 4] for n in range(8)]
        texts[1][3] = "" if variant == "absent" else texts[1][3]  # then the processes read different numbers of pairs
        groups = Dataset.from_dict({"group": list(range(8)), "document": [["d"] * 4] * 8, "text": texts})
        args = ReplugTrainingArguments(**given, temperature=0.05, lm_temperature=0.05, lm_batch_size=2)
        lm, tokenizer = AutoModelForCausalLM.from_pretrained(models["lm"]), AutoTokenizer.from_pretrained(models["lm"])
        retriever = _without_dropout(models["retriever"])
        return ReplugTrainer(retriever, lm, args, lm_tokenizer=tokenizer, max_length=32, train_dataset=groups)
    if method == "cotmote":
        args = CoTMoTETrainingArguments(stage="finetune", batch_sampler="batch_sampler", **given)
        return CoTMoTEFinetuner(models["mlm"], args, train_dataset=pairs, query_max_length=12, max_length=30)
    raw = Dataset.from_dict({"text": TEXTS})
    if method == "retromae":
        args = RetroMAETrainingArguments(**given)
        return RetroMAETrainer(models["mlm"], args, train_dataset=raw, max_length=30)
    if method == "experts":
        return CoTMoTETrainer(models["mlm"], CoTMoTETrainingArguments(**given), train_dataset=raw, max_length=30)
    if method == "nvembed":
        own: dict[str, Any] = {"lora_rank": 0 if variant == "full" else 4, "lora_dropout": 0.0}
        own |= {"temperature": 0.1, "batch_sampler": "batch_sampler"}
        own |= {"cached": {"mini_batch_size": 2}, "tokens": {"mini_batch_num_tokens": 64}}.get(variant, {})
        args = NVEmbedTrainingArguments(**given, **own)
        latents = {"num_latents": 8, "num_heads": 2}
        # Process 1 has fewer different texts than process 0.
        negatives = [TEXTS[-1], TEXTS[-2], TEXTS[3], TEXTS[2], *TEXTS[11::-1]]
        pairs = pairs.remove_columns("negative_1").add_column("negative_1", negatives)
        return NVEmbedTrainer(models["lm"], args, train_dataset=pairs, max_length=64, model_init_kwargs=latents)
    candidates = np.array([[n, (n + 3) % 16, (n + 5) % 16] for n in range(16)], np.int32)
    prompts = [{"prompt": text, "answers": ["a"], "retrieve": True, "where": "x:1"} for text in TEXTS]
    own = {"pseudo_labels": candidates, "passages": TEXTS, "max_length": 60}
    asked = Dataset.from_list([{**row, "input": row["prompt"], "task": "t", "id": "1"} for row in prompts])
    if method == "imprag":
        own |= {"pseudo_labels": None, "model_init_kwargs": {"b": 1, "t": 1, "k": 2, "l_max": 24}}
        args = ImpRAGTrainingArguments(**given, retrieval_warmup_epochs=0, num_positives=1, num_negatives=1)
        return ImpRAGTrainer(models["lm"], args, train_dataset=asked, **own)
    lora = {"lora_rank": 4 if variant == "lora" else 0, "lora_dropout": 0.0}
    if method == "rait":
        args = RAITTrainingArguments(**given, **lora)
        return RAITTrainer(models["lm"], args, train_dataset=asked, num_passages=2, max_passage_length=24, **own)
    args = RADITTrainingArguments(**given, likelihood_temperature=0.3)
    tokenizer = AutoTokenizer.from_pretrained(models["lm"])
    return RADITTrainer(
        decoder_retriever(models["lm"], 1, tokenizer, 32) if variant == "decoder" else models["retriever"],
        args,
        train_dataset=Dataset.from_list(prompts),
        passages=TEXTS,
        pseudo_labels=candidates,
        log_likelihoods=-torch.arange(48.0).view(16, 3) / 20,
    )


def _without_dropout(folder: str) -> Any:
    model = load_retriever(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def train(name: str, folder: Path, models: dict[str, str], rows: int) -> list[float]:
    """Trains, measures, exports the weights of the last step, and finishes with the best; returns the losses."""
    run = trainer(name, folder, models, rows)
    best = None
    if type(run).retrieval_encoder is not MethodTrainer.retrieval_encoder:
        corpus = {f"d{n}": text for n, text in enumerate(TEXTS)}
        queries = {f"q{n}": text[-12:] for n, text in enumerate(TEXTS)}
        run.retrieval_task = RetrievalTask(corpus, queries, {f"q{n}": {f"d{n}": 1} for n in range(16)}, "words")
        best = BestWeights.of_trainer(run, folder, resumed=False)
        run.add_callback(best)
        run.eval_dataset = {}
        run.evaluate()
    run.train()
    assert is_sharded(run.model) == (run.args.world_size > 1)
    run.write_models(folder)
    if best is not None:
        run.evaluate()
        assert sorted(best.history.scores) == [0, STEPS]
        scores = json.dumps(best.history.scores, sort_keys=True)
        best.finish(STEPS)
        run.write_models(folder / "best")
        if run.is_world_process_zero():
            (folder / "scores.json").write_text(scores)
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def resume(name: str, folder: Path, models: dict[str, str], rows: int) -> None:
    """Trains the second half of a run again, and exports the result to another folder."""
    run = trainer(name, folder, models, rows)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    run.write_models(folder / "resumed")


def main(names: list[str], folder: Path, models: dict[str, str]) -> None:
    """In each of two processes."""
    initialise = MethodTrainer.create_accelerator_and_postprocess

    def with_cpus(self: MethodTrainer) -> None:  # accelerate shards on GPUs only; FSDP2 itself does not mind CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        initialise(self)

    MethodTrainer.create_accelerator_and_postprocess = with_cpus  # type: ignore[method-assign]
    for name in names:
        losses = train(name, folder / name, models, 2)
        resume(name, folder / name, models, 2)
        (folder / f"{name}.json").write_text(json.dumps(losses))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files in an exported folder."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files, folder
    return {f"{file.relative_to(folder)}:{n}": value for file in files for n, value in load_file(file).items()}


def assert_equal(one: Path, two: Path) -> None:
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=1e-5, msg=name)


SAMPLE = ["pairs-lora", "replug", "cotmote", "nvembed-cached"]
RETRIEVERS = ["contriever", "radit", "pairs", "pairs-cached", "replug-absent"]
DECODERS = ["rait-lora", "nvembed-full", "nvembed", "rait"]
PARTS = {"cotmote": "dense", "nvembed": "embedder", "rait": "model"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [SAMPLE, *(pytest.param(names, marks=pytest.mark.exhaustive) for names in (RETRIEVERS, DECODERS))],
    ids=["sample", "retrievers", "decoders"],
)
def test_sharded_retrievers_are_those_of_one_process(
    names: list[str], tmp_path: Path, repository: Path, retriever_folder: Path, llama_folder: Path, mlm_folder: Path
) -> None:
    for folder in (retriever_folder, mlm_folder):
        config = json.loads((folder / "config.json").read_text())
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (folder / "config.json").write_text(json.dumps(config))
    models = {"retriever": str(retriever_folder), "lm": str(llama_folder), "mlm": str(mlm_folder)}
    settings = yaml.safe_load((repository / "examples" / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]
    environment = {name.upper(): str(value) for name, value in settings.items()} | {"ACCELERATE_USE_FSDP": "true"}
    launch(
        str(Path(__file__)), json.dumps(names), str(tmp_path), json.dumps(models), processes=2, environment=environment
    )
    for name in names:
        one, two = tmp_path / "one" / name, tmp_path / name
        losses = train(name, one, models, 4)
        part = PARTS.get(name.partition("-")[0], "retriever")
        assert_equal(two / part, two / "resumed" / part)
        if name == "replug-absent":  # the mean of the processes' means is not that of all groups
            continue
        assert json.loads((tmp_path / f"{name}.json").read_text()) == pytest.approx(losses, rel=1e-4), name
        assert_equal(one / part, two / part)
        if (one / "scores.json").is_file():
            assert (one / "scores.json").read_text() == (two / "scores.json").read_text(), name
            assert_equal(one / "best" / part, two / "best" / part)


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("pairs", {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "PairsTrainer does not support ZeRO-3: use FSDP2"),
        ("pairs", {"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, "FSDP 1 is not supported: set fsdp_version: 2"),
        ("contriever-queue", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use in-batch negatives"),
        ("nvembed-tokens", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use --mini_batch_size"),
        ("rait", {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "RAITTrainer does not support ZeRO-3: use FSDP2"),
        ("retromae", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use accelerate launch --multi_gpu, or ZeRO-2"),
        ("experts", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use accelerate launch --multi_gpu, or ZeRO-2"),
        ("imprag", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use accelerate launch --multi_gpu, or ZeRO-2"),
        ("radit-decoder", {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, "use accelerate launch --multi_gpu, or ZeRO-2"),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_rejected_before_training(
    name: str,
    state: dict[str, Any],
    message: str,
    tmp_path: Path,
    retriever_folder: Path,
    llama_folder: Path,
    mlm_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = MethodTrainer.create_accelerator_and_postprocess

    def with_plugin(self: MethodTrainer) -> None:
        create(self)
        self.is_fsdp_enabled = "fsdp_plugin" in state
        for plugin, value in state.items():
            monkeypatch.setattr(type(self.accelerator.state), plugin, value, raising=False)

    monkeypatch.setattr(MethodTrainer, "create_accelerator_and_postprocess", with_plugin)
    with pytest.raises(UserError, match=message):
        trainer(
            name, tmp_path, {"retriever": str(retriever_folder), "lm": str(llama_folder), "mlm": str(mlm_folder)}, 2
        )


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
