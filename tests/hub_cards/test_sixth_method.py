"""Adding a method takes its folder and one entry in `METHODS`: a toy method trains, resumes, exports and publishes by the CLI.

Its folder is written to a temporary place. Everything else that a method needs has to come from its record.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertTokenizerFast

from revela_hub.cli import main as cli
from revela_hub.trainers.methods import METHODS

RECORD = '''
"""SimToy: SimCSE in a few lines."""
from revela_hub.hub_cards.method import Command, Method, Paper

TOY = Method(
    name="toy",
    title="SimToy",
    paper=Paper("SimToy: A Toy", "Ada Lovelace and Alan Turing", "2101.00001", 2021, "taught with dropout as augmentation"),
    commands={"train toy": Command("toy.command", "train a toy")},
    model_type="toy",
    folders={"embedder_of_toy": "retriever"},
    loader="toy.trainer.load_toy",
    assembler="toy.export.assemble_toy",
    models=("encoder",),
)
'''
MODELING = """
from transformers import BertConfig, BertModel


class ToyConfig(BertConfig):
    model_type = "toy"


class ToyModel(BertModel):
    config_class = ToyConfig

    def embed(self, input_ids, attention_mask):
        states = self(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1)


ToyConfig.register_for_auto_class()
ToyModel.register_for_auto_class("AutoModel")
"""
TRAINER = """
from dataclasses import dataclass, field
from typing import Any

import torch
from toy import TOY
from toy.modeling_toy import ToyConfig, ToyModel
from transformers import AutoTokenizer

from revela_hub.trainers.base.adapters import merged_copy
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.encoder_in_training import encoder_in_training
from revela_hub.trainers.base.trainer import MethodTrainer


@dataclass
class ToyTrainingArguments(RunArguments):
    temperature: float = field(default=0.1, metadata={"help": "Temperature of the similarities."})
    chunk: int = field(default=2, metadata={"help": "Texts embedded at once."})


@dataclass
class Toy:
    model: Any
    tokenizer: Any


def load_toy(folder):
    model = ToyModel.from_pretrained(folder).eval()
    return Toy(model, AutoTokenizer.from_pretrained(folder, config=model.config))


class ToyTrainer(MethodTrainer):
    method = TOY

    def __init__(self, loaded, args, **kwargs):
        self.tokenizer = loaded.tokenizer
        super().__init__(
            model=loaded.model, args=args, data_collator=self.collate, processing_class=loaded.tokenizer, **kwargs
        )

    def collate(self, rows):
        texts = [row["text"] for row in rows]
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        one, other = (torch.nn.functional.normalize(model.embed(**inputs), dim=-1) for _ in range(2))
        loss = torch.nn.functional.cross_entropy(one @ other.T / self.args.temperature, torch.arange(len(one)))
        return (loss, {}) if return_outputs else loss

    @property
    def retriever(self):
        return encoder_in_training(self.model, self.model.embed, self.tokenizer, {}, 32, "cosine")

    def exportable(self):
        return Toy(merged_copy(self.model), self.tokenizer)
"""
EXPORT = """
import torch
from toy import TOY

from revela_hub.hub_cards.assemble import Assembled, save_reference
from revela_hub.hub_cards.export import export_retriever
from transformers import BertConfig, BertModel


def assemble_toy(loaded, checkpoint, folder, assembly):
    model, tokenizer = loaded.model, loaded.tokenizer
    fields = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "auto_map")}
    plain = BertModel(BertConfig(**fields)).eval()
    plain.load_state_dict(model.state_dict())
    prompts = {"query": "", "document": ""}
    length = assembly.max_length or 32
    export_retriever(plain, tokenizer, folder, pooling="mean", prompts=prompts, max_length=length, dtype=assembly.dtype)

    def embed(ids, mask, prompt):
        return torch.nn.functional.normalize(model.embed(ids, mask), dim=-1)

    return Assembled(folder, TOY, reference=save_reference(embed, tokenizer, prompts, folder))
"""
COMMAND = '''
"""Trains a toy.

Examples:
  revela-hub train toy --data path/to/texts --encoder google-bert/bert-base-uncased
