"""The blocks for datatrove: passages and vectors as `revela-hub encode` makes them, in files that others read."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fork_server import python

pytest.importorskip("datatrove", reason="datatrove is not installed")

PIPELINE = """
import os, signal, sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import ParquetWriter
from revela_hub.retrieval.datatrove_blocks import CutPassages, EncodePassages

folder, model, kill = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "kill"

def kill_the_third_task(data, rank, world_size):
    (folder / f"began-{rank}").write_text(str(kill))
    if kill and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from data

if __name__ == "__main__":
    LocalPipelineExecutor(
        [
            JsonlReader(str(folder / "corpus")),
            CutPassages(max_words=12),
            EncodePassages(model, device="cpu"),
            kill_the_third_task,
            ParquetWriter(str(folder / "vectors"), expand_metadata=True, compression=None),
        ],
        tasks=4, workers=1, logging_dir=str(folder / "logs"),
    ).run()
"""


def test_a_killed_pipeline_repeats_only_what_is_missing(tmp_path: Path, retriever_folder: Path) -> None:
    from datasets import load_dataset

    from revela_hub.retrieval.encoder import load_encoder

    (tmp_path / "corpus").mkdir()
    texts = [
        f"River {n} is long. It carries {n} stones to the sea every year.\n\nNobody counts them." for n in range(8)
    ]
    for number in range(4):
        rows = [{"id": f"d{n}", "text": texts[n]} for n in (2 * number, 2 * number + 1)]
        (tmp_path / "corpus" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*python("trainers"), "-c", PIPELINE, str(tmp_path), str(retriever_folder)]
    # Without pipes, and in a separate group: datatrove's helper process outlives it (the fork server ends it).
    nothing = subprocess.DEVNULL
    with subprocess.Popen([*command, "kill"], stdout=nothing, stderr=nothing, start_new_session=True) as killed:
        killed.wait()
        with suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    done = subprocess.run([*command, "live"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"began-{rank}").read_text() for rank in range(4)] == ["True", "True", "False", "False"]

    files = [str(file) for file in (tmp_path / "vectors").glob("*.parquet")]
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted({row["document"] for row in rows}) == [f"d{n}" for n in range(8)]
    assert len({row["id"] for row in rows}) == len(rows)  # also for passages of the same line
    expected = load_encoder(str(retriever_folder), device="cpu").encode_document([row["text"] for row in rows])
    np.testing.assert_allclose(np.array([row["vector"] for row in rows]), expected, atol=1e-5)
    assert {"start_line", "end_line", "vector", "text"} <= set(rows.column_names)


def test_passages_without_vectors_are_written_as_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet as pq
    from datatrove.data import Document
    from datatrove.pipeline.writers import ParquetWriter

    from revela_hub.data import read_documents
    from revela_hub.retrieval.datatrove_blocks import CutPassages

    documents = [Document(f"River {n} is long. It carries stones to the sea.", f"d{n}") for n in range(3)]
    documents.append(Document("It is dry in summer.", "d3", metadata={"title": "The river Po"}))
    writer = ParquetWriter(str(tmp_path / "passages"), expand_metadata=True)
    written = list(writer.run(CutPassages(max_words=6).run(documents)))
    (file,) = (tmp_path / "passages").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [row["text"] for row in rows] == [passage.text for passage in written]
    assert rows[1] == {
        "text": "It carries stones to the sea.",
        "id": "d0:1-1#2",
        "document": "d0",
        "start_line": 1,
        "end_line": 1,
    }
    assert [row["text"] for row in rows if row["document"] == "d3"] == ["The river Po", "It is dry in summer."]
    assert [document.text for document in read_documents(str(file))] == [row["text"] for row in rows]
