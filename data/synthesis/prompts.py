"""The prompts of two-step synthetic data, which stand in `prompts.yaml`: a list of tasks, then one example of each.

After Wang et al., "Improving Text Embeddings with Large Language Models" (arXiv 2401.00368, section 3.1 and the tables of
prompts in its appendix), which NV-Embed (arXiv 2405.17428, section 4.3) follows for its 120,000 examples. The structure,
the keys of the JSON objects and the values of the placeholders are theirs; the wording is ours. Two deviations:

- The first step names a field of knowledge, drawn from a list. With one prompt for all lists a model soon repeats itself:
  the paper sampled at temperature 1 from a very large one.
- Short-short examples have a hard negative too. The paper leaves it out; but NV-Embed's second stage has no in-batch
  negatives, and learns nothing from a pair without one.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from revela_hub.data.text.ngram_overlap import words

Form: TypeAlias = Literal["short-long", "long-short", "short-short"]

TASKS_PER_LIST = 20
PLACEHOLDER = re.compile(r"^(?:a string\b|\.\.\.|…|<[^>]*>$|\{[^}]*\}$)", re.IGNORECASE)  # copied from a prompt

BROKEN = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: JSON and a command line may have it, UTF-8 has not


class Part(BaseModel):
    """One text of an example: its key in the model's JSON, what it is, and how many words it may have."""

    key: str
    description: str
    min_words: int
    max_words: int

    def check(self, text: str) -> str:
        """The text, without space around it; raises pydantic's error, of which the type is the reason."""
        text = text.strip()
        # A text of symbols alone (code, a formula) is one word: it is not empty, and words() finds none.
        count = len(words(text)) or 1
        for reason, holds in {
            "broken character": BROKEN.search(text),
            "empty text": not text,
            "placeholder copied": PLACEHOLDER.match(text),
            "too short": count < self.min_words,
            "too long": count > self.max_words,
        }.items():
            if holds:
                raise PydanticCustomError(reason, reason)
        return text


class FormPrompts(BaseModel):
    """How one form of example is asked for; `prompts.yaml` says what the fields are."""

    kind: Literal["retrieval", "other"]
    noun: str
    called: str = ""
    task_rules: list[str]
    task_examples: list[str]
    parts: tuple[Part, Part, Part]
    rules: list[str]
    placeholders: dict[str, list[str]]

    @property
    def anchor(self) -> Part:
        """The text that the instruction belongs to."""
        return self.parts[0]

    @cached_property
    def example(self) -> type[BaseModel]:
        """What validates an example, and whose JSON schema a server can hold its model to."""
        fields: dict[str, Any] = {
            part.key: (Annotated[str, AfterValidator(part.check)], Field(description=part.description))
            for part in self.parts
        }
        config = ConfigDict(json_schema_extra={"additionalProperties": False}, strict=True)
        return create_model("Example", __config__=config, **fields)


_TEXT = files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8")
_PROMPTS: dict[str, Any] = yaml.safe_load(_TEXT)
FORMS: dict[Form, FormPrompts] = {form: FormPrompts(**fields) for form, fields in _PROMPTS["forms"].items()}
DOMAINS: tuple[str, ...] = tuple(_PROMPTS["domains"].split("; "))
VERSION = hashlib.sha256(repr(_PROMPTS).encode()).hexdigest()[:16]  # of the prompts: another version, other data


class Draw(NamedTuple):
    """What one prompt was made of, and the prompt."""

    prompt: str
    values: Mapping[str, str]


def brainstorm_prompt(form: Form, domains: Sequence[str], random: Random) -> Draw:
    """The first step: asks for a list of tasks, showing two and naming a field of knowledge, both drawn."""
    prompts = FORMS[form]
    domain = random.choice(domains)
    values = {
        "domain": domain,
        "noun": prompts.noun,
        "examples": _listed(random.sample(prompts.task_examples, 2)),
        "rules": _listed(prompts.task_rules),
        "count": str(TASKS_PER_LIST),
    }
    return Draw(_PROMPTS["tasks"].format(**values), {"domain": domain})


def example_prompt(form: Form, task: str, languages: Sequence[str], random: Random) -> Draw:
    """The second step: asks for an example of the task, all placeholders drawn."""
    prompts = FORMS[form]
    values = {name: random.choice(choices) for name, choices in prompts.placeholders.items()}
    values["language"] = random.choice(languages)
    prompt = _PROMPTS["example"].format(
        noun=prompts.called or prompts.noun,
        task=task,
        keys=_listed([f'"{part.key}": a string, {part.description}.' for part in prompts.parts]),
        rules=_listed(prompts.rules).format(**values),
    )
    return Draw(prompt, values)


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
