"""Time encoding texts of new lengths on a GPU, with and without cuDNN's attention, against sentence-transformers.

A BERT of MiniLM's shape with random weights encodes texts of 20 to 180 random words, different ones in each measurement, so that most batches
have a shape that the process has not seen. See `src/revela_hub/sdpa.py`.

    python benchmarks/new_shapes.py                               # on a GPU
    python benchmarks/new_shapes.py --device cpu --texts 32       # tries it
"""

import argparse
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel

from revela_hub.loading import varying_shapes
from revela_hub.retrieval.encoding import encode_texts

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = (REPOSITORY / "README.md").read_text(encoding="utf-8").split()


def new_texts(count: int) -> list[str]:
    return [" ".join(random.choices(WORDS, k=random.randint(20, 180))) for _ in range(count)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--texts", type=int, default=4096)
    given = parser.parse_args()
    random.seed(0)
    gpu = given.device == "cuda"
    with TemporaryDirectory() as folder:
        shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
        BertModel(BertConfig(vocab_size=30522, **shape)).save_pretrained(folder)  # type: ignore[arg-type]
        AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "quickstart" / "retriever").save_pretrained(folder)
        options = {"model_kwargs": {"dtype": torch.float16 if gpu else torch.float32}}
        transformer = Transformer(folder, max_seq_length=512, **options)
    model = SentenceTransformer(modules=[transformer, Pooling(384)], device=given.device)
    with_plans: Callable[..., object] = encode_texts.__wrapped__  # type: ignore[attr-defined]

    @varying_shapes()
    def without_plans(texts: list[str], batch_size: int) -> object:
        return model.encode_document(texts, batch_size=batch_size)

    def rate(encode: Callable[[list[str]], object], count: int) -> str:
        texts = new_texts(count)
        began = time.perf_counter()
        encode(texts)  # returns an array, so the GPU has finished
        return f"{count / (time.perf_counter() - began):,.0f}"

    place = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"{place}, torch {torch.__version__}, Python {platform.python_version()}\n\n| | texts / s |\n|---|---|")
    encode_texts(model, new_texts(min(256, given.texts)), "document")  # warm-up
    few = max(16, given.texts // 4)
    rows: dict[str, tuple[Callable[[list[str]], object], int]] = {
        "`encode_texts` with cuDNN's attention": (lambda texts: with_plans(model, texts, "document"), few),
        "sentence-transformers, batches of 32": (lambda texts: model.encode_document(texts, batch_size=32), few),
        "`encode_texts`, `batch_size` 32 (8,192 tokens)": (
            lambda texts: encode_texts(model, texts, "document"),
            given.texts,
        ),
        "`encode_texts`, `batch_size` 128": (
            lambda texts: encode_texts(model, texts, "document", batch_size=128),
            given.texts,
        ),
        "`encode_texts`, `batch_size` 512": (
            lambda texts: encode_texts(model, texts, "document", batch_size=512),
            given.texts,
        ),
        "sentence-transformers without cuDNN's attention, batches of 32": (
            lambda texts: without_plans(texts, 32),
            given.texts,
        ),
        "sentence-transformers without cuDNN's attention, batches of 256": (
            lambda texts: without_plans(texts, 256),
            given.texts,
        ),
        "tokenizer alone": (
            lambda texts: [model.preprocess(texts[n : n + 512]) for n in range(0, len(texts), 512)],
            given.texts,
        ),
    }
    for name, (encode, count) in rows.items():
        print(f"| {name} | {rate(encode, count)} |", flush=True)


if __name__ == "__main__":
    main()
