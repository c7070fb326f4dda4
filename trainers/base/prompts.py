"""Tokenise prompts and answers."""

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerBase

from revela_hub.data.prompts.rows import COLUMNS, prompt_row
from revela_hub.data.sources.rows import Row
from revela_hub.errors import UserError
from revela_hub.trainers.base.inputs import as_dataset, unformatted


def as_prompts(rows: Dataset | IterableDataset) -> Dataset:
    """Return questions with answers as prompts; prompts as `read_prompts` returns them are not changed."""
    if rows is None:
        raise UserError("train_dataset is missing: give a data set with the columns question and answer")
    rows = as_dataset(rows)
    if set(COLUMNS) <= set(rows.column_names):
        return rows
    made = (prompt_row(Row(f"train_dataset:{number}", row), "question_answering") for number, row in enumerate(rows))
    return Dataset.from_list(list(made))


def as_texts(passages: Sequence[str] | Dataset) -> Sequence[str]:
    """Return the texts of a collection: a sequence of texts, or a data set with a column `text`."""
    if isinstance(passages, Dataset):
        if "text" not in passages.column_names:
            raise UserError(
                f"the passages have the columns {', '.join(passages.column_names)}, but no column text: rename one"
            )
        passages = list(unformatted(passages)["text"])
    if isinstance(passages, str) or not isinstance(passages, Sequence):
        raise UserError(
            f"passages is a {type(passages).__name__}: pass a list of texts, or a data set with a column text"
        )
    for number, text in enumerate(passages):
        if not isinstance(text, str):
            raise UserError(f"passages:{number}: {type(text).__name__} instead of text; remove it, or give it a text")
    return passages


def refuse_eval_dataset(given: dict[str, Any], trainer: str) -> None:
    """Raise a `UserError` if a trainer that has no loss on an `eval_dataset` is given one, or its `evaluate` or `predict`."""

    def refuse(rows: Any) -> Any:
        if "row" in (getattr(rows, "column_names", None) or ()):  # of the `train_dataset`, as prepared by the trainer
            return rows
        raise UserError(
            f"{trainer} has no loss on an eval_dataset, because only the questions in train_dataset have ranked passages: leave it"
            " out, and pass retrieval_task=RetrievalTask(...) to measure retrieval"
        )

    if given.get("eval_dataset"):
        refuse(given["eval_dataset"])
    given["prepare"] = refuse


def refuse_excluded_prompts(retriever: SentenceTransformer, name: str, method: str) -> None:
    """Raise a `UserError` if a model excludes the tokens of its prompts from pooling, which a method would pool."""
    if any(retriever.prompts.values()) and not all(getattr(module, "include_prompt", True) for module in retriever):
        raise UserError(
            f"{name} excludes its prompts from pooling (include_prompt), which {method} does not support: use `revela-hub"
            " train pairs` or `train contriever`, which support it"
        )


def pair_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of prompts, and of their completions (a space and the answer) with EOS.

    An empty prompt (plain text) becomes the tokenizer's BOS token or EOS, because the model needs at least one token.
    """
    end = tokenizer.eos_token_id
    completed = tokenizer(list(completions), add_special_tokens=False)["input_ids"]
    return [ids or [end] for ids in tokenizer(list(prompts))["input_ids"]], [[*ids, end] for ids in completed]


def tokenize_prompts(
    prompts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, log: Callable[[str], None]
) -> Dataset:
    """Add the columns `prompt_ids`, `answer_ids` (first accepted answer and EOS), `source_row` and `row` (old and new index).

    Rows longer than `max_length` are dropped; their number and the location of the first are passed to `log`.

    Raises:
        UserError: an answer has no tokens, or all rows are too long.
    """

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions = [f" {answers[0]}" for answers in rows["answers"]]
        prompt_ids, answer_ids = pair_tokens(tokenizer, rows["prompt"], completions)
        for ids, where in zip(answer_ids, rows["where"], strict=True):
            if len(ids) < 2:
                raise UserError(f"{where}: the answer has no tokens: change it or remove the line")
        return {"prompt_ids": prompt_ids, "answer_ids": answer_ids}

    data = prompts.map(tokenized, batched=True, desc="Tokenizing prompts")
    lengths = [len(p) + len(a) for p, a in zip(data["prompt_ids"], data["answer_ids"], strict=True)]
    long = [row for row, length in enumerate(lengths) if length > max_length]
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if long:
        first = prompts[long[0]]["where"]
        what = (
            f"{len(long)} of {len(data)} prompts have more than {max_length} tokens, answer included (first: {first})"
        )
        if not kept:
            raise UserError(f"{what}: raise --max_length")
        log(f"{what}: dropped; raise --max_length to keep them")
        data = data.select(kept)
    return data.add_column("source_row", kept).add_column("row", list(range(len(data))))
