"""The generator of synthetic pairs, with a model that is a function in this file."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from revela_hub.data.synthesis.backends import LocalModel, Reply, Request, RequestT, Sampling
from revela_hub.data.synthesis.parsing import Rejected, parse_example, parse_tasks
from revela_hub.data.synthesis.prompts import FORMS
from revela_hub.data.synthesis.questions import QuestionFilter, write_questions
from revela_hub.data.synthesis.synthesis import SynthesisSettings, synthesize
from revela_hub.data.text.ngram_overlap import ExcludedTexts, NearDuplicates, read_excluded
from revela_hub.data.text.words import words
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Answer = Callable[[Request], "str | Reply"]

VOCABULARY = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "lu", "mo", "ne", "ri", "sa", "tu") for b in "kmnprstvxz"]


def sentence(random: Random, length: int) -> str:
    return " ".join(random.choices(VOCABULARY, k=length))


def answer(request: Request) -> str:
    """A good model: its replies depend on prompt and seed alone."""
    random = Random(f"{request.prompt}{request.seed}")
    if "JSON list" in request.prompt:
        return json.dumps([f"Find {sentence(random, 6)}." for _ in range(20)])
    form = next(form for form, prompts in FORMS.items() if f'"{prompts["parts"][0]["key"]}"' in request.prompt)
    parts = FORMS[form]["parts"]
    return json.dumps({part["key"]: sentence(random, min(30, part["max_words"] // 3)) for part in parts})


class Model:
    """A backend that takes `window` requests ahead, and keeps what it was asked."""

    def __init__(self, answer: Answer = answer, window: int = 1) -> None:
        self.answer, self.window, self.asked = answer, window, list[Request]()

    def replies(self, requests: Iterable[RequestT]) -> Iterator[tuple[RequestT, Reply]]:
        source = iter(requests)
        while taken := list(islice(source, self.window)):
            for request in taken:
                self.asked.append(request)
                reply = self.answer(request)
                yield request, reply if isinstance(reply, Reply) else Reply(reply)


def spoiled(share: float, reply: str | Reply = "I cannot help with that.") -> Answer:
    """The good model, except for a fraction of the examples, drawn by the request's seed."""

    def answers(request: Request) -> str | Reply:
        bad = "JSON list" not in request.prompt and Random(request.seed).random() < share
        return reply if bad else answer(request)

    return answers


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def settings() -> SynthesisSettings:
    return SynthesisSettings(count=20, languages=("English", "German"), model="m")


def test_rows_are_complete_and_match_their_prompts(tmp_path: Path, settings: SynthesisSettings) -> None:
    model = Model()
    report = synthesize(model, tmp_path, settings)
    made = rows(tmp_path / "pairs.jsonl")
    assert [row["task"] for row in made].count("synthetic/short-long") == 7  # 20 in three: 7, 7, 6
    assert report.pairs == {"short-long": 7, "long-short": 7, "short-short": 6}
    columns = {"task", "instruction", "anchor", "positive", "negative_1", "kind", "language", "model", "draw"}
    prompts = [request.prompt for request in model.asked if "JSON object" in request.prompt]
    assert len(prompts) == len(made)
    for row, prompt in zip(made, prompts, strict=True):
        assert set(row) == columns and all(row[name] or name == "draw" for name in columns)
        assert row["instruction"] in prompt and f"in {row['language']}" in prompt
        assert row["kind"] == ("other" if row["task"] == "synthetic/long-short" else "retrieval")
    assert {row["language"] for row in made} == {"English", "German"}
    per_task = list(Counter(row["instruction"] for row in made).values())  # two examples a task
    assert per_task == [2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2]
    assert "20 pairs (7 short-long, 7 long-short, 6 short-short) of 11 tasks" in str(report)


def test_concurrency_changes_nothing_and_no_request_is_wasted(tmp_path: Path, settings: SynthesisSettings) -> None:
    """A third of the replies is unusable."""
    found = []
    for window in (1, 3, 16):
        model = Model(spoiled(0.34), window)
        report = synthesize(model, tmp_path / str(window), settings)
        made = {(row["task"], row["draw"]): row for row in rows(tmp_path / str(window) / "pairs.jsonl")}
        found.append(made)
        examples = [request for request in model.asked if "JSON object" in request.prompt]
        assert len(examples) == len(made) + report.rejected["not JSON"]
        assert len({request.seed for request in examples}) == len(examples)
    assert found[0] == found[1] == found[2]
    other = Model(spoiled(0.34))
    synthesize(other, tmp_path / "other", SynthesisSettings(count=20, seed=1))
    assert not {row["anchor"] for row in rows(tmp_path / "other" / "pairs.jsonl")} & {
        row["anchor"] for row in found[0].values()
    }


