"""`revela-hub adapt`: from a folder of text to a verdict, a retriever and its weight of BM25."""

import errno
import json
import re
import shutil
import signal
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from revela_hub.adaptation import adapt, candidates
from revela_hub.adaptation.adapt import training_length
from revela_hub.cli.commands.adapt import seconds_of
from revela_hub.cli.main import main
from revela_hub.data.sources.queries import read_queries
from revela_hub.data.sources.source import parse_sources
from revela_hub.demo.collection import Report
from revela_hub.errors import UserError
from revela_hub.evaluation.probe_folder import read_probe_task
from revela_hub.files import claim
from revela_hub.interrupts import Interrupted, status_of
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.base.run import LOCK, lock_output
from revela_hub.trainers.pair_tuning.data import build_text_pairs

VERDICT = re.compile(
    r"VERDICT: (BETTER|WORSE|NO DIFFERENCE) [+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\] nDCG@10 \| retriever \S+ \| bm25_weight \d\.\d"
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of 40 files with two documented functions each."""
    folder = tmp_path / "code"
    folder.mkdir()
    for n in range(40):
        functions = [
            f'def area_{n}_{part}(width, height):\n    """The area number {n} of part {part} of a field."""\n'
            f"    factor = {n} * {part} + 1\n    width = abs(width)\n    return width * height * factor\n"
            for part in range(2)
        ]
        (folder / f"m{n}.py").write_text("\n\n".join(functions))
    return folder


def options(code: Path, retriever: Path, output: Path, *more: str) -> list[str]:
    budget = ["--budget", "2s", "--output_dir", str(output), "--cache_dir", str(output.parent / "cache")]
    return ["adapt", str(code), "--retriever", str(retriever), *budget, *more]


def test_a_verdict_a_retriever_and_a_weight(
    code: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = options(code, retriever_folder, output, "--exclude", "~$*")  # lock files of Office: not a home folder
    assert main(words) == 0
    printed = capsys.readouterr().out
    last = printed.strip().splitlines()[-1]
    assert VERDICT.fullmatch(last), last
    assert "natural pairs: 80 docstring" in printed
    report = json.loads((output / "adapt.json").read_text())
    names = ["base retriever", "base, identifiers split", "base, late interaction", "natural pairs", "distillation"]
    assert [system["name"] for system in report["systems"]][:5] == names
    weights = json.loads((output / "hybrid.json").read_text())
    assert weights["token_weight"] == report["token_weight"]
    assert report["token_weight"] in {system["token_weight"] for system in report["systems"]}
    assert report["verdict"] in last
    assert report["cost"] in (output / "retriever" / "README.md").read_text()
    assert json.loads((output / "hybrid.json").read_text())["bm25_weight"] == report["bm25_weight"]
    assert SentenceTransformer(str(output / "retriever"), device="cpu").encode_query("area").shape == (32,)
    card = (output / "retriever" / "README.md").read_text()
    assert str(tmp_path) not in card + (output / "adapt.json").read_text()
    assert "nDCG@10" in card

    # Nothing is trained or measured again, also in a folder of a version without some of the settings.
    settings = json.loads((output / "settings.json").read_text())
    del settings["bm25_stemmer"], settings["bm25_stopwords"]
    (output / "settings.json").write_text(json.dumps(settings))
    # Locking changes the time of the lock in older versions of filelock.
    written = [file for file in (output / "work").rglob("*") if file.is_file() and file.name != ".lock"]
    times = {file: file.stat().st_mtime_ns for file in written}
    assert main(words) == 0
    again = capsys.readouterr().out
    assert again.strip().splitlines()[-1] == last
    assert "training for" not in again
    assert {file: file.stat().st_mtime_ns for file in times} == times

    card = (output / "retriever" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"Training all candidates took \d+ s on ", card)

    # search uses the folder as it is, and the fitted weight.
    assert main(["search", str(output), "area number 7", "--corpus", str(code), "--top_k", "1"]) == 0
    assert "m" in capsys.readouterr().out
    assert main([*words, "--seed", "1"]) == 2
    assert "holds an adaptation with other settings (--seed 0 -> 1)" in capsys.readouterr().err


def test_a_slow_machine_trains_on_shorter_texts_and_exports_the_whole_length(
    code: Path,
    retriever_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = SentenceTransformer(str(retriever_folder), device="cpu").max_seq_length
    assert training_length(256, 600.0, 0.01) == 256
    assert (
        training_length(256, 128.0, 0.1) == 128
    )  # time for 10 steps of 32 pairs, half of the steps that it should have
    assert training_length(256, 1.0, 1.0) == 64
    assert training_length(32, 1.0, 1.0) == 32

    monkeypatch.setattr("revela_hub.adaptation.adapt.training_length", lambda *_: 16)
    output = tmp_path / "out"
    assert main(options(code, retriever_folder, output)) == 0
    assert "slow machine: training texts are cut at 16 tokens" in capsys.readouterr().out
    for run in ("natural_pairs", "distillation"):
        trained = SentenceTransformer(str(output / "work" / run / "retriever"), device="cpu")
        assert trained.max_seq_length == 16
    assert SentenceTransformer(str(output / "retriever"), device="cpu").max_seq_length == whole


def test_a_static_model_has_its_own_learning_rate(
    code: Path,
    static_folder: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert candidates.default_rate(str(retriever_folder)) == 5e-5
    monkeypatch.setattr(adapt, "CANDIDATES", {"natural_pairs": candidates.natural_pairs})
    output = tmp_path / "out"
    assert main(options(code, static_folder, output)) == 0
    assert VERDICT.search(capsys.readouterr().out)
    assert json.loads((output / "settings.json").read_text())["learning_rate"] == 1e-2
    trained = SentenceTransformer(str(output / "work" / "natural_pairs" / "retriever"), device="cpu")
    assert trained.max_seq_length == float("inf")
    assert candidates.default_rate(str(output)) == 1e-2  # the retriever in an output folder


def trained(inputs: candidates.Inputs, seconds: float) -> Path:
    """A candidate that takes no time."""
    model = SentenceTransformer(inputs.retriever, device="cpu")
    for parameter in model.parameters():
        parameter.data += 0.5
    folder = inputs.output / "trained" / "retriever"
    model.save(str(folder), create_model_card=False)
    return folder


def test_ctrl_c_while_a_candidate_is_measured(
    code: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapt, "CANDIDATES", {"natural_pairs": trained, "distillation": trained})
    monkeypatch.chdir(tmp_path)
    output = Path("out")

    def run() -> tuple[str, list[str]]:
        assert main(options(code, retriever_folder, output)) == 0
        report = json.loads((output / "adapt.json").read_text())
        return capsys.readouterr().out, [system["name"] for system in report["systems"]]

    measured: list[str] = []

    def stop(*given: Any) -> Any:
        measured.append("the base, and then a candidate")
        if len(measured) == 2:
            raise KeyboardInterrupt
        return retrieval_run(*given)

    retrieval_run = adapt.retrieval_run
    with monkeypatch.context() as patch:
        patch.setattr(adapt, "retrieval_run", stop)
        printed, systems = run()
    assert "stopped: the verdict is on what has finished" in printed
    assert VERDICT.fullmatch(printed.strip().splitlines()[-1])
    assert "distillation: training" not in printed and "natural pairs" not in systems
    printed, systems = run()
    assert "natural pairs: training" not in printed and "distillation: training" in printed
    assert {"natural pairs", "distillation"} <= {*systems}

    # The folder is complete in another place, and in another working directory.
    verdict = [line.partition(" | ")[0] for line in printed.splitlines()[-1:]]
    output = (tmp_path / "out").rename(tmp_path / "moved")
    monkeypatch.chdir(code)
    shutil.rmtree(output / "work" / "rankings")  # the retrievers are read again
    printed, again = run()
    assert "training for" not in printed and again == systems
    assert [line.partition(" | ")[0] for line in printed.splitlines()[-1:]] == verdict


def test_a_candidate_that_is_refused_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(inputs: candidates.Inputs, seconds: float) -> Path:
        raise UserError("it compares by dot product")

    monkeypatch.setattr(adapt, "CANDIDATES", {"natural_pairs": refuse})
    inputs: Any = SimpleNamespace(output=tmp_path, labels=None, lm=None, static=False)
    said: list[str] = []
    adaptation = adapt.Adaptation(inputs, 1.0, said.append, [])
    adaptation.try_candidates()
    assert said[-1] == "natural pairs: skipped, because it compares by dot product"


def test_ctrl_c_while_candidates_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "average", stop)
    monkeypatch.setattr(adapt.Adaptation, "_load", lambda *_: None)
    inputs: Any = SimpleNamespace(output=tmp_path)
    base, *trained = (
        SimpleNamespace(name=name, folder="", mean=lambda _, mean=mean: mean)
        for name, mean in (("base retriever", 0.1), ("natural pairs", 0.2), ("distillation", 0.3))
    )
    systems: Any = [base, *trained]
    adaptation = adapt.Adaptation(inputs, 1.0, lambda line: None, systems)
    adaptation.dev = None  # type: ignore[assignment]
    adaptation.average()
    assert adaptation.stopped and adaptation.systems == [base, *trained]


def test_labels_of_few_passages_are_not_held_out(
    code: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"anchor": f"question {n}", "positive": f"passage {n % 4}"} for n in range(240)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = ["--labels", str(tmp_path / "pairs.jsonl"), "--dry_run"]
    assert main(options(code, retriever_folder, tmp_path / "out", *labels)) == 0
    assert "the verdict is on queries made from the text" in capsys.readouterr().out


def test_no_training_asks_the_labelled_queries_of_the_verdict(
    code: Path, retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"anchor": f"the area number {n} of part {part} of a field.", "positive": f"area {n} {part}"}
        for n in range(40)
        for part in range(2)
    ] + [{"anchor": f"question {n}", "positive": f"passage {n}"} for n in range(120)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained: dict[str, list[str]] = {}

    def natural_pairs(inputs: candidates.Inputs, seconds: float) -> Path:
        sources = parse_sources(inputs.data, held_out=str(inputs.probe))
        trained["natural"] = build_text_pairs(sources, cache_dir=tmp_path / "cache")["anchor"][:]
        trained["labelled"] = [
            json.loads(line)["anchor"] for line in Path(inputs.labels or "").read_text().splitlines()
        ]
        trained["asked"] = list(read_queries(inputs.probe).values())
        raise UserError("not trained in this test")

    monkeypatch.setattr(adapt, "CANDIDATES", {"natural_pairs": natural_pairs})
    output = tmp_path / "out"
    assert main(options(code, retriever_folder, output, "--labels", str(tmp_path / "pairs.jsonl"))) == 0
    asked = {*trained["asked"]}
    assert len(asked & {row["anchor"] for row in rows[:80]}) > 10 and len(trained["natural"]) > 10
    assert not asked & {anchor.lower() for anchor in trained["natural"]} and not asked & {*trained["labelled"]}
    card = (output / "retriever" / "README.md").read_text()
    assert "held-out labelled queries (test half)" in card and "raw text, and labelled pairs" in card


def test_the_language_of_bm25_is_delivered_and_used(
    code: Path, retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[BM25Settings] = []
    made = BM25.__init__

    def noted(self: BM25, texts: Any, settings: BM25Settings | None = None, **options: Any) -> None:
        used.append(settings or BM25Settings())
        made(self, texts, settings, **options)

    monkeypatch.setattr(BM25, "__init__", noted)
    monkeypatch.setattr(adapt, "CANDIDATES", {"distillation": candidates.distillation})
    output = tmp_path / "out"
    german = ["--bm25_stemmer", "german", "--bm25_stopwords", "de"]
    assert main(options(code, retriever_folder, output, *german)) == 0
    settings = BM25Settings(stemmer="german", stopwords="de")
    split = replace(settings, split_identifiers=True)
    # Checked, measured without and with split identifiers, and the teacher; the training reports its own probe.
    assert used.count(settings) + used.count(split) == 4 and used.index(split) == 2
    assert main(["search", str(output), "area", "--corpus", str(code)]) == 0
    delivered = Report.read(output / "adapt.json").bm25
    assert delivered == used[-1] and delivered in (settings, split)
    assert main(["search", str(output), "area", "--corpus", str(code), "--bm25_stemmer", "none"]) == 0
    assert used[-1] == replace(delivered, stemmer="none")


def test_split_identifiers_are_delivered_if_they_help(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retriever of random weights cannot be better; words of the docstrings are only parts of names."""
    folder, output = tmp_path / "code", tmp_path / "out"
    folder.mkdir()
    words = "river sea stone moon iron salt wind leaf bird fish hill road lamp door rope seed".split()
    functions = [
        f'def {one}_{other}(width, height):\n    """The {one} of a {other} and of a field."""\n'
        f"    factor = {n} * width + 1\n    width = abs(width)\n    return width * height * factor\n"
        for n, (one, other) in enumerate(permutations(words, 2))
    ]
    for n in range(0, len(functions), 2):
        (folder / f"m{n:03}.py").write_text("\n\n".join(functions[n : n + 2]))
    monkeypatch.setattr("revela_hub.adaptation.adapt.CANDIDATES", {})
    # The same queries on every machine. Without late interaction: random token vectors harm.
    monkeypatch.setattr("revela_hub.adaptation.adapt.FEWEST_PASSAGES", len(functions))
    monkeypatch.setattr("revela_hub.adaptation.adapt.has_tokens", lambda _: False)
    assert main(options(folder, retriever_folder, output)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^base, identifiers split .* <- exported$", printed)
    assert "VERDICT: BETTER" in printed
    assert json.loads((output / "hybrid.json").read_text())["bm25"]["split_identifiers"] is True
    assert Report.read(output / "adapt.json").is_base
    card = (output / "retriever" / "README.md").read_text()
    assert "The base retriever, unchanged" in card
    # BM25 is not published with the model: the model's own score is without it.
    names = (
        r"\*\*retriever\*\*",
        r"this model, with BM25 \(weight [\d.]+ and split identifiers\)",
        "base retriever alone",
    )
    own, hybrid, base = (re.findall(rf"\| {name} \| ([\d.]+) \|", card)[0] for name in names)
    assert own == base < hybrid
    # The metadata has five decimals and the table four: rounding the five again may give another last digit.
    (value,) = re.findall(r"value: ([\d.e-]+)", card)
    assert float(value) == pytest.approx(float(own), abs=6e-5)
    search = ["search", str(output), "moon_river", "--corpus", str(folder), "--top_k", "1", "--json"]
    assert main(search) == 0
    assert "def moon_river" in capsys.readouterr().out


def test_ctrl_c_ends_with_the_best_so_far_and_the_same_command_goes_on(
    code: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"

    def stop(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapt, "CANDIDATES", {"natural_pairs": trained, "distillation": trained})
    with monkeypatch.context() as patch:
        patch.setitem(adapt.CANDIDATES, "distillation", stop)
        assert main(options(code, retriever_folder, output)) == 0
    printed = capsys.readouterr().out
    assert "stopped: the verdict is on what has finished" in printed
    assert VERDICT.fullmatch(printed.strip().splitlines()[-1])
    assert main(options(code, retriever_folder, output)) == 0
    printed = capsys.readouterr().out
    assert "natural pairs: training" not in printed
    assert "distillation: training" in printed


def test_the_plan_without_training(
    code: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = options(code, retriever_folder, output, "--dry_run")
    words[words.index("--budget") + 1] = "60s"
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "plan, in minutes: natural pairs" in printed.out
    assert " documents" not in printed.err  # nothing was skipped; the number of documents is in the first line
    assert not output.exists()
    (code / "empty.py").touch()
    assert main(words) == 0
    assert "\nskipped: 1 empty\n" in f"\n{capsys.readouterr().err}"

    words[words.index("--budget") + 1] = "0.001s"
    assert main(words) == 0
    small = r"the budget is too small .*: measuring alone takes about \d.\d minutes, .*; use --budget \d+m or more"
    assert re.search(small, capsys.readouterr().out)


def test_results_of_other_text_or_another_retriever_are_not_reused(
    code: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ids of queries and passages are numbers, so the rankings of an earlier text would be scored without an error."""
    monkeypatch.setattr("revela_hub.adaptation.adapt.CANDIDATES", {})
    output = tmp_path / "out"
    assert main(options(code, retriever_folder, output)) == 0
    verdict = (output / "adapt.json").read_bytes()
    capsys.readouterr()
    before = (code / "m3.py").read_text()
    (code / "m3.py").write_text(before.replace("area", "size"))
    for more in ([], ["--dry_run"]):
        assert main(options(code, retriever_folder, output, *more)) == 2
        assert "the text or the labels have changed since the earlier run" in capsys.readouterr().err
    assert (output / "adapt.json").read_bytes() == verdict

    (code / "m3.py").write_text(before)
    weights = retriever_folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    assert main(options(code, retriever_folder, output)) == 2
    assert f"--retriever {retriever_folder} changed since the adaptation in {output}" in capsys.readouterr().err
    save_file(tensors, weights, {"format": "pt"})
    assert main(options(code, retriever_folder, output)) == 0


def test_a_folder_is_used_by_one_process(
    code: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    (claim(output) / "work").mkdir()
    with lock_output(output, output / "work" / LOCK):
        assert main(options(code, retriever_folder, output)) == 2
    assert f"--output_dir {output} is in use" in capsys.readouterr().err
    assert sorted(path.name for path in (output / "work").iterdir()) == [LOCK]


@pytest.mark.parametrize("failing", ["write_probe", pytest.param("write_beir", marks=pytest.mark.exhaustive)])
def test_a_probe_that_was_not_written_completely_is_written_again(
    code: Path, retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr("revela_hub.adaptation.adapt.CANDIDATES", {})
    output = tmp_path / "out"
    place = {"write_probe": "revela_hub.adaptation.adapt", "write_beir": "revela_hub.evaluation.probe_folder"}[failing]

    def full(task: object, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.jsonl").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"{place}.{failing}", full)
        assert main(options(code, retriever_folder, output)) == 2
    assert not (output / "work" / "probe").exists()
    assert main(options(code, retriever_folder, output)) == 0
    assert read_probe_task(output / "work" / "probe").queries


def test_the_average_of_two_retrievers(retriever_folder: Path, tmp_path: Path) -> None:
    one = SentenceTransformer(str(retriever_folder), device="cpu")
    other = SentenceTransformer(str(retriever_folder), device="cpu")
    for parameter in other.parameters():
        parameter.data += 0.5
    folder = tmp_path / "mean"
    candidates.average([SentenceTransformer(str(retriever_folder), device="cpu"), other], folder)
    mean = SentenceTransformer(str(folder), device="cpu")
    for a, b in zip(one.parameters(), mean.parameters(), strict=True):
        assert (b - a - 0.25).abs().max() < 1e-5


def test_the_average_of_tied_weights(tmp_path: Path, wordpiece_tokenizer: Any) -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=len(wordpiece_tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(tmp_path / "t5")
    wordpiece_tokenizer.save_pretrained(tmp_path / "t5")
    one, other, first = (load_retriever(str(tmp_path / "t5")) for _ in range(3))
    for parameter in other.parameters():
        parameter.data += 0.5
    candidates.average([one, other], tmp_path / "mean")
    for a, b in zip(first.parameters(), one.parameters(), strict=True):
        assert (b - a - 0.25).abs().max() < 1e-5


@pytest.mark.parametrize(("functions", "skipped"), [(21, "natural pairs: skipped"), (25, "distillation: skipped")])
def test_a_candidate_with_too_little_text_is_skipped(
    functions: int, skipped: str, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    documented = [
        f'def area_{n}(width, height):\n    """The area number {n} of a field."""\n    width = abs(width) + {n}\n'
        f"    height = abs(height) + {n}\n    factor = width + {n} if width else {n}\n    return width * height * factor\n"
        for n in range(functions)
    ]
    (tmp_path / "code" / "a.py").write_text("\n\n".join(documented))
    assert main(options(tmp_path / "code", retriever_folder, tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert skipped in printed
    assert VERDICT.fullmatch(printed.strip().splitlines()[-1])


def test_a_termination_is_no_ctrl_c(tmp_path: Path) -> None:
    said: list[object] = []
    inputs = candidates.Inputs("r", ["d"], tmp_path / "probe", tmp_path, None, None, 0, 10, None, None, {})
    adaptation = adapt.Adaptation(inputs, 1.0, said.append)
    with pytest.raises(Interrupted) as caught, adaptation._ending_on_ctrl_c():
        raise Interrupted("resume with --resume_from_checkpoint last", signal.SIGTERM)
    assert str(caught.value) == "" and status_of(caught.value) == 143  # the command line adds what adapt offers
    assert not said and not adaptation.stopped
    with adaptation._ending_on_ctrl_c():
        raise Interrupted("saved", signal.SIGINT)
    assert adaptation.stopped


@pytest.mark.parametrize("budget", ["30", "0m", "m", "-5m", "5d"])
def test_a_budget_without_a_unit_is_a_clear_error(budget: str) -> None:
    with pytest.raises(UserError, match="is not a duration"):
        seconds_of(budget)


def test_json_lines_of_code_are_read_as_code(
    code: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"_id": file.name, "text": file.read_text()} for file in sorted(code.glob("*.py"))]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["adapt", str(tmp_path / "code.jsonl"), "--kind", "code", "--retriever", str(retriever_folder), "--dry_run"]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0
    assert "natural pairs: 80 docstring" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["few"], "the text has 0 candidate queries"),
        (["empty"], "no documents in empty"),
        (["code", "--lm", "/nowhere"], "cannot load the language model '/nowhere': no such folder"),
        (["code", "--labels", "nowhere.jsonl"], "nowhere.jsonl"),
        (["code", "--labels", "labels.jsonl"], "no column 'anchor'"),
        (["empty", "--labels", "labels.jsonl"], "no column 'anchor'"),  # before the text is read
        (["code", "--example_queries", "nowhere.txt"], "nowhere.txt"),
        (["code", "--retriever", "./nowhere"], "no such folder"),
        (["code", "--output_dir", "code/out"], "code/out"),
        (["code", "--output_dir", "code/out", "--dry_run"], "code/out"),
        (["code", "--output_dir", "code/out", "--exclude", "out", "m*"], "no documents in code: skipped 41 excluded"),
        (["code", "--bm25_stemmer", "klingon"], "unknown stemmer 'klingon'"),
        (["code", "--bm25_stopwords", "klingon"], "no stop words for 'klingon'"),
    ],
)
def test_what_cannot_work_is_one_clear_error_and_leaves_the_folder_free(
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
    given = ["--retriever", str(retriever_folder), "--output_dir", "out", "--budget", "2s", *words]
    assert main(["adapt", words[0], *[word for word in given if word != words[0]]]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("revela-hub: error:")
    assert not (tmp_path / "out" / "settings.json").exists()
    assert not (tmp_path / "out" / "work" / "state.json").exists()  # sizes for the options of this run
