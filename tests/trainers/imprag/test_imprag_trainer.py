"""Training ImpRAG: both stages learn, runs resume bit for bit, two processes are one, losses against plain loops."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from processes import launch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembly, assemble_part
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.trainers.imprag.checkpoint import load_imprag, load_imprag_checkpoint
from revela_hub.trainers.imprag.data import ImpRAGTrainingArguments, padded, tokenize_passages
from revela_hub.trainers.imprag.retrieval import kl_divergence, multi_label_nce, rank_passages
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer

RIVERS = ("Alba", "Brent", "Corve", "Dart", "Esk", "Foss", "Gade", "Hodder", "Isla", "Kenn", "Lune", "Mole")
PASSAGES = [f"The river {name} flows past the town {name.lower()}ford." for name in RIVERS]


def prompts() -> Dataset:
    rows = [
        {
            "id": str(row),
            "task": "question_answering",
            "prompt": f"Which town has the river {name}?",
            "input": f"river {name} town",
            "answers": [f"{name.lower()}ford"],
            "retrieve": row != 3,
            "where": f"data.jsonl:{row + 1}",
        }
        for row, name in enumerate(RIVERS)
    ]
    return Dataset.from_list(rows)


def model(tokenizer: PreTrainedTokenizerFast, **config: object) -> ImpRAGForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,  # scores that differ from the start
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return ImpRAGForCausalLM.from_backbone(llama, **({"b": 1, "t": 1, "k": 2, "l_max": 48} | config))


def arguments(folder: Path, **settings: object) -> ImpRAGTrainingArguments:
    fixed = {
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 4,
        "retrieval_warmup_epochs": 2,
        "num_positives": 1,
        "num_negatives": 3,
        "first_negative_rank": 2,
        "last_negative_rank": 12,
        "num_candidates": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "disable_tqdm": True,
    }
    return ImpRAGTrainingArguments(output_dir=str(folder), **(fixed | settings))


def trainer(
    tokenizer: PreTrainedTokenizerFast,
    args: ImpRAGTrainingArguments,
    start: ImpRAGForCausalLM | None = None,
    data: Dataset | None = None,
    max_length: int = 100,
) -> ImpRAGTrainer:
    rows = range(len(RIVERS))
    return ImpRAGTrainer(
        start or model(tokenizer),
        args,
        processing_class=tokenizer,
        train_dataset=data or prompts(),
        passages=PASSAGES,
        pseudo_labels=np.array([[own, *(row for row in rows if row != own)] for own in rows], np.int32),
        max_length=max_length,
    )


def weights(run: ImpRAGTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.imprag.state_dict().items()}


def test_both_stages_learn_and_log_their_losses(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    run = trainer(bpe_tokenizer, arguments(tmp_path, num_train_epochs=14, retrieval_warmup_epochs=8, temperature=0.3))
    run.train()
    logs = [entry for entry in run.state.log_history if "generation_loss" in entry]
    assert len(logs) == 42
    warm_up, distilled = logs[:24], logs[24:]
    assert warm_up[-1]["retrieval_loss"] < 0.5 * warm_up[0]["retrieval_loss"]
    assert distilled[-1]["generation_loss"] < 0.5 * logs[0]["generation_loss"]
    assert all(entry["answer_recall"] == 1.0 for entry in warm_up)  # the label's first passage holds the answer
    assert run.built_at == 39  # the index was rebuilt at steps 24, 27, ..., 39
    corpus = {str(number): text for number, text in enumerate(PASSAGES)}
    queries = {str(number): text for number, text in enumerate(run.train_dataset["prompt"])}
    run.retrieval_task = RetrievalTask(corpus, queries, {query: {query: 1} for query in queries}, "towns")
    assert run.evaluate()["eval_ndcg_at_10"] > 0.5
    recall = np.mean([entry["answer_recall"] for entry in distilled])
    assert recall > 0.5  # two of twelve passages by chance: 0.17
    run.save_model(str(tmp_path / "saved"))
    folder = assemble_part(run.method, tmp_path / "saved", tmp_path / "model", Assembly(), run.exportable()).folder
    loaded = ImpRAGForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in weights(run).items())


def test_the_first_steps_train_retrieval_alone(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    """Without reading: the layers above the retrieval layer keep their weights, and the loss of the same batches is lower later."""
    run = trainer(
        bpe_tokenizer, arguments(tmp_path / "all", num_train_epochs=8, retrieval_only_steps=24, temperature=0.3)
    )
    before = weights(run)
    run.train()
    logs = [entry for entry in run.state.log_history if "retrieval_loss" in entry]
    assert len(logs) == 24 and not any("generation_loss" in entry for entry in logs)
    assert all(entry["loss"] == pytest.approx(entry["retrieval_loss"], abs=1e-4) for entry in logs)
    assert logs[-1]["retrieval_loss"] < 0.5 * logs[0]["retrieval_loss"]
    changed = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    assert any(".layers.0." in name for name in changed)
    assert not any(".layers.2." in name or "lm_head" in name for name in changed)

    later = trainer(bpe_tokenizer, arguments(tmp_path / "part", num_train_epochs=4, retrieval_only_steps=4))
    later.train()
    named = [("generation_loss" in entry) for entry in later.state.log_history if "retrieval_loss" in entry]
    assert named == 4 * [False] + 8 * [True]
    ranking = later.ranking
    later.train()
    assert later.ranking is not ranking  # a second run builds its own index


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"lora_rank": 4},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.exhaustive),
        {"retrieval_only_steps": 2},
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast, settings: dict[str, object]
) -> None:
    """Stopped in self-distillation, between two rebuilds of the index."""
    options = {"num_train_epochs": 3, "retrieval_warmup_epochs": 1, "index_steps": 4, **settings}
    whole = trainer(bpe_tokenizer, arguments(tmp_path / "whole", **options))
    whole.train()
    stopped = {"save_strategy": "steps", "save_steps": 5, "max_steps": 9, **options}
    first = trainer(bpe_tokenizer, arguments(tmp_path / "first", **stopped))
    first.train()
    second = trainer(bpe_tokenizer, arguments(tmp_path / "second", **options))
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert second.built_at == whole.built_at
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_targets_of_self_distillation_have_no_dropout_and_are_computed_under_autocast(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = ImpRAGForCausalLM.answer_log_likelihoods, []

    def watched(given: ImpRAGForCausalLM, *args: torch.Tensor, **kwargs: int) -> torch.Tensor:
        seen.append((any(module.training for module in given.modules()), torch.is_autocast_enabled("cpu")))
        return own(given, *args, **kwargs)

    monkeypatch.setattr(ImpRAGForCausalLM, "answer_log_likelihoods", watched)
    args = arguments(tmp_path, max_steps=1, retrieval_warmup_epochs=0, lora_rank=4, lora_dropout=0.5, bf16=True)
    run = trainer(bpe_tokenizer, args)
    run.train()
    assert seen == [(False, True)]
    assert run.imprag.training


def test_adapters_belong_to_the_model_that_they_were_trained_on(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A decoder, an ImpRAG model with other weights that was made of it, and adapters on top of that, twice."""
    model(bpe_tokenizer).backbone.save_pretrained(tmp_path / "decoder")
    bpe_tokenizer.save_pretrained(tmp_path / "decoder")
    whole = load_imprag(str(tmp_path / "decoder"), b=1, t=1, k=2, l_max=48).model
    for weight in whole.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    whole.save_pretrained(tmp_path / "whole")
    bpe_tokenizer.save_pretrained(tmp_path / "whole")
    for base, output in pairwise([str(tmp_path / name) for name in ("whole", "one", "two")]):
        start = load_imprag(base).model
        before = {name: value.clone() for name, value in start.state_dict().items()}
        args = arguments(tmp_path / "run", lora_rank=4, max_steps=1, learning_rate=1e-2)
        run = trainer(bpe_tokenizer, args, start=start)
        assert all("lora_" in name for name, weight in run.model.named_parameters() if weight.requires_grad)
        run.train()
        run.save_model(output)
        assert json.loads(Path(output, "adapter_config.json").read_text())["base_model_name_or_path"] == base
        trained = run.exportable().model.state_dict()
        assert {name for name, value in trained.items() if not torch.equal(value, before[name])}
        loaded = load_imprag_checkpoint(output).model.state_dict()
        for name, value in trained.items():
            torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-6)
    folder = assemble_part(run.method, Path(output), tmp_path / "model", Assembly(), run.exportable()).folder
    assert not any(str(tmp_path) in file.read_text() for file in folder.rglob("*.json"))
    published = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.randint(2, 200, (1, 9))
    expected = run.imprag.eval()(ids, passage_input_ids=ids[None]).logits
    torch.testing.assert_close(published(ids, passage_input_ids=ids[None]).logits, expected, rtol=1e-4, atol=1e-5)
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(UserError, match="one': no such folder"):
        load_imprag_checkpoint(output)


