"""Builds the corpus and the tokenizer of the quickstart's base language model.

Half of the corpus is English Wikipedia (CC BY-SA 3.0), half is Python source of permissively licensed packages that
are installed on this machine. The standard library is excluded: the quickstart trains and evaluates on it, so the base
model must not have seen it.

    python base_lm_corpus.py --wikipedia PATH/part-*.jsonl.gz --output WORK
"""

import argparse
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 12288
EOS, PAD = "<|endoftext|>", "<|pad|>"
CHARS_PER_PACKAGE = 9_000_000
HELD_OUT_TOKENS = 200_000
SEED = 0
PACKAGES = (
    "accelerate bs4 click datasets docker flask fontTools fsspec huggingface_hub IPython jinja2 joblib jsonschema "
    "matplotlib moto mteb mypy narwhals networkx numpy pandas peft PIL polars pyarrow pydantic pygments rich scipy "
    "sentence_transformers sklearn sympy torch transformers trl typer werkzeug"
).split()
# Words of an identifier (snake_case and camelCase) become separate tokens, so that code and prose share them.
PRE_TOKEN = Regex(
    r" ?\p{Lu}?[\p{Ll}\p{M}]+| ?\p{Lu}+(?!\p{Ll})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n[ \t]*(?=\S)|\s+(?!\S)|\s+"
)


def wikipedia_articles(paths: list[Path]) -> Iterator[str]:
    """Yields "title newline text" of every article."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                article = json.loads(line)
                yield f"{article['title']}\n{article['text']}"


def python_files(roots: list[Path], rng: random.Random) -> Iterator[str]:
    """Yields source files of ``PACKAGES``, without tests, at most ``CHARS_PER_PACKAGE`` characters of each package."""
    for root in roots:
        for package in PACKAGES:
            files = [p for p in sorted((root / package).rglob("*.py")) if not {"tests", "_vendor"} & set(p.parts)]
            rng.shuffle(files)
            budget = CHARS_PER_PACKAGE
            for path in files:
                text = path.read_text(encoding="utf-8", errors="ignore")
                if budget > 0 and 300 < len(text) < 300_000:
                    budget -= len(text)
                    yield text


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of ``VOCAB_SIZE`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PRE_TOKEN, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=2048, padding_side="right"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikipedia", nargs="+", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", type=Path, default=[Path(sysconfig.get_paths()["purelib"])])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    rng = random.Random(SEED)
    code = sorted(set(python_files(args.packages, rng)))
    prose = list(wikipedia_articles(args.wikipedia))
    rng.shuffle(code)
    rng.shuffle(prose)
    print(f"{len(prose)} articles, {sum(map(len, prose)) / 1e6:.1f} M characters")
    print(f"{len(code)} Python files, {sum(map(len, code)) / 1e6:.1f} M characters")

    tokenizer = train_tokenizer(prose[:1200] + code[:2400])
    tokenizer.save_pretrained(args.output / "tokenizer")
    documents = prose + code
    rng.shuffle(documents)
    tokens: list[np.ndarray] = []
    for start in range(0, len(documents), 512):
        for ids in tokenizer(documents[start : start + 512], add_special_tokens=False)["input_ids"]:
            tokens.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    stream = np.concatenate(tokens)
    np.save(args.output / "held_out.npy", stream[:HELD_OUT_TOKENS])
    np.save(args.output / "train.npy", stream[HELD_OUT_TOKENS:])
    print(f"{len(stream) / 1e6:.1f} M tokens, {sum(map(len, documents)) / len(stream):.2f} characters each")


if __name__ == "__main__":
    main()
