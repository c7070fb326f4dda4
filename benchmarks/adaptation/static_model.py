"""Write the static embeddings of the package wordllama (MIT, 32,000 tokens, 256 dimensions) as a sentence-transformers folder.

    pip install --no-deps wordllama
    python benchmarks/adaptation/static_model.py outputs/wordllama

The package is used as a source of weights only.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="folder to write")
    options, found = parser.parse_args(), find_spec("wordllama")
    if found is None or found.origin is None:
        parser.error("the package wordllama is missing: pip install --no-deps wordllama")
    package = Path(found.origin).parent
    (weights,) = load_file(package / "weights" / "l2_supercat_256.safetensors").values()
    tokenizer = Tokenizer.from_file(str(package / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    static = StaticEmbedding(tokenizer, embedding_weights=weights.float())
    SentenceTransformer(modules=[static, Normalize()]).save_pretrained(options.output, create_model_card=False)
