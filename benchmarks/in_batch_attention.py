"""In-batch attention against a straightforward einsum version, and a whole Revela step against a plain LM step.

Both sides alternate in one process; times are medians, ratios are of those. Memory is the peak of the tensors alive above
what was there before, counted by the CUDA allocator, or on a CPU by torch's profiler.

    python benchmarks/in_batch_attention.py                  # CPU, a model of 30 M parameters
    python benchmarks/in_batch_attention.py --device cuda --hidden 2048 --layers 16 --heads 32 --kv-heads 8 --dtype bfloat16

The plain step is what the same model costs on the same number of tokens: 2B documents, as Revela runs two streams.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from revela_hub.modeling import RevelaForCausalLM
from revela_hub.modeling.in_batch_attention import InBatch, Options, cross_document_attention


def einsum_attention(query: Tensor, key: Tensor, value: Tensor, similarity_GBB: Tensor, options: Options) -> Tensor:
    """The equation as one writes it first: all scores of all pairs at once."""
    groups, size, _ = similarity_GBB.shape
    n, heads, length, dim = query.shape
    key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    q, k, v = (x.view(groups, size, heads, length, dim) for x in (query, key, value))
    scores = torch.einsum("gihqd,gjhkd->gijhqk", q, k) * options.scaling
    read = torch.einsum("gijhqk,gjhkd->gijhqd", scores.softmax(-1), v)
    weight = similarity_GBB * ~torch.eye(size, dtype=torch.bool, device=query.device)
    out = torch.einsum("gij,gijhqd->gihqd", weight, read.to(weight.dtype))
    return out.reshape(n, heads, length, dim).transpose(1, 2)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(sides: dict[str, Callable[[], None]], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of each side, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 2):
        for name, side in sides.items():
            synchronize(device)
            start = time.perf_counter()
            side()
            synchronize(device)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_mib(side: Callable[[], None], device: str) -> float:
    """Peak MiB of tensors that one call has alive at a time."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        side()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        side()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak / 2**20


def layer_row(args: argparse.Namespace, size: int) -> str:
    """Forward and backward of the cross-document part alone, ours and einsum."""
    dim, dtype = args.hidden // args.heads, getattr(torch, args.dtype)
    shape = (size, args.heads, args.length, dim)
    query = torch.randn(shape, device=args.device, dtype=dtype, requires_grad=True)
    kv_shape = (size, args.kv_heads, args.length, dim)
    key, value = (torch.randn(kv_shape, device=args.device, dtype=dtype, requires_grad=True) for _ in range(2))
    similarity = torch.rand(1, size, size, device=args.device).softmax(-1).requires_grad_()
    grad = torch.randn(size, args.length, args.heads, dim, device=args.device)
    options = Options(dim**-0.5, None, 0.0, eager=False, v_normalization=False, eps=1e-6)

    def ours() -> None:
        out = cross_document_attention(query, key, value, InBatch(similarity), options)
        torch.autograd.grad(out, (query, key, value, similarity), grad)

    def einsum() -> None:
        out = einsum_attention(query, key, value, similarity, options)
        torch.autograd.grad(out, (query, key, value, similarity), grad)

    sides = {"ours": ours, "einsum": einsum}
    seconds = alternate(sides, args.device, args.repeats)
    memory = {name: peak_mib(side, args.device) for name, side in sides.items()}
    return (
        f"| {size} | {seconds['ours'] * 1e3:.1f} ms | {seconds['einsum'] * 1e3:.1f} ms "
        f"| {seconds['ours'] / seconds['einsum']:.2f} | {memory['ours']:.0f} MiB | {memory['einsum']:.0f} MiB "
        f"| {memory['ours'] / memory['einsum']:.2f} |"
    )


def step_row(args: argparse.Namespace, revela: RevelaForCausalLM, size: int) -> str:
    """Forward and backward of the whole LM: Revela's two streams, and a plain step over 2B documents."""
    revela.config.group_size = size
    lm = revela.lm
    ids = torch.randint(args.vocabulary, (size, args.length), device=args.device)
    mask = torch.ones_like(ids)
    similarity = torch.rand(1, size, size, device=args.device).softmax(-1).requires_grad_()
    one_hot = torch.eye(size, device=args.device).roll(1, 0)[None].requires_grad_()
    double = torch.cat([ids, ids])

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                value = loss()
            value.backward()
            revela.zero_grad(set_to_none=True)

        return run

    def sparse() -> Tensor:
        revela.config.similarity_tolerance = 1e-3
        loss: Tensor = revela(ids, mask, labels=ids, similarity=one_hot).loss
        revela.config.similarity_tolerance = 0.0
        return loss

    sides = {
        "revela": step(lambda: revela(ids, mask, labels=ids, similarity=similarity).loss),
        "sparse": step(sparse),
        "plain": step(lambda: lm(input_ids=double, labels=double, use_cache=False).loss),
    }
    seconds = alternate(sides, args.device, args.repeats)
    memory = {name: peak_mib(side, args.device) for name, side in sides.items()}
    plain = seconds["plain"]
    return (
        f"| {size} | {plain * 1e3:.0f} ms | {seconds['revela'] * 1e3:.0f} ms | {seconds['revela'] / plain:.2f} "
        f"| {seconds['sparse'] / plain:.2f} | {memory['revela'] / memory['plain']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 8, 16, 32], help="group sizes B")
    parser.add_argument("--length", type=int, default=160, help="tokens of a document")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"`python benchmarks/in_batch_attention.py {' '.join(sys.argv[1:])}`")
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("Cross-document part of one layer, forward and backward:\n")
    print("| B | ours | einsum | time ratio | ours, peak | einsum, peak | memory ratio |")
    print("|---|---|---|---|---|---|---|")
    for size in args.sizes:
        print(layer_row(args, size), flush=True)

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
    )
    with torch.device(args.device):
        lm = LlamaForCausalLM(config)
        small = LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
    revela = RevelaForCausalLM.from_backbones(small.model, lm).train()
    print(f"\nWhole LM step ({lm.num_parameters() / 1e6:.0f} M parameters), against a plain step over 2B documents:\n")
    print("| B | plain | Revela | time ratio | time ratio, one-hot similarity and tolerance | memory ratio |")
    print("|---|---|---|---|---|---|")
    for size in args.sizes:
        print(step_row(args, revela, size), flush=True)


if __name__ == "__main__":
    main()
