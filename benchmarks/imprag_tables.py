"""Small versions of tables 4, 5 and 7 of ImpRAG (arXiv 2506.02279) with SmolLM2-135M on one CPU core.

Table 5 (tasks that share marks with unseen tasks): from one retrieval round on SQuAD, `imprag.py`'s training continues with as
many other rows as questions: all tasks (a third each of reading comprehension, phrase denoising and sentence generation), or
reading comprehension alone. Two unseen tasks test it: slot filling and entity linking, made from Wikipedia.
Table 4 (query templates): the retrievers' ranks with the whole prompt, the input alone, and a template written for the task.
Table 7 (frozen states): the passages' states of a trained reader against those of the language model it was made of.

    python benchmarks/imprag_tables.py --data $REVELA_HUB_DATA --backbone $SMOLLM2 --output outputs/imprag-tables

Finished rows are kept in --output/results; --report prints their tables.
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from imprag import MAX_LENGTH, Experiment, Setting, retrieving_lm, train_imprag
from imprag_measures import Questions, Test, read
from transformers import AutoTokenizer

from revela_hub.data.prompts import prompt_row, text_prompts
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Document
from revela_hub.evaluation.question_answering import score_answers
from revela_hub.evaluation.significance import paired_bootstrap
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder
from revela_hub.trainers.imprag.data import padded, tokenize_passages

SIZES: dict[str, Any] = {
    "b": 7, "t": 20, "questions": 200, "passages": 400, "train_questions": 1500, "steps": 20, "batch": 16,
    "lora_rank": 16, "retrieval_rounds": 1, "retrieval_steps": 90, "retrieval_batch": 32,
    "retrieval_learning_rate": 2e-4, "freeze_embeddings": True,
}  # fmt: skip
ANSWERED = 80  # questions of each task whose answers are generated: ranks cost less
ARMS = {
    "all": ("reading_comprehension", "phrase_denoising", "next_sentence", "previous_sentence"),
    "no-marks": ("reading_comprehension",),
}
WEIGHTS = {"reading_comprehension": 2, "phrase_denoising": 2}  # sentence generation has two kinds of weight 1
DATE = r"(?:\d{1,2} )?(?:January|February|March|April|May|June|July|August|September|October|November|December)(?: \d{1,2},)? \d{4}"
NAME = r"([A-Z][\w'-]+(?: [A-Z][\w'-]+)+)"
PEOPLE = "actor|actress|writer|author|novelist|poet|politician|philosopher|mathematician|physicist|composer|singer|painter|architect"
RELATIONS = {
    "date of birth": rf"\((?:[^()]*?; )?(?:born )?({DATE})",
    "date of death": rf"\([^()]*{DATE} ?[–-] ?({DATE})\)",
    "author": rf"(?:novel|book|play|story|poem)[\w ,]* by (?:the )?(?:[A-Za-z]+ (?:author|writer|novelist) )?{NAME}",
    "director": rf"film,? (?:co-)?(?:written and )?directed by {NAME}",
    "occupation": rf"(?:was|is) an? (?:[A-Z]\w+(?:-[A-Z]\w+)? )((?:\w+ )?(?:{PEOPLE}))",
}
ORACLE = {  # a query written for the task; for question answering, another common template
    "question_answering": "Question: {input}\nAnswer:",
    "slot_filling": "Q: What is the {relation} of {subject}? A:",
    "entity_linking": "Q: What is {subject}? A:",
}
Articles = list[tuple[str, list[str]]]


def articles(data: Path, part: int) -> Articles:
    """Return title and paragraphs of the articles of a part of Wikipedia."""
    with gzip.open(data / "text" / "wikipedia" / f"part-{part:02}.jsonl.gz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [(row["title"], row["text"].split("\n")) for row in rows]


def lead(title: str, paragraphs: list[str], words: int = 24) -> str:
    """Return the passage of an article: its title and its first words."""
    return f"{title}: {' '.join(paragraphs[0].split()[:words])}"


def slot_filling(found: Articles) -> Iterator[dict[str, Any]]:
    """Yield a question for each relation whose value the passage of an article states."""
    for title, paragraphs in found:
        for relation, pattern in RELATIONS.items():
            if match := re.search(pattern, lead(title, paragraphs)):
                name = title.split(" (")[0]
                own = {"title": title, "subject": name, "relation": relation}
                yield {"input": f"{name} [SEP] {relation}", "answers": [match[1]], **own}


def entity_linking(found: Articles) -> Iterator[dict[str, Any]]:
    """Yield, for each title that another article mentions within a sentence, the words around the mention."""
    titles = {title.split(" (")[0]: title for title, _ in found}
    for title, paragraphs in found:
        for paragraph in paragraphs[1:]:
            for match in re.finditer(r"(?<=[a-z,] )[A-Z]\w{3,}(?: [A-Z]\w+)*", paragraph):
                mention = match[0]
                if titles.get(mention, title) != title and mention not in title:
                    before, after = paragraph[: match.start()].split()[-12:], paragraph[match.end() :].split()[:12]
                    text = " ".join([*before, f"[START] {mention} [END]", *after])
                    yield {"input": text, "answers": [titles[mention]], "title": titles[mention], "subject": mention}


MADE = {"slot_filling": slot_filling, "entity_linking": entity_linking}


def unseen(task: str, found: Articles, count: int, collection: int) -> tuple[Questions, list[dict[str, Any]]]:
    """Return questions of a task, each on another article, over passages of these and other articles."""
    made, drawn = list(MADE[task](found)), random.Random(0)
    drawn.shuffle(made)
    rows = list({row["title"]: row for row in made}.values())[:count]
    wanted = {row["title"] for row in rows}
    others = [title for title, _ in found if title not in wanted]
    titles = sorted(wanted | set(drawn.sample(others, collection - len(wanted))))
    passages = {title: lead(title, paragraphs) for title, paragraphs in found}
    prompts = Dataset.from_list([prompt_row(Row(row["title"], row), task) for row in rows])
    gold, none = [titles.index(row["title"]) for row in rows], np.zeros((0, 20), np.int32)
    return Questions(prompts, [passages[title] for title in titles], gold, none), rows


def other_rows(kinds: tuple[str, ...], train: Questions, found: Articles, tokenizer: Any) -> Dataset:
    """Return rows without retrieval, as many as there are questions, that fit into `MAX_LENGTH` tokens."""
    count, parts = len(train.prompts), []
    documents = [Document(title, "\n".join(paragraphs), None, "text") for title, paragraphs in found[:150]]
    for kind in kinds:
        if kind == "reading_comprehension":
            rows = [row | {"context": train.passages[n]} for row, n in zip(train.prompts, train.gold, strict=True)]
            texts = [{name: row[name] for name in ("input", "context", "answers")} for row in rows]
            drawn = random.Random(1).sample(texts, count)
            made = Dataset.from_list([prompt_row(Row(f"{n}", row), kind) for n, row in enumerate(drawn)])
        else:
            made = text_prompts(documents, kind, 2 * count, words=36)

        def fits(row: dict[str, Any]) -> bool:
            return len(tokenizer(f"{row['prompt']} {row['answers'][0]}")["input_ids"]) < MAX_LENGTH - 2

        share = -(-count * WEIGHTS.get(kind, 1) // sum(WEIGHTS.get(each, 1) for each in kinds))
        made = made.filter(fits)
        parts.append(made.select(range(min(share, len(made)))))
    others = concatenate_datasets([part.cast(train.prompts.features) for part in parts]).shuffle(seed=0)
    return others.select(np.resize(np.arange(len(others)), count))


def mixed(train: Questions, others: Dataset) -> Questions:
    """Return the questions with as many other rows, which have no passages."""
    bm25 = np.concatenate([train.bm25, np.full_like(train.bm25, -1)])
    return replace(train, prompts=concatenate_datasets([train.prompts, others]), bm25=bm25)


def ranking(
    model: ImpRAGForCausalLM, tokenizer: Any, test: Questions, queries: list[str]
) -> tuple[list[int], np.ndarray]:
    """Return the rank of each question's own passage, and the two best passages."""
    encoder = ImpRAGEncoder(model, tokenizer)
    scores = encoder.encode_query(queries) @ encoder.encode_document(test.passages).T
    own = scores[np.arange(len(scores)), test.gold[: len(scores)]]
    return (1 + (scores > own[:, None]).sum(1)).tolist(), np.argsort(-scores, axis=1)[:, :2]


