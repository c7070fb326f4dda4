"""Shows how one or two models lay out queries and passages: a t-SNE picture, and divergences between the two.

Writes OUTPUT.png, a plane for each model with its queries and passages, and OUTPUT.json with, for each, the Kullback-Leibler
divergences of queries from passages and back and their Jensen-Shannon divergence (0: the same, 0.693: nothing in common),
over the cells of a k-means clustering. A model whose queries and passages go through experts of their own, such as a
CoT-MoTE, can be laid beside one that reads both alike.

Queries and passages are JSON lines (.jsonl, .jsonl.gz) or data sets (hf:owner/name), or a BEIR folder for the passages.

Examples:
  revela-hub analyze outputs/experts/dense outputs/siamese/dense --queries dev.jsonl --query-column question \
      --passages passages.jsonl.gz --output analysis
  revela-hub analyze my-retriever --queries data/beir/scifact/queries.jsonl --passages data/beir/scifact
"""

import json
import random
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.errors import UserError
from revela_hub.ranges import PositiveInt, Seed, check_ranges

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POSITIONALS = ("models",)
READ_AT_MOST = 1_000_000


@dataclass
class Arguments:
    """Arguments of `revela-hub analyze`."""

    models: list[str] = field(metadata={"help": "One or two sentence-transformers folders or Hub ids."})
    queries: str = field(metadata={"help": "JSON lines or data set of queries."})
    passages: str = field(metadata={"help": "JSON lines, data set or BEIR folder of passages."})
    query_column: str = field(default="text", metadata={"help": "Column of the queries with the text."})
    passage_column: str = field(default="text", metadata={"help": "Column of the passages with the text."})
    output: str = field(default="analysis", metadata={"help": "Where to write, without .png and .json."})
    max_texts: PositiveInt = field(default=1000, metadata={"help": "Queries, and passages, to draw at random at most."})
    cells: PositiveInt = field(default=50, metadata={"help": "Cells of the clustering, at most a tenth of the texts."})
    seed: Seed = field(default=0, metadata={"help": "Of the drawing, the clustering and the picture."})
    batch_size: PositiveInt = field(default=32, metadata={"help": "Texts per forward pass."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, mps; by default the fastest there is."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model."})

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: for a value out of range.
        """
        check_ranges(self)


def run(arguments: Arguments) -> None:
    """Prints a table and writes the two files."""
    from revela_hub.evaluation.embedding_space import divergences, draw_planes, plane

    if len(arguments.models) > 2 or len(set(arguments.models)) < len(arguments.models):
        raise UserError(f"give one model, or two to compare, not {' '.join(arguments.models)}")
    queries = _texts(arguments.queries, arguments.query_column, "--queries", arguments)
    passages = _texts(arguments.passages, arguments.passage_column, "--passages", arguments)
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    found, planes, captions = {}, {}, {}
    width = max(map(len, arguments.models))
    print(f"{len(queries):,} queries, {len(passages):,} passages\n{'model':<{width}}  KL(q|p)  KL(p|q)      JS")
    for name in arguments.models:
        vectors = _vectors(name, queries, passages, arguments)
        result = divergences(*vectors, cells=arguments.cells, seed=arguments.seed)
        found[name] = result.to_dict()
        planes[name] = plane(*vectors, seed=arguments.seed)
        captions[name] = f"JS divergence {result.js:.3f}"
        print(f"{name:<{width}}  {result.kl_query_passage:7.4f}  {result.kl_passage_query:7.4f}  {result.js:6.4f}")
    picture, record = output.with_name(f"{output.name}.png"), output.with_name(f"{output.name}.json")
    draw_planes(planes, captions, picture)
    record.write_text(json.dumps({"models": found, "seed": arguments.seed}, indent=2) + "\n", encoding="utf-8")
    print(f"{picture}\n{record}")


def _texts(source: str, column: str, option: str, arguments: Arguments) -> list[str]:
    """Some of the texts, the same for every model."""
    from revela_hub.retrieval.mining.sources import read_corpus

    texts = [text for text in islice(read_corpus(source, column), READ_AT_MOST) if text.strip()]
    if len(texts) < 10:
        raise UserError(f"{option} {source} has {len(texts)} texts: at least 10 are needed to speak of a distribution")
    return random.Random(arguments.seed).sample(texts, min(len(texts), arguments.max_texts))


def _vectors(
    name: str, queries: list[str], passages: list[str], arguments: Arguments
) -> "tuple[NDArray[np.float32], NDArray[np.float32]]":
    from revela_hub.retrieval.encoder import as_vectors, load_encoder, similarity_of

    model = load_encoder(name, device=arguments.device, trust_remote_code=arguments.trust_remote_code)
    normalize = similarity_of(model, name) == "cosine"
    settings: dict[str, Any] = {"batch_size": arguments.batch_size, "show_progress_bar": False}
    encoded = model.encode_query(queries, **settings), model.encode_document(passages, **settings)
    return (
        as_vectors(encoded[0], len(queries), normalize=normalize),
        as_vectors(encoded[1], len(passages), normalize=normalize),
    )
