"""Batches of varying shape do not reach cuDNN's attention, which builds a plan for each new shape."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from revela_hub.data.synthesis.backends import LocalModel, Request
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.rerank import Reranker
from revela_hub.sdpa import varying_shapes
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments
from revela_hub.trainers.baselines.ra_it import pasted_log_likelihoods
from revela_hub.trainers.imprag.answering import Answerer
from revela_hub.trainers.imprag.data import token_rows


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN's attention may be used, at each call of a model's linear layer."""
    seen: list[bool] = []
    forward = nn.Linear.forward

    def recorded(self: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(self, inputs)

    monkeypatch.setattr(nn.Linear, "forward", recorded)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    return seen


def check(call: Callable[[], Any], enabled: list[bool]) -> None:
    """The call uses the other kernels only, and the setting is restored."""
    enabled.clear()
    call()
    assert enabled and not any(enabled)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_encoding_and_reranking(retriever_folder: Path, enabled: list[bool]) -> None:
    model = load_encoder(str(retriever_folder), device="cpu")
    check(lambda: encode_texts(model, ["rivers", "rivers carry sediment"], "document"), enabled)
    reranker = Reranker(model)
    check(lambda: reranker.scores([("rivers", "rivers carry sediment")]), enabled)


def test_generation_and_likelihoods(
    llama_folder: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast, enabled: list[bool]
) -> None:
    check(lambda: LocalModel(str(llama_folder))._answer([Request("rivers", 0)]), enabled)
    check(lambda: pasted_log_likelihoods(tiny_llama, bpe_tokenizer, ["rivers"], ["sediment"]), enabled)
    model = ImpRAGForCausalLM.from_backbone(tiny_llama, b=0, t=1, k=1, l_max=8).eval()
    answerer = Answerer(model, bpe_tokenizer, None, k=0)
    check(lambda: list(answerer.answer(["rivers"], max_new_tokens=2)), enabled)
    check(lambda: token_rows([[5, 6], [7]]).encode(model.embed_passages, torch.device("cpu")), enabled)


def test_training(retriever_folder: Path, llama_folder: Path, tmp_path: Path, enabled: list[bool]) -> None:
    arguments = RevelaTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, lora_rank=0, report_to="none", use_cpu=True
    )
    text = " ".join(["rivers carry sediment ."] * 400)
    trainer = RevelaTrainer(
        str(retriever_folder),
        arguments,
        lm=str(llama_folder),
        max_length=16,
        train_dataset=Dataset.from_dict({"text": [text]}),
    )
    check(trainer.train, enabled)


def test_an_error_restores_the_setting() -> None:
    with pytest.raises(KeyError), varying_shapes():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # a user's own choice is kept
    try:
        with varying_shapes():
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_overlapping_threads_leave_the_setting_as_it_was() -> None:
    """The first one that begins ends first, so the setting that the second one finds is not the user's."""
    first, second = varying_shapes(), varying_shapes()
    first.__enter__()
    with ThreadPoolExecutor() as pool:
        pool.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # the second one still needs it
        pool.submit(second.__exit__, None, None, None).result()
    assert torch.backends.cuda.cudnn_sdp_enabled()