@torch.no_grad()
def answered(
    model: ImpRAGForCausalLM, tokenizer: Any, test: Questions, read_Bk: np.ndarray, encode: Callable[..., Any]
) -> dict[str, Any]:
    """Return scores of the generated answers, and the log-likelihood per token of the gold ones, after the given passages."""
    tokens, _ = tokenize_passages(tokenizer, test.passages, model.config.l_max)
    answers, likelihoods, gold = [], [], [list(row) for row in test.prompts["answers"][: len(read_Bk)]]
    for prompt, accepted, numbers in zip(test.prompts["prompt"], gold, read_Bk, strict=False):
        states = encode(*(part[None] for part in padded(tokens[n] for n in numbers)))
        asked = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = tokenizer(f" {accepted[0]}", add_special_tokens=False)["input_ids"]
        ids = torch.cat([asked, torch.tensor([[*answer, tokenizer.eos_token_id]])], 1)
        log_p = model(ids, passage_states=states).logits[0, asked.shape[1] - 1 : -1].log_softmax(-1)
        likelihoods.append(log_p.gather(-1, ids[0, asked.shape[1] :, None]).mean().item())
        ended = model.generate(asked, passage_states=states, max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(ended[0, asked.shape[1] :], skip_special_tokens=True).strip().split("\n")[0])
    scores = score_answers(answers, gold).per_question
    return {"exact_match": scores["exact_match"].tolist(), "f1": scores["f1"].tolist(), "log_likelihood": likelihoods}


