"""The README's Python runs as it stands, on tiny models and a few files."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("pytrec_eval", reason="the README measures, which needs the extra eval")


@pytest.fixture
def stand_ins(tmp_path: Path, texts: list[str], llama_folder: Path, bert_folder: Path) -> dict[str, str]:
    """What the README names, and what stands in for it here."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    # Chunks have 160 tokens, more than the tiny model takes.
    BertModel(BertConfig.from_pretrained(bert_folder, max_position_embeddings=256)).save_pretrained(bert_folder)
    transformer = Transformer(str(bert_folder))
    SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="mean")]).save(str(tmp_path / "encoder"))
    code = tmp_path / "code"
    code.mkdir()
    for number in range(4):
        (code / f"module_{number}.py").write_text("\n\n".join(texts[4:] * 20))
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(texts)]
    queries = [{"_id": f"q{n}", "text": text.split()[-1]} for n, text in enumerate(texts)]
    (beir / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (beir / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    rows = [f"q{n}\td{n}\t1" for n in range(len(texts))]
    (beir / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
    return {
        "sentence-transformers/all-MiniLM-L6-v2": str(tmp_path / "encoder"),
        "HuggingFaceTB/SmolLM2-135M": str(llama_folder),
        "path/to/code": str(code),
        "path/to/beir/folder": str(beir),
    }


def test_python_of_the_readme(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: dict[str, str]
) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks.sort(key=lambda block: "RevelaTrainer(" not in block)  # what is used has to be trained first
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        for name, stand_in in stand_ins.items():
            block = block.replace(name, stand_in)
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "outputs" / "mine" / "lm" / "config.json").exists()
    assert tuple(names["queries"].shape) == (1, 32)
    assert tuple(names["documents"].shape) == (2, 32)