"""
from dataclasses import dataclass, field

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.text.passages import build_passages
from revela_hub.trainers.base.arguments import ProbeArguments, TextArguments
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from toy import TOY
from toy.trainer import ToyTrainer, ToyTrainingArguments, load_toy


@dataclass(kw_only=True)
class Arguments(ProbeArguments, TextArguments, ToyTrainingArguments):

    encoder: str = field(metadata={"help": "Encoder to train."})
    output_dir: str = field(default="outputs/toy", metadata={"help": "Output folder."})


def run(arguments):
    print(f"toy: {train(arguments)}")


def train(arguments, **options):
    with open_run(TOY, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        rows, report = run.read(*_read(arguments, held_out.folder))
        loaded = load_toy(arguments.encoder)
        trainer = ToyTrainer(loaded, arguments, train_dataset=rows, retrieval_task=held_out.task, **options)
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output


def _read(arguments, held_out):
    report = ReadReport()
    return build_passages(arguments.sources(held_out), cache_dir=arguments.cache_dir, report=report), report
'''
FILES = {
    "__init__.py": RECORD,
    "modeling_toy.py": MODELING,
    "trainer.py": TRAINER,
    "export.py": EXPORT,
    "command.py": COMMAND,
}


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], int]]:
    """The command line of a package with the sixth method: its folder, and its line in the list."""
    for name, text in FILES.items():
        (tmp_path / "toy").mkdir(exist_ok=True)
        (tmp_path / "toy" / name).write_text(text.lstrip("\n"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(METHODS, "toy", importlib.import_module("toy").TOY)
    importlib.reload(cli)
    yield lambda words: cli.main(list(map(str, words)))
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]
    importlib.reload(cli)


@pytest.fixture
def run(tmp_path: Path, main: Callable[[list[str]], int], wordpiece_tokenizer: BertTokenizerFast) -> list[str]:
    """The command that trains a toy into `tmp_path / "out"`."""
    from toy.modeling_toy import ToyConfig, ToyModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(wordpiece_tokenizer), max_position_embeddings=48, pad_token_id=0, **sizes)
    folder, text = tmp_path / "encoder", tmp_path / "text"
    ToyModel(ToyConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})).save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    text.mkdir()
    for number in range(8):
        sentences = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "
        (text / f"{number}.txt").write_text(f"Document {number}. " + sentences * 3)
    options = {
        "--data": text, "--encoder": folder, "--output_dir": tmp_path / "out", "--cache_dir": tmp_path / "cache",
        "--max_steps": 2, "--save_steps": 1, "--per_device_train_batch_size": 4, "--bf16": "false",
        "--report_to": "none", "--probe": "none", "--disable_tqdm": "true", "--gradient_accumulation_steps": 1,
    }  # fmt: skip
    return ["train", "toy", *(str(word) for pair in options.items() for word in pair)]


def test_the_command_line_knows_it(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "train toy" in capsys.readouterr().out
    assert main(["train", "toy", "--help"]) == 0
    short = capsys.readouterr().out
    assert "--chunk" in short and "--temperature" in short and "--adam_beta1" not in short
    assert main(["train", "toy", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "Trains a toy." in shown and "--temperature" in shown and "--probe_queries" in shown
    assert main(["train", "to"]) == 2 and "toy" in capsys.readouterr().err


def test_it_trains_resumes_and_writes_a_card(
    tmp_path: Path, run: list[str], main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "embedder_of_toy").mkdir(parents=True)
    (out / "embedder_of_toy" / "notes.txt").write_text("the user's")
    assert main(run) == 2 and "contains embedder_of_toy, which no training run wrote" in capsys.readouterr().err
    (out / "embedder_of_toy" / "notes.txt").unlink()
    assert main(run) == 0
    card = (out / "embedder_of_toy" / "README.md").read_text()
    assert "taught with dropout as augmentation" in card and "2101.00001" in card and "lovelace2021simtoy" in card
    assert "SentenceTransformer" in card and "revela-hub train toy --config" in card
    assert SentenceTransformer(str(out / "embedder_of_toy"), device="cpu").encode(["a fox"]).shape == (1, 16)
    resume = [*run, "--resume_from_checkpoint", "last", "--max_steps", "3"]
    assert main([*resume, "--temperature", "0.2"]) == 0
    printed = capsys.readouterr()
    assert "temperature 0.2 (before: 0.1)" in printed.err and "resuming from" in printed.out
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3


def test_it_is_exported_checked_and_published(
    tmp_path: Path,
    run: list[str],
    main: Callable[[list[str]], int],
    hub: LoopbackHub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(run) == 0
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert main(["export", checkpoint, "--output_dir", tmp_path / "exported"]) == 0
    exported = tmp_path / "exported" / "embedder_of_toy"
    assert f'embedder_of_toy: SentenceTransformer("{exported}"' in capsys.readouterr().out
    live = tmp_path / "out" / "embedder_of_toy" / "model.safetensors"
    assert (exported / "model.safetensors").read_bytes() == live.read_bytes()
    assert main(["check", exported]) == 0

    assert main(["publish", checkpoint, "org/toy"]) == 0
    files = hub.repositories["org/toy"].files("main")
    assert files is not None and {"modules.json", "model.safetensors", "README.md"} <= set(files)
    assert b"2101.00001" in files["README.md"] and b"SentenceTransformer" in files["README.md"]
    assert main(["publish", checkpoint, "org/lm", "--part", "lm"]) == 2
    assert "SimToy has no part lm" in capsys.readouterr().err


def test_it_takes_five_files() -> None:
    """And a line in the list of methods."""
    assert len(FILES) == 5
