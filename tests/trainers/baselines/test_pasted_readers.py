"""RA-IT and RA-DIT: pasted prompts, the reader's likelihoods against plain loops, the retriever by equation 6."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from revela_hub.errors import UserError
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.pasted import paste, pasted_log_likelihoods, pasted_prompts, ra_it_trainer
from revela_hub.trainers.baselines.ra_dit import RADITTrainer, decoder_retriever, reader_likelihoods

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
    with pytest.raises(UserError, match="k=5 passages are to be read, but the collection has 4"):
        pasted_prompts(prompts(), PASSAGES, RANKING, 5)


def test_ra_it_learns_the_answers_alone(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    texts = pasted_prompts(prompts(), PASSAGES, RANKING, 2)
    answers = [text.strip() for text in texts["completion"]]
    before = pasted_log_likelihoods(model, bpe_tokenizer, texts["prompt"], answers)
    for number, (text, answer) in enumerate(zip(texts["prompt"], answers, strict=True)):  # one token at a time
        ids = bpe_tokenizer(text)["input_ids"]
        total = 0.0
        for token in [*bpe_tokenizer(f" {answer}")["input_ids"], bpe_tokenizer.eos_token_id]:
            total += float(model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token])
            ids = [*ids, token]
        assert float(before[number]) == pytest.approx(total, rel=1e-4)
    args = SFTConfig(output_dir=str(tmp_path), max_steps=12, learning_rate=3e-3, completion_only_loss=True, **COMMON)
    trainer = ra_it_trainer(
        model, args, tokenizer=bpe_tokenizer, prompts=prompts(), passages=PASSAGES, ranking=RANKING, k=2
    )
    trainer.train()
    after = pasted_log_likelihoods(model, bpe_tokenizer, texts["prompt"], answers)
    assert (after > 0.9 * before).all()


def test_ra_dit_brings_the_retriever_to_what_helps_the_reader(
    tmp_path: Path, llama_folder: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    retriever = decoder_retriever(str(llama_folder), 1, bpe_tokenizer)
    assert len(retriever.model.get_decoder().layers) == 2  # b + 1 layers
    candidates = np.array([[0, 1, 2, 3]] * 3, np.int32)
    reader = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    assert reader_likelihoods(reader, bpe_tokenizer, prompts(), PASSAGES, candidates).shape == (3, 4)
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
        retriever, args, prompts=prompts(), passages=PASSAGES, candidates=candidates, log_likelihoods=wanted
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0], losses
    ranked = retriever.rank(prompts()["prompt"][:2], PASSAGES, 4, query_length=32, passage_length=32)
    assert ranked[:, 0].tolist() == [0, 1]
    with pytest.raises(UserError, match="b=2 is beyond the last layer"):
        decoder_retriever(str(llama_folder), 2, bpe_tokenizer)
