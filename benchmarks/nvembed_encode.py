"""Time NV-Embed's encoding of texts of mixed length, against an eager and unsorted version.

Ours is `NVEmbedModel.encode`: SDPA, texts sorted by length. The table also shows the gain of each of the two alone. All
versions use the same weights and return the same vectors (the largest difference is printed). They alternate in one
process; times are medians. Text lengths are drawn log-uniformly.

    python benchmarks/nvembed_encode.py                    # CPU, the quickstart's language model as the decoder
    python benchmarks/nvembed_encode.py --device cuda --dtype bfloat16 --backbone mistralai/Mistral-7B-v0.1 --texts 2048
"""

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.trainers.nvembed.checkpoint import nvembed_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]


def mixed_texts(count: int, shortest: int, longest: int) -> list[str]:
    """Return word sequences from the repository's README, with lengths in random order."""
    words = (REPOSITORY / "README.md").read_text(encoding="utf-8").split()
    chosen = random.Random(0)
    texts = []
    for _ in range(count):
        length = round(shortest * (longest / shortest) ** chosen.random())
        start = chosen.randrange(len(words))
        texts.append(" ".join((words[start:] + words * (length // len(words) + 1))[:length]))
    return texts


def encode(model: NVEmbedModel, texts: list[str], attention: str, sort: bool, batch_size: int) -> Tensor:
    """Return the vectors. If unsorted, batches follow the order of the texts."""
    model.set_attn_implementation(attention)
    if sort:
        return model.encode(texts, batch_size=batch_size)
    starts = range(0, len(texts), batch_size)
    return torch.cat([model.encode(texts[start : start + batch_size], batch_size=batch_size) for start in starts])


def alternate(sides: dict[str, Callable[[], Tensor]], device: str, repeats: int) -> dict[str, float]:
    """Return the median time of each side in seconds, alternating calls."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default=str(REPOSITORY / "examples" / "quickstart" / "lm"))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--attention", default="sdpa", help="sdpa, flash_attention_2, ...")
    parser.add_argument("--latents", type=int, default=512)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--words", nargs=2, type=int, default=[4, 128], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)

    dtype = getattr(torch, args.dtype)
    model = NVEmbedModel.from_backbone(
        args.backbone, num_latents=args.latents, dtype=dtype, max_seq_length=args.max_length
    )
    model = model.to(args.device).eval()
    model.tokenizer = nvembed_tokenizer(AutoTokenizer.from_pretrained(args.backbone))
    texts = mixed_texts(args.texts, *args.words)
    lengths = [len(ids) for ids in model.tokenizer(texts, truncation=True, max_length=args.max_length)["input_ids"]]

    versions = {
        "eager, unsorted": ("eager", False),
        "eager, sorted": ("eager", True),
        f"{args.attention}, unsorted": (args.attention, False),
        f"{args.attention}, sorted (ours)": (args.attention, True),
    }
    sides = {
        name: lambda attention=attention, sort=sort: encode(model, texts, attention, sort, args.batch_size)
        for name, (attention, sort) in versions.items()
    }
    vectors = [side() for side in sides.values()]  # also the warm-up
    difference = max(float((other - vectors[0]).abs().max()) for other in vectors)
    seconds = alternate(sides, args.device, args.repeats)

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"`{' '.join(['python benchmarks/nvembed_encode.py', *sys.argv[1:]])}`")
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print(f"{model.num_parameters() / 1e6:.0f} M parameters, {args.dtype}; {len(texts)} texts of {min(lengths)} to")
    print(
        f"{max(lengths)} tokens, {sum(lengths)} in all, {args.batch_size} in a batch; vectors differ by {difference:.0e}.\n"
    )
    print("| version | texts / s | tokens / s | speed-up |")
    print("|---|---|---|---|")
    slowest = seconds["eager, unsorted"]
    for version, value in seconds.items():
        rates = f"{len(texts) / value:.1f} | {sum(lengths) / value:.0f}"
        print(f"| {version} | {rates} | {slowest / value:.2f} |")


if __name__ == "__main__":
    main()
