"""`revela-hub evaluate MODEL --task qa`: the answers of a model to questions, scored as in SQuAD."""

import json
import sys
from pkgutil import resolve_name
from typing import Any

from tqdm.auto import tqdm

from revela_hub.errors import UserError


def evaluate_answers(
    models: list[str],
    data: str | None,
    index: str | None,
    *,
    k: int | None = None,
    max_new_tokens: int = 32,
    batch_size: int = 8,
    device: str | None = None,
    as_json: bool = False,
    reranker: Any = None,
    rerank_depth: int = 50,
) -> None:
    """Print exact match, F1 and answer recall of a model, as a table or as a JSON list.

    Args:
        models: The model, in a list; there can be only one because the index belongs to a model.
        data: JSON lines of questions and answers.
        index: The index that `revela-hub index` made with the model.
        k: Number of passages per question.
        max_new_tokens: Maximum number of tokens per answer.
        batch_size: Number of questions per forward pass.
        device: Device to run on (default: the fastest one).
        as_json: Print JSON.
        reranker: A `retrieval.rerank.Reranker` that chooses the passages among the best retrieved ones.
        rerank_depth: Number of retrieved passages per question to choose from.

    Raises:
        UserError: An option is missing, or a file cannot be read.
    """
    from revela_hub.checkpoints import method_of_model
    from revela_hub.data.prompts.rows import read_prompts
    from revela_hub.evaluation.question_answering import score_answers

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
    answerer = resolve_name(method.answerer)(models[0], index, k=k, device=device)
    answerer.reranker, answerer.rerank_depth = reranker, rerank_depth
    found = answerer.answer(
        list(questions["prompt"]),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        places=list(questions["where"]),
    )
    bar = tqdm(found, total=len(questions), desc="Answering", unit=" questions", disable=not sys.stderr.isatty())
    answers = list(bar)
    scores = score_answers(
        [answer.text for answer in answers],
        list(questions["answers"]),
        [[read.text for read in answer.passages] for answer in answers],
    )
    sys.stdout.write(f"{_report(models[0], data, scores.to_dict(), as_json)}\n")


def _report(model: str, data: str, scores: dict[str, Any], as_json: bool) -> str:
    if as_json:
        return json.dumps([{"model": model, "data": data, **scores}], indent=2)
    k = scores["k"]
    return (
        f"{data}: {scores['questions']:,} questions, {k} passages each\n"
        f"{'model':<{max(5, len(model))}}     EM      F1  Recall@{k}\n"
        f"{model:<{max(5, len(model))}}  {scores['exact_match']:.3f}   {scores['f1']:.3f}  {scores['answer_recall']:9.3f}"
    )
