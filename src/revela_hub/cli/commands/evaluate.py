"""Evaluate retrievers, or BM25, on a retrieval task: nDCG@10, MRR@10 and Recall@100, or any --metrics.

The task is a BEIR folder (--corpus: corpus.jsonl, queries.jsonl, qrels/<split>.tsv, optionally .gz), or mteb tasks or
benchmarks (--tasks), which are downloaded. With several values of --mode, each model is evaluated in each mode. As in
BEIR, a document with the id of the query is ignored unless it is judged relevant. A model of `revela-hub adapt` is
evaluated as `search` uses it, in hybrid with BM25 and with late interaction; --mode dense is its retriever alone.

Each row after the first is compared with the first, query by query: difference, 95% confidence interval and p-value
(paired bootstrap; queries of one document of a probe are drawn together). Each p-value is for one comparison; with ten
rows, divide the significance level by nine.

--save_run writes the ranking in TREC format. Such a file in place of a model is scored again without a model.
Questions with answers instead of judgements (--data FILE.jsonl) are asked of an --index; answer_recall@K is the fraction
of questions for which one of the first K passages contains an answer.

--tasks takes all types of mteb tasks, e.g. MTEB56, and prints means by type. --instructions puts an instruction
for each task before the queries, for models that follow instructions.
--dims measures shorter vectors: their first components.

--task qa measures a model that answers questions: exact match and F1 (normalised as in SQuAD), and the fraction of
questions for which a retrieved passage contains an answer. A reader with passages in its prompt needs a --retriever, with
which the index was made, or bm25.

Examples:
  revela-hub evaluate my-retriever --corpus data/beir/scifact
  revela-hub evaluate bm25 my-retriever sentence-transformers/all-MiniLM-L6-v2 --corpus data/beir/scifact --json
  revela-hub evaluate my-retriever --corpus data/msmarco --split dev --metrics mrr@10 recall@50 recall@1000 --save_run run.trec
  revela-hub evaluate my-retriever --corpus data/beir/scifact --mode dense hybrid --dims 384 192 96
  revela-hub evaluate my-retriever --tasks MTEB56 --instructions instructions.json
  revela-hub evaluate my-retriever --data nq-test.jsonl --index my-index --metrics answer_recall@20 answer_recall@100
  revela-hub evaluate outputs/reader/model --task qa --data dev.jsonl --index my-index --retriever my-retriever
"""

import json as json_format
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import local_path, scratch_folder
from revela_hub.options import option, required, values_of
from revela_hub.output import is_quiet, note, progress_bar
from revela_hub.ranges import PositiveInt
from revela_hub.search.models import fitted_settings, load_models, load_reranker
from revela_hub.search.options import NO_RERANKING, SELF, RankOptions

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

    from revela_hub.evaluation import PairedDifference, RetrievalScores
    from revela_hub.evaluation.retrieval import Rankings

POSITIONALS = ("models",)

LABELS = {"ndcg": "nDCG", "mrr": "MRR"}


@dataclass(kw_only=True)
class Arguments(RankOptions):
    """Arguments of `revela-hub evaluate`."""

    models: list[str] = required("Sentence-transformers folders or Hub ids, bm25, or rankings in TREC format.")
    corpus: str | None = option(None, "BEIR folder to evaluate on.")
    tasks: list[str] = option(
        [],
        "Names of mteb tasks or benchmarks, such as SciFact or CoIR, or BEIR13, BRIGHT12 and MTEB56 of the papers.",
    )
    instructions: str | None = option(
        None,
        "--tasks: JSON file with the instruction of each task, or mteb for those of mteb (default: the model's own prompts).",
        metavar="FILE",
    )
    metrics: list[str] = option(
        ["ndcg@10", "mrr@10", "recall@100"], "Any of ndcg@K, mrr@K, recall@K; with --data, answer_recall@K."
    )
    save_run: str | None = option(None, "New file for the ranking of the model, in TREC format.", metavar="FILE")
    split: str = option("test", "Split of the BEIR folder to evaluate on.")
    mode: list[Literal["dense", "sparse", "bm25", "hybrid"]] = option(
        [], "One or more kinds of ranking (default: dense; bm25 for bm25; hybrid for a model of adapt)."
    )
    dims: list[PositiveInt] = option(
        [], "Numbers of leading components of the vectors, e.g. 384 192 96 (default: all)."
    )
    cache_dir: str | None = option(
        None, "Folder that keeps vectors for the next evaluation (default: they are deleted at the end)."
    )
    json: bool = option(False, "Print JSON.")
    task: Literal["retrieval", "qa"] = option("retrieval", "Measure retrieval, or the answers of a model (qa).")
    data: list[str] = option(
        [], "Questions and answers: JSON lines, data sets (hf:owner/name), or mappings in a YAML file."
    )
    index: str | None = option(None, "--data: Index that `revela-hub index` made with the model or --retriever.")
    retriever: str | None = option(
        None, "--task qa: Retriever of a reader with passages in its prompt: Hub id, folder or bm25."
    )
    query_text: Literal["prompt", "input"] = option(
        "prompt", "--task qa: Query of --retriever: the whole prompt, or the input without its template."
    )
    num_passages: PositiveInt | None = option(
        None, "--task qa: Number of passages per question (default: the model's own)."
    )
    max_new_tokens: PositiveInt = option(32, "--task qa: Maximum number of tokens per answer.")


