"""Forward passes ask the device nothing: on a GPU each question waits for all that was computed before it."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import revela_hub.modeling
from revela_hub.modeling import NVEmbedModel, RevelaForCausalLM

OURS = str(Path(revela_hub.modeling.__file__).resolve().parent)
QUESTIONS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")


class NoQuestions(TorchDispatchMode):
    """Raises where the number or shape of a result would have to come from the device. What transformers asks is its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func.overloadpacket.__name__ in QUESTIONS:
            frame = sys._getframe(1)
            while frame is not None and "site-packages" in frame.f_code.co_filename:
                if "/transformers/" in frame.f_code.co_filename:
                    break
                frame = frame.f_back
            assert frame is None or not str(Path(frame.f_code.co_filename).resolve()).startswith(OURS), (
                f"{func} at {frame.f_code.co_filename}:{frame.f_lineno} waits for the device"
            )
        return func(*args, **(kwargs or {}))


def llama(**settings: int) -> transformers.LlamaForCausalLM:
    config = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | settings
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **config)
    )


@pytest.mark.parametrize("pooling", ["latent", "mean", "eos", "self_attention"])
def test_nvembed_does_not_wait_for_the_device(pooling: str) -> None:
    model = NVEmbedModel.from_backbone(llama(), pooling=pooling, num_latents=5, num_heads=2).eval()
    ids = torch.randint(61, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
    with NoQuestions():
        model(ids, mask, mask, prompt_length=2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("v_normalization", [False, True])
def test_revela_does_not_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch, v_normalization: bool, training: bool) -> None:
    """On tensors without values (and without autocast), of which every question raises."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    # Transformers' own question, before the first layer: whether the rows are several texts each.
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda _: None)
    with torch.device("meta"):
        settings = {"group_size": 4, "v_normalization": v_normalization}
        model = RevelaForCausalLM.from_backbones(llama().model, llama(), **settings).train(training)
        ids = torch.zeros(8, 12, dtype=torch.long)
        # Given embeddings, because transformers asks whether the retriever's mask is needed.
        embeddings = torch.zeros(8, 32, requires_grad=True)
        output = model(ids, torch.ones_like(ids), labels=ids, embeddings=embeddings)
        output.loss.backward()
    assert (output.logits is None) == training
    assert embeddings.grad is not None
    assert all(p.grad is not None for p in model.lm.parameters())
