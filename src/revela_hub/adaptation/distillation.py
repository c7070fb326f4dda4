"""Rows for listwise distillation: made queries, a few passages each, and the teacher's scores of these passages.

The teacher is the hybrid of the base retriever and BM25. Queries are of several kinds: natural ones (docstrings, titles, sentences),
keywords of a passage, and, with a language model, questions that it writes. The student learns the teacher's distribution over the
passages (KL divergence), not that one passage is right and the others are wrong, which often hurts strong retrievers (CADET, arXiv
2505.19274).
"""

import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.synthesis.questions import QuestionFilter, write_questions
from revela_hub.evaluation.hybrid_weight import fuse_runs
from revela_hub.evaluation.query_shapes import in_shape
from revela_hub.evaluation.retrieval import bm25_run, retrieval_run
from revela_hub.output import is_quiet
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.encoder import similarity_of
from revela_hub.retrieval.hybrid import BM25_WEIGHT

if TYPE_CHECKING:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from torch import nn

    from revela_hub.data.synthesis.backends import Backend

PASSAGES_PER_QUESTION = 8
"""Passages per query: the best ones of the teacher."""
QUERIES_PER_PASSAGE = 2
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.05, 0.1


def distillation_rows(
    pairs: "Dataset",
    teacher: "SentenceTransformer",
    *,
    bm25_weight: float = BM25_WEIGHT,
    bm25: BM25Settings | None = None,
    most: int = 1000,
    questions: "Backend | None" = None,
    seconds: float = 60,
    seed: int = 0,
    log: Callable[[str], None] = lambda _: None,
) -> "Dataset":
    """Return rows with the columns `anchor`, `positive`, `negative_1`, ... and `label`, the teacher's scores of the passages.

    Queries are made of `pairs` of the text; a language model may write more questions for some `seconds`. At most `most` passages are encoded.
    """
    from datasets import Dataset

    random = Random(seed)
    chosen = pairs.select(random.sample(range(len(pairs)), min(len(pairs), most)))
    passages = list(dict.fromkeys(chosen["positive"]))
    queries = [*chosen["anchor"], *in_shape("keywords", {text: text for text in passages}, passages).values()]
    if questions is not None:
        end = time.monotonic() + seconds
        keep = QuestionFilter(passages)
        queries += [text for _, text in write_questions(questions, list(enumerate(passages)), seed, end, keep)]
        log(f"language model: {keep}")
    queries = random.sample(queries, min(len(queries), QUERIES_PER_PASSAGE * most))
    # Queries and passages have different names: a query never finds a passage with its own name.
    corpus = {f"p{place}": text for place, text in enumerate(passages)}
    asked = {f"q{place}": text for place, text in enumerate(dict.fromkeys(queries))}
    task = RetrievalTask(corpus, asked, {query: {"p0": 1} for query in asked}, "distillation")
    dense = retrieval_run(teacher, task, not is_quiet())
    fused = fuse_runs(dense, bm25_run(task, bm25), task, bm25_weight)
    names = ["positive", *(f"negative_{number}" for number in range(1, PASSAGES_PER_QUESTION))]
    rows = []
    for query, text in task.queries.items():
        best = list(fused[query].items())[: len(names)]
        if len(best) == len(names):
            passages_by_name = {name: corpus[passage] for name, (passage, _) in zip(names, best, strict=True)}
            rows.append({"anchor": text, **passages_by_name, "label": [score for _, score in best]})
    return Dataset.from_list(rows)


def distillation_loss(student: "SentenceTransformer") -> "nn.Module":
    """Return sentence-transformers' KL divergence between the student's and the teacher's distribution."""
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
    from sentence_transformers.util import pairwise_cos_sim, pairwise_dot_score

    cosine = similarity_of(student, "the retriever") == "cosine"
    return DistillKLDivLoss(
        student,
        similarity_fct=pairwise_cos_sim if cosine else pairwise_dot_score,
        student_temperature=STUDENT_TEMPERATURE,
        teacher_temperature=TEACHER_TEMPERATURE,
    )
