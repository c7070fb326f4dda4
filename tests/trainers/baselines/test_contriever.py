"""Contriever: its equations in loops, views, runs that are killed, and two processes as one."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import TrainerCallback, TrainerControl, TrainerState

from revela_hub.errors import UserError
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.contriever import (
    EMPTY,
    Contriever,
    ContrieverTrainer,
    ContrieverTrainingArguments,
    ViewCollator,
)


def passages(number: int = 24) -> Dataset:
    words = "the quick brown fox jumps over a lazy dog and rivers carry sediment from mountains to the sea".split()
    texts = [" ".join(words[(7 * n + 3 * i) % len(words)] for i in range(14 + n % 5)) for n in range(number)]
    return Dataset.from_dict({"row": list(range(number)), "document": ["d"] * number, "text": texts})


def arguments(folder: Path, **options: Any) -> ContrieverTrainingArguments:
    given = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 1, "report_to": [], "quiet": True}
    return ContrieverTrainingArguments(output_dir=str(folder), **(given | {"save_strategy": "no"} | options))


def trainer(folder: Path, retriever: Path, **options: Any) -> ContrieverTrainer:
    callbacks = options.pop("callbacks", None)
    model = load_retriever(str(retriever))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and options.get("dropout") is False:
            module.p = 0.0
    options.pop("dropout", None)
    args = arguments(folder, **options)
    return ContrieverTrainer(model, args, train_dataset=passages(), callbacks=callbacks)


def loop_loss(query: list[list[float]], keys: list[list[list[float]]], temperature: float) -> float:
    """L of each query with its own candidates, the first of which is right, in plain loops."""
    total = 0.0
    for q, candidates in zip(query, keys, strict=True):
        scores = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / temperature) for k in candidates]
        total -= math.log(scores[0] / sum(scores))
    return total / len(query)


def embed(model: Any, features: dict[str, torch.Tensor]) -> list[list[float]]:
    return model(dict(features))["sentence_embedding"].detach().tolist()  # type: ignore[no-any-return]


def test_in_batch_loss_is_the_equation(retriever_folder: Path, tmp_path: Path) -> None:
    model = load_retriever(str(retriever_folder)).double().eval()
    args = arguments(tmp_path, temperature=0.05)
    batch = ViewCollator(model, args)([passages()[n] for n in range(5)])
    q, k = embed(model, batch["query"]), embed(model, batch["key"])
    expected = loop_loss(q, [[k[i], *(k[j] for j in range(5) if j != i)] for i in range(5)], 0.05)
    outputs = Contriever(model, args).eval()(**batch)
    assert float(outputs["loss"]) == pytest.approx(expected, abs=1e-5)
    outputs["loss"].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_queue_and_momentum_are_the_equations(retriever_folder: Path, tmp_path: Path) -> None:
    """Three steps: the first has no negatives, the third sees a queue that has lost its oldest keys."""
    model = load_retriever(str(retriever_folder)).double()
    followed = load_retriever(str(retriever_folder)).double().eval()
    model.truncate_dim = 8  # vectors are whole in training
    args = arguments(tmp_path, temperature=0.5, queue_size=6, momentum=0.9)
    module = Contriever(model, args).double()
    module.train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    collator = ViewCollator(model, args)
    queue: list[list[float]] = []
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)  # what an update might do
            for own, new in zip(followed.parameters(), model.parameters(), strict=True):
                own.copy_(0.9 * own + 0.1 * new)
        module.move_key_encoder()
        batch = collator([passages()[4 * step + n] for n in range(4)])
        outputs = module(**batch)
        q, k = embed(model, batch["query"]), embed(followed, batch["key"])
        expected = loop_loss(q, [[k[i], *queue] for i in range(4)], 0.5)
        assert float(outputs["loss"]) == pytest.approx(expected, abs=1e-5)
        queue = (queue + k)[-6:]
        got = {tuple(round(x, 6) for x in key) for key in module.queue_KD[module.queue_hash_K != EMPTY].tolist()}
        assert got == {tuple(round(x, 6) for x in key) for key in queue}
    outputs["loss"].backward()
    assert all(p.grad is None for p in module.key_encoder.parameters())
    assert any(p.grad is not None for p in model.parameters())


def test_views_are_parts_of_the_text_and_their_own_in_every_epoch(retriever_folder: Path, tmp_path: Path) -> None:
    model = load_retriever(str(retriever_folder))
    text = "one two three four five six seven eight nine ten 東京 eleven twelve"
    cropping = ViewCollator(model, arguments(tmp_path, deletion=0.0, seed=3))
    for row in range(20):
        for view in cropping.views(text, row):
            assert view in text and 1 <= len(view.split()) <= 7
    assert cropping.views(text, 1) == cropping.views(text, 1) != cropping.views(text, 2)
    before = cropping.views(text, 1)
    cropping.epoch = 1
    assert cropping.views(text, 1) != before
    cloze = ViewCollator(model, arguments(tmp_path, deletion=0.0, views="inverse_cloze"))
    for row in range(20):
        query, rest = cloze.views(text, row)
        assert query in text and sorted((query + rest).replace(" ", "")) == sorted(text.replace(" ", ""))
    both = ViewCollator(model, arguments(tmp_path, deletion=0.0, views="both"))
    longest = [max(len(view.split()) for view in both.views(text, row)) for row in range(60)]
    assert 10 < sum(length > 7 for length in longest) < 50  # the rest of a text is longer than a crop
    deleted = ViewCollator(model, arguments(tmp_path, deletion=0.5, min_ratio=1.0, max_ratio=1.0))
    kept = [len(deleted.views(" ".join(map(str, range(100))), row)[0].split()) for row in range(20)]
    assert 35 < sum(kept) / len(kept) < 65
    assert all(view for view in cropping.views("word", 0))


def test_a_decoder_in_the_form_of_revela_s_paper(llama_folder: Path, tmp_path: Path) -> None:
    """LoRA, the EOS as the vector and both prompts; the exported weights are the trained ones."""
    form: dict[str, Any] = {"pooling": "last", "prompts": {"query": "Query: ", "document": "Passage: "}}
    args = arguments(tmp_path / "run", lora_rank=4, lora_alpha=2, lora_dropout=0.1, learning_rate=1e-2)
    run = ContrieverTrainer(str(llama_folder), args, model_init_kwargs=form, train_dataset=passages())
    assert all("lora_" in name for name, p in run.model.named_parameters() if p.requires_grad)
    batch = run.data_collator([passages()[0]])
    tokenizer = run.retriever.tokenizer
    for side, prompt in (("query", "Query:"), ("key", "Passage:")):
        (ids,) = batch[side]["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids).startswith(prompt)
    run.train()
    expected = run.retriever.encode_query(["the fox"])
    exported = SentenceTransformer(str(run.write_models(tmp_path / "out")[0]), device="cpu")
    assert exported.prompts["document"] == "Passage: "
    np.testing.assert_allclose(exported.encode_query(["the fox"]), expected, atol=1e-5)
    assert not any("lora" in name for name, _ in exported.named_parameters())
    plain = load_retriever(str(llama_folder), pooling="last").encode(["Query: the fox"])
    assert np.abs(plain - expected).max() > 1e-3
    with pytest.raises(UserError, match="pooling"):
        load_retriever(str(tmp_path / "out" / "retriever"), pooling="mean")


class _Kill(TrainerCallback):
    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_killed_run_resumes_with_its_queue_and_momentum_encoder(retriever_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 9, "save_strategy": "steps", "save_steps": 4}
    options |= {"queue_size": 8, "momentum": 0.5}
    whole = trainer(tmp_path / "whole", retriever_folder, **options)
    whole.train()
    killed = trainer(tmp_path / "killed", retriever_folder, callbacks=[_Kill()], **options)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = trainer(tmp_path / "killed", retriever_folder, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    expected, got = whole.model.state_dict(), resumed.model.state_dict()
    assert "queue_KD" in expected
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_the_best_checkpoint_is_loaded(retriever_folder: Path, tmp_path: Path) -> None:
    steps: dict[str, Any] = {f"{name}_strategy": "steps" for name in ("eval", "save")} | {
        "eval_steps": 2,
        "save_steps": 2,
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    args = arguments(tmp_path, learning_rate=1e-3, **steps, **best)
    run = ContrieverTrainer(str(retriever_folder), args, train_dataset=passages(), eval_dataset=passages())
    run.train()
    checkpoint = str(run.state.best_model_checkpoint)
    assert not checkpoint.endswith("-6")
    for name, weight in SentenceTransformer(checkpoint, device="cpu").state_dict().items():
        assert torch.equal(run.retriever.state_dict()[name].cpu(), weight), name


def test_a_model_for_dot_products_is_trained_by_them(retriever_folder: Path, tmp_path: Path) -> None:
    made = SentenceTransformer(str(retriever_folder), device="cpu")
    dot = SentenceTransformer(modules=[made[0], made[1]], similarity_fn_name="dot", device="cpu").eval()
    args = arguments(tmp_path, temperature=1.0)
    views = ViewCollator(dot, args)([passages()[0], passages()[1]])
    query, key = (torch.tensor(embed(dot, views[side])) for side in ("query", "key"))
    expected = torch.nn.functional.cross_entropy(query @ key.T, torch.arange(2))
    assert float(Contriever(dot, args)(**views)["loss"]) == pytest.approx(float(expected))
    assert float(query.norm()) > 2
    dot.similarity_fn_name = "euclidean"
    with pytest.raises(UserError, match="euclidean"):
        load_retriever(dot)


def test_views_are_encoded_as_queries_and_documents(retriever_folder: Path, tmp_path: Path) -> None:
    """Each view takes its own route, and the prompt's tokens are not pooled if the model excludes them."""
    modules = []
    for _ in range(2):
        route = SentenceTransformer(str(retriever_folder), device="cpu")
        modules.append([route[0], Pooling(route.get_embedding_dimension(), "mean", include_prompt=False)])
    made = SentenceTransformer(
        modules=[Router.for_query_document(*modules)],
        prompts={"query": "a river ", "document": "the sea "},
        device="cpu",
    )
    with torch.no_grad():
        modules[0][0].auto_model.embeddings.word_embeddings.weight.neg_()
    made.save_pretrained(str(tmp_path / "routes"))
    run = trainer(tmp_path / "run", tmp_path / "routes", dropout=False)
    rows = [passages()[0], passages()[1]]
    views = [run.data_collator.views(row["text"], row["row"]) for row in rows]
    batch = run.data_collator(rows)
    run.retriever.eval()
    for side, texts, encode in zip(
        ("query", "key"),
        zip(*views, strict=True),
        (run.retriever.encode_query, run.retriever.encode_document),
        strict=True,
    ):
        expected = encode(list(texts))
        torch.testing.assert_close(torch.tensor(embed(run.retriever, batch[side])), torch.from_numpy(expected))
    before = {name: weight.clone() for name, weight in run.retriever.state_dict().items()}
    run.train()
    changed = [name for name, weight in run.retriever.state_dict().items() if not torch.equal(weight, before[name])]
    assert any("query" in name for name in changed) and any("document" in name for name in changed)


def test_the_keys_encoder_moves_once_per_step(retriever_folder: Path, tmp_path: Path) -> None:
    seen = []

    class Watched(ContrieverTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append([weight.clone() for weight in self.model.key_encoder.parameters()])
            return super().training_step(*args, **kwargs)

    args = arguments(
        tmp_path,
        queue_size=8,
        momentum=0.5,
        gradient_accumulation_steps=3,
        max_steps=3,
        learning_rate=1e-2,
        warmup_steps=0,
    )
    Watched(load_retriever(str(retriever_folder)), args, train_dataset=passages(36)).train()
    moved = [any(not torch.equal(a, b) for a, b in zip(*each, strict=True)) for each in pairwise(seen)]
    assert moved == [False, False, True, False, False, True, False, False]


def test_options_with_which_it_would_learn_nothing(tmp_path: Path, retriever_folder: Path) -> None:
    with pytest.raises(ValueError, match="min_ratio"):
        arguments(tmp_path, min_ratio=0.6)
    with pytest.raises(ValueError, match="no negatives"):
        arguments(tmp_path, per_device_train_batch_size=1)
    arguments(tmp_path, per_device_train_batch_size=1, queue_size=4)
