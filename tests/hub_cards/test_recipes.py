"""The recipes of Revela, its baselines, RetroMAE and CoT-MoTE start as they are, from data sets and models of the Hub with the same columns and files, tiny."""

import gzip
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback_hub import LoopbackHub, Repository
from test_pickles import pickle_weights

from revela_hub.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = "--max_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_length 32 --bf16 false"
TINY += " --report_to none --save_strategy no --dataloader_num_workers 0 --cache_dir cache --quiet"


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def place(
    hub: LoopbackHub,
    tmp_path: Path,
    texts: list[str],
    mlm_folder: Path,
    llama_folder: Path,
    t5_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with the files that the recipes read, and the Hub with what they download."""
    wiki = b"---\nconfigs:\n- config_name: 20231101.en\n  data_files:\n  - split: train\n    path: 20231101.en/train-*\n---\n"
    files = {
        "google-bert/bert-base-uncased": {path.name: path.read_bytes() for path in mlm_folder.iterdir()},
        "datasets/wikimedia/wikipedia": {
            "README.md": wiki,
            "20231101.en/train-00000-of-00001.parquet": parquet(
                id=["1"], url=["u"], title=["T"], text=[" ".join(texts)]
            ),
        },
        "datasets/bookcorpus/bookcorpus": {
            "plain_text/train/0000.parquet": parquet(text=[text.lower() for text in texts])
        },
        "datasets/Tevatron/msmarco-passage-corpus": {
            "default/train/0000.parquet": parquet(docid=list("0123"), title=["", "a", "b", "c"], text=texts[:4])
        },
    }
    files["meta-llama/Llama-3.2-1B"] = {path.name: path.read_bytes() for path in llama_folder.iterdir()}
    shard = "data/train-00000-of-00001.parquet"
    passages = [{"docid": str(n), "title": "T", "text": f"T. {text}"} for n, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in passages).encode()
    files["datasets/Tevatron/wikipedia-nq-corpus"] = {"corpus.jsonl.gz": gzip.compress(lines)}
    files["datasets/code-rag-bench/online-tutorials"] = {shard: parquet(title=["T"], text=texts[:1], type=[""])}
    files["datasets/code-rag-bench/library-documentation"] = {shard: parquet(doc_id=["a"], doc_content=texts[:1])}
    files["datasets/code-rag-bench/stackoverflow-posts"] = {shard: parquet(text=texts)}
    files["datasets/HuggingFaceFW/fineweb-edu"] = {
        "README.md": wiki.replace(b"20231101.en/", b"sample/10BT/").replace(b"20231101.en", b"sample-10BT"),
        "sample/10BT/train-00000.parquet": parquet(id=["1", "2"], text=[" ".join(texts)] * 2),
    }
    files["datasets/trumancai/revela_training_corpus"] = {shard: parquet(text=[[*texts, "", *texts][:16]] * 2)}
    files["Shitao/RetroMAE"] = {path.name: path.read_bytes() for path in pickle_weights(mlm_folder).iterdir()}
    files["castorini/doc2query-t5-base-msmarco"] = {path.name: path.read_bytes() for path in t5_folder.iterdir()}
    for name, content in files.items():
        repository = hub.repositories[name] = Repository()
        repository.commit("refs/convert/parquet", content, "converted")
        repository.commit("main", content, "files")
    monkeypatch.chdir(tmp_path)
    beir = tmp_path / "data" / "beir" / "msmarco"
    (beir / "qrels").mkdir(parents=True)
    passages = [f"{text} Another fox, number {n}." for n in range(5) for text in texts[:4]]
    lines = {"corpus": [{"_id": str(n), "text": text} for n, text in enumerate(passages)]}
    lines["queries"] = [{"_id": str(n), "text": f"Another fox {text[:20]}"} for n, text in enumerate(passages)]
    for name, rows in lines.items():
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = "".join(f"{n}\t{n}\t1\n" for n in range(8))
    (beir / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    (tmp_path / "data" / "msmarco-docs.jsonl").write_text(json.dumps({"title": "T", "text": " ".join(texts)}) + "\n")
    return tmp_path


def run(command: str, recipe: str = "", more: str = TINY) -> None:
    config = ["--config", str(EXAMPLES / recipe)] if recipe else []
    assert main([*command.split(), *config, *more.split()]) == 0


REVELA = TINY.replace("--bf16 false", "--max_words 12 --probe none")


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        *((name, "") for name in ("wikipedia", "code", "fineweb", "mixed")),
        ("wikipedia", "--data hf:trumancai/revela_training_corpus --groups_column text"),
    ],
)
def test_revela_is_trained(recipe: str, more: str, place: Path) -> None:
    run("train revela", f"revela/{recipe}.yaml", f"{REVELA} --total_groups_per_step 2 {more} --output_dir out")
    assert (place / "out" / "retriever" / "modules.json").is_file()


@pytest.mark.parametrize("name", ["contriever", "replug"])
def test_the_baselines_of_revela_are_trained(name: str, place: Path) -> None:
    run(f"train {name}", f"revela/baselines/{name}-wikipedia.yaml", f"{REVELA} --output_dir out")
    assert (place / "out" / "retriever" / "modules.json").is_file()


@pytest.mark.parametrize("recipe", ["pretrain", "pretrain_msmarco"])
def test_retromae_is_pre_trained(recipe: str, place: Path) -> None:
    run("train retromae", f"retromae/{recipe}.yaml", f"{TINY} --probe none --output_dir out")
    assert (place / "out" / "encoder" / "modules.json").is_file()


MINE = "mine bm25 --beir data/beir/msmarco --num_negatives {} --range_max 19 --sampling random --positive_aware false --output mined.jsonl"


@pytest.mark.parametrize(("recipe", "negatives"), [("msmarco", 15), ("nq", 1), ("beir", 1)])
def test_retromae_is_fine_tuned(recipe: str, negatives: int, place: Path) -> None:
    run(MINE.format(negatives), more="--cache_dir mining --quiet")
    more = TINY.replace("--max_length 32", "--max_length 32 --query_max_length 16").replace("--cache_dir cache", "")
    run("train pairs --pairs mined.jsonl", f"retromae/{recipe}.yaml", f"{more} --output_dir out")
    settings = json.loads((place / "out" / "retriever" / "config_sentence_transformers.json").read_text())
    assert settings["similarity_fn_name"] == "dot"
    [pooling] = (place / "out" / "retriever").glob("1_Pooling/config.json")
    assert '"cls"' in pooling.read_text()


def test_cot_mote_is_trained_from_its_own_queries(place: Path) -> None:
    run("pseudo-queries", "cot-mote/queries.yaml", "--max_length 32 --max_new_tokens 6 --quiet")
    run("train cot-mote", "cot-mote/pretrain.yaml", f"{TINY} --output_dir outputs/cot-mote-pretrained")
    run(MINE.format(15), more="--cache_dir mining --quiet")
    run(
        "train cot-mote --pairs mined.jsonl", "cot-mote/finetune.yaml", f"{TINY} --query_max_length 16 --output_dir out"
    )
    assert (place / "out" / "sparse" / "modules.json").is_file()


def test_a_cross_encoder_is_distilled(place: Path, monkeypatch: pytest.MonkeyPatch, retriever_folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("distill", EXAMPLES / "retromae" / "distill.py")
    assert spec is not None and spec.loader is not None
    distill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(distill)
    run(MINE.format(2), more="--cache_dir mining --quiet")
    for words in (
        "teacher google-bert/bert-base-uncased --pairs mined.jsonl --output teacher --max_steps 1",
        "score teacher --pairs mined.jsonl --output scored.jsonl",
        f"student {retriever_folder} --pairs scored.jsonl --output out --max_steps 1",
    ):
        monkeypatch.setattr(sys, "argv", ["distill.py", *words.split()])
        distill.main()
    rows = [json.loads(line) for line in (place / "scored.jsonl").read_text().splitlines()]
    assert all(len(row["label"]) == 3 for row in rows) and max(row["label"][0] for row in rows) != min(rows[0]["label"])
    assert (place / "out" / "retriever" / "modules.json").is_file()
