"""The prompts of two-step synthetic data: first a list of tasks, then one example for each.

After Wang et al., "Improving Text Embeddings with Large Language Models" (arXiv 2401.00368, section 3.1 and the tables of
prompts in its appendix), which NV-Embed (arXiv 2405.17428, section 4.3) follows for its 120,000 examples. The structure,
the keys of the JSON objects and the values of the placeholders are theirs; the wording is ours. Two deviations:

- The first step names a field of knowledge, drawn from a list. With one prompt for all lists a model soon repeats itself:
  the paper sampled at temperature 1 from a very large one.
- Short-short examples have a hard negative too. The paper leaves it out; but NV-Embed's second stage has no in-batch
  negatives, and learns nothing from a pair without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["short-long", "long-short", "short-short"]

TASKS_PER_LIST = 20

DOMAINS = (
    "agriculture",
    "architecture",
    "arts and museums",
    "astronomy",
    "biology",
    "business and management",
    "chemistry",
    "consumer products",
    "cooking and nutrition",
    "cybersecurity",
    "earth science and climate",
    "economics and finance",
    "education",
    "employment and careers",
    "energy",
    "engineering and manufacturing",
    "entertainment, film and games",
    "environment and wildlife",
    "family and everyday life",
    "geography and travel",
    "government and public services",
    "health and medicine",
    "history",
    "housing and real estate",
    "insurance",
    "journalism and news",
    "language and linguistics",
    "law",
    "literature",
    "mathematics",
    "music",
    "philosophy and religion",
    "physics",
    "politics and international relations",
    "psychology",
    "social media and online communities",
    "software and programming",
    "sports",
    "technical support",
    "transport and logistics",
)

_DIFFICULTY = ("high school", "college", "PhD")
_CLARITY = ("clear", "understandable with some effort", "ambiguous")


@dataclass(frozen=True)
class Part:
    """One text of an example: its key in the model's JSON, and how many words it may have.

    The bounds keep out what is no example at all (a copied placeholder, a text without end); what the prompt asks for is
    narrower.
    """

    key: str
    min_words: int
    max_words: int


@dataclass(frozen=True)
class FormPrompts:
    """How one form of example is asked for.

    Attributes:
        kind: `"retrieval"`, or `"other"` where another example's positive may be just as right (labels), so that
            in-batch negatives would be wrong.
        noun: What a task is called in the first step.
        task_rules: The first step's rules.
        task_examples: Tasks of which the first step shows two.
        instructions: The second step, with the placeholders in braces.
        placeholders: Their values, of which one is drawn.
        anchor: The text that the instruction belongs to.
        positive: What belongs to it.
        negative: What only seems to.
    """

    kind: Literal["retrieval", "other"]
    noun: str
    task_rules: tuple[str, ...]
    task_examples: tuple[str, ...]
    instructions: str
    placeholders: Mapping[str, tuple[str, ...]]
    anchor: Part
    positive: Part
    negative: Part

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """Anchor, positive, negative."""
        return self.anchor, self.positive, self.negative


FORMS: dict[Form, FormPrompts] = {
    "short-long": FormPrompts(
        kind="retrieval",
        noun="text retrieval task",
        task_rules=(
            "Say what a query is, and which documents are wanted for it.",
            "A task must fit a wide range of queries: do not make it too specific.",
        ),
        task_examples=(
            "Given a scientific claim as query, retrieve documents that help to verify or refute it.",
            "Search for documents that answer a frequently asked question about the nutrition of children.",
            "Given keywords of a few words, find news articles that report on the event they describe.",
            "Retrieve passages of manuals that tell how to solve the technical problem in the query.",
            "Given the name of a historical person, retrieve accounts of what the person is known for.",
        ),
        instructions=(
            "You are given this retrieval task: {task}\n\n"
            "Write one example for it as a JSON object with these keys:\n"
            '- "user_query": a string, a query that a user might type for this task.\n'
            '- "positive_document": a string, a document that is relevant to the query.\n'
            '- "hard_negative_document": a string, a document that looks relevant to the query but is not.\n\n'
            "Rules:\n"
            "- The query is {query_type}, {query_length} and {clarity}; choose an unusual subject.\n"
            "- Write the documents independently of the query and do not repeat it word for word. Parts of the positive "
            "document may be about something else.\n"
            "- Each document has at least {num_words} words.\n"
            "- The hard negative document has some useful information, but is less useful or less complete than the "
            "positive document.\n"
            "- Query and documents are in {language}.\n"
            "- No document explains why it is relevant or not.\n"
            "- Query and documents take {difficulty} level education to understand.\n\n"
            "Answer with the JSON object alone, without explanation. Be creative!"
        ),
        placeholders={
            "query_type": ("extremely long-tail", "long-tail", "common"),
            "query_length": ("less than 5 words", "5 to 15 words", "at least 10 words"),
            "clarity": _CLARITY,
            "num_words": ("50", "100", "200", "300", "400", "500"),
            "difficulty": _DIFFICULTY,
        },
        anchor=Part("user_query", 1, 150),
        positive=Part("positive_document", 10, 2500),
        negative=Part("hard_negative_document", 10, 2500),
    ),
    "long-short": FormPrompts(
        kind="other",
        noun="text classification task",
        task_rules=("The tasks cover many fields and many kinds of classification.",),
        task_examples=(
            "Classify a customer's message by what the customer wants.",
            "Identify the emotion that a short text expresses.",
            "Decide which section of a newspaper an article belongs to.",
            "Classify a clause of a contract by the obligation it creates.",
            "Tell which kind of bug a report to software developers describes.",
        ),
        instructions=(
            "You are given this text classification task: {task}\n\n"
            "Write one example for it as a JSON object with these keys:\n"
            '- "input_text": a string, a text to classify.\n'
            '- "label": a string, its right label.\n'
            '- "misleading_label": a string, a wrong label that is related to the task.\n\n'
            "Rules:\n"
            "- The input text has {num_words} words; vary the expression.\n"
            "- The misleading label is a valid label of this task, but fits the input text less well than the label.\n"
            "- All values are in {language}.\n"
            "- Neither label stands in the input text: that would make the task too easy.\n"
            "- The input text is {clarity} and takes {difficulty} level education to understand.\n\n"
            "Answer with the JSON object alone, without explanation. Be creative!"
        ),
        placeholders={
            "num_words": ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200"),
            "clarity": _CLARITY,
            "difficulty": _DIFFICULTY,
        },
        anchor=Part("input_text", 2, 2500),
        positive=Part("label", 1, 50),
        negative=Part("misleading_label", 1, 50),
    ),
    "short-short": FormPrompts(
        kind="retrieval",
        noun="text matching task",
        task_rules=(
            "In every task both the input and the text that is looked for are very short: a sentence or two, or a phrase.",
        ),
        task_examples=(
            "Given the title of a scientific paper, retrieve the titles of papers that cite it.",
            "Match a word with its definition.",
            "Given the name of a well-known person, find the person's occupation or achievement.",
            "Match a proverb with a plain sentence that means the same.",
            "Given a symptom, find the medical specialty that treats it.",
        ),
        instructions=(
            "You are given this text matching task: {task}\n\n"
            "Write one example for it as a JSON object with these keys:\n"
            '- "input": a string, an input of this task.\n'
            '- "positive_document": a string, what is to be found for the input.\n'
            '- "hard_negative_document": a string, what seems to fit the input but does not.\n\n'
            "Rules:\n"
            "- All values are in {language}.\n"
            "- All three are very short (a phrase or a sentence). They share few words: else the task would be too easy.\n"
            "- Each can be understood without the others.\n\n"
            "Answer with the JSON object alone, without explanation. Be creative!"
        ),
        placeholders={},
        anchor=Part("input", 1, 80),
        positive=Part("positive_document", 1, 80),
        negative=Part("hard_negative_document", 1, 80),
    ),
}


@dataclass(frozen=True)
class Draw:
    """What one prompt was made of, and the prompt."""

    prompt: str
    values: Mapping[str, str] = field(default_factory=dict)


def brainstorm_prompt(form: Form, domains: Sequence[str], random: Random) -> Draw:
    """The first step: asks for a list of tasks, showing two and naming a field of knowledge, both drawn."""
    prompts = FORMS[form]
    domain = random.choice(domains)
    examples = "".join(f"- {example}\n" for example in random.sample(prompts.task_examples, 2))
    rules = "".join(f"- {rule}\n" for rule in prompts.task_rules)
    prompt = (
        f"Think of potentially useful {prompts.noun}s from the field of {domain}.\n\n"
        f"Two examples, which may be from other fields:\n{examples}\n"
        f"Rules:\n{rules}\n"
        f"Answer with a JSON list of about {TASKS_PER_LIST} strings and nothing else, without explanation. Each string "
        f"describes a different {prompts.noun} in one sentence. Be creative!"
    )
    return Draw(prompt, {"domain": domain})


def example_prompt(form: Form, task: str, languages: Sequence[str], random: Random) -> Draw:
    """The second step: asks for an example of the task, all placeholders drawn."""
    prompts = FORMS[form]
    values = {name: random.choice(choices) for name, choices in prompts.placeholders.items()}
    values["language"] = random.choice(languages)
    return Draw(prompts.instructions.format(task=task, **values), values)
