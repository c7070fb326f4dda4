"""Time losses over a vocabulary without stored logits, against torch's cross-entropy and torch's fused version.

All sides alternate in one process. Times are CPU seconds, the best of several; ratios are of those times. Memory is the
peak of the tensors allocated during the call. The first table is the loss alone, forward and backward. The second is a
whole step of RetroMAE, Revela's language model and ImpRAG, compared with the same step with the logits of all labelled
positions (ImpRAG: all positions).

    python benchmarks/vocabulary.py
"""

import argparse
import platform
import sys
from collections.abc import Callable

import torch
from in_batch_attention import alternate, peak_mib
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from revela_hub.modeling import ImpRAGForCausalLM, RetroMAEForPreTraining, RevelaForCausalLM
from revela_hub.modeling.linear_cross_entropy import linear_cross_entropy

SHAPES = ((1600, 384, 30522), (2560, 256, 12288))  # BERT's vocabulary, and the quickstart's


def losses(shape: tuple[int, int, int], repeats: int) -> str:
    rows, dim, vocabulary = shape
    hidden = torch.randn(rows, dim, requires_grad=True)
    weight = torch.randn(vocabulary, dim).mul_(0.05).requires_grad_()
    labels = torch.randint(vocabulary, (rows,))

    def side(loss: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(loss(), (hidden, weight)) and None

    sides = {
        "ours": side(lambda: linear_cross_entropy(hidden, weight, None, labels)),
        "plain": side(lambda: F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        sides["torch"] = side(lambda: F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options))
    seconds = alternate(sides, "cpu", repeats)
    memory = {name: peak_mib(run, "cpu") for name, run in sides.items()}
    cells = [f"| {rows} x {dim} x {vocabulary} | {seconds['ours'] * 1e3:.0f} ms | {memory['ours']:.0f} MiB "]
    for peer in ("plain", "torch"):
        if peer in sides:
            cells.append(f"| {seconds['ours'] / seconds[peer]:.2f} | {memory['ours'] / memory[peer]:.2f} ")
        else:
            cells.append("| - | - ")
    return "".join(cells) + "|"


def retromae_step(length: int = 128, passages: int = 8) -> dict[str, Callable[[], None]]:
    """Build RetroMAE with a 6 x 384 encoder and 30% of its tokens masked, as in the paper."""
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
    model = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(config)).train()
    ids = torch.randint(1000, 30000, (passages, length))
    masked = torch.rand(ids.shape) < 0.3
    batch = {
        "encoder_input_ids": ids.masked_fill(masked, 103),
        "encoder_attention_mask": torch.ones_like(ids),
        "encoder_labels": ids.masked_fill(~masked, -100),
        "decoder_input_ids": ids,
        "decoder_attention_mask": torch.rand(passages, length, length) < 0.5,
        "decoder_labels": ids.masked_fill(torch.arange(length) == 0, -100),
    }
    return with_and_without(model, lambda: model(**batch).loss)


def revela_step(size: int = 16, length: int = 160) -> dict[str, Callable[[], None]]:
    """Build Revela with the quickstart's language model and one group."""
    config = LlamaConfig(
        vocab_size=12288, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4
    )
    small = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = RevelaForCausalLM.from_backbones(
        LlamaForCausalLM(small).model, LlamaForCausalLM(config), group_size=size
    ).train()
    ids = torch.randint(12288, (size, length))
    embeddings = torch.randn(size, 384, requires_grad=True)
    mask = torch.ones_like(ids)
    return with_and_without(model, lambda: model(ids, mask, labels=ids, embeddings=embeddings).loss)


def imprag_step(prompts: int = 16, length: int = 48, answer: int = 8) -> dict[str, Callable[[], None]]:
    """Build ImpRAG with the quickstart's language model and two passages of 64 tokens; only the answer has a loss."""
    config = LlamaConfig(
        vocab_size=12288, hidden_size=256, intermediate_size=640, num_hidden_layers=6, num_attention_heads=4
    )
    model = ImpRAGForCausalLM.from_backbone(LlamaForCausalLM(config), k=2, l_max=64).train()
    ids, passages = torch.randint(12288, (prompts, length)), torch.randint(12288, (prompts, 2, 64))
    labels = ids.masked_fill(torch.arange(length) < length - answer, -100)

    def side(return_logits: bool) -> None:
        model(ids, passage_input_ids=passages, labels=labels, return_logits=return_logits).loss.backward()
        model.zero_grad(set_to_none=True)

    return {"ours": lambda: side(False), "plain": lambda: side(True)}


def with_and_without(model: torch.nn.Module, loss: Callable[[], Tensor]) -> dict[str, Callable[[], None]]:
    """Return our step, and the same without the projection's hooks (logits of all labelled positions)."""
    head = model.lm.get_output_embeddings()

    def ours() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    def plain() -> None:
        hooks = head._forward_pre_hooks, head._forward_hooks
        head._forward_pre_hooks, head._forward_hooks = type(hooks[0])(), type(hooks[1])()
        try:
            ours()
        finally:
            head._forward_pre_hooks, head._forward_hooks = hooks

    return {"ours": ours, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"`python benchmarks/vocabulary.py {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("The loss alone, forward and backward; ratios are ours to the peer's:\n")
    print("| rows x width x vocabulary | ours | peak | plain: time | memory | torch's own: time | memory |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        print(losses(shape, args.repeats), flush=True)
    print("\nA whole step, against the same with the logits of all labelled positions:\n")
    print("| step | ours | time ratio | memory ratio |")
    print("|---|---|---|---|")
    steps = {
        "RetroMAE, 6 x 384, 8 x 128 tokens": retromae_step,
        "Revela, 4 x 256, 16 x 160 tokens": revela_step,
        "ImpRAG, 6 x 256, 16 x 48 tokens, 8 of them answers": imprag_step,
    }
    for name, make in steps.items():
        sides = make()
        seconds = alternate(sides, "cpu", args.repeats)
        memory = {key: peak_mib(run, "cpu") for key, run in sides.items()}
        ratios = f"{seconds['ours'] / seconds['plain']:.2f} | {memory['ours'] / memory['plain']:.2f}"
        print(f"| {name} | {seconds['ours'] * 1e3:.0f} ms | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
