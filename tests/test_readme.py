"""What the READMEs show runs as it stands, on tiny models and a few files; every command is one that the parser reads."""

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from revela_hub.cli import main as cli
from revela_hub.cli.outline import outline
from revela_hub.cli.parser import CommandParser, build_arguments

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


ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *("README.md", "CONTRIBUTING.md", "examples/*/README.md", "examples/**/*.yaml", "examples/**/*.py"),
    *("benchmarks/**/*.md", "benchmarks/**/*.py", "docs/*.md", "docs/guides/*.md", "docs/methods/*.md"),
]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for name in FILES for file in ROOT.glob(name)}
PAGES |= {name: outline(row.module).__doc__ or "" for name, row in cli.COMMANDS.items()}


def lines(text: str, start: str) -> Iterator[str]:
    """The lines that begin with `start`, of code blocks, docstrings and comments, without what precedes the command."""
    for line in re.sub(r"\\\n[# ]*", " ", text).splitlines():
        if shown := re.match(rf"(?:# +|\$ +| *)(?:[A-Z_]+=\S+ )*({start}.*)", line):
            yield shown[1]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows, after `revela-hub` or `-m revela_hub`."""
    for line in lines(text, r"(?:revela-hub|accelerate launch .*-m revela_hub) [a-z]"):
        if "COMMAND" not in line and not re.search(r" [a-z]+ \.\.\.$", line):  # options that are left out
            shown = re.split(r"revela[-_]hub ", line.partition(" < ")[0], maxsplit=1)[1]
            shown += '"' * (shown.count('"') % 2)  # a text of several lines
            yield shlex.split(re.sub(r"\$\w+", "0", shown.replace("$'", "'")), comments=True)


def bound(words: list[str]) -> dict[str, Any] | None:
    """What the command's own parser makes of the words; a text with spaces is a query or a prompt, and never a path."""
    name, rest = cli._command_name(words)
    told = outline(cli.COMMANDS[name].module)
    values = CommandParser(told.Arguments, name, "", getattr(told, "POSITIONALS", ())).read(rest)
    for option, value in (values or {}).items():
        swallowed = (
            [word for word in value if " " in word]
            if isinstance(value, list) and all(isinstance(word, str) for word in value)
            else []
        )
        assert not swallowed, f"--{option} takes {swallowed}: {shlex.join(words)}"
    if values is not None:  # and they go together
        command = importlib.import_module(cli.COMMANDS[name].module)
        build_arguments(command.Arguments, dict(values), name)
    return values


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_that_are_shown_are_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = list(commands(PAGES[page]))
    assert shown or not re.match(r"README|examples/.*README|[a-z -]+$", page)
    for words in shown:
        assert bound(words) is not None or words[0] == "quickstart"


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_that_are_shown_have_these_options(page: str) -> None:
    for line in lines(PAGES[page], r"python (?:benchmarks|examples|tests/adversarial)/"):
        script, *words = shlex.split(line.removeprefix("python "), comments=True)
        calls = [node for node in ast.walk(ast.parse((ROOT / script).read_bytes())) if isinstance(node, ast.Call)]
        known = {value.value for call in calls for value in call.args if isinstance(value, ast.Constant)}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


def test_pairs_corpus_and_mixture_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retriever_folder: Path, llama_folder: Path
) -> None:
    """The files as they are shown, mined from and trained on."""
    monkeypatch.chdir(tmp_path)
    files = dict(
        re.findall(r"^`(\w+\.\w+)`[^\n]*:\n\n```(?:json|yaml)\n(.*?)```", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    )
    assert set(files) == {"pairs.jsonl", "corpus.jsonl", "mixture.yaml"}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    example = re.search(r"topics.jsonl +# ({.*})", files["mixture.yaml"])
    assert example is not None
    labels = ["traffic", "traffic", "weather", "weather"]
    topics = [json.loads(example[1]) | {"text": f"message {n}", "label": label} for n, label in enumerate(labels)]
    Path("topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in topics))
    words = next(words for words in commands(PAGES["README.md"]) if words[0] == "mine")
    mine = [str(retriever_folder) if word.startswith("sentence-transformers/") else word for word in words]
    assert cli.main([*mine, "--cache_dir", "cache", "--device", "cpu", "--positive_aware", "false"]) == 0
    rows = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"anchor", "positive", "negative_1"}] * 2
    small = [
        "--num_negatives",
        "1",
        "--max_length",
        "160",
        "--max_steps",
        "1",
        "--num_latents",
        "4",
        "--use_cpu",
        "true",
    ]
    small += ["--per_device_train_batch_size", "2", "--report_to", "none", "--cache_dir", "cache", "--bf16", "false"]
    for words in [words for words in commands(PAGES["README.md"]) if words[:2] == ["train", "nvembed"]]:
        stage = words[words.index("--stage") + 1]
        train = [str(llama_folder) if word == "Qwen/Qwen3-0.6B" else word for word in words]
        latents = ["--num_latents", "4"] if stage == "1" else []
        assert cli.main([*train, *small, *latents]) == 0
    assert (tmp_path / "outputs" / "stage-two" / "embedder" / "modules.json").exists()
