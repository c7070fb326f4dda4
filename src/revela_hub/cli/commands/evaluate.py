"""Evaluate retrievers, or BM25, on a retrieval task: nDCG@10, MRR@10 and Recall@100.

The task is a BEIR folder (--corpus: corpus.jsonl, queries.jsonl, qrels/<split>.tsv, optionally .gz), or mteb tasks or
benchmarks (--tasks), which are downloaded. With several values of --mode, each model is evaluated in each mode. As in
BEIR, a document with the id of the query is ignored unless it is judged relevant.

Each row after the first is compared with the first, query by query: difference, 95% confidence interval and p-value
(paired bootstrap). Each p-value is for one comparison; with ten rows, divide the significance level by nine.

--dims and --precision measure shorter and quantised vectors of dense models by exact search, in all combinations.

--task qa measures a model that answers questions: exact match and F1 (normalised as in SQuAD), and the fraction of
questions for which a retrieved passage contains an answer.

Examples:
  revela-hub evaluate my-retriever --corpus data/beir/scifact
  revela-hub evaluate bm25 my-retriever sentence-transformers/all-MiniLM-L6-v2 --corpus data/beir/scifact --json
  revela-hub evaluate my-retriever --corpus data/beir/scifact --mode dense hybrid
  revela-hub evaluate bm25 --corpus data/beir/scifact --bm25 anserini
  revela-hub evaluate my-retriever --corpus data/beir/scifact --dims 384 192 96 --precision float32 int8 binary
  revela-hub evaluate my-retriever --tasks SciFact NFCorpus
  revela-hub evaluate my-retriever --tasks CoIR
  revela-hub evaluate my-retriever --tasks BEIR13
  revela-hub evaluate outputs/reader/model --task qa --data dev.jsonl --index my-index
"""

import json as json_format
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import scratch_folder
from revela_hub.options import option, required
from revela_hub.ranges import PositiveInt
from revela_hub.search.models import DEPTH, load_models, load_reranker
from revela_hub.search.options import NO_RERANKING, SELF, RankOptions

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

    from revela_hub.evaluation import PairedDifference, RetrievalScores
    from revela_hub.evaluation.vector_sizes import SizeScores

POSITIONALS = ("models",)

VECTOR_MODES = {"dense", "hybrid"}
"""Modes with a retriever whose token vectors can rerank."""
METRICS = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}


@dataclass(kw_only=True)
class Arguments(RankOptions):
    """Arguments of `revela-hub evaluate`."""

    models: list[str] = required("Sentence-transformers folders or Hub ids, or bm25.")
    corpus: str | None = option(None, "BEIR folder to evaluate on.")
    tasks: list[str] = option(
        [], "Names of mteb tasks or benchmarks, e.g. SciFact, CoIR, or BEIR13 and BRIGHT12 of Revela's paper."
    )
    split: str = option("test", "Split of the BEIR folder to evaluate on.")
    mode: list[str] = option([], "One or more of dense, sparse, bm25 and hybrid (default: dense, or bm25 for bm25).")
    dims: list[PositiveInt] = option(
        [], "Numbers of leading components of the vectors to compare, e.g. 384 192 96 (default: all)."
    )
    precision: list[str] = option(
        [], "One or more of float32, int8 and binary for the passages' vectors (default: float32)."
    )
    cache_dir: str | None = option(
        None, "Folder that keeps vectors for the next evaluation (default: they are deleted at the end)."
    )
    json: bool = option(False, "Print JSON.")
    task: Literal["retrieval", "qa"] = option("retrieval", "Measure retrieval, or the answers of a model (qa).")
    data: str | None = option(None, "--task qa: JSON lines of questions and answers.")
    index: str | None = option(None, "--task qa: Index that `revela-hub index` made with the model.")
    num_passages: PositiveInt | None = option(
        None, "--task qa: Number of passages per question (default: the model's own)."
    )
    max_new_tokens: PositiveInt = option(32, "--task qa: Maximum number of tokens per answer.")


