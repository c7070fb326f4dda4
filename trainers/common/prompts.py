"""Prompts and answers as tokens, for all that is trained to answer."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError


def tokenize_prompts(
    prompts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, say: Callable[[str], None]
) -> Dataset:
    """Adds `prompt_ids`, `answer_ids` (the first accepted answer and EOS), `source_row` and `row`, its number before and now.

    Rows longer than `max_length` are left out, and the run is to `say` how many and where the first stands.

    Raises:
        UserError: an answer has no token, or no row is short enough.
    """

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # An empty prompt (plain text) is the tokenizer's own beginning, or EOS: something has to be read first.
        prompt_ids = [ids or [tokenizer.eos_token_id] for ids in tokenizer(rows["prompt"])["input_ids"]]
        answers = [f" {answers[0]}" for answers in rows["answers"]]
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
        for ids, where in zip(answer_ids, rows["where"], strict=True):
            if not ids:
                raise UserError(f"{where}: the answer has no token: give another, or leave the line out")
        return {"prompt_ids": prompt_ids, "answer_ids": [[*ids, tokenizer.eos_token_id] for ids in answer_ids]}

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
        say(f"{what}: left out; raise --max_length to keep them")
        data = data.select(kept)
    return data.add_column("source_row", kept).add_column("row", list(range(len(data))))
