r"""Download the public data sets that the benchmarks read from `$REVELA_HUB_DATA`, and convert them.

    python benchmarks/data.py ~/revela-hub-data
    export REVELA_HUB_DATA=~/revela-hub-data

The section "Data and models" of benchmarks/README.md describes the folders. MedQuAD and CoSQA are made from the authors' repositories, and are the
same as ours row by row. The others come from the Hub, with the columns that its pages show (of wikimedia/wikipedia we found no page, but many copies
with these columns). They differ from ours as follows:

- beir/scifact: BeIR's own files. Ours were made from the authors' release; the counts are equal.
- squad: ours were read from the pages of the SQuAD explorer; the counts are equal.
- banking77: other numbers of the labels, with the same names.
- nq_open: without the 1,800 questions of EfficientQA.
- text/wikipedia: the first long articles of November 2023. Ours come from an older dump that is not on the Hub, so results on this text differ.
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from datasets import load_dataset
from huggingface_hub import hf_hub_download

GITHUB = "https://github.com/{}/archive/{}.zip"
MEDQUAD = ("abachaa/MedQuAD", "577bd37b96c02d1833b2c9eed2de9f96964e96cb")
COSQA = ("Jun-jie-Huang/CoCLR", "14ebcacf9e9bc3e7109102632bc63047876f27d2")
ARTICLES, PARTS, MIN_CHARACTERS = 5220, 4, 1500

Row = dict[str, Any]


def scifact(folder: Path) -> None:
    """Claims and abstracts, as in BEIR."""
    for name, file in (("corpus", "corpus.jsonl.gz"), ("queries", "queries.jsonl")):
        with gzip.open(hf_hub_download("BeIR/scifact", f"{name}.jsonl.gz", repo_type="dataset"), "rt") as lines:
            write(folder / file, map(json.loads, lines))
    for split in ("train", "test"):
        file = hf_hub_download("BeIR/scifact-qrels", f"{split}.tsv", repo_type="dataset")
        qrels(folder, split, (line.split("\t")[:2] for line in Path(file).read_text().splitlines()[1:]))


def squad(folder: Path) -> None:
    """The dev set of SQuAD 1.1, split by article: every third article is `dev`."""
    articles: dict[str, dict[str, list[Row]]] = {}
    for row in load_dataset("rajpurkar/squad", split="validation"):
        articles.setdefault(row["title"].replace("_", " "), {}).setdefault(row["context"], []).append(row)
    passages, questions = [], {"train": list[Row](), "dev": list[Row]()}
    for number, (title, paragraphs) in enumerate(articles.items()):
        for place, (text, rows) in enumerate(paragraphs.items()):
            passage = {"_id": f"squad-{number:02}-{place:03}", "title": title, "text": text}
            passages.append(passage | {"article_index": number, "paragraph_index": place})
            for row in rows:
                answers = list(dict.fromkeys(row["answers"]["text"]))
                asked = {"_id": row["id"], "question": row["question"], "answers": answers}
                questions["train" if number % 3 else "dev"].append(asked | {"passage_id": passage["_id"]})
    write(folder / "passages.jsonl.gz", passages)
    for split, asked in questions.items():
        write(folder / f"{split}.jsonl.gz", asked)


def medquad(folder: Path) -> None:
    """Medical questions, whose answers are the passages; the subjects are divided by their names: 10% left out, 8% `dev`."""
    passages: dict[str, Row] = {}
    asked: dict[tuple[str, str], Row] = {}
    files = from_github(*MEDQUAD, r"\d+_\w+/\w+\.xml")
    for name, content in sorted(files, key=lambda file: (int(file[0].split("_")[0]), file[0])):
        document = ElementTree.fromstring(content)
        subject = one_line(document.findtext("Focus"))
        folder_number, source = name.split("/")[0].split("_", 1)
        for pair in document.iter("QAPair"):
            if answer := one_line(pair.findtext("Answer")):
                new = {"_id": f"mq{len(passages):05}", "title": subject, "text": answer, "source": source}
                new |= {"source_doc": f"{document.get('source')}-{document.get('id')}"}
                passage, found = passages.setdefault(answer, new), pair.find("Question")
                question = one_line(found.text).replace(" ?", "?")
                row = {"_id": f"{folder_number}-{found.get('qid')}", "question": question, "qtype": found.get("qtype")}
                asked.setdefault((question, passage["_id"]), row | {"passage_id": passage["_id"]})
    part_of = {row["_id"]: digest(row["title"].lower()) % 100 for row in passages.values()}
    write(folder / "passages.jsonl.gz", (row for row in passages.values() if part_of[row["_id"]] >= 10))
    for split, parts in (("dev", range(10, 18)), ("train", range(18, 100))):
        rows = [row for row in asked.values() if part_of[row["passage_id"]] in parts]
        uses = Counter(row["_id"] for row in rows)
        ids = (row["_id"] + f"-{row['passage_id']}" * (uses[row["_id"]] > 1) for row in rows)
        write(folder / f"{split}.jsonl.gz", [row | {"_id": id_} for row, id_ in zip(rows, ids, strict=True)])


def cosqa(folder: Path) -> None:
    """Web queries and Python functions; the labelled pairs are those whose query is in no retrieval test."""
    files = dict(
        from_github(*COSQA, r"data/(search/code_idx_map.txt|search/cosqa-retrieval-\w+-500.json|qa/cosqa-dev.json)")
    )
    read = {Path(name).stem: json.loads(content) for name, content in files.items()}
    code = sorted(read["code_idx_map"].items(), key=lambda pair: pair[1])
    write(folder / "corpus.jsonl.gz", ({"_id": f"d{number}", "title": "", "text": text} for text, number in code))
    dev = read["cosqa-retrieval-dev-500"]
    write(folder / "queries.jsonl", ({"_id": row["idx"], "text": row["doc"]} for row in dev))
    qrels(folder, "dev", ((row["idx"], f"d{row['retrieval_idx']}") for row in dev))
    tested = {row["doc"] for row in read["cosqa-retrieval-test-500"]}
    pairs = (row for row in read["cosqa-dev"] if row["doc"] not in tested)
    keys = {"_id": "idx", "query": "doc", "code": "code", "label": "label"}
    write(folder / "labelled_pairs.jsonl.gz", ({key: row[name] for key, name in keys.items()} for row in pairs))


def banking77(folder: Path) -> None:
    """Messages to a bank, with their intent."""
    for split in ("train", "test"):
        rows = load_dataset("mteb/banking77", split=split).rename_column("label_text", "label_name")
        write(folder / f"{split}.jsonl", rows)


def stsb(folder: Path) -> None:
    """Pairs of sentences with a score from 0 to 5."""
    for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
        rows = load_dataset("sentence-transformers/stsb", split=split)  # scores from 0 to 1
        write(folder / f"{name}.jsonl", (row | {"score": round(5 * row["score"], 3)} for row in rows))


def nq_open(folder: Path) -> None:
    """Questions with short answers, without passages."""
    rows = load_dataset("google-research-datasets/nq_open", split="validation").rename_column("answer", "answers")
    write(folder / "dev.jsonl", ({"_id": f"nq-dev-{number}"} | row for number, row in enumerate(rows)))


def wikipedia(folder: Path) -> None:
    """Articles of the English Wikipedia, without those of SQuAD's dev set."""
    left_out = {title.replace("_", " ") for title in load_dataset("rajpurkar/squad", split="validation")["title"]}
    rows = load_dataset("wikimedia/wikipedia", "20231101.en", split="train", streaming=True)
    long = (row for row in rows if len(row["text"]) >= MIN_CHARACTERS and row["title"] not in left_out)
    articles = ({"_id": f"wiki-{row['id']}", "title": row["title"], "text": row["text"]} for row in long)
    for part in range(PARTS):
        write(folder / f"part-{part:02}.jsonl.gz", islice(articles, ARTICLES // PARTS))


def wikitext(folder: Path) -> None:
    """Tokenised text with <unk>, one paragraph in each line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("validation", "valid"), ("test", "test")):
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-v1", split=split)
        with gzip.open(folder / f"{name}.txt.gz", "wt", encoding="utf-8") as file:
            file.writelines((row["text"].rstrip("\n") or " ") + "\n" for row in rows)


DATA_SETS = {
    "beir/scifact": scifact,
    "squad": squad,
    "medquad": medquad,
    "cosqa": cosqa,
    "banking77": banking77,
    "stsb": stsb,
    "nq_open": nq_open,
    "text/wikipedia": wikipedia,
    "text/wikitext-2": wikitext,
}


def from_github(repository: str, commit: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of files of a repository."""
    with urllib.request.urlopen(GITHUB.format(repository, commit)) as answer:
        archive = zipfile.ZipFile(io.BytesIO(answer.read()))
    for name in archive.namelist():
        if re.fullmatch(pattern, inside := name.partition("/")[2]):
            yield inside, archive.read(name)


def digest(text: str) -> int:
    """Return a number that is the same on every machine."""
    return int(hashlib.md5(text.encode()).hexdigest(), 16)


def one_line(text: str | None) -> str:
    """Return a text without line ends, or "" for None."""
    return " ".join((text or "").split())


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write JSON lines, in a .gz file compressed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if file.suffix == ".gz" else open)(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def qrels(folder: Path, split: str, judged: Iterable[Iterable[str]]) -> None:
    """Write the judgements of a split as BEIR does, all relevant."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join([*pair, "1"]) for pair in judged)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Make the folders that are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-sets", nargs="+", default=list(DATA_SETS), choices=DATA_SETS)
    given = parser.parse_args()
    for name in given.data_sets:
        folder = given.folder / name
        if not folder.exists():
            part = folder.with_name(f"{folder.name}.part")
            DATA_SETS[name](part)
            part.rename(folder)
            print(name)


if __name__ == "__main__":
    main()