def frozen_hidden_states(model: ImpRAGForCausalLM, base: ImpRAGForCausalLM) -> Callable[..., Any]:
    """Return an encoder whose layers see the base model's hidden states through the trained projections (appendix B)."""
    kept: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(base._layers()):
        layer.register_forward_pre_hook(lambda _, args, n=number: kept.__setitem__(n, args[0]))

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        base.encode_passages(ids, mask)
        layers = enumerate(model._layers())
        hooks = [each.register_forward_pre_hook(lambda _, args, n=n: (kept[n], *args[1:])) for n, each in layers]
        states = model.encode_passages(ids, mask)
        for hook in hooks:
            hook.remove()
        return states

    return encode


@dataclass
class Tables:
    """The data of all rows, and a method for each kind of row."""

    setting: Setting

    def __post_init__(self) -> None:
        """Read the data and make the unseen tasks."""
        given, data = self.setting, self.setting.data
        assert data is not None
        self.tokenizer = AutoTokenizer.from_pretrained(given.backbone)
        self.train = read(data, "train", given.train_questions, None, given.max_words)
        self.held_out = read(data, "dev", given.questions, given.passages, given.max_words)
        self.test = Test(self.held_out, self.tokenizer, given.k, given.l_max)
        found = [each for part in range(3) for each in articles(data, part)]
        own = (self.held_out, [{"input": text} for text in self.held_out.prompts["input"]])
        sizes = (given.questions, given.passages)
        self.tasks = {"question_answering": own} | {task: unseen(task, found, *sizes) for task in MADE}

    def retrieval_round(self) -> dict[str, Any]:
        """Train the layers up to b on the questions, and return the ranks of all queries."""
        given = self.setting
        folder = retrieving_lm(Experiment(given, self.train, self.test), 0, given.b, 1)
        model = ImpRAGForCausalLM.from_backbone(folder, b=given.b, t=given.b, k=given.k, l_max=given.l_max)
        return self.ranks(model.eval())

    def with_tasks(self, kinds: tuple[str, ...], *, answers: bool) -> dict[str, Any]:
        """Train further on questions and other rows; return the ranks of all queries, and of prompts the answers' scores."""
        others = other_rows(kinds, self.train, articles(self.setting.data, 3), self.tokenizer)
        experiment = Experiment(self.setting, mixed(self.train, others), self.test)
        model = train_imprag(experiment, 0, "warm-up").eval()
        result = self.ranks(model)
        for task, (questions, _) in self.tasks.items() if answers else ():
            best = ranking(model, self.tokenizer, questions, questions.prompts["prompt"][:ANSWERED])[1]
            result[f"{task}: prompt"] |= answered(model, self.tokenizer, questions, best, model.encode_passages)
        return result

    def ranks(self, model: ImpRAGForCausalLM) -> dict[str, Any]:
        """Return the rank of each question's own passage for three forms of its query."""
        result: dict[str, Any] = {}
        for task, (questions, rows) in self.tasks.items():
            queries = {"prompt": list(questions.prompts["prompt"]), "input": [row["input"] for row in rows]}
            queries["oracle"] = [ORACLE[task].format(**row) for row in rows]
            for name, texts in queries.items():
                result[f"{task}: {name}"] = {"rank": ranking(model, self.tokenizer, questions, texts)[0]}
        return result

    def frozen(self) -> dict[str, Any]:
        """Train a reader of passages that are encoded alone; return its answers after three encodings of BM25's best two."""
        given = replace(self.setting, retrieval_rounds=0, steps=24, batch=8)
        experiment = Experiment(given, self.train, self.test)
        model = train_imprag(experiment, 0, "warm-up", passage_encoding="independent").eval()
        own = {name: getattr(model.config, name) for name in ("b", "t", "k", "l_max", "passage_encoding")}
        base = ImpRAGForCausalLM.from_backbone(given.backbone, **own).eval()
        encoders = {"trained": model.encode_passages, "frozen KV states": base.encode_passages}
        encoders |= {"frozen hidden states": frozen_hidden_states(model, base)}
        best = self.held_out.bm25[:64, :2]
        return {name: answered(model, self.tokenizer, self.held_out, best, encode) for name, encode in encoders.items()}