def test_a_stopped_run_is_resumed_and_a_higher_count_adds(tmp_path: Path, settings: SynthesisSettings) -> None:
    def stops(request: Request) -> str:
        if len(model.asked) == 9:
            raise KeyboardInterrupt
        return answer(request)

    file, model = tmp_path / "pairs.jsonl", Model(stops)
    with pytest.raises(KeyboardInterrupt):
        synthesize(model, tmp_path, settings)
    before = file.read_text()
    assert before.count("\n") > 3 and synthesize(Model(), tmp_path, settings).pairs.total() == 20
    model = Model()
    assert synthesize(model, tmp_path, settings).pairs.total() == 20 and not model.asked
    assert synthesize(model, tmp_path, replace(settings, count=26)).pairs.total() == 26
    assert len(model.asked) == 6 + 3  # six examples; a list of tasks for each form
    assert file.read_text().startswith(before)
    with pytest.raises(UserError, match="has examples of m"):
        synthesize(Model(), tmp_path, replace(settings, model="n"))
    file.write_text('{"mine": 1}\n')
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"pairs.jsonl:1: not written by"):
            synthesize(Model(), tmp_path, settings, overwrite=overwrite)
    assert file.read_text() == '{"mine": 1}\n'


def test_earlier_examples_are_replaced_when_the_first_new_one_exists(
    tmp_path: Path, settings: SynthesisSettings
) -> None:
    def refused(request: Request) -> str:
        raise UserError("cannot reach the server")

    file, other = tmp_path / "pairs.jsonl", replace(settings, seed=3)
    synthesize(Model(), tmp_path, settings)
    before = file.read_bytes()
    with pytest.raises(UserError, match="cannot reach the server"):
        synthesize(Model(refused), tmp_path, other, overwrite=True)
    assert file.read_bytes() == before
    synthesize(Model(), tmp_path, other, overwrite=True)
    synthesize(Model(), tmp_path / "new", other)
    assert file.read_bytes() == (tmp_path / "new" / "pairs.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply('{"user_query": "wh', "cut off"), "cut off"),
    ],
)
def test_gives_up_with_the_reasons(tmp_path: Path, reply: str | Reply, reason: str) -> None:
    with pytest.raises(UserError, match=f"50 unusable replies in a row .rejected: 50 {reason}"):
        synthesize(Model(spoiled(1.0, reply)), tmp_path, SynthesisSettings(count=90))
    with pytest.raises(UserError, match=r"no list of tasks"):
        synthesize(Model(lambda request: "Tasks are hard."), tmp_path, SynthesisSettings(count=9))


def test_goes_on_with_fewer_tasks_where_the_lists_repeat_themselves(tmp_path: Path) -> None:
    tasks = ["Find the river that flows through a town.", "Match a mountain with its height in metres."]

    def answers(request: Request) -> str:
        # the second list says the same in other letters
        return (
            json.dumps([task.upper() for task in tasks] + tasks) if "JSON list" in request.prompt else answer(request)
        )

    report = synthesize(Model(answers), tmp_path, SynthesisSettings(count=9, forms=["short-short"]))
    assert report.tasks["short-short"] == 2 and report.rejected["no new task"] == 10
    instructions = [row["instruction"] for row in rows(tmp_path / "pairs.jsonl")]
    assert [instructions.count(task.upper()) for task in tasks] == [5, 4]


def test_examples_of_evaluation_sets_are_kept_out(tmp_path: Path) -> None:
    folder = tmp_path / "scifact"
    folder.mkdir()
    plain = SynthesisSettings(count=12)
    synthesize(Model(), tmp_path / "plain", plain)
    made = rows(tmp_path / "plain" / "pairs.jsonl")
    # The corpus gets some of the made texts: 15 words from the middle of a document, a whole label's text, in other letters.
    leaked = [" ".join(made[0]["negative_1"].split()[8:23]).upper(), made[4]["anchor"].replace(" ", ", ")]
    query = " ".join(made[8]["positive"].split()[:12])
    corpus = [{"_id": str(i), "title": "", "text": f"Before. {text}. After."} for i, text in enumerate(leaked)]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in corpus))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": query}) + "\n")
    excluded, summary = read_excluded([str(folder)])
    assert summary == "excluded: 3 texts of scifact"
    report = synthesize(Model(), tmp_path / "clean", plain, excluded=excluded)
    assert report.rejected == {"overlapping scifact": 3} and report.pairs.total() == 12
    clean = rows(tmp_path / "clean" / "pairs.jsonl")
    before = {row["anchor"] for row in made}
    assert before - {row["anchor"] for row in clean} == {made[0]["anchor"], made[4]["anchor"], made[8]["anchor"]}


