"""Tiny copies of what the recipes in examples/ read: data sets and models of the Hub, and files with the names in the printed commands.

The configurations, splits and columns are those of the cards, as far as they could be read; the recipes mark the columns that are not confirmed.
"""

import gzip
import io
import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from loopback_hub import LoopbackHub

Row = dict[str, Any]
WORDS = "river sea stone lamp moon iron road hill fox dog salt rope glass wood".split()
TEXT = "The river Dart flows past the town Dartford. The river Esk rises in the hills of Eskdale, and reaches the sea."
QUESTION = {"context": TEXT, "question": "Where is the Dart?"}
KILT = {"input": "Where is the Esk?", "output": [{"answer": "Eskdale", "meta": {"score": 0}, "provenance": []}]}
MESSAGE = {"message_id": "a", "parent_id": None, "text": "Hi", "role": "prompter", "lang": "en"}
REPLIES = [MESSAGE | {"message_id": n, "parent_id": "a", "role": "assistant", "lang": n} for n in ("en", "de")]
COQA_ANSWERS = {"input_text": ["the Dart", "Dartford"], "answer_start": [4, 31], "answer_end": [8, 39]}


def words(seed: int, salt: int = 0) -> str:
    return " ".join(WORDS[(seed * step + salt) % len(WORDS)] for step in (1, 3, 5, 9, 11, 13)) + f" {seed}x{salt}"


LONG = " ".join(f"{words(n, n % 5).capitalize()}." for n in range(16))
SETS: dict[str, str | Row | list[Row]] = {  # "names configurations splits": columns, a row, or rows
    "google-research-datasets/nq_open nq_open train,validation": {"question": "where is the dart", "answer": ["Dartford"]},
    "facebook/kilt_tasks hotpotqa,nq,trex,structured_zeroshot,fever,aidayago2 train,validation": KILT,
    "basicv8vc/SimpleQA default test": {"metadata": "{}", "problem": "Where is the Dart?", "answer": "Dartford"},
    "xanhho/2WikiMultihopQA default train,dev": QUESTION | {"answer": "Dartford", "type": "bridge_comparison"},
    "OpenAssistant/oasst1 default train": [MESSAGE, *REPLIES],
    "stanfordnlp/coqa default train": {
        "source": "wikipedia", "story": TEXT, "questions": ["Which river?", "Where?"], "answers": COQA_ANSWERS
    },
    "ucinlp/drop default train": {
        "passage": TEXT, "question": "How many rivers?", "answers_spans": {"spans": ["2"], "types": ["number"]}
    },
    "lucadiliello/newsqa default train": QUESTION | {"answers": ["Dartford"], "key": "a"},
    "qiaojin/PubMedQA pqa_artificial,pqa_labeled train": {
        "pubid": 1, "question": "Do they flow?", "context": {"contexts": [TEXT, "They do."]}, "final_decision": "yes"
    },
    "textmachinelab/quail default train": QUESTION | {"answers": ["the sea", "Dartford"], "correct_answer_id": 1},
    "abisee/cnn_dailymail 1.0.0,2.0.0,3.0.0 train": {"article": TEXT, "highlights": "Rivers flow.", "id": "1"},
    "rajpurkar/squad plain_text train": "id title context question answers",
    "sentence-transformers/natural-questions,paq pair train": "query answer",
    "sentence-transformers/stackexchange-duplicates title-title-pair train": "title1 title2",
    "sentence-transformers/stackexchange-duplicates body-body-pair train": "body1 body2",
    "sentence-transformers/nli-for-simcse triplet train": "anchor positive negative",
    "sentence-transformers/miracl,mr-tydi en-triplet,en-triplet-all train": "anchor positive negative",
    "sentence-transformers/reddit-title-body default train": "title body subreddit",
    "BeIR/arguana-generated-queries,bioasq-generated-queries default train": "_id title text query",
    "mteb/msmarco,hotpotqa,fiqa,fever,scifact,nfcorpus default train": "query-id corpus-id score",
    "mteb/msmarco,hotpotqa,fiqa,fever,scifact,nfcorpus corpus corpus": "_id title text",
    "mteb/msmarco,hotpotqa,fiqa,fever,scifact,nfcorpus queries queries": "_id text",
    "mteb/sts12-sts,stsbenchmark-sts default train,test": "sentence1 sentence2 score",
    "mteb/sts22-crosslingual-sts en,de train,test": "id score sentence1 sentence2",
    "mteb/amazon_polarity,toxic_conversations_50k default train,test": "text label",
    "mteb/amazon_counterfactual,AmazonReviewsClassification en,de train,test": "text label",
    "mteb/MTOPIntentClassification,MTOPDomainClassification en,de train,test": "id text label",
    "mteb/imdb,banking77,emotion,tweet_sentiment_extraction default train,test": "text label label_text",
    "mteb/amazon_massive_intent,amazon_massive_scenario en,de train,test": "id label label_text text lang",
    "mteb/raw_arxiv,raw_biorxiv,raw_medrxiv default train": "id title abstract category",
    "mteb/arxiv-clustering-p2p,biorxiv-clustering-p2p,medrxiv-clustering-p2p default test": "sentences labels",
    "mteb/arxiv-clustering-s2s,biorxiv-clustering-s2s,medrxiv-clustering-s2s default test": "sentences labels",
    "mteb/reddit-clustering,reddit-clustering-p2p,twentynewsgroups-clustering default test": "sentences labels",
    "mteb/stackexchange-clustering default validation,test": "sentences labels",
    "SetFit/20_newsgroups default train,test": "text label label_text",
    "wikimedia/wikipedia 20231101.de,20231101.en train": {"id": "1", "url": "u", "title": "T", "text": LONG},
    "HuggingFaceFW/fineweb-edu sample-10BT,sample-100BT train": [{"id": n, "text": LONG + n} for n in "12"],
    "code-rag-bench/online-tutorials default train": {"title": "T", "text": LONG, "type": ""},
    "code-rag-bench/library-documentation default train": {"doc_id": "a", "doc_content": LONG},
    "code-rag-bench/stackoverflow-posts default train": "text",
    "trumancai/revela_training_corpus default train": {"text": [words(n) for n in range(15)] + [""]},
}  # fmt: skip


