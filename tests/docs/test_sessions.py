"""The blocks of the documentation run on tiny models, and print lines of the form that the pages show."""

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from revela_hub.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = runpy.run_path(str(ROOT / "docs" / "sessions.py"))
PAGES = [
    str(file.relative_to(ROOT))
    for folder in (".", "api", "guides", "methods")
    for file in sorted((ROOT / "docs" / folder).glob("*.md"))
    if file.name != "api.md" and any(True for _ in SESSIONS["steps"](file.read_text(encoding="utf-8")))
]
# Trainings end after two steps. Random models find every passage alike: without limits, there are negatives.
EXTRA = {"train": ["--max_steps", "2"], "mine": ["--positive_aware", "false"]}
# Verify in other processes, which takes long; tests/hub_cards runs them.
NOT_RUN = ("check", "publish")
# 5 seconds of CPU time or more
SLOW = ("docs/index.md", "docs/guides/publish.md", *map("docs/methods/{}.md".format, ("revela", "nvembed", "retromae")))
# Lines that come with some data only: logs of single steps, which weights are exported, and whether a difference is significant.
VARIABLE = re.compile(
    r"^(step|before training|trained|exported|hybrid|Training|A hybrid|stopped)\b|Exported:|s per step|found nothing|queries\)\.$|p < |p = |passages are longer|with fewer|queries are too|few to claim"
)
WORDS = "fox dog river sea mountain lazy quick brown sediment layer".split()


@pytest.fixture
def names(tmp_path: Path, llama_folder: Path, bert_folder: Path) -> dict[str, str]:
    """The models that the pages name, and the tiny ones that replace them."""
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertForMaskedLM

    # Chunks have up to 160 tokens, more than the tiny model takes.
    BertForMaskedLM(BertConfig.from_pretrained(bert_folder, max_position_embeddings=512)).save_pretrained(bert_folder)
    pooling = Pooling(32, pooling_mode="mean")
    SentenceTransformer(modules=[Transformer(str(bert_folder)), pooling]).save(str(tmp_path / "tiny-retriever"))
    CrossEncoder(str(bert_folder), num_labels=1, device="cpu").save_pretrained(str(tmp_path / "tiny-reranker"))
    return {
        "cross-encoder/ms-marco-MiniLM-L6-v2": str(tmp_path / "tiny-reranker"),
        "sentence-transformers/all-MiniLM-L6-v2": str(tmp_path / "tiny-retriever"),
        "google-bert/bert-base-uncased": str(bert_folder),
        "HuggingFaceTB/SmolLM2-135M": str(llama_folder),
        "examples/quickstart/retriever": str(tmp_path / "tiny-retriever"),
        "examples/quickstart/lm": str(llama_folder),
    }


