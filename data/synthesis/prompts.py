"""The prompts of two-step synthetic data (in `prompts.yaml`): a list of tasks, then examples of each.

After Wang et al., "Improving Text Embeddings with Large Language Models" (arXiv 2401.00368, section 3.1 and the tables of
prompts in its appendix), which NV-Embed (arXiv 2405.17428, section 4.3) follows for its 120,000 examples. The structure,
the keys of the JSON objects and the values of the placeholders are theirs; the wording is ours. Two deviations:

- The first step names a field of knowledge, drawn from a list. With one prompt for all lists, a model soon repeats itself;
  the paper sampled at temperature 1 from a very large model.
- Short-short examples have a hard negative too, unlike in the paper, because a stage without in-batch negatives
  cannot learn from a pair without one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random
from typing import Any, Literal, TypeAlias

import yaml

from revela_hub.data.text.words import words

Form: TypeAlias = Literal["short-long", "long-short", "short-short"]

TASKS_PER_LIST = 20
PLACEHOLDER = re.compile(r"^(?:a string\b|\.\.\.|…|<[^>]*>$|\{[^}]*\}$)", re.IGNORECASE)  # copied from a prompt
BROKEN = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: possible in JSON, not in UTF-8


@dataclass(frozen=True)
class Part:
    """One text of an example: its key in the model's JSON, its description, and its limits in words."""

    key: str
    description: str
    min_words: int
    max_words: int

    def problem(self, text: object) -> str | None:
        """Return why a value of the model's JSON cannot be used, or None."""
        if not isinstance(text, str):
            return "key missing" if text is None else "not a string"
        # A text of symbols only (code, a formula) counts as one word: it is not empty, but words() finds none.
        count = len(words(text)) or 1
        problems = {
            "broken character": BROKEN.search(text),
            "empty text": not text.strip(),
            "placeholder copied": PLACEHOLDER.match(text.strip()),
            "too short": count < self.min_words,
            "too long": count > self.max_words,
        }
        return next((problem for problem, holds in problems.items() if holds), None)


@dataclass(frozen=True)
class FormPrompts:
    """The prompts of one form of example; `prompts.yaml` describes the fields."""

    kind: Literal["retrieval", "other"]
    noun: str
    task_rules: list[str]
    task_examples: list[str]
    parts: tuple[Part, Part, Part]
    rules: list[str]
    placeholders: dict[str, list[str]]
    called: str = ""


_PROMPTS: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8"))
FORMS: dict[Form, FormPrompts] = {
    form: FormPrompts(**fields | {"parts": tuple(Part(**part) for part in fields["parts"])})
    for form, fields in _PROMPTS["forms"].items()
}
DOMAINS: tuple[str, ...] = tuple(_PROMPTS["domains"].split("; "))


def brainstorm_prompt(form: Form, domains: Sequence[str], random: Random) -> str:
    """Return the prompt of the first step, for a list of tasks, with two random examples and a random field."""
    prompts = FORMS[form]
    prompt: str = _PROMPTS["tasks"].format(
        domain=random.choice(domains),
        noun=prompts.noun,
        examples=_listed(random.sample(prompts.task_examples, 2)),
        rules=_listed(prompts.task_rules),
        count=TASKS_PER_LIST,
    )
    return prompt


def example_prompt(form: Form, task: str, languages: Sequence[str], random: Random) -> tuple[str, str]:
    """Return the prompt of the second step, for an example of the task, with random placeholder values; and its language."""
    prompts = FORMS[form]
    values = {name: random.choice(choices) for name, choices in prompts.placeholders.items()}
    values["language"] = random.choice(languages)
    prompt: str = _PROMPTS["example"].format(
        noun=prompts.called or prompts.noun,
        task=task,
        keys=_listed([f'"{part.key}": a string, {part.description}.' for part in prompts.parts]),
        rules=_listed(prompts.rules).format(**values),
    )
    return prompt, values["language"]


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
