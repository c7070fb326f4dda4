"""Training data for `nvembed_ablations.py`: pairs of four retrieval tasks with negatives, similarity and classes."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from nvembed_scores import encode, passage_text, read
from sentence_transformers import SentenceTransformer

from revela_hub.retrieval.mining import MiningSettings, mine_negatives

INSTRUCTIONS = {
    "medquad": "Given a medical question, retrieve passages that answer the question",
    "squad": "Given a question, retrieve passages that answer the question",
    "scifact": "Given a scientific claim, retrieve documents that support or refute the claim",
    "cosqa": "Given a web search query, retrieve Python functions that answer it",
    "stsb": "Retrieve semantically similar text",
    "banking77": "Given an online banking query, find queries with the same intent",
}


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Mining:
    """Options of the training data."""

    data: Path = option(Path("../shared/data"), "folder with medquad, squad, cosqa, beir, stsb, banking77")
    output: Path = option(Path("outputs/nvembed-ablations"), "folder of the mined negatives and the results")
    teacher: str | None = option(None, "retriever that mines the negatives (default: BM25)")
    max_length: int = option(48, "tokens of a text, instruction included")
    mining_rows: int | None = option(None, "rows of each task (default: up to 8000)")
    mining_passages: int | None = option(None, "passages of each task to mine from (default: all)")

    @property
    def mined(self) -> Path:
        """Folder of the pairs with negatives."""
        return self.output / "mined"


def mine(setting: Mining) -> None:
    """Write the pairs of each task with a mined negative, and the same pairs with a random one."""
    if (setting.mined / "done").is_file():
        return
    setting.mined.mkdir(exist_ok=True)
    ranker: Any = "bm25"
    if setting.teacher:
        ranker = Teacher(setting.teacher, setting.max_length)
    for name, (pairs, corpus) in training_pairs(setting).items():
        found = mine_negatives(
            [anchor for anchor, _ in pairs],
            [positive for _, positive in pairs],
            corpus,
            ranker,
            MiningSettings(num_negatives=1, relative_margin=0.05, range_max=50, sampling="random"),
        )
        print(f"{name}\n{found.report}", flush=True)
        found.dataset.to_json(setting.mined / f"{name}-mined.jsonl")
        drawn = torch.randint(len(corpus), (len(found.dataset),), generator=torch.Generator().manual_seed(0))
        rows = [row | {"negative_1": corpus[int(at)]} for row, at in zip(found.dataset, drawn, strict=True)]
        Dataset.from_list(rows).to_json(setting.mined / f"{name}-random.jsonl")
    (setting.mined / "done").touch()


def mixture(setting: Mining, negatives: str, mode: str) -> dict[str, Any]:
    """Return the tasks of the blend. A task's weight is its number of rows after `max_samples`."""
    root, most = setting.data, {"medquad": 4000, "squad": 4000, "scifact": None, "cosqa": None}
    rows = setting.mining_rows or 4000
    tasks: list[dict[str, Any]] = []
    for name, limit in most.items():
        source = setting.mined / f"{name}-{negatives}.jsonl"
        tasks.append({"name": name, "type": "retrieval", "source": str(source.resolve()), "max_samples": limit})
    stsb, banking = (str(root / name / "train.jsonl") for name in ("stsb", "banking77"))
    classes = {"columns": {"label": "label_name"}, "mode": mode, "max_samples": rows}
    tasks.append({"name": "stsb", "type": "sts", "source": stsb, "max_samples": min(rows, 2000)})
    tasks.append({"name": "banking77", "type": "classification", "source": banking} | classes)
    return {"tasks": [task | {"instruction": INSTRUCTIONS[task["name"]]} for task in tasks]}


def training_pairs(setting: Mining) -> dict[str, tuple[list[tuple[str, str]], list[str]]]:
    """Return the (query, passage) pairs and the corpus of each retrieval task, or a sample of both."""
    found, data = {}, setting.data
    for name in ("medquad", "squad"):
        passages = {row["_id"]: passage_text(row) for row in read(data / name / "passages.jsonl.gz")}
        rows = read(data / name / "train.jsonl.gz")[:8000]
        found[name] = ([(row["question"], passages[row["passage_id"]]) for row in rows], list(passages.values()))
    scifact = data / "beir" / "scifact"
    abstracts = {row["_id"]: passage_text(row) for row in read(scifact / "corpus.jsonl.gz")}
    claims = {row["_id"]: row["text"] for row in read(scifact / "queries.jsonl")}
    judged = read(scifact / "qrels" / "train.tsv")
    pairs = [(claims[row["query-id"]], abstracts[row["corpus-id"]]) for row in judged if int(row["score"]) > 0]
    found["scifact"] = (pairs, list(abstracts.values()))
    rows = [row for row in read(data / "cosqa" / "labelled_pairs.jsonl.gz") if row["label"] == 1]
    functions = [passage_text(row) for row in read(data / "cosqa" / "corpus.jsonl.gz")]
    found["cosqa"] = ([(row["query"], row["code"]) for row in rows], functions)
    drawn = random.Random(0)
    for name, (pairs, corpus) in found.items():
        if setting.mining_rows is not None:
            pairs = drawn.sample(pairs, min(setting.mining_rows, len(pairs)))
        if setting.mining_passages is not None:
            corpus = drawn.sample(corpus, min(setting.mining_passages, len(corpus)))
            corpus = list(dict.fromkeys([*corpus, *(positive for _, positive in pairs)]))
        found[name] = (pairs, corpus)
    return found


class Teacher:
    """Wraps the retriever for mining, which computes in bf16 where that is fast."""

    def __init__(self, name: str, max_length: int) -> None:
        self.model = SentenceTransformer(name)
        self.model.max_seq_length = max_length

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        """Return (n, d) vectors of queries or passages."""
        return encode(self.model, texts, "", **options)

    encode_document = encode_query