def run(arguments: Arguments) -> None:
    """Print a table per task, or one JSON list."""
    if arguments.task == "qa":
        _evaluate_answers(arguments)
        return
    _check(arguments)
    sizes: dict[str, SizeScores] = {}
    with scratch_folder("evaluate") as scratch:  # modes of the same model share their vectors
        cache = arguments.cache_dir or scratch
        results = list(_on_mteb(arguments) if arguments.tasks else _on_folder(arguments, sizes, cache))
    compared = list(_compared(results))
    if arguments.json:
        rows = [
            {"model": model}
            | scores.to_dict()
            | ({"bytes_per_passage": sizes[model].bytes_per_passage} if model in sizes else {})
            | ({"compared_with": results[0][0], "difference": found} if found else {})
            for (model, scores), found in zip(
                results, [{name: each.to_dict() for name, each in pair.items()} for pair in compared], strict=True
            )
        ]
        print(json_format.dumps(rows, indent=2))
    else:
        lines = [f"{label}: {counted(size.bytes_per_passage, 'byte')} per passage" for label, size in sizes.items()]
        print("\n\n".join([*_tables(results, compared), *(["\n".join(lines)] if lines else [])]))


def _check(arguments: Arguments) -> None:
    """Reject combinations of options that would measure something else than they say."""
    if bool(arguments.corpus) == bool(arguments.tasks):
        raise UserError("give either --corpus BEIR_FOLDER or --tasks NAME ... (see revela-hub evaluate --help)")
    if arguments.endpoint and (arguments.tasks or len({*arguments.models} - {"bm25"}) != 1):
        raise UserError(
            "--endpoint requires --corpus and one model (besides bm25): a server has the vectors of one model"
        )
    reranks = arguments.rerank not in (None, NO_RERANKING)
    if (arguments.dims or arguments.precision) and (arguments.tasks or reranks or set(arguments.mode) - {"dense"}):
        raise UserError("--dims and --precision require --corpus and dense retrieval without --rerank")
    if arguments.tasks and (reranks or arguments.mode):
        raise UserError("--rerank and --mode require --corpus: mteb evaluates dense retrieval, or its own BM25")


def _on_folder(
    arguments: Arguments, sizes: "dict[str, SizeScores]", cache_dir: "Path | str"
) -> "Iterator[tuple[str, RetrievalScores]]":
    """Yield the name and the scores of each row, and add the sizes of vectors that are asked for to `sizes`."""
    from revela_hub.data.sources.beir import read_beir
    from revela_hub.evaluation.retrieval import evaluate_ranking, evaluate_reranking
    from revela_hub.evaluation.vector_sizes import evaluate_sizes

    assert arguments.corpus is not None
    task = read_beir(arguments.corpus, arguments.split)
    shared = load_reranker(arguments)
    for name in arguments.models:
        if (arguments.dims or arguments.precision) and name != "bm25":
            encoder = load_models(arguments, name, "dense", rerank=False).dense
            measured = evaluate_sizes(
                encoder, task, arguments.dims, arguments.precision, batch_size=arguments.batch_size
            )
            found = {f"{name} [{size.dims} {size.precision}]": size for size in measured}
            sizes |= found
            yield from ((label, size.scores) for label, size in found.items())
            continue
        modes = ["bm25"] if name == "bm25" else arguments.mode or ["dense"]
        for mode in modes:
            models = load_models(arguments, name, mode, rerank=shared is None and mode in VECTOR_MODES)
            reranker = shared or models.reranker
            label = name if len(modes) == 1 else f"{name} [{mode}]"
            given_models = {"dense": models.dense, "sparse": models.sparse, "cache_dir": cache_dir}
            if reranker is None:
                yield label, evaluate_ranking(task, models.settings, **given_models)
                continue
            before, after = evaluate_reranking(task, models.settings, reranker, **given_models)
            yield label, before
            yield f"{label} > {arguments.rerank or SELF}", after


def _on_mteb(arguments: Arguments) -> "Iterator[tuple[str, RetrievalScores]]":
    from revela_hub.evaluation.mteb_tasks import evaluate_mteb, mean_of, resolve_tasks

    tasks = resolve_tasks(arguments.tasks)  # before a model is loaded
    for name in arguments.models:
        model: Any = name if name == "bm25" else load_models(arguments, name, "dense").dense
        given_prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
        if name != "bm25" and any(prompt is not None for prompt in given_prompts.values()):
            model.prompts = model.prompts | {kind: text for kind, text in given_prompts.items() if text is not None}
        found = evaluate_mteb(model, tasks, batch_size=arguments.batch_size)
        for scores in (*found, mean_of(found)) if len(found) > 1 else found:
            yield name, scores


def _compared(results: "list[tuple[str, RetrievalScores]]") -> "Iterator[dict[str, PairedDifference]]":
    """For each row, each metric against that of the first row; nothing for the first, and where it cannot be done."""
    from revela_hub.evaluation import compare_queries

    first = results[0][1].per_query if results else {}
    for row, (_, scores) in enumerate(results):
        possible = row > 0 and first and scores.per_query and scores.queries > 1 and scores.name == results[0][1].name
        yield (
            {metric: compare_queries(first[metric], scores.per_query[metric]) for metric in METRICS} if possible else {}
        )


