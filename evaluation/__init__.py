"""Retrieval quality: tasks in BEIR form or by their mteb names, scores, and the BM25 baseline."""

from revela_hub.evaluation.beir import read_beir, write_beir
from revela_hub.evaluation.docstrings import DocstringTask, docstring_task
from revela_hub.evaluation.encoder import Encoder, load_encoder
from revela_hub.evaluation.mteb_tasks import evaluate_mteb
from revela_hub.evaluation.retrieval import (
    RetrievalScores,
    RetrievalTask,
    evaluate_bm25,
    evaluate_retrieval,
    score_run,
)

__all__ = [
    "DocstringTask",
    "Encoder",
    "RetrievalScores",
    "RetrievalTask",
    "docstring_task",
    "evaluate_bm25",
    "evaluate_mteb",
    "evaluate_retrieval",
    "load_encoder",
    "read_beir",
    "score_run",
    "write_beir",
]
