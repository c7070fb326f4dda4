"""Measures retrievers, and BM25, on a retrieval task: nDCG@10, MRR@10 and Recall@100, by trec_eval.

A model is a sentence-transformers folder, a Hub id, or the word bm25. The task is a BEIR folder (corpus.jsonl,
queries.jsonl, qrels/<split>.tsv, each plain or .gz), or with --tasks the name of an mteb task or benchmark, whose data
is downloaded from the Hub.

Examples:
  revela-hub evaluate my-retriever --corpus data/beir/scifact
  revela-hub evaluate bm25 my-retriever sentence-transformers/all-MiniLM-L6-v2 --corpus data/beir/scifact --json
  revela-hub evaluate my-retriever --tasks SciFact NFCorpus
  revela-hub evaluate my-retriever --tasks CoIR
"""

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from revela_hub.evaluation import RetrievalScores

POSITIONALS = ("models",)


@dataclass
class Arguments:
    """Arguments of `revela-hub evaluate`."""

    models: list[str] = field(metadata={"help": "Sentence-transformers folders, Hub ids, or bm25."})
    corpus: str | None = field(default=None, metadata={"help": "BEIR folder."})
    tasks: list[str] = field(
        default_factory=list,
        metadata={"help": "mteb's names of tasks or benchmarks: SciFact, BEIR, CoIR, BRIGHT(v1.1)."},
    )
    split: str = field(default="test", metadata={"help": "Which of the BEIR folder's qrels to use."})
    json: bool = field(default=False, metadata={"help": "Print JSON instead of a table."})
    batch_size: int = field(default=32, metadata={"help": "Texts per forward pass."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, mps; by default the fastest there is."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model."})
    max_seq_length: int | None = field(default=None, metadata={"help": "Cut texts at this many tokens."})


def run(arguments: Arguments) -> None:
    """Prints a table per task, or one JSON list."""
    if bool(arguments.corpus) == bool(arguments.tasks):
        raise UserError("give either --corpus BEIR_FOLDER or --tasks NAME ... (see revela-hub evaluate --help)")
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, not {arguments.batch_size}")
    results = list(_on_mteb(arguments) if arguments.tasks else _on_folder(arguments))
    if arguments.json:
        print(json_format.dumps([{"model": model} | scores.to_dict() for model, scores in results], indent=2))
    else:
        print("\n\n".join(_tables(results)))


def _on_folder(arguments: Arguments) -> "Iterator[tuple[str, RetrievalScores]]":
    from revela_hub.data.sources.beir import read_beir
    from revela_hub.evaluation.retrieval import evaluate_bm25, evaluate_retrieval
    from revela_hub.retrieval.encoder import similarity_of

    assert arguments.corpus is not None
    task = read_beir(arguments.corpus, arguments.split)
    for name in arguments.models:
        if name == "bm25":
            yield name, evaluate_bm25(task, show_progress_bar=True)
            continue
        model = _load(name, arguments)
        similarity = similarity_of(model, name)
        yield name, evaluate_retrieval(model, task, arguments.batch_size, similarity=similarity, show_progress_bar=True)


def _on_mteb(arguments: Arguments) -> "Iterator[tuple[str, RetrievalScores]]":
    from revela_hub.evaluation.mteb_tasks import evaluate_mteb, resolve_tasks

    tasks = resolve_tasks(arguments.tasks)  # a name that is wrong should not cost the loading of a model
    for name in arguments.models:
        model = name if name == "bm25" else _load(name, arguments)
        for scores in evaluate_mteb(model, tasks, batch_size=arguments.batch_size):
            yield name, scores


def _load(name: str, arguments: Arguments) -> "SentenceTransformer":
    from revela_hub.retrieval.encoder import load_encoder

    return load_encoder(
        name,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        max_seq_length=arguments.max_seq_length,
    )


def _tables(results: "list[tuple[str, RetrievalScores]]") -> Iterator[str]:
    """One table per task, its models in the order in which they were given."""
    width = max(len("model"), *(len(model) for model, _ in results))
    for task in dict.fromkeys(scores.name for _, scores in results):
        rows = [(model, scores) for model, scores in results if scores.name == task]
        size = rows[0][1]
        yield "\n".join(
            [
                f"{task}: {size.queries:,} queries, {size.documents:,} documents",
                f"{'model':<{width}}  nDCG@10  MRR@10  Recall@100",
                *(
                    f"{model:<{width}}  {scores.ndcg_at_10:7.4f}  {scores.mrr_at_10:6.4f}  {scores.recall_at_100:10.4f}"
                    for model, scores in rows
                ),
            ]
        )