class Row(NamedTuple):
    """A row of a table, with the ranking if it is saved."""

    model: str
    scores: "RetrievalScores"
    run: "Rankings | None" = None
    groups: Mapping[str, str] = {}


def run(arguments: Arguments) -> None:
    """Print a table per task, or one JSON list."""
    if arguments.task == "qa":
        _evaluate_answers(arguments)
        return
    _check(arguments)
    with scratch_folder("evaluate") as scratch:  # modes of the same model share their vectors
        measured = _on_questions if arguments.data else _on_mteb if arguments.tasks else _on_folder
        rows = list(measured(arguments, arguments.cache_dir or scratch))
    if arguments.save_run and rows[-1].run is not None:
        from revela_hub.evaluation.retrieval import write_run

        write_run(rows[-1].run, arguments.save_run, rows[-1].model)
    compared = [_compared(rows[0], row) if row is not rows[0] else {} for row in rows]
    if not arguments.json:
        print("\n\n".join(_tables(rows, compared)))
        return
    found = []
    for row, pair in zip(rows, compared, strict=True):
        difference = {metric: each.to_dict() for metric, each in pair.items()}
        more = {"compared_with": rows[0].model, "difference": difference} if pair else {}
        found.append({"model": row.model} | row.scores.to_dict() | more)
    print(json_format.dumps(found, indent=2))


def _check(arguments: Arguments) -> None:
    """Reject combinations of options that would measure something else than they say."""
    from revela_hub.evaluation.retrieval import cutoff

    reranks = arguments.rerank not in (None, NO_RERANKING)
    if [bool(arguments.corpus), bool(arguments.tasks), bool(arguments.data and arguments.index)].count(True) != 1:
        raise UserError(
            "give either --corpus BEIR_FOLDER, --tasks NAME ..., or --data FILE and --index FOLDER (see revela-hub evaluate --help)"
        )
    if {cutoff(metric)[0] == "answer_recall" for metric in arguments.metrics} != {bool(arguments.data)}:
        raise UserError("--data measures --metrics answer_recall@K ..., and only --data has answers")
    if (arguments.dims and not arguments.corpus) or (arguments.instructions and not arguments.tasks):
        raise UserError("--dims requires --corpus, and --instructions requires --tasks")
    if arguments.tasks and (reranks or arguments.mode or arguments.endpoint):
        raise UserError("mteb evaluates dense retrieval or its own BM25: the options of ranking require --corpus")
    if arguments.endpoint and len({*arguments.models} - {"bm25"}) != 1:
        raise UserError("--endpoint requires one model (besides bm25): a server has the vectors of one model")
    if arguments.save_run:
        if not arguments.corpus or len(arguments.models) > 1 or len(arguments.mode) > 1 or arguments.dims:
            raise UserError("--save_run writes the ranking of one model in one --mode on a --corpus")
        if local_path(arguments.save_run).exists():
            raise UserError(f"{arguments.save_run} exists already: choose another --save_run")


def _on_folder(arguments: Arguments, cache_dir: "Path | str") -> Iterator[Row]:
    from revela_hub.data.sources.beir import read_beir
    from revela_hub.evaluation.retrieval import depth_of, ranking_runs, read_run, score_run
    from revela_hub.retrieval.index_options import IndexOptions

    assert arguments.corpus is not None
    task, metrics = read_beir(arguments.corpus, arguments.split), arguments.metrics
    modes = _modes(arguments)
    shared, depth = load_reranker(arguments), depth_of(metrics)
    for name in arguments.models:
        if local_path(name).is_file():
            run = read_run(name, task, depth)
            yield Row(name, score_run(run, task, metrics), run, task.groups)
            continue
        for mode, label in modes[name]:
            fitted = mode == "hybrid" and not arguments.mode
            models = load_models(arguments, name, mode, rerank=shared is None and mode in ("dense", "hybrid"))
            given = {"dense": models.dense, "sparse": models.sparse, "reranker": shared or models.reranker}
            sizes: Sequence[int | None] = (arguments.dims if models.dense else None) or [None]
            for dims in sizes:
                settings = replace(models.settings, index=IndexOptions(truncate_dim=dims))
                runs = ranking_runs(task, settings, depth, cache_dir=cache_dir, **given)
                whole = label if dims is None else f"{label} [{dims} dimensions]"
                suffixes = ["", f" > {arguments.rerank or SELF}"][: len(runs)]
                if fitted and arguments.rerank is None:
                    runs, suffixes = runs[-1:], [""]
                for run, suffix in zip(runs, suffixes, strict=True):
                    scores, kept = score_run(run, task, metrics), run if arguments.save_run else None
                    yield Row(whole + suffix, scores, kept, task.groups)