def rows_of(columns: str | Row | list[Row], salt: int) -> list[Row]:
    """Rows with these columns: ten of generated text, or the given ones."""
    if not isinstance(columns, str):
        return columns if isinstance(columns, list) else [columns] * 3

    def value(column: str, n: int, place: int) -> Any:
        made: dict[str, Any] = {
            "label": n % 2,
            "label_text": f"class {n % 2}",
            "category": f"c{n % 2}",
            "subreddit": f"r/{n % 2}",
            "labels": ["c0", "c1"],
            "sentences": [words(2 * n + part, salt + 500) for part in range(2)],  # not those of the training sets
            "score": 3.0 + n % 3 if "sentence1" in columns else 1.0,
            "_id": f"d{n}" if "title" in columns else f"q{n}",
            "query-id": f"q{n}",
            "corpus-id": f"d{n}",
            "answers": {"text": [f"{n}x{salt + 2}"], "answer_start": [0]},
        }
        return made.get(column, words(n, salt + place))

    return [{column: value(column, n, place) for place, column in enumerate(columns.split())} for n in range(10)]


def jsonl(rows: Iterable[Row]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def data_sets(hub: LoopbackHub, recipe: str) -> None:
    """Add the data sets to a Hub; those with a revision in the recipe have no other."""
    found: dict[str, dict[str, dict[str, list[Row]]]] = {}
    for number, (key, columns) in enumerate(SETS.items()):
        names, configurations, splits = key.split()
        owner, _, names = names.partition("/")
        for name, configuration in product(names.split(","), configurations.split(",")):
            made = {split: rows_of(columns, number + 50 * place) for place, split in enumerate(splits.split(","))}
            found.setdefault(f"{owner}/{name}", {})[configuration] = made
    for name, contents in found.items():
        files, card = {}, []
        for configuration, parts in contents.items():
            paths = {split: f"{configuration}/{split}.jsonl" for split in parts}
            card.append(
                {"config_name": configuration, "data_files": [{"split": s, "path": p} for s, p in paths.items()]}
            )
            files |= {paths[split]: jsonl(rows) for split, rows in parts.items()}
        files["README.md"] = f"---\n{json.dumps({'configs': card})}\n---\n".encode()
        pinned = re.search(rf'hf:{name}:[\w:-]*"?,?\s+revision: (\w+)', recipe)
        hub.add(f"datasets/{name}", files, pinned[1] if pinned else "main")
    lines = [{"docid": str(n), "title": "T", "text": f"T. {words(n, n)}."} for n in range(40)]
    hub.add("datasets/Tevatron/wikipedia-nq-corpus", {"corpus.jsonl.gz": gzip.compress(jsonl(lines))})
    books = {"plain_text/train/0000.parquet": parquet(text=[words(n) for n in range(40)])}
    passages = {"default/train/0000.parquet": parquet(docid=list("0123"), title=["", *"abc"], text=[LONG] * 4)}
    hub.add("datasets/bookcorpus/bookcorpus", books, "refs/convert/parquet")
    hub.add("datasets/Tevatron/msmarco-passage-corpus", passages, "refs/convert/parquet")


FUNCTION = '''
def make_{0}(value):
    """Builds the {0} of a value and returns it."""
    result = value + {1}
    log(result)
    return result
'''


def local_files(folder: Path) -> None:
    """Write the files that a user brings, with the names in the commands."""
    passages = [{"_id": f"d{n}", "title": "", "text": f"Another fox {words(n, n)[-9:]}."} for n in range(20)]
    queries = [{"_id": f"q{n}", "text": f"Another {words(n, n)}"} for n in range(20)]
    asked = [{"_id": f"{n}", "question": words(n, n), "answers": ["fox"], "passage_id": f"d{n}"} for n in range(20)]
    qrels = b"query-id\tcorpus-id\tscore\n" + b"".join(b"q%d\td%d\t1\n" % (n, n) for n in range(8))
    dpr = [{"question": words(n), "positive_ctxs": [{"title": "T", "text": words(n)}]} for n in range(9)]
    wiki = [{"id": f"{n}", "title": f"Esk {n}", "section": "Course", "text": f"{TEXT} Part {n}."} for n in range(12)]
    beir = {"corpus.jsonl": jsonl(passages), "queries.jsonl": jsonl(queries), "qrels/train.tsv": qrels}
    code = "".join(FUNCTION.format(f"{a}_{b}", n) for n, a in enumerate(WORDS) for b in WORDS)
    pairs = [{"text": words(n), "query": words(n), "code": words(n, 1), "label": n % 2} for n in range(9)]
    files = {
        **{f"data/beir/msmarco/{name}": file for name, file in beir.items()},
        **{f"local/beir/scifact/{name}": file for name, file in beir.items()},
        "data/beir/msmarco/qrels/dev.tsv": qrels,
        "data/msmarco-docs.jsonl": jsonl([{"title": "T", "text": LONG}]),
        "data/dpr/biencoder-nq-train.json": json.dumps([*dpr, {"question": "", "positive_ctxs": []}]).encode(),
        "data/dpr/psgs_w100.tsv": "".join(
            ["id\ttext\ttitle\n", *(f"{n}\t{words(n)}\tT\n" for n in range(20))]
        ).encode(),
        "path/to/text-list-100-sec.jsonl": jsonl(wiki),
        "path/to/train.jsonl": jsonl([{"question": f"Where is {n}?", "answers": ["Eskdale"]} for n in range(4)]),
        "path/to/passages/wiki.jsonl": jsonl(wiki),
        "path/to/code/code.py": code.encode(),
        "WIKIPEDIA.jsonl.gz": gzip.compress(jsonl([{"title": f"T{n}", "text": f"{LONG} {n}"} for n in range(9)])),
        **{f"local/{name}/train.jsonl.gz": gzip.compress(jsonl(asked)) for name in ("medquad", "squad")},
        **{f"local/{name}/passages.jsonl.gz": gzip.compress(jsonl(passages)) for name in ("medquad", "squad")},
        "local/cosqa/labelled_pairs.jsonl.gz": gzip.compress(jsonl(pairs)),
        "local/banking77/train.jsonl": jsonl(row | {"label_name": f"c{row['label']}"} for row in pairs),
        "local/stsb/train.jsonl": jsonl(rows_of("sentence1 sentence2 score", 0)),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
