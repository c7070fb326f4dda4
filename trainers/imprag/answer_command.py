"""Answer prompts with an ImpRAG model from the passages of an index.

The index has to be made by `revela-hub index` with the same model. Prompts are read from standard input, one per
line, if none is given. --task puts them into the template of a task; without it, a prompt is used as it is and has to
end where the answer begins. Prints each answer with its passages, or one JSON object per prompt with --json.

Examples:
  revela-hub answer outputs/imprag/model --index my-index --task question_answering "Who wrote Emma?"
  revela-hub answer outputs/imprag/model --index my-index --task question_answering --json < questions.txt
"""

import json as json_format
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from revela_hub.options import option, required
from revela_hub.output import is_utf8, typed_lines
from revela_hub.ranges import PositiveInt

if TYPE_CHECKING:
    from revela_hub.trainers.imprag.answering import Answer

POSITIONALS = ("model", "prompt")
WIDTH = 110


@dataclass(kw_only=True)
class Arguments:
    """Arguments of `revela-hub answer`."""

    model: str = required("ImpRAG model: folder or Hub id.")
    index: str = required("Index that `revela-hub index` made with this model.")
    prompt: str | None = option(None, "Prompt to answer (default: the lines of standard input).")
    task: str | None = option(
        None, "Task whose template the prompts are put into (default: prompts are used as they are)."
    )
    num_passages: PositiveInt | None = option(None, "Number of passages per prompt (default: the model's own).")
    max_new_tokens: PositiveInt = option(64, "Maximum number of tokens per answer.")
    json: bool = option(False, "Print JSON.")
    batch_size: PositiveInt = option(8, "Number of prompts per forward pass.")
    device: str | None = option(None, "Device to run on, e.g. cpu, cuda:1 or mps (default: the fastest one).")


def run(arguments: Arguments) -> None:
    """Opens the index, then answers the prompt, or those of standard input."""
    from revela_hub.data.prompts import render, retrieves
    from revela_hub.trainers.imprag.answering import open_answerer

    answerer = open_answerer(
        arguments.model, arguments.index, num_passages=arguments.num_passages, device=arguments.device
    )
    task = arguments.task
    if task is not None and not retrieves(task):
        answerer.collection = None  # as in training
    lines = ((f"line {number} of standard input", prompt) for number, prompt in typed_lines("prompt"))
    given = lines if arguments.prompt is None else iter([("the prompt", arguments.prompt)])
    size = 1 if sys.stdin.isatty() else arguments.batch_size
    while batch := list(islice(given, size)):
        places, prompts = zip(*batch, strict=True)
        answers = answerer.answer(
            prompts if task is None else [render(task, "--task", input=prompt) for prompt in prompts],
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch_size,
            places=places,
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if arguments.json:
                print(json_format.dumps({"prompt": prompt, **answer.to_dict()}, ensure_ascii=not is_utf8()), flush=True)
            else:
                print("\n".join(_lines(answer)), flush=True)


def _lines(answer: "Answer") -> Iterator[str]:
    yield answer.text
    yield ""
    for rank, passage in enumerate(answer.passages, start=1):
        yield f"  {rank}. {passage.score:.3f}  {passage.location}"
        text = " ".join(passage.text.split())[: 10 * WIDTH]  # wrapping a word takes the square of its length
        yield from (f"       {line}" for line in textwrap.wrap(text, WIDTH, max_lines=3, placeholder=" ..."))
    yield ""
