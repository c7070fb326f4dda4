"""In-batch attention against straightforward versions, and a whole Revela step against a plain LM step.

The cross-document part is compared with the equation in einsums, and with a loop over chunks that recomputes in the
backward pass (`torch.utils.checkpoint`), which this package used before it had a custom backward pass.

All sides alternate in one process. Times are the best of several, in CPU seconds, or wall-clock seconds on a GPU;
ratios are of those times. Memory is the peak of the tensors allocated during the call, counted by the CUDA allocator,
or on a CPU by torch's profiler.

    python benchmarks/in_batch_attention.py                  # CPU, a model of 30 M parameters
    python benchmarks/in_batch_attention.py --device cuda --dtype bfloat16 --sizes 4 16 32 64 --most-dense 64 \
        --hidden 2048 --intermediate 8192 --layers 16 --heads 32 --kv-heads 8 --vocabulary 128256    # Llama 3.2 1B
    python benchmarks/in_batch_attention.py --part check --device cuda --sizes 4 --dtype bfloat16

The plain step runs the same model on the same number of tokens: 2B documents, because Revela has two streams.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from revela_hub.modeling import RevelaForCausalLM
from revela_hub.modeling.in_batch_attention import InBatch, all_pairs, cross_document_attention, every_pair
from revela_hub.modeling.in_batch_kernels import Options


def einsum_attention(query: Tensor, key: Tensor, value: Tensor, similarity_GBB: Tensor, options: Options) -> Tensor:
    """Compute the equation directly: all scores of all pairs at once."""
    groups, size, _ = similarity_GBB.shape
    n, heads, length, dim = query.shape
    key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    q, k, v = (x.view(groups, size, heads, length, dim) for x in (query, key, value))
    scores = torch.einsum("gihqd,gjhkd->gijhqk", q, k)
    read = torch.einsum("gijhqk,gjhkd->gijhqd", scores.softmax(-1), v)
    weight = similarity_GBB * ~torch.eye(size, dtype=torch.bool, device=query.device)
    out = torch.einsum("gij,gijhqd->gihqd", weight, read.to(weight.dtype))
    return out.reshape(n, heads, length, dim).transpose(1, 2)


def checkpointed_attention(
    query: Tensor, key: Tensor, value: Tensor, similarity_GBB: Tensor, options: Options
) -> Tensor:
    """Compute the equation for one chunk j at a time, with torch operations."""
    n, heads, length, dim = query.shape
    folded = query.view(n, key.shape[1], -1, length, dim).transpose(2, 3).reshape(n, key.shape[1], -1, dim)
    with_blocks_of_one = replace(options, eager=True)
    out = all_pairs(folded, key, value, InBatch(similarity_GBB), with_blocks_of_one)
    return out.view(n, key.shape[1], length, -1, dim).transpose(1, 2).reshape(n, length, heads, dim)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(sides: dict[str, Callable[[], None]], device: str, repeats: int) -> dict[str, float]:
    """Return the best time of each side in seconds, alternating calls."""
    # On a busy machine, CPU time is more reliable than wall-clock time. It counts all threads.
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            synchronize(device)
            start = clock()
            side()
            synchronize(device)
            if turn:
                times[name].append(clock() - start)
    return {name: min(values) for name, values in times.items()}


def peak_mib(side: Callable[[], None], device: str) -> float:
    """Return the peak memory of the tensors of one call, in MiB."""
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
    """Time forward and backward of the cross-document part alone, ours and the peers'."""
    dim, dtype = args.hidden // args.heads, getattr(torch, args.dtype)
    shape = (size, args.heads, args.length, dim)
    query = torch.randn(shape, device=args.device, dtype=dtype, requires_grad=True)
    kv_shape = (size, args.kv_heads, args.length, dim)
    key, value = (torch.randn(kv_shape, device=args.device, dtype=dtype, requires_grad=True) for _ in range(2))
    similarity = torch.rand(1, size, size, device=args.device).softmax(-1).requires_grad_()
    grad = torch.randn(size, args.length, args.heads, dim, device=args.device)
    options = Options(v_normalization=args.v_normalization)

    def side(attend: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            out = attend(query * dim**-0.5, key, value, similarity, options)
            torch.autograd.grad(out, (query, key, value, similarity), grad)

        return run

    sides = {
        "ours": side(lambda q, k, v, s, options: cross_document_attention(q, k, v, InBatch(s), options)),
        "checkpointed": side(checkpointed_attention),
    }
    if not args.v_normalization and size <= 32:
        sides["einsum"] = side(einsum_attention)
    seconds = alternate(sides, args.device, args.repeats)
    memory = {name: peak_mib(run, args.device) for name, run in sides.items()}
    cells = [f"| {size} | {seconds['ours'] * 1e3:.1f} ms | {memory['ours']:.0f} MiB |"]
    for peer in ("checkpointed", "einsum"):
        if peer in sides:
            cells.append(f" {seconds['ours'] / seconds[peer]:.2f} | {memory['ours'] / memory[peer]:.2f} |")
        else:
            cells.append(" - | - |")
    return "".join(cells)


def check_row(args: argparse.Namespace, size: int) -> str:
    """Compare outputs and gradients with the equation in float64: all pairs in one call, and a list of pairs."""
    dim, dtype = args.hidden // args.heads, getattr(torch, args.dtype)
    shapes = [(size, heads, args.length, dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
    inputs = [torch.randn(shape, device=args.device, dtype=dtype).requires_grad_() for shape in shapes]
    similarity = torch.rand(1, size, size, device=args.device).softmax(-1).requires_grad_()
    grad = torch.randn(size, args.length, args.heads, dim, device=args.device)
    options = Options()

    def run(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], given: list[Tensor]) -> list[Tensor]:
        out = attend(given[0] * dim**-0.5, *given[1:])
        return [out, *torch.autograd.grad(out, given, grad.to(out.dtype))]

    wide = [x.detach().double().requires_grad_() for x in (*inputs, similarity)]
    reference = run(lambda q, k, v, s: einsum_attention(q, k, v, s, options), wide)
    cells = []
    for listed in (False, True):
        pairs = every_pair(similarity) if listed else None
        found = run(
            lambda q, k, v, s, p=pairs: cross_document_attention(q, k, v, InBatch(s, pairs_2P=p), options),
            [*inputs, similarity],
        )
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True)]
        cells.append(f"{errors[0]:.1e} | {max(errors[1:]):.1e}")
    return f"| {size} | {' | '.join(cells)} |"


