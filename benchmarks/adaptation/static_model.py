"""Write the static embeddings of the package wordllama (MIT, 32,000 tokens, 256 dimensions) as a sentence-transformers folder.

    pip install --no-deps wordllama
    python benchmarks/adaptation/static_model.py outputs/wordllama

The package is used as a source of weights only.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

if __name__ == "__main__":
    found = find_spec("wordllama")
    if len(sys.argv) != 2 or found is None or found.origin is None:
        raise SystemExit(__doc__)
    package = Path(found.origin).parent
    (weights,) = load_file(package / "weights" / "l2_supercat_256.safetensors").values()
    tokenizer = Tokenizer.from_file(str(package / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    static = StaticEmbedding(tokenizer, embedding_weights=weights.float())
    SentenceTransformer(modules=[static, Normalize()]).save_pretrained(sys.argv[1], create_model_card=False)