def test_accumulation_is_a_larger_batch_where_no_prompt_sees_another(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Self-distillation has no in-batch negatives: 2 batches of 6 are one of 12."""
    ends = []
    for size, steps in ((12, 1), (6, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 1}
        args = arguments(tmp_path, retrieval_warmup_epochs=0, optim="sgd", learning_rate=0.1, **options)
        run = trainer(bpe_tokenizer, args)
        run.train_dataset = run.train_dataset.map(lambda row: row | {"retrieve": True})
        run.train()
        ends.append(weights(run))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warm_up", [0, 2])
def test_prompts_that_do_not_retrieve_cost_no_passages(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, warm_up: int
) -> None:
    """And the gradient of two prompts, one of which retrieves, is the sum of theirs."""
    run, encoded, gradients = trainer(bpe_tokenizer, arguments(tmp_path)), [], []
    run.current_gradient_accumulation_steps, run.args.retrieval_warmup_epochs = 1, warm_up
    run.pseudo_labels[3] = -1  # as `prompt_ranking` has it
    run.rebuild_index()
    for name in ("embed_passages", "passage_states"):
        own = getattr(run.imprag, name)
        monkeypatch.setattr(run.imprag, name, lambda ids, *rest, own=own: encoded.append(len(ids)) or own(ids, *rest))
    for rows in ([0, 3], [0], [3]):
        run.model.zero_grad()
        batch = run.data_collator([run.train_dataset[row] for row in rows])
        run.compute_loss(run.model, batch, num_items_in_batch=20).backward()
        gradients.append({name: weight.grad.clone() for name, weight in run.imprag.named_parameters()})
    assert encoded[:2] == [4, 1]  # candidates, sets of passages
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name] + gradients[2][name], value, rtol=1e-5, atol=1e-6)


TWO = """
import sys
import torch
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from revela_hub.trainers.baselines.ra_dit import reader_likelihoods
from test_imprag_trainer import PASSAGES, arguments, prompts, trainer, weights
processes = int(sys.argv[1])
args = arguments(Path({folder!r}), per_device_train_batch_size=4 // processes, num_train_epochs=2,
                 retrieval_warmup_epochs=1, retrieval_only_steps=1, optim="sgd", learning_rate=0.1)
run = trainer(PreTrainedTokenizerFast.from_pretrained({folder!r}), args)
reader, ranking = run.imprag.backbone, run.pseudo_labels[:, :3]
likelihoods = reader_likelihoods(reader, run.own_tokenizer, prompts(), PASSAGES, ranking)  # of RA-DIT
run.train()
if args.should_save:
    torch.save((weights(run) | {{"": likelihoods}}, run.state.log_history), Path({folder!r}) / f"{{processes}}.pt")
"""


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    bpe_tokenizer.save_pretrained(tmp_path)
    here, script = Path(__file__).resolve(), tmp_path / "two.py"
    script.write_text(TWO.format(folder=str(tmp_path), tests=str(here.parents[2]), here=str(here.parent)))
    for processes in (1, 2):
        launch(str(script), str(processes), processes=processes, environment={"CUDA_VISIBLE_DEVICES": ""})
    (one, one_log), (two, two_log) = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    for a, b in zip(one_log, two_log, strict=True):
        for name in {"generation_loss", "retrieval_loss", "answer_recall"} & set(a):
            assert a[name] == pytest.approx(b[name], rel=1e-3), name


def test_losses_are_their_equations() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    positive = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()
    negative = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    got = multi_label_nce(scores, positive, negative)
    for q in range(3):
        terms = []
        for p in range(5):
            if positive[q, p]:
                rest = sum(math.exp(scores[q, n]) for n in range(5) if negative[q, n])
                terms.append(-math.log(math.exp(scores[q, p]) / (math.exp(scores[q, p]) + rest)))
        assert float(got[q]) == pytest.approx(sum(terms) / len(terms) if terms else 0.0)
    likelihood = torch.randn(3, 5, dtype=torch.float64) - 2
    for q in range(3):
        retrieval = [math.exp(s) / sum(math.exp(x) for x in scores[q]) for s in scores[q]]
        target = [math.exp(s / 0.5) / sum(math.exp(x / 0.5) for x in likelihood[q]) for s in likelihood[q]]
        forward = sum(p * math.log(p / r) for p, r in zip(target, retrieval, strict=True))
        backward = sum(r * math.log(r / p) for p, r in zip(target, retrieval, strict=True))
        assert float(kl_divergence(likelihood / 0.5, scores)[q]) == pytest.approx(forward)
        assert float(kl_divergence(scores, likelihood / 0.5)[q]) == pytest.approx(backward)


def test_bm25_ranks_and_fills_up_with_nothing() -> None:
    ranked = rank_passages("bm25", ["the town albaford", "zebra"], PASSAGES, depth=4)
    assert ranked.shape == (2, 4)
    assert ranked[0, 0] == 0
    assert (ranked[1] == -1).all()


def test_the_index_finds_the_candidates(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    run = trainer(bpe_tokenizer, arguments(tmp_path))
    run.rebuild_index()
    rows = run.train_dataset
    queries = [run.imprag.embed_queries(torch.tensor([ids]))[0] for ids in rows["prompt_ids"]]
    tokens, _ = tokenize_passages(bpe_tokenizer, PASSAGES, 48)
    passages = [run.imprag.embed_passages(padded([row])[0])[0] for row in tokens]
    assert (run.ranking[3] == -1).all()  # does not retrieve
    for query, ranked in zip(queries[:3] + queries[4:], np.delete(run.ranking, 3, axis=0), strict=True):
        scores = torch.stack([query @ passage for passage in passages])
        torch.testing.assert_close(scores[ranked.tolist()], scores.topk(4).values, rtol=1e-3, atol=1e-4)
    first = run.ranking.copy()
    with torch.no_grad():
        run.imprag.get_input_embeddings().weight.mul_(-1)
    run.rebuild_index()  # the index of the old weights is gone
    assert (run.ranking != first).any()


def test_prompts_that_do_not_fit_are_dropped_or_errors(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    data, args = prompts().to_list(), arguments(tmp_path)
    data[5]["prompt"] = "x " * 300
    run = trainer(bpe_tokenizer, args, data=Dataset.from_list(data))
    assert "1 of 12 prompts have more than 100 tokens" in capsys.readouterr().out
    assert run.train_dataset["id"][4:6] == ["4", "6"] and run.pseudo_labels[4:6, 0].tolist() == [4, 6]
    with pytest.raises(UserError, match="do not fit into the backbone's 256"):
        trainer(bpe_tokenizer, args, max_length=200)
    with pytest.raises(UserError, match=r"have more than 5 tokens, answer included \(first: data.jsonl:1\)"):
        trainer(bpe_tokenizer, args, max_length=5)
    with pytest.raises(ValueError, match="ranks must be in this order"):
        arguments(tmp_path, num_positives=5, first_negative_rank=3)
