"""Next-token loss of a pre-trained language model that reads other chunks in different ways, before and after fitting a few numbers.

Groups of 8 chunks of 60 words from Wikipedia, similarities of a given retriever. No weight of the LM is trained. "Fitted" rows train
only the numbers that the form adds (a bias per layer for joint reading, a gate per head for gated added reading) on other groups, for
`--steps` steps. Losses are in nats per token, means over `--groups` groups with a 95 % interval of the paired difference to the LM alone.

    python benchmarks/real/reading_loss.py --data $REVELA_HUB_DATA --retriever $MINILM --lm $SMOLLM2
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from revela_hub.data.sources.source import parse_sources
from revela_hub.data.text.groups import GroupSettings, build_groups
from revela_hub.modeling import RevelaForCausalLM, in_batch_attention
from revela_hub.trainers.revela.checkpoint import load_backbones
from revela_hub.trainers.revela.collator import RevelaCollator

SIZE, WORDS, TOKENS = 8, 60, 96
Batch = dict[str, Tensor]


def batches(data: Path, retriever: str, lm: str, count: int) -> list[Batch]:
    """Return the first groups of the Wikipedia sample as batches."""
    loaded = load_backbones(retriever, lm, group_size=SIZE)
    prompts = loaded.model.config.prompts
    collator = RevelaCollator(
        loaded.retriever_tokenizer, loaded.lm_tokenizer, max_length=TOKENS, passage_prompt=prompts["document"]
    )
    settings = GroupSettings(group_size=SIZE, max_words=WORDS, max_groups=count)
    groups = build_groups(parse_sources([str(data / "text" / "wikipedia")]), settings)
    found = [collator([groups[i]]) for i in range(count)]
    for batch in found:
        batch.pop("document")
    return found


@contextmanager
def gates(model: RevelaForCausalLM) -> Iterator[nn.Parameter]:
    """Multiply the added reads of every head by a number that starts at zero."""
    config = model.lm.config
    gate = nn.Parameter(torch.zeros(config.num_hidden_layers, config.num_attention_heads))
    original, calls = in_batch_attention.cross_document_attention, 0

    def gated(*args: object) -> Tensor:
        nonlocal calls
        layer, calls = calls % len(gate), calls + 1
        return original(*args) * gate[layer][:, None]

    in_batch_attention.cross_document_attention = gated
    try:
        yield gate
    finally:
        in_batch_attention.cross_document_attention = original


def fit(model: RevelaForCausalLM, parameter: nn.Parameter, training: list[Batch], rate: float) -> None:
    """Train one parameter with Adam, one group per step."""
    optimizer = torch.optim.Adam([parameter], lr=rate)
    for batch in training:
        optimizer.zero_grad()
        model(**batch, return_logits=False).loss.backward()
        optimizer.step()


def losses(model: RevelaForCausalLM, groups: list[Batch], similarity: Tensor | None = None) -> Tensor:
    """Return the loss of each group, with the retriever's similarities or given ones."""
    with torch.no_grad():
        return torch.stack([model(**batch, similarity=similarity, return_logits=False).loss for batch in groups])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--retriever", required=True)
    parser.add_argument("--lm", required=True)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.03)
    options = parser.parse_args()
    found = batches(options.data, options.retriever, options.lm, options.groups + options.steps)
    test, training = found[: options.groups], found[options.groups :]

    def build(**config: object) -> RevelaForCausalLM:
        settings = {"group_size": SIZE, "temperature": options.temperature} | config
        model = load_backbones(options.retriever, options.lm, **settings).model
        model.retriever.requires_grad_(False)
        model.lm.requires_grad_(False)
        return model.eval()

    base = losses(build(), test, torch.zeros(1, SIZE, SIZE))
    row("LM alone", base, base)
    for normalized in (False, True):
        row(
            f"added, V-normalisation {'on' if normalized else 'off'}",
            losses(build(v_normalization=normalized), test),
            base,
        )
    row("added, temperature 1", losses(build(temperature=1.0), test), base)
    for bias in (0.0, -1.0, -2.0, -3.0, -4.0):
        row(f"joint, bias {bias:g}", losses(build(reading="joint", reading_bias=bias), test), base)
    joint = build(reading="joint")
    fit(joint, joint.reading_bias.weight, training, 0.1)
    row("joint, bias per layer fitted from -2", losses(joint, test), base)
    gated = build()
    with gates(gated) as gate:
        row("added, gate per head, at 0", losses(gated, test), base)
        fit(gated, gate, training, 0.01)
        row("added, gate per head, fitted from 0", losses(gated, test), base)
        sys.stdout.write(f"largest gate: {gate.abs().max().item():.3f}\n")


def row(name: str, found: Tensor, base: Tensor) -> None:
    """Print the mean loss and its difference to that of the LM alone."""
    difference = found - base
    half = 1.96 * difference.std().item() / len(found) ** 0.5
    change = "" if found is base else f" | {difference.mean().item():+.3f} ± {half:.3f}"
    sys.stdout.write(f"{name:40s} | {found.mean().item():6.3f}{change}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
