"""`benchmarks/data.py` downloads and converts: tiny copies of its data sets, with the columns of the Hub and the authors' files."""

import gzip
import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import LoopbackHub

from revela_hub.data import read_beir

ANSWERS = {"text": ["ice", "the ice", "ice"], "answer_start": [0, 0, 0]}
QUESTIONS = [
    {"id": f"{n}", "title": f"A_{n // 2}", "context": f"Text {n}.", "question": f"Why {n}?", "answers": ANSWERS}
    for n in range(8)
]
STS = {"sentence1": "A fox.", "sentence2": "A dog.", "score": 0.76}
HUB = {  # the data set and its configuration -> split -> rows
    "rajpurkar/squad plain_text": {"validation": QUESTIONS},
    "mteb/banking77 default": dict.fromkeys(("train", "test"), [{"text": "Hi", "label": 3, "label_text": "greeting"}]),
    "sentence-transformers/stsb default": dict.fromkeys(("train", "validation", "test"), [STS]),
    "google-research-datasets/nq_open nq_open": {"validation": [{"question": "who", "answer": ["Ann"]}]},
    "wikimedia/wikipedia 20231101.en": {
        "train": [
            {"id": f"{n}", "url": "u", "title": f"A {n}", "text": "word " * (400 if n % 2 else 9)} for n in range(9)
        ]
    },
    "Salesforce/wikitext wikitext-2-v1": dict.fromkeys(
        ("validation", "test"), [{"text": ""}, {"text": " = A <unk> = \n"}]
    ),
}
MEDQUAD = """<Document id="1_1" source="NIH"><Focus>{focus}</Focus><QAPairs><QAPair pid="1"><Question qid="1_1-1"
 qtype="information">What is {focus} ?</Question><Answer>{focus}
 is common.</Answer></QAPair><QAPair pid="2"><Question qid="1_1-2" qtype="causes">Why ?</Question><Answer/></QAPair></QAPairs></Document>"""


def lines(rows: Any) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def archive(file: Path, contents: dict[str, str]) -> None:
    with zipfile.ZipFile(file, "w") as made:
        for name, content in contents.items():
            made.writestr(f"Name-abc/{name}", content)


def test_the_data_of_the_benchmarks(
    hub: LoopbackHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_data", repository / "benchmarks" / "data.py")
    assert spec is not None and spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    files: dict[str, dict[str, bytes]] = {}
    for name, splits in HUB.items():
        name, configuration = name.split()
        card = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        card = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{card}---\n"
        files[name] = {"README.md": card.encode()} | {f"{split}.jsonl": lines(rows) for split, rows in splits.items()}
    texts = {"corpus": [{"_id": "7", "title": "T", "text": "Foxes."}], "queries": [{"_id": "1", "text": "Foxes?"}]}
    files["BeIR/scifact"] = {f"{name}.jsonl.gz": gzip.compress(lines(rows)) for name, rows in texts.items()}
    table = b"query-id\tcorpus-id\tscore\n1\t7\t1\n"
    files["BeIR/scifact-qrels"] = dict.fromkeys(("train.tsv", "test.tsv"), table)
    for name, content in files.items():
        hub.add(f"datasets/{name}", content)
    foci = ("Gout", "Measles", "Asthma", "Anemia", "Cold", "Flu")
    archive(tmp_path / "med.zip", {f"1_A_QA/{focus}.xml": MEDQUAD.format(focus=focus) for focus in foci})
    code = {"idx": "q0", "doc": "sort a list", "code": "def f(): pass", "label": 1, "retrieval_idx": 0}
    search = {f"data/search/cosqa-retrieval-{split}-500.json": json.dumps([code]) for split in ("dev", "test")}
    pairs = {"data/qa/cosqa-dev.json": json.dumps([code, code | {"doc": "read a file"}])}
    archive(tmp_path / "cosqa.zip", search | pairs | {"data/search/code_idx_map.txt": '{"def f(): pass": 0}'})
    monkeypatch.setattr(data, "GITHUB", f"{tmp_path.as_uri()}/{{}}.zip")
    monkeypatch.setattr(data, "MEDQUAD", ("med", ""))
    monkeypatch.setattr(data, "COSQA", ("cosqa", ""))
    monkeypatch.setattr("sys.argv", ["data.py", str(tmp_path / "made")])

    data.main()

    def rows(name: str) -> list[dict[str, Any]]:
        content = (tmp_path / "made" / name).read_bytes()
        return [json.loads(row) for row in (gzip.decompress(content) if name.endswith("gz") else content).splitlines()]

    assert read_beir(tmp_path / "made" / "beir" / "scifact", "test").qrels == {"1": {"7": 1}}
    assert [row["passage_id"] for row in rows("squad/dev.jsonl.gz")] == [
        "squad-00-000", "squad-00-001", "squad-03-000", "squad-03-001"
    ]  # fmt: skip
    assert rows("squad/train.jsonl.gz")[0]["answers"] == ["ice", "the ice"]
    asked = [*rows("medquad/train.jsonl.gz"), *rows("medquad/dev.jsonl.gz")]
    assert {row["text"] for row in rows("medquad/passages.jsonl.gz")} == {
        row["question"].removeprefix("What is ").replace("?", " is common.") for row in asked
    }
    assert read_beir(tmp_path / "made" / "cosqa", "dev").corpus == {"d0": "def f(): pass"}
    assert [row["query"] for row in rows("cosqa/labelled_pairs.jsonl.gz")] == ["read a file"]
    assert rows("banking77/test.jsonl") == [{"text": "Hi", "label": 3, "label_name": "greeting"}]
    assert rows("stsb/dev.jsonl") == [STS | {"score": 3.8}]
    assert rows("nq_open/dev.jsonl") == [{"_id": "nq-dev-0", "question": "who", "answers": ["Ann"]}]
    parts = [rows(f"text/wikipedia/part-0{part}.jsonl.gz") for part in range(4)]
    assert [row["_id"] for part in parts for row in part] == ["wiki-5", "wiki-7"]  # long, and not of SQuAD
    text = gzip.decompress((tmp_path / "made" / "text" / "wikitext-2" / "test.txt.gz").read_bytes())
    assert text == b" \n = A <unk> = \n"