def _modes(arguments: Arguments) -> dict[str, list[tuple[str, str]]]:
    """Return the modes of each model, with the labels of their rows."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in arguments.models:
        modes: list[str] = ["bm25"] if name == "bm25" else [*arguments.mode]
        if not modes and not arguments.dims and fitted_settings(name):
            note(f"{name}: evaluated as `search` uses it, with its hybrid.json (--mode dense: the retriever alone)")
            modes = ["hybrid"]
        modes = modes or ["dense"]
        found[name] = [(mode, name if len(modes) == 1 else f"{name} [{mode}]") for mode in modes]
    arguments.check_modes(*(mode for rows in found.values() for mode, _ in rows))
    return found


def _on_questions(arguments: Arguments, _: object) -> Iterator[Row]:
    from revela_hub.data.prompts import parse_prompts, read_prompts
    from revela_hub.evaluation.question_answering import answer_recall
    from revela_hub.evaluation.retrieval import depth_of
    from revela_hub.search.searcher import Searcher

    questions, options = read_prompts(arguments.data), values_of(RankOptions, arguments)
    names = ", ".join(parse_prompts(source).name for source in arguments.data)
    for name, modes in _modes(arguments).items():
        for mode, label in modes:
            with Searcher(name, index=arguments.index, mode=mode, **options) as searcher:
                found = searcher.search(list(questions["input"]), depth_of(arguments.metrics))
                texts = ([hit.text for hit in hits] for hits in found)
                answers, size = questions["answers"], len(searcher)
                yield Row(label, answer_recall(texts, answers, arguments.metrics, name=names, documents=size))


def _on_mteb(arguments: Arguments, _: object) -> Iterator[Row]:
    from revela_hub.evaluation.mteb_tasks import evaluate_mteb, means_of, resolve_tasks

    arguments.check_modes()
    tasks = resolve_tasks(arguments.tasks)  # before a model is loaded
    instructions: Any = None
    if arguments.instructions is not None:
        given = arguments.instructions != "mteb"
        instructions = json_format.loads(local_path(arguments.instructions).read_text("utf-8")) if given else {}
    for name in arguments.models:
        model: Any = name if name == "bm25" else load_models(arguments, name, "dense").dense
        prompts = {"query": arguments.query_prompt, "document": arguments.document_prompt}
        if name != "bm25":
            model.prompts = model.prompts | {kind: text for kind, text in prompts.items() if text is not None}
        how: dict[str, Any] = {"metrics": arguments.metrics, "instructions": instructions}
        found = evaluate_mteb(model, tasks, batch_size=arguments.batch_size, **how)
        yield from (Row(name, scores) for scores in (*found, *means_of(found)))


def _compared(first: Row, row: Row) -> "dict[str, PairedDifference]":
    """Compare each metric with that of the first row; nothing if its task is another one or has too few queries."""
    from revela_hub.evaluation import compare_queries

    a, b = first.scores, row.scores
    if not (a.per_query and b.per_query and b.queries > 1 and a.name == b.name):
        return {}
    return {metric: compare_queries(a.per_query[metric], b.per_query[metric], row.groups) for metric in a.metrics}


def _tables(rows: list[Row], compared: "list[dict[str, PairedDifference]]") -> Iterator[str]:
    """One table per task, its models in the order in which they were given, and below it the comparisons."""
    from revela_hub.evaluation.significance import too_few_queries

    width = max(len("model"), *(len(row.model) for row in rows))
    for task in dict.fromkeys(row.scores.name for row in rows):
        of_task = [row for row in rows if row.scores.name == task]
        size = of_task[0].scores
        sizes = f": {counted(size.queries, 'query')}, {counted(size.documents, 'document')}" if size.queries else ""
        columns = {metric: max(6, len(_label(metric))) for metric in size.metrics}
        heads = [f"{_label(metric):>{column}}" for metric, column in columns.items()]
        lines = [f"{task}{sizes}", "  ".join([f"{'model':<{width}}", *heads])]
        for model, scores, *_ in of_task:
            numbers = [f"{scores.metrics[metric]:{column}.4f}" for metric, column in columns.items()]
            lines.append("  ".join([f"{model:<{width}}", *numbers]))
        for model, scores, *_ in of_task:
            if scores.unanswered:
                lines.append(f"{model} found nothing for {scores.unanswered:,} of the queries; they score 0")
        yield "\n".join(lines)
    labels = max((len(_label(metric)) for pair in compared for metric in pair), default=0)
    lines = [
        f"{row.model:<{width}}  {_label(metric):<{labels}} {found}"
        for row, pair in zip(rows, compared, strict=True)
        for metric, found in pair.items()
    ]
    if lines:
        few = too_few_queries(pair["ndcg_at_10"] for pair in compared if "ndcg_at_10" in pair)
        title = f"compared with {rows[0].model} (paired bootstrap, 95% interval):"
        yield "\n".join([title, *lines, *filter(None, [few])])


def _label(metric: str) -> str:
    kind, at, k = metric.partition("_at_")
    return LABELS.get(kind, kind.replace("_", " ").capitalize()) + at.replace("_at_", "@") + k


def _evaluate_answers(arguments: Arguments) -> None:
    """Print exact match, F1 and answer recall of a model on each data set, as tables or as a JSON list, scored as in SQuAD."""
    from revela_hub.checkpoints import METHODS, resolve
    from revela_hub.data.prompts import parse_prompts, read_prompts
    from revela_hub.evaluation.question_answering import score_answers

    index = arguments.index
    if not arguments.data or index is None or len(arguments.models) > 1:
        raise UserError("--task qa needs one model, --data (questions and answers) and the --index of the model")
    [model] = arguments.models
    names = [parse_prompts(source).name for source in arguments.data]
    questions = [read_prompts([source]) for source in arguments.data]
    options: dict[str, Any] = {"num_passages": arguments.num_passages, "device": arguments.device}
    method = resolve(model).method
    if arguments.retriever:  # a reader is a plain decoder, without a model type of ours
        method = next(each for each in METHODS.values() if each.answerer and not each.model_type)
        options["retriever"] = arguments.retriever
    if method is None or not method.answerer:
        raise UserError(f"{model} does not retrieve: --task qa needs its --retriever")
    answerer = resolve_name(method.answerer)(model, index, **options)
    collection, found = answerer.collection, []
    for name, asked in zip(names, questions, strict=True):
        answerer.collection = collection
        answers = _answers(answerer, asked, arguments)
        passages = [[read.text for read in answer.passages] for answer in answers]
        scores = score_answers([answer.text for answer in answers], list(asked["answers"]), passages)
        found.append({"model": model, "data": name, **scores.to_dict()})
        if not arguments.json:
            width = max(5, len(model))
            without = sum(not read for read in passages)
            remark = f" ({without:,} without passages)" if without else ""
            recall = "-" if scores.answer_recall is None else f"{scores.answer_recall:.3f}"
            print(f"{name}: {counted(scores.questions, 'question')}, {counted(scores.k, 'passage')} each{remark}")
            print(f"{'model':<{width}}     EM      F1  Recall@{scores.k}")
            print(f"{model:<{width}}  {scores.exact_match:.3f}   {scores.f1:.3f}  {recall:>9}")
    if arguments.json:
        print(json_format.dumps(found, indent=2))
    elif len(found) > 1:
        print(
            f"mean exact match of {len(found)} data sets: {sum(row['exact_match'] for row in found) / len(found):.3f}"
        )


def _answers(answerer: Any, questions: "Dataset", arguments: Arguments) -> list[Any]:
    """Return the answer to each question; those that do not retrieve are answered without passages, after the others."""
    found: dict[int, Any] = {}
    for retrieve, collection in ((True, answerer.collection), (False, None)):
        answerer.collection = collection
        if rows := [row for row, value in enumerate(questions["retrieve"]) if value == retrieve]:
            part = questions.select(rows)
            options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.batch_size}
            options |= {"queries": list(part[arguments.query_text])} if arguments.retriever else {}
            answers = answerer.answer(list(part["prompt"]), places=list(part["where"]), **options)
            bar = progress_bar(answers, total=len(rows), desc="Answering", unit=" questions", show=not is_quiet())
            found |= zip(rows, bar, strict=True)
    return [found[row] for row in range(len(questions))]
