"""Evaluate models on mteb's own tasks, with local data instead of downloads: SciFact, CosQA, STSBenchmark, Banking77.

mteb computes the scores with its rules. A model with prompts named after the tasks of `nvembed_data.py` gets these; others get
no prompt.

    python benchmarks/nvembed_mteb.py --data $REVELA_HUB_DATA --models $MINILM outputs/nvembed/model --max_length 64
"""

import argparse
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict
from mteb.models import SentenceTransformerEncoderWrapper
from nvembed_scores import read
from sentence_transformers import SentenceTransformer

from revela_hub.data.sources.beir import read_beir

SYMMETRIC = {"STSBenchmark": "stsb", "Banking77Classification": "banking77"}
RETRIEVAL = {"SciFact": "scifact", "CosQA": "cosqa"}
FOLDERS = {"SciFact": ("beir/scifact", "test"), "CosQA": ("cosqa", "dev")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with beir, cosqa, stsb, banking77")
    parser.add_argument("--models", nargs="+", required=True, help="sentence-transformers folders")
    parser.add_argument("--tasks", nargs="+", default=[*SYMMETRIC, *RETRIEVAL], choices=[*SYMMETRIC, *RETRIEVAL])
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code in the folders of the models")
    given = parser.parse_args()
    print(f"| | {' | '.join(given.tasks)} |\n|---|{'---|' * len(given.tasks)}", flush=True)
    for folder in given.models:
        model = SentenceTransformer(folder, device="cpu", trust_remote_code=given.trust_remote_code)
        model.max_seq_length = given.max_length
        row = [f"{score(model, name, given):.4f}" for name in given.tasks]
        print(f"| {Path(folder).name} | {' | '.join(row)} |", flush=True)


def score(model: SentenceTransformer, name: str, given: argparse.Namespace) -> float:
    """Return mteb's main score of a task."""
    task: Any = mteb.get_task(name)
    task.dataset = local_data(name, given.data)
    task.data_loaded = True
    prompt = model.prompts.get((SYMMETRIC | RETRIEVAL)[name], "")
    prompts = {name: prompt} if name in SYMMETRIC else {"query": prompt, "document": ""}
    result = mteb.evaluate(
        SentenceTransformerEncoderWrapper(model, model_prompts=prompts),
        task,
        cache=None,
        co2_tracker=False,
        encode_kwargs={"batch_size": given.batch_size, "show_progress_bar": False},
        show_progress_bar=False,
    )
    return float(result.task_results[0].get_score())


def local_data(name: str, data: Path) -> Any:
    """Return the data of a task as mteb's `load_data` leaves them."""
    if name in SYMMETRIC:
        splits = ("test",) if name == "STSBenchmark" else ("train", "test")
        return DatasetDict(
            {split: Dataset.from_list(read(data / SYMMETRIC[name] / f"{split}.jsonl")) for split in splits}
        )
    folder, split = FOLDERS[name]
    task = read_beir(data / folder, split)
    corpus, queries = (
        Dataset.from_list([{"id": key, "text": text} for key, text in texts.items()])
        for texts in (task.corpus, task.queries)
    )
    parts = {"corpus": corpus, "queries": queries, "relevant_docs": task.qrels, "top_ranked": None}
    return {"default": {"test": parts}}


if __name__ == "__main__":
    main()