def run(setting: Setting) -> None:
    """Train and measure every row that has no result yet."""
    torch.set_num_threads(1)
    tables = Tables(setting)
    rows: dict[str, Callable[[], dict[str, Any]]] = {"retrieval-round": tables.retrieval_round}
    rows |= {"all": lambda: tables.with_tasks(ARMS["all"], answers=True), "frozen": tables.frozen}
    rows["no-marks"] = lambda: tables.with_tasks(ARMS["no-marks"], answers=False)
    for name, measure in rows.items():
        file = setting.output / "results" / f"{name}.json"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(measure()), encoding="utf-8")
            print(f"{name}: finished", flush=True)


def report(output: Path) -> None:
    """Print the tables of the finished rows."""
    runs = {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted((output / "results").glob("*.json"))
    }
    cells: dict[tuple[str, str], dict[str, Any]] = {
        (run, row): values for run, rows in runs.items() for row, values in rows.items()
    }
    for values in cells.values():
        if ranks := values.pop("rank", None):
            values |= {f"recall@{k}": [float(rank <= k) for rank in ranks] for k in (2, 10)}
    for (run, row), values in cells.items():
        print(f"{run}: {row}", *(f"{name} {np.mean(scores):.3f}" for name, scores in values.items()), sep=" | ")
    pairs = [(("frozen", "trained"), ("frozen", name)) for name in ("frozen hidden states", "frozen KV states")]
    for task in ORACLE:
        rows = [f"{task}: {query}" for query in ("prompt", "input", "oracle")]
        pairs += [((run, rows[0]), (run, row)) for run in ("retrieval-round", "all") for row in rows[1:]]
        pairs += [(("retrieval-round", row), ("all", rows[0])) for row in (rows[0], rows[2])]
        pairs += [(("all", rows[0]), ("no-marks", rows[0]))]
    print("\nb - a, paired bootstrap over the questions")
    for a, b in pairs:
        if a in cells and b in cells:
            both = (name for name in cells[a] if name in cells[b])
            print(
                a,
                b,
                *(f"{name} {paired_bootstrap(np.array(cells[a][name]), np.array(cells[b][name]))}" for name in both),
                sep=" | ",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--backbone", default="")
    parser.add_argument("--output", type=Path, default=Path("outputs/imprag-tables"))
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if not given.report:
        run(Setting(data=given.data, backbone=given.backbone, output=given.output, **SIZES))
    report(given.output)


if __name__ == "__main__":
    main()