def test_sets_of_one_name_all_count(tmp_path: Path) -> None:
    """The sets were kept by the file's name alone: of two queries.jsonl only the last counted, and both were reported."""
    texts = {"a": "zinc shortens the common cold by a day", "b": "the moon has no atmosphere of its own to speak of"}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "queries.jsonl").write_text(json.dumps({"_id": "1", "text": text}) + "\n")
    files = [str(tmp_path / folder / "queries.jsonl") for folder in texts]
    assert [read_excluded(files)[0].find(text) for text in texts.values()] == files


def test_overlap_is_what_a_loop_over_all_ngrams_finds() -> None:
    random = Random(0)
    small = VOCABULARY[:4]  # so that chance overlaps are common

    def text(low: int, high: int) -> list[str]:
        return random.choices(small, k=random.randint(low, high))

    outcomes = []
    for _ in range(150):
        n = random.choice([3, 5, 7])
        evaluation = [text(1, 12) for _ in range(3)]
        excluded = ExcludedTexts(n)
        excluded.add("set", (" ".join(tokens) for tokens in evaluation))
        tested = text(1, 15)
        expected = False
        for tokens in evaluation:
            size = min(n, len(tokens))
            grams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
            inside = any(tested[i : i + size] in grams for i in range(len(tested) - size + 1))
            same = len(tokens) < n and set(tokens) == set(tested)
            expected |= (inside and size >= min(n, 5)) or same
        outcomes.append(expected)
        assert (excluded.find(" ".join(tested).title()) is not None) == expected
    assert 30 < sum(outcomes) < 120


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_near_duplicates_follow_the_jaccard_similarity(threshold: float) -> None:
    """Well above the threshold all are found, well below none; the estimate's error is 0.035."""
    random = Random(1)
    wrong = total = 0
    for _ in range(60):
        base = random.choices(VOCABULARY, k=80)
        changed = list(base)
        for place in random.sample(range(80), random.randint(0, 20)):
            changed[place] = random.choice(VOCABULARY)
        pairs = [{(a, b) for a, b in zip(tokens, tokens[1:], strict=False)} for tokens in (base, changed)]
        jaccard = len(pairs[0] & pairs[1]) / len(pairs[0] | pairs[1])
        if abs(jaccard - threshold) > 0.12:
            seen = NearDuplicates(threshold)
            seen.add(" ".join(random.choices(VOCABULARY, k=80)))
            seen.add(" ".join(base))
            total += 1
            wrong += (" ".join(changed) in seen) != (jaccard > threshold)
    assert total > 20 and wrong == 0


GOOD = {
    "user_query": "why?",
    "positive_document": " ".join(VOCABULARY[:12]),
    "hard_negative_document": " ".join(VOCABULARY[20:32]),
}


