"""The recipe of NV-Embed's paper from the first command to the last, on tiny copies of its data sets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from revela_hub.cli.main import main
from revela_hub.data.mixture.tasks import parse_mixture

WORDS = "river sea stone lamp moon iron road hill fox dog salt rope glass wood".split()
PAIRS: dict[str, tuple[str, ...]] = {
    "hf:sentence-transformers/natural-questions": ("query", "answer"),
    "hf:sentence-transformers/paq": ("query", "answer"),
    "hf:sentence-transformers/stackexchange-duplicates": ("body1", "body2"),
    "hf:sentence-transformers/nli-for-simcse": ("anchor", "positive", "negative"),
    "hf:sentence-transformers/miracl": ("anchor", "positive", "negative"),
    "hf:sentence-transformers/mr-tydi": ("anchor", "positive", "negative"),
    "hf:rajpurkar/squad": ("id", "title", "context", "question"),
    "hf:BeIR/arguana-generated-queries": ("_id", "title", "text", "query"),
    "hf:BeIR/bioasq-generated-queries": ("_id", "title", "text", "query"),
    "hf:sentence-transformers/reddit-title-body": ("title", "body", "subreddit"),
}
"""The columns of the sets on the Hub that are neither BEIR's nor mteb's."""


def text(seed: int, salt: int = 0) -> str:
    return " ".join(WORDS[(seed * step + salt) % len(WORDS)] for step in (1, 3, 5, 9, 11, 13)) + f" {seed}x{salt}"


def rows_of(path: str, name: str | None) -> Iterator[dict[str, Any]]:
    """Ten rows with the columns of a set on the Hub."""
    salt = len(path)
    for n in range(10):
        label = n % 2
        if path in PAIRS:
            yield {column: text(n, salt + place) for place, column in enumerate(PAIRS[path])} | {
                "subreddit": f"r/{label}"
            }
        elif name == "default":
            yield {"query-id": f"q{n}", "corpus-id": f"d{n}", "score": 1.0}
        elif name in ("corpus", "queries"):
            yield {
                "_id": f"{'d' if name == 'corpus' else 'q'}{n}",
                "title": "A title",
                "text": text(n, salt + len(name)),
            }
        elif "sts" in path:
            yield {"sentence1": text(n, 1), "sentence2": text(n, 2), "score": 3.0 + n % 3}
        elif "raw_" in path:
            yield {"title": text(n, 1), "abstract": text(n, 2), "category": f"c{label}"}
        elif "-clustering" in path:
            yield {"sentences": [text(2 * n + part, salt) for part in range(2)], "labels": ["c0", "c1"]}
        else:
            yield {"text": text(n, salt), "label": label, "label_text": f"class {label}"}


@pytest.fixture
def place(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and a Hub of which `datasets` reads tiny copies of the recipe's sets."""

    def load_dataset(path: str, name: str | None = None, **options: Any) -> dict[str, list[dict[str, Any]]]:
        assert options.pop("streaming") and options.keys() == {"data_files", "revision"}
        rows = list(rows_of(f"hf:{path}", name))
        shifted = [{column: f"{value} test" for column, value in row.items()} for row in rows]
        return {"train": rows, "validation": rows, "corpus": rows, "queries": rows, "test": shifted}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(repository / "examples")
    synthetic = [
        {"task": "synthetic/x", "instruction": f"Find {n}", "anchor": text(n, 7), "positive": text(n, 8), "negative_1": text(n, 9),
         "kind": kind} for n, kind in enumerate(["retrieval"] * 4 + ["other"] * 4)
    ]  # fmt: skip
    Path("outputs/synthetic").mkdir(parents=True)
    Path("outputs/synthetic/pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in synthetic))
    return tmp_path


SMALL = (
    "--num_negatives 2 --max_length 192 --max_steps 2 --per_device_train_batch_size 4 --pooling mean --dtype float32 --bf16 false"
    " --gradient_checkpointing false --probe none --report_to none"
).split()


def test_the_commands_of_the_recipe_run(place: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(words: str, recipe: str, *more: str) -> str:
        assert main([*words.split(), "--config", f"examples/nvembed/{recipe}.yaml", *more]) == 0
        return capsys.readouterr().out

    command("mine", "mine", "--model", "bm25", "--num_negatives", "2", "--no_positive_aware")
    given, mined = (parse_mixture(f) for f in ("examples/nvembed/paper.yaml", "outputs/nvembed-mined/mixture.yaml"))
    assert [(task.name, task.in_stages) for task in given] == [(task.name, task.in_stages) for task in mined]
    files = [task for task in mined if "nvembed-mined" in task.source.path]
    assert (
        len(files) == sum(task.has_passages or task.type == "sts" for task in given) - 2 == 18
    )  # not the synthetic ones
    out = command("train nvembed", "stage_one", "--backbone", str(llama_folder), *SMALL)
    assert f"{sum(task.is_retrieval for task in given)} tasks" in out
    assert f"{len(given) - 1} tasks" in command(
        "train nvembed", "stage_two", *SMALL, "--classes", "label", "--without_tasks", "mtop-intent"
    )
    prompts = json.loads(Path("outputs/nvembed-2/embedder/config_sentence_transformers.json").read_text())["prompts"]
    assert all(task.instruction in prompts[task.name] for task in given if task.name != "mtop-intent")
