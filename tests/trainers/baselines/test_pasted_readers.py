"""RA-IT and RA-DIT: pasted prompts, the reader's likelihoods against plain loops, the retriever by equation 6."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.ra_dit import (
    RADITTrainer,
    RADITTrainingArguments,
    Retriever,
    decoder_retriever,
    open_retriever,
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
    rows = pasted_prompts(prompts(), PASSAGES, RANKING, 2).to_list()
    assert rows[0] == {"prompt": paste("Where is the Dart?", PASSAGES[:2]), "completion": " here"}
    assert rows[1]["prompt"] == "Passage: The river Esk is long.\nWhere is the Esk?"
    assert rows[2] == {"prompt": "Say no.", "completion": " no"}
    with pytest.raises(UserError, match="--num_passages 5 is more than the 4 passages"):
        pasted_prompts(prompts(), PASSAGES, RANKING, 5)


def test_ra_it_learns_the_answers_alone(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    texts = pasted_prompts(prompts(), PASSAGES, RANKING, 2)
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
    for row, text, answer in zip(
        rows, texts["prompt"], answers, strict=True
    ):  # nothing is cut, the answer is the label
        assert bpe_tokenizer.decode(row["input_ids"]) == f"{text} {answer}<|endoftext|>"
        assert bpe_tokenizer.decode([n for n in row["labels"] if n != -100]) == f" {answer}<|endoftext|>"
    trainer.train()
    after = pasted_log_likelihoods(model, bpe_tokenizer, texts["prompt"], answers)
    assert (after > 0.9 * before[:-1]).all()
    plain = AutoModelForCausalLM.from_pretrained(trainer.write_models(tmp_path)[0])
    assert torch.equal(pasted_log_likelihoods(plain, bpe_tokenizer, texts["prompt"], answers), after)


def test_ra_dit_brings_the_retriever_to_what_helps_the_reader(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer)
    assert len(retriever.retriever.get_decoder().layers) == 2  # b + 1 layers
    candidates = np.array([[0, 1, 2, 3]] * 3, np.int32)
    reader = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    assert reader_likelihoods(reader, bpe_tokenizer, prompts(), PASSAGES, candidates).shape == (3, 4)
    assert (
        reader_likelihoods(reader, bpe_tokenizer, prompts(), PASSAGES, candidates)[2].isinf().all()
    )  # does not retrieve
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
    ranked = trainer.model.rank(prompts()["prompt"][:2], PASSAGES, 4, query_length=32, passage_length=32)
    assert ranked[:, 0].tolist() == [0, 1]
    corpus = {str(number): text for number, text in enumerate(PASSAGES)}
    trainer.retrieval_task = RetrievalTask(corpus, {"q": prompts()["prompt"][1]}, {"q": {"1": 1}}, "towns")
    assert trainer.evaluate()["eval_ndcg_at_10"] == 1.0
    with pytest.raises(UserError, match="--retrieval_layer 2"):
        decoder_retriever(str(llama_folder), 2, bpe_tokenizer)
    with pytest.raises(UserError, match="--max_passage_length 4000 does not fit"):
        decoder_retriever(str(llama_folder), 1, bpe_tokenizer, 4000)


def test_scores_of_ra_dit_are_in_float32_under_autocast(retriever_folder: Path) -> None:
    retriever = open_retriever(str(retriever_folder)).eval()
    query, passages = torch.randint(5, 50, (2, 4)), torch.randint(5, 50, (2, 3, 6))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        scores = retriever(query, torch.ones_like(query), passages, torch.ones_like(passages))
        queries_BE = retriever.embed(query, torch.ones_like(query), query=True).float()
        flat = passages.flatten(0, 1)
        passages_BCE = retriever.embed(flat, torch.ones_like(flat), query=False).float().view(2, 3, -1)
    torch.testing.assert_close(scores, torch.einsum("be,bce->bc", queries_BE, passages_BCE), rtol=1e-6, atol=1e-6)


def test_ra_dit_rejects_a_retriever_that_excludes_its_prompts_from_pooling(retriever_folder: Path) -> None:
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model[1].include_prompt = False
    with pytest.raises(UserError, match=r"excludes its prompts from pooling \(include_prompt\), which RA-DIT"):
        open_retriever(model)
    model.prompts = {"query": "", "document": ""}
    open_retriever(model)


def test_ra_dit_rejects_a_retriever_with_a_chat_template(retriever_folder: Path) -> None:
    """RA-DIT tokenizes texts itself, without the template."""
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    assert not open_retriever(model).decoder
    model[0].tokenizer.chat_template = "{% for m in messages %}user: {{ m['content'] }}{% endfor %}"
    model[0].modality_config["message"] = {"format": "flat", **model[0].modality_config["text"]}
    with pytest.raises(UserError, match="chat template"):
        open_retriever(model)


@pytest.mark.parametrize("decoder", [True, False])
def test_a_stopped_run_of_ra_dit_goes_on_bit_for_bit_and_is_exported(
    tmp_path: Path, llama_folder: Path, retriever_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast, decoder: bool
) -> None:
    candidates = np.array([[0, 1, 2], [1, 2, -1], [2, 3, 0]], np.int32)  # BM25 found two only for the second
    likelihoods = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -3.0, -torch.inf], [-1.0, -1.0, -2.0]])

    def build(folder: str, **settings: object) -> RADITTrainer:
        if decoder:
            retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer, 32)
        else:
            model = load_retriever(str(retriever_folder))
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            retriever = Retriever(model, model.tokenizer, decoder=False)
        given = COMMON | {"logging_steps": 1, "learning_rate": 1e-3, "max_steps": 6, "retrieval_warmup_epochs": 2}
        args = RADITTrainingArguments(output_dir=str(tmp_path / folder), **(given | {"num_positives": 1} | settings))
        return RADITTrainer(
            retriever,
            args,
            train_dataset=prompts(),
            passages=PASSAGES,
            pseudo_labels=candidates,
            log_likelihoods=likelihoods,
        )

    whole = build("whole")
    whole.train()
    build("cut", max_steps=4, save_strategy="steps", save_steps=4, lr_scheduler_type="constant").train()
    straight = build("straight", lr_scheduler_type="constant")
    straight.train()
    resumed = build("cut", lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    folder = str(whole.write_models(tmp_path / "out")[0])
    encoder = load_imprag_encoder(folder, "cpu") if decoder else SentenceTransformer(folder, device="cpu")
    options = {} if decoder else {"normalize_embeddings": True}  # it is trained as it is searched with: by cosines
    tokens = whole.model.tokens(PASSAGES, 32, query=False)
    expected = whole.model.cpu().encode(tokens, query=False)
    np.testing.assert_allclose(encoder.encode_document(PASSAGES, **options), expected, rtol=1e-4, atol=1e-5)
    queries = list(prompts()["prompt"])
    expected = whole.model.encode(whole.model.tokens(queries, 32, query=True), query=True)
    np.testing.assert_allclose(encoder.encode_query(queries, **options), expected, rtol=1e-4, atol=1e-5)
    cut = whole.model.tokens(["The river Dart is long."], 5, query=False)
    assert (len(cut.tokens), cut.cut, cut.max_length) == (5, 1, 5)
    if not decoder:  # what ends a text is kept, as sentence-transformers does
        assert cut.tokens[-1] == encoder.tokenizer.sep_token_id
        encoder.max_seq_length = 4
        assert (
            len(Retriever(encoder, encoder.tokenizer, decoder=False).tokens(PASSAGES[:1], 5, query=False).tokens) == 4
        )


def test_what_cannot_be_trained_is_said_in_one_line(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    args = RAITTrainingArguments(output_dir=str(tmp_path), **COMMON)
    given = {"tokenizer": bpe_tokenizer, "train_dataset": prompts(), "pseudo_labels": RANKING}
    model.config.max_position_embeddings = 10
    with pytest.raises(UserError, match="the decoder has 10 positions: lower"):
        RAITTrainer(model, args, passages=PASSAGES, num_passages=2, **given)
    with pytest.raises(UserError, match="3 of 3 prompts have more than 2 tokens"):
        RAITTrainer(model, args, passages=PASSAGES, num_passages=2, max_length=2, **given)
    with pytest.raises(UserError, match="the decoder has 10 positions: lower"):
        pasted_log_likelihoods(model, bpe_tokenizer, ["word " * 20], ["yes"])
    retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer)
    dit = RADITTrainingArguments(output_dir=str(tmp_path), **COMMON)
    given = {"passages": PASSAGES, "log_likelihoods": torch.zeros(3, 2)}
    with pytest.raises(UserError, match="0 of 0 prompts"):
        RADITTrainer(retriever, dit, train_dataset=prompts().select([2]), pseudo_labels=RANKING[:1], **given)
    with pytest.raises(UserError, match="2 of 2 prompts have fewer than two candidates to compare: add passages"):
        RADITTrainer(retriever, dit, train_dataset=prompts(), pseudo_labels=RANKING[[1, 1, 2]], **given)
    capsys.readouterr()
    kept = RADITTrainer(retriever, dit, train_dataset=prompts(), pseudo_labels=RANKING, **given).train_dataset
    assert kept["row"] == [0]
    assert "1 of 2 prompts have fewer than two candidates to compare: dropped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="num_candidates must be at least 2, not 1"):
        RADITTrainingArguments(output_dir=str(tmp_path), num_candidates=1)
    with pytest.raises(ValueError, match="packing"):
        RAITTrainingArguments(output_dir=str(tmp_path), packing=True)
    with pytest.raises(ValueError, match="num_positives 5 leaves no negatives among num_candidates 4"):
        RADITTrainingArguments(output_dir=str(tmp_path), num_candidates=4, retrieval_warmup_epochs=1)


def test_the_first_layers_of_a_family_whose_layers_have_types(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=len(bpe_tokenizer), use_cache=False)
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    cut = decoder_retriever(str(tmp_path), 1, bpe_tokenizer).retriever.eval()
    reference = ImpRAGForCausalLM.from_backbone(whole, b=1, t=1).eval()
    ids = torch.randint(2, 50, (3, 7))
    assert len(cut.get_decoder().layers) == 2
    assert torch.equal(cut.embed_passages(ids), reference.embed_passages(ids))
    assert torch.equal(cut.embed_queries(ids), reference.embed_queries(ids))
