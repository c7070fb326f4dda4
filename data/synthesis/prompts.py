"""The prompts of two-step synthetic data (in `prompts.yaml`): a list of tasks, then examples of each.

After Wang et al., "Improving Text Embeddings with Large Language Models" (arXiv 2401.00368, section 3.1 and the tables of
prompts in its appendix), which NV-Embed (arXiv 2405.17428, section 4.3) follows for its 120,000 examples. The structure,
the keys of the JSON objects and the values of the placeholders are theirs; the wording is ours. Two deviations:

- The first step names a field of knowledge, drawn from a list. With one prompt for all lists, a model soon repeats itself;
  the paper sampled at temperature 1 from a very large model.
- Short-short examples have a hard negative too, unlike in the paper, because a stage without in-batch negatives
  cannot learn from a pair without one.
"""

from collections.abc import Sequence
from importlib.resources import files
from random import Random
from typing import Any, Literal, TypeAlias

import yaml

Form: TypeAlias = Literal["short-long", "long-short", "short-short"]

TASKS_PER_LIST = 20

_PROMPTS: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8"))
FORMS: dict[Form, dict[str, Any]] = _PROMPTS["forms"]
"""Described in `prompts.yaml`."""
DOMAINS: tuple[str, ...] = tuple(_PROMPTS["domains"].split("; "))


def brainstorm_prompt(form: Form, domains: Sequence[str], random: Random) -> str:
    """Return the prompt of the first step, for a list of tasks, with two random examples and a random field."""
    prompts = FORMS[form]
    values = {"domain": random.choice(domains), "noun": prompts["noun"], "count": TASKS_PER_LIST}
    values["examples"] = _listed(random.sample(prompts["task_examples"], 2))
    return str(_PROMPTS["tasks"].format(**values, rules=_listed(prompts["task_rules"])))


def example_prompt(form: Form, task: str, languages: Sequence[str], random: Random) -> tuple[str, str]:
    """Return the prompt of the second step, for an example of the task, with random placeholder values; and its language."""
    prompts = FORMS[form]
    values = {name: random.choice(choices) for name, choices in prompts["placeholders"].items()}
    values["language"] = random.choice(languages)
    keys = _listed([f'"{part["key"]}": a string, {part["description"]}.' for part in prompts["parts"]])
    rules = _listed(prompts["rules"]).format(**values)
    noun = prompts.get("called", prompts["noun"])
    return _PROMPTS["example"].format(noun=noun, task=task, keys=keys, rules=rules), values["language"]


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