@pytest.fixture
def files(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages name, in a separate folder, which becomes the current one."""
    folder = tmp_path / "work"
    (folder / "path/to/code").mkdir(parents=True)
    (folder / "path/to/text").mkdir()
    monkeypatch.chdir(folder)
    for name in ("examples", "docs"):
        Path(name).symlink_to(ROOT / name)
    for n in range(30):
        functions = (
            f'def area_{n}_{part}(width, height):\n    """Return the area number {n} of part {part} of a field."""\n'
            f"    factor = {n} * {part} + 1\n    width = abs(width)\n    return width * height * factor\n"
            for part in range(2)
        )
        Path(f"path/to/code/m{n}.py").write_text("\n\n".join(functions))
        sentences = [f"The {word} number {n} is {other} to the sea." for word in WORDS[:4] for other in WORDS[4:7]]
        Path(f"path/to/text/t{n}.txt").write_text(f"Title {n} {WORDS[n % 10]}\n\n{' '.join(sentences)}\n")
    rows = [f"{WORDS[n % 10]} {n} is {WORDS[n // 10 % 10]} to the sea" for n in range(220)]
    write = SESSIONS["write_rows"]
    write(Path("pairs.jsonl"), ({"anchor": f"where is {row.split(' is')[0]}", "positive": row} for row in rows))
    write(Path("corpus.jsonl"), ({"text": row, "title": row.split()[0]} for row in rows[:60]))
    write(Path("topics.jsonl"), ({"text": f"message {n} {texts[n % 4]}", "label": f"topic {n % 4}"} for n in range(40)))
    write(
        Path("questions.jsonl"),
        ({"question": f"where is {row.split(' is')[0]}?", "answers": [row]} for row in rows[:20]),
    )
    beir = Path("path/to/beir/folder")
    (beir / "qrels").mkdir(parents=True)
    write(beir / "corpus.jsonl", ({"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(texts)))
    write(beir / "queries.jsonl", ({"_id": f"q{n}", "text": text.split()[-1]} for n, text in enumerate(texts)))
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(len(texts)))
    (beir / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES])
def test_the_blocks_of_a_page_run(
    page: str, files: Path, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (ROOT / page).read_text(encoding="utf-8")
    SESSIONS["shown_files"](files, text)
    for step in SESSIONS["steps"](text):
        if step.kind == "command" and step.text.split()[1] in NOT_RUN:
            continue
        printed = run(step, names)
        whole = " ".join(forms(printed))
        missing = [line for line in forms(step.shown or "") if line not in whole]
        assert not missing, f"{step.text}\nprinted:\n{printed}"


def test_the_pages_name_no_folder_of_a_machine() -> None:
    for page in PAGES:
        assert not re.findall(r"/(?:root|home|tmp|work)/\S*|site-packages", (ROOT / page).read_text(encoding="utf-8"))


def test_no_output_shows_the_name_of_a_model_that_another_stood_in_for() -> None:
    shown = [
        step.shown or "" for page in PAGES for step in SESSIONS["steps"]((ROOT / page).read_text(encoding="utf-8"))
    ]
    assert not [text for text in shown if any(name in text for name in SESSIONS["STAND_INS"])]


def run(step: Any, names: dict[str, str]) -> str:
    """Run a step in this process; return what it prints."""
    text = step.text
    for name, stand_in in names.items():
        text = text.replace(name, stand_in)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if step.kind == "python":
            exec(compile(text, "a page", "exec"), {"__name__": "a_page"})
        else:
            words = shlex.split(text.replace("--dims 384 192", "--dims 32 16"))[1:]  # the tiny models have 32
            extra = EXTRA.get(words[0], []) + (["--retriever_start_step", "0"] if words[1] == "revela" else [])
            extra += ["--rerank_depth", "4"] if words[0] == "mine" and "--rerank" in words else []
            assert cli.main([*words, *extra]) == 0, printed.getvalue()
    output = printed.getvalue()
    for name, stand_in in names.items():
        output = output.replace(stand_in, name)
    return output


def forms(output: str) -> list[str]:
    """Return the form of each line that does not depend on data and speed: without numbers, times, and the width of columns."""
    lines = []
    for line in output.splitlines():
        if re.match(r" {4}|  passage:|  query:|\.\.\.|$", line) or VARIABLE.search(line):
            continue
        line = re.sub(r"\S*/\S*", "PATH", re.split("removed:|skipped:|dropped:", line)[0].removesuffix(" ..."))
        line = re.sub(r"\(dropped[^)]*\)", "", line).replace(" in bf16", " in float32")  # the machine decides
        line = re.sub(r"(?:(?<=\[) )?[+-]?\d[\d,.e+-]*", "0", line)
        line = re.sub(r"\((0 (docstring|sentence|title)(, )?)+\)", "(KINDS)", line)
        line = re.sub(r"\b0 (s|min|h|ms|K|M|B|KB|MB|GB|kB)\b", "0", re.sub(r"  +", "  ", line))
        lines.append(line.strip(" ;"))
    return lines
