"""`revela-hub adapt`: from a folder of text to a verdict, a retriever and its weight of BM25."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from revela_hub.adaptation import adapt, candidates, plan
from revela_hub.cli.main import main
from revela_hub.data.sources.beir import read_queries
from revela_hub.data.sources.source import parse_sources
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import read_probe_task
from revela_hub.interrupts import Interrupted
from revela_hub.trainers.pair_tuning.data import build_text_pairs

VERDICT = re.compile(
    r"VERDICT: (BETTER|WORSE|NO DIFFERENCE) [+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\] nDCG@10 \| retriever \S+ \| bm25_weight \d\.\d"
)
Run = Callable[..., str]


def documented(name: str, doc: str, number: int) -> str:
    return (
        f'def {name}(width, height):\n    """{doc}"""\n    factor = {number} * width + 1\n    width = abs(width)\n'
        "    return width * height * factor\n"
    )


def write_code(folder: Path, functions: list[str], per_file: int = 2) -> Path:
    folder.mkdir()
    for n in range(0, len(functions), per_file):
        (folder / f"m{n // per_file:03}.py").write_text("\n\n".join(functions[n : n + per_file]))
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of 40 files with two documented functions each."""
    functions = [
        documented(f"area_{n}_{part}", f"The area number {n} of part {part} of a field.", n)
        for n in range(40)
        for part in range(2)
    ]
    return write_code(tmp_path / "code", functions)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(output: Path, code: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on the code, or on another text, and return what it prints; standard error if it fails."""

    def run(*more: str, text: Path = code, retriever: Path = retriever_folder, status: int = 0) -> str:
        words = ["--budget", "2s", "--output_dir", str(output), "--cache_dir", str(output.parent / "cache")]
        assert main(["adapt", str(text), "--retriever", str(retriever), *words, *more]) == status
        printed = capsys.readouterr()
        if not status and "--dry_run" not in more:
            assert VERDICT.fullmatch(printed.out.strip().splitlines()[-1])
        return printed.err if status else printed.out

    return run


def systems(output: Path) -> list[str]:
    return [system["name"] for system in json.loads((output / "adapt.json").read_text())["systems"]]


def shifted(inputs: candidates.Inputs, folder: Path, seconds: float) -> None:
    """A candidate that takes no time."""
    model = SentenceTransformer(inputs.options.retriever, device="cpu")
    for parameter in model.parameters():
        parameter.data += 0.5
    model.save(str(folder / "retriever"), create_model_card=False)


@pytest.fixture
def no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "CANDIDATES", {})


def test_a_verdict_a_retriever_and_a_weight(
    code: Path, output: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("--exclude", "~$*")  # lock files of Office: not a home folder
    last = printed.strip().splitlines()[-1]
    assert "natural pairs: 80 docstring" in printed
    report = json.loads((output / "adapt.json").read_text())
    names = ["base retriever", "BM25", "split identifiers", "late interaction", "trained with natural pairs"]
    assert [name.rpartition(" + ")[2] for name in systems(output)[:5]] == names and report["verdict"] in last
    weights = json.loads((output / "retriever" / "hybrid.json").read_text())
    for name in ("bm25_weight", "token_weight"):
        assert weights[name] == report[name] and weights[name] in {system[name] for system in report["systems"]}
    assert SentenceTransformer(str(output / "retriever"), device="cpu").encode_query("area").shape == (32,)
    card = (output / "retriever" / "README.md").read_text(encoding="utf-8")
    assert "nDCG@10" in card and report["cost"] in card
    assert str(tmp_path) not in (output / "adapt.json").read_text()

    # Nothing is trained or measured again. Locking changes the time of the lock in older versions of filelock.
    written = [file for file in (output / "work").rglob("*") if file.is_file() and file.name != ".lock"]
    times = {file: file.stat().st_mtime_ns for file in written}
    again = run("--exclude", "~$*")
    assert again.strip().splitlines()[-1] == last and not re.search("training with .* for", again)
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert "seed" in run("--exclude", "~$*", "--seed", "1", status=2)
    # search uses the folder as it is, and the fitted weight.
    assert main(["search", str(output), "area number 7", "--corpus", str(code), "--top_k", "1"]) == 0
    found = capsys.readouterr()
    assert ".py" in found.out and f"encodes{found.err.split(',')[1].rstrip()} (about" in printed


def test_a_slow_machine_trains_on_shorter_texts_and_exports_the_whole_length(
    output: Path, run: Run, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "training_length", lambda *_: 16)
    assert "slow machine: training texts are cut at 16 tokens" in run()
    for name, length in (("work/natural_pairs", 16), ("work/distillation", 16), (".", 128)):
        assert SentenceTransformer(str(output / name / "retriever"), device="cpu").max_seq_length == length


def test_a_static_model_has_its_own_learning_rate(
    output: Path, run: Run, static_folder: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert candidates.default_rate(str(retriever_folder)) == 5e-5
    monkeypatch.setattr(candidates, "CANDIDATES", {"natural_pairs": candidates.natural_pairs})
    run(retriever=static_folder)
    assert json.loads((output / "settings.json").read_text())["learning_rate"] == 1e-2
    trained = SentenceTransformer(str(output / "work" / "natural_pairs" / "retriever"), device="cpu")
    assert trained.max_seq_length == float("inf")
    assert candidates.default_rate(str(output)) == 1e-2  # the retriever in an output folder


def test_ctrl_c_ends_with_the_best_so_far_and_the_same_command_goes_on(
    code: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "CANDIDATES", {"natural_pairs": shifted, "distillation": shifted})
    compare = adapt.compare
    with monkeypatch.context() as patch:  # while the first candidate is measured
        patch.setattr(
            adapt, "compare", lambda base, other, task: compare(base, stop() if other.trained else other, task)
        )
        printed = run()
    assert "stopped: the verdict is on what has finished" in printed and "training with distillation" not in printed
    with monkeypatch.context() as patch:
        patch.setitem(candidates.CANDIDATES, "distillation", stop)
        printed = run()
    assert "training with natural pairs for" not in printed and "training with distillation" in printed
    assert "trained with natural pairs" in systems(output) and "trained with distillation" not in systems(output)
    last = run().splitlines()[-1]
    assert {"trained with natural pairs", "trained with distillation"} <= {*systems(output)}
    # The folder is complete in another working directory.
    monkeypatch.chdir(code)
    shutil.rmtree(output / "work" / "rankings")  # the retrievers are read again
    printed = run()
    assert not re.search("training with .* for", printed) and printed.splitlines()[-1] == last
    tested = read_probe_task(output / "work" / "probe")  # whole, for the demo and for recomputing
    assert len(tested.qrels) > len(read_probe_task(output / "work" / "dev-probe").qrels)
    printed = run("--budget", "4s")
    assert "training with natural pairs for" in printed and "training with distillation" in printed
    assert read_probe_task(output / "work" / "probe") == tested


def test_a_termination_is_no_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise Interrupted("resume with --resume_from_checkpoint last", signal.SIGTERM)

    monkeypatch.setattr(candidates, "CANDIDATES", {"natural_pairs": end, "distillation": shifted})
    assert "resume_from_checkpoint" not in run(status=143)


def test_no_training_asks_the_labelled_queries_of_the_verdict(
    output: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"anchor": f"the area number {n} of part {part} of a field.", "positive": f"area {n} {part}"}
        for n in range(40)
        for part in range(2)
    ] + [{"anchor": f"question {n}", "positive": f"passage {n}"} for n in range(120)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained: dict[str, list[str]] = {}

    def natural_pairs(inputs: candidates.Inputs, folder: Path, seconds: float) -> None:
        sources = parse_sources(inputs.options.data, held_out=str(inputs.probe))
        trained["natural"] = build_text_pairs(sources, cache_dir=tmp_path / "cache")["anchor"][:]
        left = Path(inputs.labels or "").read_text().splitlines()
        trained["labelled"] = [json.loads(line)["anchor"] for line in left]
        trained["asked"] = list(read_queries(inputs.probe).values())
        raise UserError("not trained in this test")

    monkeypatch.setattr(candidates, "CANDIDATES", {"natural_pairs": natural_pairs})
    printed = run("--labels", str(tmp_path / "pairs.jsonl"))
    assert "training with natural pairs: skipped, because not trained in this test" in printed
    asked = {*trained["asked"]}
    assert len(asked & {row["anchor"] for row in rows[:80]}) > 10 and len(trained["natural"]) > 10
    assert not asked & {anchor.lower() for anchor in trained["natural"]} and not asked & {*trained["labelled"]}
    card = (output / "retriever" / "README.md").read_text()
    assert "held-out labelled queries (test half)" in card and "raw text, and labelled pairs" in card


def test_the_language_of_bm25_is_delivered(output: Path, run: Run, no_candidates: None) -> None:
    run("--bm25_stemmer", "german", "--bm25_stopwords", "de")
    delivered = json.loads((output / "retriever" / "hybrid.json").read_text())["bm25"]
    assert (delivered["stemmer"], delivered["stopwords"]) == ("german", "de")


def test_split_identifiers_are_delivered_if_they_help(
    output: Path,
    run: Run,
    tmp_path: Path,
    no_candidates: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The retriever of random weights cannot be better; words of the docstrings are only parts of names."""
    words = "river sea stone moon iron salt wind leaf bird fish hill road lamp door rope seed".split()
    functions = [
        documented(f"{one}_{other}", f"The {one} of a {other} and of a field.", n)
        for n, (one, other) in enumerate(permutations(words, 2))
    ]
    folder = write_code(tmp_path / "names", functions)
    # The same queries on every machine. Without late interaction: random token vectors harm.
    monkeypatch.setattr(plan, "MIN_PASSAGES", len(functions))
    monkeypatch.setattr(adapt, "has_tokens", lambda _: False)
    printed = run(text=folder)
    assert re.search(r"(?m)^base .* split identifiers .* <- exported$", printed) and "VERDICT: BETTER" in printed
    assert json.loads((output / "retriever" / "hybrid.json").read_text())["bm25"]["split_identifiers"] is True
    assert json.loads((output / "adapt.json").read_text())["trained"] is False
    card = (output / "retriever" / "README.md").read_text()
    assert "with the weights of the base model, unchanged" in card
    # The score of the model alone is without BM25.
    names = (r"\*\*retriever\*\*", r"this model \+ BM25 \(weight [\d.]+, split identifiers\)")
    own, hybrid = (re.findall(rf"\| {name} \| ([\d.]+) \|", card)[0] for name in names)
    assert own < hybrid and "| base retriever |" not in card
    search = ["search", str(output), "moon_river", "--corpus", str(folder), "--top_k", "1", "--json"]
    assert main(search) == 0
    assert "def moon_river" in capsys.readouterr().out


def test_the_plan_without_training(code: Path, output: Path, run: Run, tmp_path: Path) -> None:
    assert "plan, in minutes: training with natural pairs" in run("--dry_run")
    assert "a full run needs" in run("--dry_run", "--budget", "0.001s")
    rows = [{"anchor": f"question {n}", "positive": f"passage {n % 4}"} for n in range(240)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "verdict is on queries made from the text" in run("--dry_run", "--labels", str(tmp_path / "pairs.jsonl"))
    lines = [{"_id": file.name, "text": file.read_text()} for file in sorted(code.glob("*.py"))]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert "natural pairs: 80 docstring" in run("--dry_run", "--kind", "code", text=tmp_path / "code.jsonl")
    assert not output.exists()


def test_results_of_other_text_or_another_retriever_are_not_reused(
    code: Path, output: Path, run: Run, retriever_folder: Path, no_candidates: None
) -> None:
    """The ids of queries and passages are numbers, so the rankings of an earlier text would be scored without an error."""
    run()
    verdict = (output / "adapt.json").read_bytes()
    before = (code / "m003.py").read_text()
    (code / "m003.py").write_text(before.replace("area", "size"))
    assert "task changed" in run(status=2)
    (code / "m003.py").write_text(before)
    weights = retriever_folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    assert "content of retriever changed" in run(status=2)
    assert (output / "adapt.json").read_bytes() == verdict
    save_file(tensors, weights, {"format": "pt"})
    run()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["few"], "the text has 0 candidate queries"),
        (["empty"], "no documents in empty"),
        (["code", "--lm", "/nowhere"], "/nowhere"),
        (["empty", "--labels", "labels.jsonl"], "no column 'anchor'"),  # before the text is read
        (["code", "--output_dir", "code/out"], "code/out"),
        (["code", "--bm25_stemmer", "klingon"], "'klingon' not found"),
    ],
)
def test_what_cannot_work_is_one_error_and_leaves_the_folder_free(
    code: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("Rivers carry sand. The sea is cold.")
    (tmp_path / "labels.jsonl").write_text('{"query": "rivers"}\n')
    given = ["--retriever", str(retriever_folder), "--output_dir", "out", "--budget", "2s", *words[1:]]
    assert main(["adapt", words[0], *given]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("revela-hub: error:")
    assert not (tmp_path / "out" / "settings.json").exists()
    assert not (tmp_path / "out" / "work" / "state.json").exists()  # a plan for the options of this run
