"""REPLUG: its equations in loops."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from revela_hub.errors import UserError
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.replug import GroupCollator, Replug, ReplugTrainer, ReplugTrainingArguments


def groups(number: int = 8, absent: int = 0) -> Dataset:
    words = "the quick brown fox jumps over a lazy dog and rivers carry sediment from mountains to the sea".split()
    texts = [
        [" ".join(words[(5 * g + 7 * c + 3 * i) % len(words)] for i in range(5 + (g + c) % 4)) for c in range(4)]
        for g in range(number)
    ]
    for text in texts[:absent]:
        text[-1] = ""
    return Dataset.from_dict({"group": list(range(number)), "document": [["d"] * 4] * number, "text": texts})


def trainer(folder: Path, retriever: Path, lm: Path, **options: Any) -> ReplugTrainer:
    callbacks = options.pop("callbacks", None)
    model = load_retriever(str(retriever))
    if options.pop("dropout", True) is False:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    given = {"max_steps": 6, "logging_steps": 1, "report_to": [], "quiet": True, "save_strategy": "no"}
    given |= {"gradient_accumulation_steps": 1, "temperature": 0.05, "lm_temperature": 0.05}
    args = ReplugTrainingArguments(output_dir=str(folder), **(given | options))
    return ReplugTrainer(
        model,
        args,
        lm=AutoModelForCausalLM.from_pretrained(lm),
        lm_tokenizer=AutoTokenizer.from_pretrained(lm),
        max_length=32,
        train_dataset=groups(),
        callbacks=callbacks,
    )


PAPER = {"similarity_sides": "query_passage", "similarity_span": "first_half", "likelihood": "sum"}


@pytest.mark.parametrize("form", [{}, PAPER], ids=["ours", "paper"])
def test_the_loss_is_the_equation(
    retriever_folder: Path, llama_folder: Path, tmp_path: Path, form: dict[str, str]
) -> None:
    """In plain loops, pair by pair and without padding; one chunk of the first group is absent."""
    retriever = load_retriever(str(retriever_folder)).double().eval()
    lm = AutoModelForCausalLM.from_pretrained(llama_folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    rows = [groups(2, absent=1)[n] for n in range(2)]
    retriever.prompts = {"query": "the: ", "document": "a: "}
    args = ReplugTrainingArguments(output_dir=str(tmp_path), temperature=0.02, lm_temperature=0.01, **form)
    collator = GroupCollator(retriever, tokenizer, 32, args)
    losses = []
    for row in rows:
        texts = [text for text in row["text"] if text]
        vectors = retriever.encode_document(texts, convert_to_tensor=True).double().tolist()
        halves = [" ".join(text.split()[: math.ceil(len(text.split()) / 2)]) for text in texts]
        queries = retriever.encode_query(halves, convert_to_tensor=True).double().tolist() if form else vectors
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:32] for text in texts]
        for i in range(len(texts)):
            others = [j for j in range(len(texts)) if j != i]
            likelihood, cosine = [], []
            for j in others:
                read = torch.tensor([ids[j] + ids[i]])
                log_p = lm(input_ids=read).logits[0].log_softmax(-1)
                at = range(len(ids[j]), read.shape[1])
                total = sum(float(log_p[p - 1, int(read[0, p])]) for p in at)
                likelihood.append(total if form else total / len(ids[i]))
                cosine.append(sum(a * b for a, b in zip(queries[i], vectors[j], strict=True)))
            q = [math.exp((value - max(likelihood)) / 0.01) for value in likelihood]
            p = [math.exp((value - max(cosine)) / 0.02) for value in cosine]
            q, p = [v / sum(q) for v in q], [v / sum(p) for v in p]
            losses.append(sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a))
    assert len(losses) == 7
    expected = sum(losses) / 7
    for block in (1, 3, 64):
        args.lm_batch_size = block
        outputs = Replug(retriever, lm, args).eval()(**collator(rows))
        assert float(outputs["loss"]) == pytest.approx(expected, rel=1e-4)
    outputs["loss"].backward()
    assert all(p.grad is None for p in lm.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in retriever.parameters())


def test_it_learns_what_the_frozen_model_likes(retriever_folder: Path, llama_folder: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", retriever_folder, llama_folder, max_steps=40, learning_rate=2e-3)
    lm = {name: value.clone() for name, value in run.model.lm.state_dict().items()}
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert all(torch.equal(value, lm[name]) for name, value in run.model.lm.state_dict().items())
    assert not run.model.lm.training
    [folder] = run.write_models(run.args.output_dir)
    assert not any(file.stat().st_size > 2_000_000 for file in folder.rglob("*"))


def test_language_models_that_do_not_fit_are_errors(retriever_folder: Path, llama_folder: Path) -> None:
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(llama_folder), AutoTokenizer.from_pretrained(llama_folder)
    given = {"lm_tokenizer": tokenizer, "train_dataset": groups()}
    lm.config.max_position_embeddings = 100
    with pytest.raises(UserError, match="100 positions"):
        ReplugTrainer(str(retriever_folder), lm=lm, max_length=64, **given)
    lm.config.max_position_embeddings = 2048
    with pytest.raises(UserError, match="is an encoder"):
        ReplugTrainer(str(retriever_folder), lm=str(retriever_folder), max_length=32, **given)
