"""A Revela run: what it learns, logs and saves, and that how it is split or interrupted changes nothing."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from processes import launch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import TemplateProcessing
from transformers import TrainerCallback, TrainerControl, TrainerState

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones
from revela_hub.trainers.revela.checkpoint import load_checkpoint
from revela_hub.trainers.revela.trainer import similarity_statistics

WORDS = "river sea mountain fox dog text layer chunk paris tokyo area width height retriever".split()


@pytest.fixture
def groups() -> Dataset:
    """12 groups of 4 chunks, two of each of two documents."""
    generator = torch.Generator().manual_seed(1)

    def chunk() -> str:
        picks = torch.randint(len(WORDS), (6 + int(torch.randint(6, (1,), generator=generator)),), generator=generator)
        return " ".join(WORDS[i] for i in picks)

    rows = [
        {"group": g, "document": [f"a{g}"] * 2 + [f"b{g}"] * 2, "text": [chunk() for _ in range(4)]} for g in range(12)
    ]
    return Dataset.from_list(rows)


def trainer(
    folder: Path,
    llama: Path,
    groups: Dataset,
    *,
    callbacks: tuple[TrainerCallback, ...] = (),
    task: RetrievalTask | None = None,
    reading: str = "added",
    similarity: dict[str, Any] | None = None,
    **options: object,
) -> RevelaTrainer:
    defaults: dict[str, object] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "lora_rank": 4,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    settings = {"group_size": 4, "temperature": 0.1, "reading": reading} | (similarity or {})
    backbones = load_backbones(str(llama), str(llama), **settings)
    return RevelaTrainer(
        backbones.model,
        RevelaTrainingArguments(**(defaults | options)),
        retriever_tokenizer=backbones.retriever_tokenizer,
        lm_tokenizer=backbones.lm_tokenizer,
        max_length=32,
        retrieval_task=task,
        train_dataset=groups,
        callbacks=list(callbacks),
    )


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def losses(trainer: RevelaTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_both_models_learn_and_the_similarity_is_logged(
    tmp_path: Path, llama_folder: Path, groups: Dataset, lora_rank: int
) -> None:
    run = trainer(tmp_path / "run", llama_folder, groups, lora_rank=lora_rank, max_steps=12)
    before = trained(run.model)
    run.train()
    after = trained(run.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("retriever" in name for name in changed)
    assert any(".lm." in f".{name}" for name in changed)
    assert losses(run)[-1] < losses(run)[0] - 0.1
    entry = next(e for e in run.state.log_history if "loss" in e)
    assert 0 < entry["similarity_entropy"] <= math.log(3) + 1e-6
    assert 0 < entry["same_document_share"] < 1
    assert lora_rank == 0 or all("lora_" in name for name in before)


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_frozen_lm_with_joint_reading(
    tmp_path: Path, llama_folder: Path, groups: Dataset, lora_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The retriever and the biases are trained; checkpoints and exports do not contain the LM."""
    options = {"lora_rank": lora_rank, "lm_training": "frozen", "reading": "joint", "save_strategy": "steps"}
    run = trainer(tmp_path / "run", llama_folder, groups, save_steps=3, max_steps=6, **options)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    changed = {name for name, p in run.model.named_parameters() if not torch.equal(before[name], p)}
    assert not any(".lm." in f".{name}" for name in changed)
    assert any("retriever" in name for name in changed)
    assert any("reading_bias" in name for name in changed)
    biases = [entry["reading_bias"] for entry in run.state.log_history if "loss" in entry]
    assert -2.1 < biases[-1] < -1.9
    assert biases[-1] != -2

    checkpoint = tmp_path / "run" / "checkpoint-6"
    names = {name for file in checkpoint.glob("*.safetensors") for name in load_file(file)}
    assert names
    assert not any(".lm." in f".{name}" for name in names)
    loaded = load_checkpoint(checkpoint).model
    ids = torch.randint(5, 50, (4, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {f"retriever_{name}": value for name, value in inputs.items()}
    run.revela.eval()
    torch.testing.assert_close(loaded(**inputs).logits, run.revela(**inputs).logits, rtol=1e-4, atol=1e-5)

    resumed = trainer(tmp_path / "run", llama_folder, groups, save_steps=3, max_steps=6, **options)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    caplog.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    logger.removeHandler(caplog.handler)
    assert not caplog.messages
    for name, parameter in resumed.model.named_parameters():
        torch.testing.assert_close(parameter, dict(run.model.named_parameters())[name], rtol=0, atol=0)
    resumed.write_models(tmp_path / "exported")
    assert (tmp_path / "exported" / "retriever").is_dir()
    assert not (tmp_path / "exported" / "lm").exists()


class _Kill(TrainerCallback):
    """Ends the run as a power cut would, after the checkpoint of a step."""

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.exhaustive), 4])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, llama_folder: Path, groups: Dataset, lora_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Over an epoch's end, with the retriever's later start and dropout in the adapters."""
    options = {
        "lora_rank": lora_rank,
        "lora_dropout": 0.2 if lora_rank else 0.0,
        "max_steps": 10,
        "save_strategy": "steps",
        "save_steps": 3,
        "retriever_start_step": 2,
    }
    whole = trainer(tmp_path / "whole", llama_folder, groups, **options)
    whole.train()
    killed = trainer(tmp_path / "killed", llama_folder, groups, callbacks=(_Kill(),), **options)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = trainer(tmp_path / "killed", llama_folder, groups, **(options | {"save_steps": 0.3}))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    caplog.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-3"))
    logger.removeHandler(caplog.handler)
    assert not caplog.messages  # nothing about tied weights, or about 3 of 10 steps given as a fraction of 0.3
    expected, got = trained(whole.model), trained(resumed.model)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert losses(resumed)[-3:] == losses(whole)[-3:]


def test_batch_and_accumulation_give_the_same_step(tmp_path: Path, llama_folder: Path, groups: Dataset) -> None:
    """Also where the batches of an update hold different numbers of tokens."""
    one = trainer(tmp_path / "a", llama_folder, groups, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    four = trainer(tmp_path / "b", llama_folder, groups, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    for run in (one, four):
        run.train()
    torch.testing.assert_close(torch.tensor(losses(one)), torch.tensor(losses(four)), rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(trained(one.model).items(), trained(four.model).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


_PROCESS = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from datasets import load_from_disk
from test_revela_trainer import losses, trainer
run = trainer(
    Path({out!r}), Path({llama!r}), load_from_disk({data!r}), gradient_accumulation_steps={steps}, lora_rank=0,
    train_sampling_strategy="sequential", **{more!r},
)
run.train()
if run.is_world_process_zero():
    state = [float(v["exp_avg_sq"].sum()) for v in run.optimizer.state_dict()["state"].values()]
    weights = sum(float(p.abs().sum()) for p in run.revela.retriever.parameters())
    Path({out!r}, "losses.json").write_text(json.dumps([*losses(run), sum(state), weights]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"retriever_start_step": 3, "gradient_checkpointing": True}])
def test_two_processes_give_the_losses_of_one_with_the_same_global_batch(
    tmp_path: Path, llama_folder: Path, groups: Dataset, more: dict[str, Any]
) -> None:
    """Also with gradient checkpointing and a retriever that waits for its start without gradients."""
    groups.save_to_disk(tmp_path / "data")
    names = {"tests": str(Path(__file__).parent), "llama": str(llama_folder), "data": str(tmp_path / "data")}
    results = {}
    for processes in (1, 2):
        out, script = tmp_path / f"run{processes}", tmp_path / f"run{processes}.py"
        out.mkdir()
        script.write_text(_PROCESS.format(out=str(out), steps=4 // processes, more=more, **names))
        launch(str(script), processes=processes)
        results[processes] = json.loads((out / "losses.json").read_text())
    assert len(results[1]) == 6
    assert results[1] == pytest.approx(results[2], rel=1e-4)


def test_the_retriever_waits_for_its_start_and_then_warms_up(
    tmp_path: Path, llama_folder: Path, groups: Dataset
) -> None:
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
            weights = {n: v for n, v in trained(kwargs["model"]).items() if "retriever" in n}
            rates = {bool(g.get("is_retriever")): g["lr"] for g in kwargs["optimizer"].param_groups}
            seen.append((weights, rates[True], rates[False]))

    run = trainer(
        tmp_path / "run", llama_folder, groups, callbacks=(Watch(),), max_steps=6, retriever_start_step=2,
        warmup_steps=2, retriever_learning_rate=1e-3, lr_scheduler_type="constant_with_warmup",
    )  # fmt: skip
    start = {n: v for n, v in trained(run.model).items() if "retriever" in n}
    run.train()

    def moved(weights: dict[str, torch.Tensor]) -> bool:
        return any(not torch.equal(weights[n], start[n]) for n in start)

    assert [moved(weights) for weights, _, _ in seen] == [False, False, True, True, True, True]
    assert [rate for _, rate, _ in seen] == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3])
    assert seen[-1][2] == pytest.approx(1e-2)
    run.lr_scheduler = None
    with pytest.raises(UserError, match="retriever_start_step"):  # an optimizer that does not know the retriever
        run.create_scheduler(6, torch.optim.SGD(run.model.parameters(), lr=0.1))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint_holds_everything(tmp_path: Path, llama_folder: Path, groups: Dataset, lora_rank: int) -> None:
    run = trainer(
        tmp_path / "run", llama_folder, groups, lora_rank=lora_rank, save_strategy="steps", save_steps=4, max_steps=4
    )
    run.train()
    written = tmp_path / "run" / "checkpoint-4" / "config.json"
    config = json.loads(written.read_text())
    del config["similarity_sides"], config["similarity_dtype"]  # as in checkpoints before there were queries
    written.write_text(json.dumps(config))
    loaded = load_checkpoint(tmp_path / "run" / "checkpoint-4")
    assert loaded.model.config.similarity_sides == "symmetric"
    ids = torch.tensor([[5, 6, 7, loaded.retriever_tokenizer.eos_token_id]])
    mask = torch.ones_like(ids)
    run.revela.eval()
    torch.testing.assert_close(loaded.model.embed(ids, mask), run.revela.embed(ids, mask), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        loaded.model.lm(ids, attention_mask=mask).logits, run.revela.lm(ids, attention_mask=mask).logits,
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    assert loaded.retriever_tokenizer("fox")["input_ids"][-1] == loaded.retriever_tokenizer.eos_token_id
    assert loaded.lm_tokenizer("fox")["input_ids"][-1] != loaded.lm_tokenizer.eos_token_id
    assert not any("lora_" in name for name, _ in loaded.model.named_parameters())


def test_similarity_statistics_by_hand() -> None:
    similarity = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]])
    statistics = similarity_statistics(similarity, torch.tensor([0, 0, 1]))
    # The third chunk reads nothing, so it does not count.
    assert statistics["similarity_entropy"] == pytest.approx(math.log(2) / 2)
    assert statistics["same_document_share"] == pytest.approx(0.75)


def test_a_retriever_keeps_its_settings(
    tmp_path: Path, llama_folder: Path, retriever_folder: Path, groups: Dataset
) -> None:
    prompts, default = {"query": "q: ", "document": "d: ", "text": "t: "}, "text"
    kept: dict[str, Any] = {"truncate_dim": 8, "similarity_fn_name": "dot", "default_prompt_name": default}
    model = SentenceTransformer(str(retriever_folder), device="cpu", prompts=dict(prompts), **kept)
    expected = model.encode_document(["river sea"])
    args = RevelaTrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], lora_rank=0)
    run = RevelaTrainer(model, args, lm=str(llama_folder), max_length=32, train_dataset=groups)
    encoder = run.retriever
    measured = encoder.encode_document(["river sea"])
    run.write_models(tmp_path / "exported")  # verifies that the folder returns the same vectors
    published = SentenceTransformer(str(tmp_path / "exported" / "retriever"), device="cpu")
    assert expected.shape == (1, 8) and encoder.similarity_fn_name == "dot"
    assert {name: getattr(published, name) for name in kept} == kept and published.prompts == prompts
    for vectors in (measured, published.encode_document(["river sea"])):
        torch.testing.assert_close(torch.as_tensor(vectors), torch.from_numpy(expected))
    other = load_backbones(model, str(llama_folder), prompts={"query": "Q: ", "document": "D: "}).model.config
    assert other.prompts == {"query": "Q: ", "document": "D: ", "text": "t: "}


def test_retrievers_with_other_similarities_are_rejected(llama_folder: Path, retriever_folder: Path) -> None:
    """Revela trains and exports cosine similarities, and pools the tokens of the prompt."""
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model.similarity_fn_name = "dot"
    assert load_backbones(model, str(llama_folder)).model.config.pooling == "mean"  # the same for unit vectors
    plain = SentenceTransformer(modules=[model[0], model[1]], similarity_fn_name="dot", device="cpu")
    with pytest.raises(UserError, match="dot product .* use `revela-hub train pairs`"):
        load_backbones(plain, str(llama_folder))
    plain.similarity_fn_name = "manhattan"
    with pytest.raises(UserError, match="compares by manhattan distance"):
        load_backbones(plain, str(llama_folder))
    model[0].tokenizer.chat_template = "{% for m in messages %}user: {{ m['content'] }}{% endfor %}"
    model[0].modality_config["message"] = {"format": "flat", **model[0].modality_config["text"]}
    with pytest.raises(UserError, match="a chat template"):
        load_backbones(model, str(llama_folder))
    del model[0].modality_config["message"]
    last = [model[0], Pooling(32, "lasttoken")]  # after [SEP]
    assert (
        load_backbones(SentenceTransformer(modules=last, device="cpu"), str(llama_folder)).model.config.pooling
        == "last"
    )
    model[0].tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")
    with pytest.raises(UserError, match="no end token"):
        load_backbones(SentenceTransformer(modules=last, device="cpu"), str(llama_folder))
    model[1].include_prompt = False
    with pytest.raises(UserError, match="excluded from pooling"):
        load_backbones(model, str(llama_folder))


def test_both_prompts_are_trained_in_the_papers_form(tmp_path: Path, llama_folder: Path, groups: Dataset) -> None:
    """Similarities of a step are those of the query prompt and the first half with the passage prompt and the whole."""
    form = {"similarity_sides": "query_passage", "similarity_span": "first_half", "similarity_dtype": "bfloat16"}
    run = trainer(tmp_path / "run", llama_folder, groups, similarity=form, lora_rank=0)
    batch = next(iter(run.get_train_dataloader()))
    tokenizer, prompts = run.retriever_tokenizer, run.revela.config.prompts
    texts = run.lm_tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    queries, passages = (
        tokenizer([prompts[side] + text for text in texts], padding=True, return_tensors="pt")
        for side in ("query", "document")
    )
    batch.pop("document")
    output = run.revela.eval()(**batch)
    torch.testing.assert_close(output.embeddings, run.revela.embed(**passages), rtol=1e-4, atol=1e-5)
    assert output.query_embeddings.shape == output.embeddings.shape
    assert not torch.allclose(output.query_embeddings, run.revela.embed(**queries), atol=1e-3)  # whole, not half
    run.train()
    run.save_model()
    loaded = load_checkpoint(tmp_path / "run").model.config
    assert {name: getattr(loaded, name) for name in form} == form
