"""RA-IT and RA-DIT: pasted prompts, the reader's likelihoods against plain loops, the retriever by equation 6."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.trainers.base.retriever import inputs_of, load_retriever
from revela_hub.trainers.baselines.ra_dit import (
    CandidateScores,
    RADITTrainer,
    RADITTrainingArguments,
    decoder_retriever,
    reader_likelihoods,
)
from revela_hub.trainers.baselines.ra_it import (
    RAITTrainer,
    RAITTrainingArguments,
    paste,
    pasted_log_likelihoods,
    pasted_prompts,
)
from revela_hub.trainers.imprag.checkpoint import load_imprag_encoder

PASSAGES = ["The river Dart.", "The river Esk is long.", "A fox.", "Paris."]


def prompts() -> Dataset:
    rows = [("Where is the Dart?", "here", True), ("Where is the Esk?", "over there", True), ("Say no.", "no", False)]
    return Dataset.from_list([{"prompt": p, "answers": [a], "retrieve": r, "where": "x:1"} for p, a, r in rows])


RANKING = np.array([[0, 1], [1, -1], [2, 3]], np.int32)
COMMON = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}


def test_passages_are_pasted_before_prompts_that_retrieve() -> None:
    rows = pasted_prompts(prompts(), PASSAGES, RANKING).to_list()
    assert rows[0] == {"prompt": paste("Where is the Dart?", PASSAGES[:2]), "completion": " here"}
    assert rows[1]["prompt"] == "Passage: The river Esk is long.\nWhere is the Esk?"
    assert rows[2] == {"prompt": "Say no.", "completion": " no"}


def test_ra_it_learns_the_answers_alone(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    texts = pasted_prompts(prompts(), PASSAGES, RANKING)
    answers = [text.strip() for text in texts["completion"]]
    asked = [*texts["prompt"], ""]  # EOS precedes the answer to an empty prompt
    before = pasted_log_likelihoods(model, bpe_tokenizer, asked, [*answers, "here"])
    for number, (text, answer) in enumerate(zip(asked, [*answers, "here"], strict=True)):  # one token at a time
        ids = bpe_tokenizer(text)["input_ids"] or [bpe_tokenizer.eos_token_id]
        total = 0.0
        for token in [*bpe_tokenizer(f" {answer}")["input_ids"], bpe_tokenizer.eos_token_id]:
            total += float(model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token])
            ids = [*ids, token]
        assert float(before[number]) == pytest.approx(total, rel=1e-4)
    args = RAITTrainingArguments(output_dir=str(tmp_path), max_steps=12, learning_rate=3e-3, warmup_steps=0, **COMMON)
    trainer = RAITTrainer(
        model,
        args,
        processing_class=bpe_tokenizer,
        train_dataset=prompts(),
        passages=PASSAGES,
        pseudo_labels=RANKING,
        num_passages=2,
    )
    rows = [dict(row) for row in trainer.train_dataset]
    assert [len(row["input_ids"]) for row in rows] == [len(row["labels"]) for row in rows]
    # Nothing is cut, the answer is the label.
    for row, text, answer in zip(rows, texts["prompt"], answers, strict=True):
        assert bpe_tokenizer.decode(row["input_ids"]) == f"{text} {answer}<|endoftext|>"
        assert bpe_tokenizer.decode([n for n in row["labels"] if n != -100]) == f" {answer}<|endoftext|>"
    trainer.train()
    after = pasted_log_likelihoods(model, bpe_tokenizer, texts["prompt"], answers)
    assert (after > 0.9 * before[:-1]).all()
    trainer.save_model(str(tmp_path / "saved"))
    assert "RA-DIT" in (tmp_path / "saved" / "model" / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(trainer.write_models(tmp_path)[0])
    assert plain.config.num_passages == 2
    assert torch.equal(pasted_log_likelihoods(plain, bpe_tokenizer, texts["prompt"], answers), after)


def test_ra_dit_brings_the_retriever_to_what_helps_the_reader(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer)
    candidates = np.array([[0, 1, 2, 3]] * 3, np.int32)
    reader = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    likelihoods = reader_likelihoods(reader, bpe_tokenizer, prompts(), PASSAGES, candidates)
    assert likelihoods.shape == (3, 4) and likelihoods[2].isinf().all()  # does not retrieve
    wanted = torch.full((3, 4), -20.0)
    wanted[0, 0] = wanted[1, 1] = wanted[2, 3] = 0.0  # certain, each with another passage
    args = RADITTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=60,
        learning_rate=1e-3,
        temperature=0.05,
        likelihood_temperature=0.3,
        logging_steps=1,
        **COMMON,
    )
    trainer = RADITTrainer(
        retriever, args, train_dataset=prompts(), passages=PASSAGES, pseudo_labels=candidates, log_likelihoods=wanted
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0], losses
    corpus = {str(number): text for number, text in enumerate(PASSAGES)}
    queries = {str(number): prompt for number, prompt in enumerate(prompts()["prompt"][:2])}
    trainer.retrieval_task = RetrievalTask(corpus, queries, {number: {number: 1} for number in queries}, "towns")
    assert trainer.evaluate()["eval_ndcg_at_10"] == 1.0
    with pytest.raises(UserError, match="0 <= b <= t < 2"):
        decoder_retriever(str(llama_folder), 2, bpe_tokenizer)
    with pytest.raises(UserError, match="4000 tokens do not fit"):
        decoder_retriever(str(llama_folder), 1, bpe_tokenizer, 4000)


def test_scores_of_ra_dit_are_in_float32_under_autocast(retriever_folder: Path) -> None:
    scores = CandidateScores(load_retriever(str(retriever_folder)).eval(), temperature=1.0)
    query = inputs_of(scores.retriever, ["a river", "a fox"], "query")
    passage = inputs_of(scores.retriever, [*PASSAGES, "the sea", "a town"], "document")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = scores(dict(query), dict(passage))
        query_BE, passage_BCE = scores.embed(dict(query)), scores.embed(dict(passage)).view(2, 3, -1)
    torch.testing.assert_close(found, torch.einsum("be,bce->bc", query_BE, passage_BCE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decoder", [True, False])
def test_a_stopped_run_of_ra_dit_resumes_bit_for_bit_and_is_exported(
    tmp_path: Path, llama_folder: Path, retriever_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast, decoder: bool
) -> None:
    candidates = np.array([[0, 1, 2], [1, 2, -1], [2, 3, 0]], np.int32)  # BM25 found two only for the second
    likelihoods = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -3.0, -torch.inf], [-1.0, -1.0, -2.0]])

    def build(folder: str, **settings: object) -> RADITTrainer:
        if decoder:
            retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer, 32)
        else:
            retriever = load_retriever(str(retriever_folder))
            for module in retriever.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        given = COMMON | {"learning_rate": 1e-3, "max_steps": 6, "retrieval_warmup_epochs": 2, "num_positives": 1}
        args = RADITTrainingArguments(
            output_dir=str(tmp_path / folder), lr_scheduler_type="constant", **(given | settings)
        )
        data = {"train_dataset": prompts(), "passages": PASSAGES}
        return RADITTrainer(retriever, args, pseudo_labels=candidates, log_likelihoods=likelihoods, **data)

    build("cut", max_steps=4, save_strategy="steps", save_steps=4).train()
    whole, resumed = build("whole"), build("cut")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    folder = str(whole.write_models(tmp_path / "out")[0])
    encoder = load_imprag_encoder(folder, "cpu") if decoder else SentenceTransformer(folder, device="cpu")
    scores = whole.model.cpu().eval()
    for task, encode in (("query", encoder.encode_query), ("document", encoder.encode_document)):
        expected = scores.embed(inputs_of(scores.retriever, PASSAGES, task)).detach()
        # It is trained as it is searched with: by cosines.
        options = {} if decoder else {"normalize_embeddings": True}
        np.testing.assert_allclose(encode(PASSAGES, **options), expected, rtol=1e-4, atol=1e-5)


def test_prompts_that_cannot_be_used_are_errors_or_dropped(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    args = RAITTrainingArguments(output_dir=str(tmp_path), **COMMON)
    given: dict[str, Any] = {"processing_class": bpe_tokenizer, "train_dataset": prompts(), "pseudo_labels": RANKING}
    model.config.max_position_embeddings = 10
    with pytest.raises(UserError, match="10 positions"):
        RAITTrainer(model, args, passages=PASSAGES, num_passages=2, **given)
    with pytest.raises(UserError, match="10 positions"):
        pasted_log_likelihoods(model, bpe_tokenizer, ["word " * 20], ["yes"])
    with pytest.raises(UserError, match="3 of 3 prompts have more than 2 tokens"):
        RAITTrainer(model, args, passages=PASSAGES, num_passages=2, max_length=2, **given)
    with pytest.raises(UserError, match="7 rows"):
        RAITTrainer(model, args, passages=PASSAGES, **given | {"pseudo_labels": np.zeros((7, 2), np.int32)})
    retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer)
    dit = RADITTrainingArguments(output_dir=str(tmp_path), **COMMON)
    given = {"passages": PASSAGES, "log_likelihoods": torch.zeros(3, 2), "train_dataset": prompts()}
    assert RADITTrainer(retriever, dit, pseudo_labels=RANKING, **given).train_dataset["row"][:] == [0]
    assert "1 of 2 prompts have fewer than two candidates to compare: dropped" in capsys.readouterr().out


def test_the_first_layers_of_a_family_whose_layers_have_types(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=len(bpe_tokenizer), use_cache=False)
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    retriever = decoder_retriever(str(tmp_path), 1, bpe_tokenizer)
    retriever.save_pretrained(str(tmp_path / "cut"))
    cut = load_imprag_encoder(str(tmp_path / "cut"), "cpu").model
    reference = ImpRAGForCausalLM.from_backbone(whole, b=1, t=1).eval()
    ids = torch.randint(2, 50, (3, 7))
    assert len(cut.get_decoder().layers) == 2
    assert torch.equal(cut.embed_passages(ids), reference.embed_passages(ids))
    assert torch.equal(cut.embed_queries(ids), reference.embed_queries(ids))


@pytest.mark.parametrize("loss", ["ra-dit", "imprag"])
def test_the_losses_are_divergences_over_the_candidates_that_exist(loss: str) -> None:
    """RA-DIT's equation 6 with likelihoods, and ImpRAG's with log-likelihoods, in plain loops."""
    scores = torch.randn(1, 4, dtype=torch.float64)
    log_likelihoods = torch.tensor([[-1.0, -0.2, -3.0, -torch.inf]], dtype=torch.float64)
    trainer = SimpleNamespace(
        candidates=np.array([[2, 0, 1, -1]], dtype=np.int32),
        log_likelihoods=log_likelihoods,
        args=SimpleNamespace(loss=loss, likelihood_temperature=0.5, retrieval_warmup_epochs=0),
        state=SimpleNamespace(epoch=1.0),
    )
    found = RADITTrainer.compute_loss(trainer, lambda: scores, {"row": torch.tensor([0])})  # type: ignore[arg-type]
    likelihoods = [float(value) for value in log_likelihoods[0, :3]]
    exponents = likelihoods if loss == "imprag" else [math.exp(value) for value in likelihoods]
    target = [math.exp(value / 0.5) / sum(math.exp(other / 0.5) for other in exponents) for value in exponents]
    mine = scores[0, :3].tolist()
    retrieval = [math.exp(value) / sum(math.exp(other) for other in mine) for value in mine]
    p, q = (target, retrieval) if loss == "imprag" else (retrieval, target)
    assert found.item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