def _tables(
    results: "list[tuple[str, RetrievalScores]]", compared: "list[dict[str, PairedDifference]]"
) -> Iterator[str]:
    """One table per task, its models in the order in which they were given, and below it the comparisons."""
    width = max(len("model"), *(len(model) for model, _ in results))
    for task in dict.fromkeys(scores.name for _, scores in results):
        rows = [(model, scores) for model, scores in results if scores.name == task]
        size = rows[0][1]
        yield "\n".join(
            [
                f"{task}: {counted(size.queries, 'query')}, {counted(size.documents, 'document')}",
                f"{'model':<{width}}  nDCG@10  MRR@10  Recall@100",
                *(
                    f"{model:<{width}}  {scores.ndcg_at_10:7.4f}  {scores.mrr_at_10:6.4f}  {scores.recall_at_100:10.4f}"
                    for model, scores in rows
                ),
                *(
                    f"{model} found nothing for {scores.unanswered:,} of the queries (no document contains a term of"
                    " the query); they score 0"
                    for model, scores in rows
                    if scores.unanswered
                ),
            ]
        )
    lines = [
        f"{model:<{width}}  {METRICS[metric]:<10} {found}"
        for (model, _), pair in zip(results, compared, strict=True)
        for metric, found in pair.items()
    ]
    if lines:
        yield "\n".join([f"compared with {results[0][0]} (paired bootstrap over queries, 95% interval):", *lines])


def _evaluate_answers(arguments: Arguments) -> None:
    """Print exact match, F1 and answer recall of a model, as a table or as a JSON list, scored as in SQuAD."""
    from tqdm.auto import tqdm

    from revela_hub.checkpoints import method_of_model
    from revela_hub.data.prompts import read_prompts
    from revela_hub.evaluation.question_answering import score_answers

    models, data, index = arguments.models, arguments.data, arguments.index
    if data is None or index is None:
        raise UserError(
            "--task qa needs --data FILE.jsonl (questions and answers) and --index FOLDER (revela-hub index)"
        )
    if len(models) > 1:
        raise UserError("--task qa evaluates one model at a time, because an index belongs to the model that made it")
    questions = read_prompts([data])
    method = method_of_model(models[0])
    if method is None or not method.answerer:
        raise UserError(f"{models[0]} does not answer questions: --task qa needs a model that reads passages")
    answerer = resolve_name(method.answerer)(
        models[0], index, num_passages=arguments.num_passages, device=arguments.device
    )
    answerer.reranker, answerer.rerank_depth = load_reranker(arguments), arguments.rerank_depth or DEPTH
    found = _answers(answerer, questions, arguments)
    bar = tqdm(found, total=len(questions), desc="Answering", unit=" questions", disable=not sys.stderr.isatty())
    answers = [answer for _, answer in sorted(bar, key=itemgetter(0))]
    scores = score_answers(
        [answer.text for answer in answers],
        list(questions["answers"]),
        [[read.text for read in answer.passages] for answer in answers],
    )
    if arguments.json:
        print(json_format.dumps([{"model": models[0], "data": data, **scores.to_dict()}], indent=2))
        return
    width = max(5, len(models[0]))
    without = sum(not answer.passages for answer in answers)
    remark = f" ({without:,} without passages)" if without else ""
    recall = "-" if scores.answer_recall is None else f"{scores.answer_recall:.3f}"
    print(f"{data}: {counted(scores.questions, 'question')}, {counted(scores.k, 'passage')} each{remark}")
    print(f"{'model':<{width}}     EM      F1  Recall@{scores.k}")
    print(f"{models[0]:<{width}}  {scores.exact_match:.3f}   {scores.f1:.3f}  {recall:>9}")


def _answers(answerer: Any, questions: "Dataset", arguments: Arguments) -> Iterator[tuple[int, Any]]:
    """Yield the number and the answer of each question: first of those that read passages, then of the others."""
    for retrieve, collection in ((True, answerer.collection), (False, None)):
        answerer.collection = collection
        if rows := [row for row, value in enumerate(questions["retrieve"]) if value == retrieve]:
            part = questions.select(rows)
            options = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.batch_size}
            answers = answerer.answer(list(part["prompt"]), places=list(part["where"]), **options)
            yield from zip(rows, answers, strict=True)
