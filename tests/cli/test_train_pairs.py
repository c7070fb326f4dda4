"""`train pairs`: labelled and natural pairs, measured on queries that are held out."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from revela_hub.cli.main import main
from revela_hub.data import read_beir

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "retriever"
SHORT = ["--max_steps", "4", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--report_to", "none"]


def functions(number: int) -> list[str]:
    """Two functions with docstrings."""
    return [
        f'def area_{number}_{part}(width, height):\n    """The area number {number} of part {part} of a field."""\n'
        f"    factor = {number} * {part} + 1\n    width = abs(width)\n    return width * height * factor\n"
        for part in range(2)
    ]


def test_half_of_the_natural_pairs_of_a_short_text_measure_and_the_others_train(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").mkdir()
    for n in range(40):
        (tmp_path / "code" / f"m{n}.py").write_text("\n\n".join(functions(n)))
    output = tmp_path / "out"
    options = ["--data", str(tmp_path / "code"), "--retriever", str(retriever_folder), "--output_dir", str(output)]
    options += [*SHORT, "--cache_dir", str(tmp_path / "cache")]
    assert main(["train", "pairs", *options]) == 0
    assert "Training " in capsys.readouterr().out
    from datasets import Dataset

    files = (tmp_path / "cache" / "revela_hub").glob("generator/*text-pairs-*/*/*.arrow")
    rows, everything = sorted((Dataset.from_file(str(file)) for file in files), key=len)
    asked = set(read_beir(output / "probe").queries.values())
    assert len(asked) == len(rows) == 40 and len(everything) == 80 and not asked & set(rows["anchor"])
    for row in rows:
        assert row["anchor"].startswith("The area number") and row["anchor"] not in row["positive"]
        n, part = row["anchor"].split()[3], row["anchor"].split()[6]
        assert f"def area_{n}_{part}(" in row["positive"]


def test_a_short_text_is_trained_on_without_a_probe(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text("\n\n".join(text for n in range(12) for text in functions(n)))
    options = [
        "--data",
        str(tmp_path / "code.py"),
        "--retriever",
        str(retriever_folder),
        "--cache_dir",
        str(tmp_path / "c"),
    ]
    assert main(["train", "pairs", *options, "--output_dir", str(tmp_path / "out"), *SHORT]) == 0
    assert "no evaluation: the text has 24 natural pairs, fewer than 40" in capsys.readouterr().out
    assert (tmp_path / "out" / "retriever" / "modules.json").is_file()


def labelled(number: int) -> str:
    """Pairs in JSON lines."""
    words = "fox dog river sea mountain lazy quick brown sediment layer".split()
    rows = [
        {
            "anchor": f"where is {words[n % 10]} {n}",
            "positive": f"{words[n % 10]} {n} is {words[n // 10 % 10]} to the sea",
        }
        for n in range(number)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.slow
def test_labelled_pairs_are_held_out_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "pairs.jsonl", tmp_path / "out"
    file.write_text(labelled(220))
    options = ["--pairs", str(file), "--retriever", str(QUICKSTART), "--output_dir", str(output), *SHORT]
    options += ["--eval_steps", "2", "--learning_rate", "1e-3"]
    assert main(["train", "pairs", *options]) == 0
    out = capsys.readouterr().out
    assert "220 pairs" in out and "held out for evaluation: 22 queries" in out and "Training " in out
    task = read_beir(output / "probe")
    assert len(task.queries) == 22
    card = (output / "retriever" / "README.md").read_text()
    assert main(["publish", str(output), "me/tuned", "--dry_run"]) == 0
    assert "me/tuned" in capsys.readouterr().out
    assert "2101.06983" in card and str(tmp_path) not in card
    assert SentenceTransformer(str(output / "retriever"), device="cpu").encode_query(["a river"]).shape[0] == 1
