"""Memory of a BM25 index of real text: the index itself, and the peak while it is built.

Passages are those of `revela-hub index`: at most 120 words, in whole sentences. The texts are on disk and not counted.

    python benchmarks/bm25_memory.py --corpus $REVELA_HUB_DATA/text/wikipedia
"""

import argparse
import tempfile
from pathlib import Path

from retrieval_common import cost, heading

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.text.words import count_words
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.passages import read_passages


def measure(corpus: str, documents: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        read = (document for _, document in zip(range(documents), read_documents(corpus), strict=False))
        passages = read_passages(read, Path(folder))
        number = len(passages)
        words = sum(count_words(text) for row in range(number) for text in passages.read([row])) / number
        index = BM25(passages)
        postings = index.postings[0]
        size = sum(array.nbytes for array in (postings.data, postings.indices, postings.indptr))
        return f"| {number:,} | {words:.0f} | {postings.nnz / number:.1f} | {size / number:.0f} | {size / 1e6:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 500, 5220])
    given = parser.parse_args()
    columns = "passages", "words", "distinct words in the index", "bytes per passage", "index, MB", "peak, MB"
    print(f"{heading()}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for documents in given.documents:
        found = cost(lambda documents=documents: measure(given.corpus, documents))
        print(f"{found.result} {found.megabytes:.0f} |", flush=True)


if __name__ == "__main__":
    main()