def step_row(args: argparse.Namespace, revela: RevelaForCausalLM, size: int) -> str:
    """Time forward and backward of the whole LM: Revela's two streams, and a plain step over 2B documents."""
    revela.config.group_size = size
    lm = revela.lm
    ids = torch.randint(args.vocabulary, (size, args.length), device=args.device)
    mask = torch.ones_like(ids)
    similarity = torch.rand(1, size, size, device=args.device).softmax(-1).requires_grad_()
    # At the paper's temperature, nearly all of a row's weight is on the nearest chunks.
    embeddings = torch.randn(size, 384, device=args.device, requires_grad=True)
    double = torch.cat([ids, ids])

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                value = loss()
            value.backward()
            revela.zero_grad(set_to_none=True)

        return run

    sides = {
        "paper": step(lambda: revela(ids, mask, labels=ids, embeddings=embeddings).loss),
        "plain": step(lambda: lm(input_ids=double, labels=double, use_cache=False).loss),
    }
    if size <= args.most_dense:
        sides["dense"] = step(lambda: revela(ids, mask, labels=ids, similarity=similarity).loss)
    seconds = alternate(sides, args.device, args.repeats)
    memory = {name: peak_mib(side, args.device) for name, side in sides.items()}
    plain = seconds["plain"]
    dense = f"{seconds['dense'] / plain:.2f} | {memory['dense'] / memory['plain']:.2f}" if "dense" in sides else "- | -"
    return (
        f"| {size} | {plain * 1e3:.0f} ms | {dense} | {seconds['paper'] / plain:.2f} | {memory['paper'] / memory['plain']:.2f} "
        f"| {seconds['paper'] / size * 1e3:.1f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[8, 16, 32], help="group sizes B")
    parser.add_argument("--most-dense", type=int, default=32, help="largest B at which every pair is also measured")
    parser.add_argument("--v-normalization", action="store_true")
    parser.add_argument(
        "--reading", default="added", choices=["added", "joint"], help="how chunks read, for --part step"
    )
    parser.add_argument("--part", choices=["check", "layer", "step"], nargs="+", default=["layer", "step"])
    parser.add_argument("--length", type=int, default=160, help="tokens per document")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, help="width of the feed-forward layers (default: 8/3 of --hidden)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"`python benchmarks/in_batch_attention.py {' '.join(sys.argv[1:])}`")
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    if "check" in args.part:
        print(f"Relative errors against float64 ({args.dtype}): output and largest of the gradients.\n")
        print("| B | all pairs: output | gradients | listed pairs: output | gradients |\n|---|---|---|---|---|")
        for size in args.sizes:
            print(check_row(args, size), flush=True)
        print()
    if "layer" in args.part:
        print("Cross-document part of one layer, forward and backward, every pair; ratios are ours to the peer's:\n")
        print("| B | ours | peak | checkpointed: time | memory | einsum: time | memory |")
        print("|---|---|---|---|---|---|---|")
        for size in args.sizes:
            print(layer_row(args, size), flush=True)
    if "step" not in args.part:
        return

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
    )
    with torch.device(args.device):
        lm = LlamaForCausalLM(config)
        small = LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
    revela = RevelaForCausalLM.from_backbones(small.model, lm, reading=args.reading).train()
    print(f"\nWhole LM step ({lm.num_parameters() / 1e6:.0f} M parameters), against a plain step over 2B documents:\n")
    print("| B | plain | every pair: time | memory | at temperature 1e-4: time | memory | per document |")
    print("|---|---|---|---|---|---|---|")
    for size in args.sizes:
        print(step_row(args, revela, size), flush=True)


if __name__ == "__main__":
    main()