@pytest.mark.parametrize(
    "reply",
    [
        json.dumps(GOOD),
        f"Sure! Here it is:\n```json\n{json.dumps(GOOD, indent=2)}\n```\nI hope this helps {{really}}.",
        f"<think>A {{draft}}: {{'user_query': 1}}</think>{json.dumps(GOOD)}",
        json.dumps(GOOD).replace("why?", "  why?\n"),
    ],
)  # fmt: skip
def test_examples_are_found_in_what_models_write(reply: str) -> None:
    parsed = parse_example("short-long", reply)
    assert parsed["anchor"] == "why?" and parsed["negative_1"] == GOOD["hard_negative_document"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "empty"),
        (f"<think>A draft: {json.dumps(GOOD)} It is too easy", "empty"),
        (json.dumps(GOOD)[:-5], "not JSON"),
        (json.dumps(GOOD | {"user_query": " \n"}), "too short or too long"),
        (json.dumps(GOOD | {"user_query": "a string, a query of the task"}), "not a text"),
        (json.dumps(GOOD | {"positive_document": "so " * 5000}), "too short or too long"),
        (json.dumps(GOOD | {"user_query": GOOD["positive_document"].upper()}), "query equals positive"),
        (json.dumps(GOOD | {"hard_negative_document": GOOD["positive_document"]}), "positive equals negative"),
    ],
)
def test_examples_that_are_none_are_rejected(reply: str, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        parse_example("short-long", reply)
    assert str(caught.value) == reason


TASKS = ["Find the law that a case cites.", "Match a word with its antonym."]


@pytest.mark.parametrize(
    "reply",
    [
        json.dumps(TASKS),
        json.dumps([{"task": task, "id": 1} for task in TASKS]),
        "Here are two:\n\n" + "\n".join(f"{i}. **{task}**" for i, task in enumerate(TASKS, 1)),
        "\n".join(f'- "{task}",' for task in TASKS),
        json.dumps([*TASKS, TASKS[0].upper(), "", "Short.", "...", 3]),
        json.dumps(TASKS, indent=1)[:-2] + ',\n "Find what is cut off in the mid',
    ],
)
def test_tasks_are_found_in_what_models_write(reply: str) -> None:
    found = parse_tasks(reply)
    assert [words(task) for task in found] == [words(task) for task in TASKS]


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}\nA: "])
def test_a_local_model_answers_in_batches_and_repeats_itself_by_seed(
    tmp_path: Path, tiny_llama: "LlamaForCausalLM", bpe_tokenizer: "PreTrainedTokenizerFast", template: str | None
) -> None:
    bpe_tokenizer.chat_template = template
    tiny_llama.save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    model = LocalModel(str(tmp_path), Sampling(max_new_tokens=5), batch_size=2, device="cpu")
    requests = [Request(f"Say {'a very long ' * number}word", seed=number) for number in range(5)]
    first, second = list(model.replies(requests)), list(model.replies(requests))
    assert [request for request, _ in first] == requests and first == second
    assert all(reply.text and request.prompt not in reply.text for request, reply in first)
    longest = max(first, key=lambda answered: len(bpe_tokenizer.tokenize(answered[1].text)))[1]
    assert longest.problem == "cut off"
    reseeded = [Request(request.prompt, seed=request.seed + 100) for request in requests]
    assert [reply for _, reply in model.replies(reseeded)] != [reply for _, reply in first]
    # greedy: what a model says does not depend on the batch it is in (padding is on the left)
    greedy = LocalModel(str(tmp_path), Sampling(0.0, 1.0, 5), batch_size=5, device="cpu")
    alone = LocalModel(str(tmp_path), Sampling(0.0, 1.0, 5), batch_size=1, device="cpu")
    assert list(greedy.replies(requests)) == list(alone.replies(requests))


def test_a_mixture_takes_the_pairs_as_they_are(tmp_path: Path, settings: SynthesisSettings) -> None:
    """As the guide shows it."""
    import yaml

    from revela_hub.data.mixture.mixture import load_mixture

    synthesize(Model(), tmp_path, settings)
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "training-data.md").read_text(encoding="utf-8")
    shown = guide.split("use the examples like this:\n\n```yaml\n")[1].split("```")[0]
    rows_ = load_mixture(
        yaml.safe_load(shown.replace("outputs/synthetic", str(tmp_path))), cache_dir=str(tmp_path / "cache")
    ).dataset
    assert len(rows_) == 20
    written = {row["anchor"]: row for row in rows(tmp_path / "pairs.jsonl")}
    for row in rows_:
        assert row["positive"] == written[row["anchor"]]["positive"]
        assert row["negative_1"] == written[row["anchor"]]["negative_1"]
        assert row["task"] == {"retrieval": "synthetic", "other": "synthetic-labels"}[written[row["anchor"]]["kind"]]


def test_questions_that_are_not_about_their_passage_are_dropped_and_counted() -> None:
    passages = [
        "The river carries sediment to the sea, and the delta grows.",
        "The tides follow the moon, and the water rises twice a day.",
        "The glacier moves the rocks, and the valley gets wider.",
        "The wind shapes the dunes, and the sand wanders to the east.",
        "长江是亚洲最长的河流。它发源于青藏高原，流入东海。",
        "Sediment is carried from the mountains to the sea.",
    ]
    replies = [
        "What is your question?",
        "How do you answer the question that the text asks?",
        "Here is one question about the glacier:",
        "Question: what moves the dunes",
        "长江有多长？",
        Reply("What do mountains", "cut off"),
    ]
    questions = iter(replies)
    keep = QuestionFilter(passages)
    found = list(write_questions(Model(lambda _: next(questions)), list(enumerate(passages)), seed=0, keep=keep))
    assert found == [(3, "what moves the dunes"), (4, "长江有多长？")]
    assert sorted(keep.dropped.values()) == [1, 1, 2] and keep.asked == 6
