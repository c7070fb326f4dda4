"""The authors' side of `official.py`, which starts it in a separate environment and sends one task per line."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

Side = Callable[[], torch.Tensor | None]


def retromae(official: Path, given: Path) -> dict[str, Side]:
    """Return the tasks for RetroMAE: the collator, the model on a given batch, and both."""
    sys.path.insert(0, str(official / "src"))
    from pretrain.arguments import ModelArguments
    from pretrain.data import RetroMAECollator
    from pretrain.modeling import RetroMAEForPretraining

    tokenizer = AutoTokenizer.from_pretrained(given / "lm")
    model = RetroMAEForPretraining.from_pretrained(ModelArguments(), given / "lm").train()
    model.c_head.load_state_dict(load_file(given / "decoder.safetensors"))
    rows = json.loads((given / "rows.json").read_text())
    shares = {"encoder_mlm_probability": 0.3, "decoder_mlm_probability": 0.5}
    collator = RetroMAECollator(tokenizer, max_seq_length=1 + max(map(len, rows)) + 1, **shares)
    batch = load_file(given / "batch.safetensors")

    def make() -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = collator([{"token_ids": row} for row in rows])
        return made

    def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)[0]
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return {"collator": lambda: make() and None, "model": lambda: train(batch), "step": lambda: train(make())}


def nvembed(official: Path, given: Path) -> dict[str, Side]:
    """Return the tasks for NV-Embed: a forward pass on a given batch, and encoding texts in batches."""
    for name in ("configuration_nvembed.py", "modeling_nvembed.py"):
        (given / "model" / name).write_text((official / name).read_text())
    model = AutoModel.from_pretrained(given / "model", trust_remote_code=True).eval()
    batch = load_file(given / "batch.safetensors")
    texts = json.loads((given / "texts.json").read_text())

    @torch.no_grad()
    def forward() -> torch.Tensor:
        vectors: torch.Tensor = model(**batch, pool_mask=batch["attention_mask"])["sentence_embeddings"]
        return vectors

    def encode() -> torch.Tensor:
        vectors: torch.Tensor = model._do_encode(texts, batch_size=8, max_length=512, num_workers=0)
        return vectors

    return {"forward": forward, "encode": encode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["retromae", "nvembed"])
    parser.add_argument("official", type=Path)
    parser.add_argument("given", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    answers, sys.stdout = sys.stdout, sys.stderr
    sides: dict[str, Any] = {"retromae": retromae, "nvembed": nvembed}[args.part](args.official, args.given)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        began = time.process_time()
        result = sides[line.strip()]()
        seconds = time.process_time() - began
        print(json.dumps([seconds, None if result is None else result.tolist()]), file=answers, flush=True)


if __name__ == "__main__":
    main()
