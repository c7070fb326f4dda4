"""Publish with the real client to a local Hub."""

import importlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub.errors import HfHubHTTPError
from loopback_hub import LoopbackHub, Repository
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.checkpoints import publish
from revela_hub.cli import main as cli
from revela_hub.errors import UserError
from revela_hub.hub_cards import Assembly, Check, Destination, ModelCardMetadata, Result, write_card
from revela_hub.hub_cards.assemble import assemble_part
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.modeling import RevelaForCausalLM
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones
from revela_hub.trainers.revela import REVELA

# The module, not the function of the same name.
publishing = importlib.import_module("revela_hub.hub_cards.upload")

METADATA = ModelCardMetadata(
    description="A tiny one.",
    license="apache-2.0",
    languages=("en",),
    results=(Result("SciFact", {"ndcg_at_10": 0.5}, dataset="mteb/scifact"),),
)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the verification, for tests of the upload."""
    monkeypatch.setattr(publishing, "verify", lambda *args, **options: [Check("all", True, "not looked at")])


def llama(tokenizer: PreTrainedTokenizerBase, like: LlamaForCausalLM) -> PreTrainedModel:
    return type(like)(like.config).eval()


@pytest.fixture
def checkpoint(
    hub: LoopbackHub, tmp_path: Path, tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A LoRA checkpoint of the trainer, whose two base models are on the Hub."""
    names = {"retriever": "org/base-retriever", "lm": "org/base-lm"}
    parts: dict[str, PreTrainedModel] = {"retriever": llama(bpe_tokenizer, tiny_llama).model, "lm": tiny_llama}
    for part, name in names.items():
        folder = tmp_path / part
        parts[part].save_pretrained(folder)
        bpe_tokenizer.save_pretrained(folder)
        hub.repositories[name] = Repository()
        hub.repositories[name].commit("main", {file.name: file.read_bytes() for file in folder.iterdir()}, "base")
    model = RevelaForCausalLM.from_backbones(names["retriever"], names["lm"], group_size=2)
    targets = [name for name, module in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    folder = tmp_path / "checkpoint-3"
    adapted.save_pretrained(folder)
    model.config.save_pretrained(folder)
    with_eos(bpe_tokenizer).save_pretrained(folder / "retriever_tokenizer")
    bpe_tokenizer.save_pretrained(folder / "lm_tokenizer")
    history = [{"step": step, "loss": 5.0 - step} for step in range(1, 4)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


# --- assembling


def test_no_part_keeps_a_local_path(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for part in ("retriever", "lm"):
        config[part]["_name_or_path"] = str(tmp_path / part)
    (checkpoint / "config.json").write_text(json.dumps(config))
    for part in ("retriever", "lm", "model"):
        folder = assemble_part(REVELA, checkpoint, tmp_path / f"out-{part}", Assembly(part=part)).folder
        for file in filter(Path.is_file, folder.rglob("*")):
            assert str(tmp_path) not in file.read_text(errors="ignore"), file


def test_only_model_files_are_published(
    hub: LoopbackHub, retriever_folder: Path, tmp_path: Path, unverified: None
) -> None:
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(retriever_folder, folder)
    skipped = ["optimizer.pt", "training_args.bin", "trainer_state.json", "notes.ipynb", "train.jsonl", "stray.py",
               "checkpoint-3/model.safetensors", "1_Pooling/log.csv", "runs/events.out.tfevents.1"]  # fmt: skip
    for name in [*skipped, ".env", "LICENSE"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}")
    published = publish(folder, Destination("org/x"))
    assert sorted(published.skipped) == sorted(skipped)
    there = set(hub.repositories["org/x"].files("main")) - {".gitattributes"}
    assert there == set(published.files) and {"LICENSE", "README.md", "model.safetensors"} <= there
    assert not there & {*skipped, ".env"} and not any(name.startswith(".revela_hub") for name in there)


# --- the card of a finished folder


def test_our_card_is_written_again_and_that_of_the_author_is_kept(
    retriever_folder: Path, tmp_path: Path, unverified: None
) -> None:
    folder = Path(shutil.copytree(retriever_folder, tmp_path / "embedder"))

    def published(name: str, assembly: Assembly | None = None) -> str:
        publish(folder, Destination("org/x"), assembly, dry_run=True, keep=tmp_path / name)
        return (tmp_path / name / "model" / "README.md").read_text()

    write_card(folder, ModelCardMetadata(method=REVELA, base_model="/home/ada/base"))
    assert f'SentenceTransformer("{folder.name}"' in (folder / "README.md").read_text()
    card = published("ours")
    assert 'SentenceTransformer("org/x"' in card and "2506.16552" in card and "ada" not in card
    (folder / "README.md").write_text("# My own words\n")
    assert published("own") == "# My own words\n"
    assert published("given", Assembly(metadata=METADATA)).startswith("---\n")
    with pytest.raises(UserError, match="finished model"):
        published("cast", Assembly(dtype=torch.float16))


# --- the repository


def test_nothing_is_published_if_a_check_fails(
    hub: LoopbackHub, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Check("weights", True, ""), Check("length", False, "EOS is not added")]
    monkeypatch.setattr(publishing, "verify", lambda *args, **options: rows)
    with pytest.raises(UserError, match="length: EOS is not added"):
        publish(retriever_folder, Destination("org/x"))
    assert not [request for request in hub.requests if not request.startswith("GET")]


def test_branch_pull_request_and_update(hub: LoopbackHub, retriever_folder: Path, unverified: None) -> None:
    publish(retriever_folder, Destination("org/x", private=True))
    repository = hub.repositories["org/x"]
    assert repository.private
    with pytest.raises(UserError, match="update"):
        publish(retriever_folder, Destination("org/x"), Assembly(metadata=METADATA))
    head = dict(repository.files("main"))
    own = {"LICENSE": b"mine", "docs/NOTES.md": b"mine", "handler.py": b"mine", "results_2024/mteb.json": b"mine"}
    old = ["model-00002-of-00002.safetensors", "3_Dense/config.json", "onnx/model.onnx", "pytorch_model.bin"]
    repository.commit("main", head | own | dict.fromkeys(old, b"{}"), "an earlier version")
    lines: list[str] = []
    assert publish(retriever_folder, Destination("org/x", update=True), dry_run=True).deleted == sorted(old)
    publish(retriever_folder, Destination("org/x", update=True), log=lines.append)
    assert repository.files("main") == head | own and sum("deleting" in line for line in lines) == len(old)
    publish(retriever_folder, Destination("org/x", revision="next"), Assembly(metadata=METADATA))
    assert repository.files("main") == head | own and b"apache-2.0" in repository.files("next")["README.md"]
    published = publish(retriever_folder, Destination("org/x", pull_request=True), Assembly(metadata=METADATA))
    assert str(published.url).endswith("/org/x/discussions/1") and repository.files("main") == head | own


@pytest.mark.parametrize("name", ["README.md", "LICENSE"])
def test_files_of_others_are_replaced_on_demand_only(
    hub: LoopbackHub, retriever_folder: Path, tmp_path: Path, name: str, unverified: None
) -> None:
    folder = Path(shutil.copytree(retriever_folder, tmp_path / "licensed"))
    (folder / "LICENSE").write_text("MIT")
    repository = hub.repositories["org/x"] = Repository()
    before = {name: b"my own words", "notes.txt": b"notes"}
    repository.commit("main", before, "initial commit")
    with pytest.raises(UserError, match="update"):
        publish(folder, Destination("org/x"))
    assert repository.files("main") == before
    publish(folder, Destination("org/x", update=True))
    files = repository.files("main") or {}
    assert files[name] != b"my own words" and files["notes.txt"] == b"notes"


def test_access_is_checked_before_the_work(
    hub: LoopbackHub, retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/public"] = Repository()
    hub.repositories["org/public"].commit("main", {}, "initial commit")
    monkeypatch.setattr(publishing, "_assembled", lambda *args: pytest.fail("the work has begun"))
    for destination, message in (
        (Destination("org/public", private=True), "private"),
        (Destination("org/public", private=True, revision="other"), "private"),
        (Destination("other/x"), "no write access"),
    ):
        with pytest.raises(UserError, match=message):
            publish(retriever_folder, destination)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    with pytest.raises(HfHubHTTPError):
        publish(retriever_folder, Destination("org/x"))
    for repo_id in ("a b/c", "name", "a/b/c"):
        with pytest.raises((UserError, ValueError)):
            Destination(repo_id)
    assert set(hub.repositories) == {"org/public"}


def test_a_commit_with_other_files_is_reported(hub: LoopbackHub, retriever_folder: Path, unverified: None) -> None:
    def changed(request: str) -> None:
        if request == "POST /api/models/org/x/commit/main":
            repository = hub.repositories["org/x"]
            repository.commits[repository.refs["main"]]["modules.json"] = b"[]"

    hub.after_request = changed
    with pytest.raises(UserError, match=r"modules.json differs"):
        publish(retriever_folder, Destination("org/x"))


# The requests of an upload in order. The process is killed after each of them.
STEPS = (
    "POST /api/repos/create",
    "POST /api/models/org/x/branch/next",
    "PUT /lfs/",
    "POST /api/models/org/x/commit/next",
)


def waiting(step: str, reached: threading.Event, released: threading.Event) -> Callable[[str], None]:
    def wait(request: str) -> None:
        if request.startswith(step) and not reached.is_set():
            reached.set()
            released.wait(60)

    return wait


def test_a_killed_upload_is_resumed_at_any_step(hub: LoopbackHub, retriever_folder: Path, unverified: None) -> None:
    for step in STEPS:
        destination = Destination("org/x", revision="next", update="/commit/" in step)
        hub.repositories.clear()
        hub.large.clear()
        reached, released = threading.Event(), threading.Event()
        hub.after_request = waiting(step, reached, released)
        child = os.fork()
        if not child:
            try:
                publish(retriever_folder, destination)
            finally:
                os._exit(0)
        assert reached.wait(60), step
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        hub.after_request = lambda request: None
        released.set()
        hub.requests.clear()
        stored = {f"PUT /lfs/{name}" for name in hub.large}  # files upload in parallel: others may be under way
        published = publish(retriever_folder, destination)
        repository = hub.repositories["org/x"]
        assert repository.refs["next"] == published.commit, step
        assert repository.messages.count(repository.messages[-1]) == 1, f"{step}: published twice"
        assert not stored & set(hub.requests), "sent again"
        assert {"model.safetensors", "modules.json", "README.md"} <= set(repository.files("next")), step


# --- commands


def test_publish_and_check_commands(
    hub: LoopbackHub, retriever_folder: Path, unverified: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "metadata.yaml"
    metadata.write_text("license: mit\nresults:\n  - {name: SciFact, ndcg_at_10: 0.25, queries: 3}\n")
    words = ["publish", str(retriever_folder), "org/x", "--card", str(metadata)]
    assert cli.main([*words, "--dry_run", "--timeout", "9"]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out and "org/x" not in hub.repositories
    assert cli.main(words) == 0
    assert f"{hub.endpoint}/org/x" in capsys.readouterr().out
    card = hub.repositories["org/x"].files("main")["README.md"].decode()
    assert "license: mit" in card and "| SciFact | **x** | 0.2500 |" in card
    metadata.write_text("licence: mit\n")
    assert cli.main(words) == 2
    assert "licence" in capsys.readouterr().err
    assert cli.main(["check", "org/x"]) == 0
    assert cli.main(["check", "org/absent"]) == 2
    assert cli.main(["check", "no/such/folder"]) == 2


def test_a_failed_check_is_exit_status_1(
    retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publishing, "verify", lambda *args, **options: [Check("weights", False, "NaN")])
    with pytest.raises(SystemExit, match="1"):
        cli.main(["check", str(retriever_folder), "--json"])
    assert json.loads(capsys.readouterr().out)["checks"] == [{"name": "weights", "ok": False, "detail": "NaN"}]


def test_export_does_not_replace_files_of_the_user(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "here" / "retriever" / "model.safetensors"  # such as the base model, with --output_dir .
    own.parent.mkdir(parents=True)
    own.write_bytes(b"the user's")
    assert cli.main(["export", str(checkpoint), "--output_dir", str(tmp_path / "here")]) == 2
    assert "retriever exists" in capsys.readouterr().err
    assert own.read_bytes() == b"the user's"
    new = tmp_path / "new"
    assert cli.main(["export", str(checkpoint), "--output_dir", str(new)]) == 0
    write_card(new / "retriever", METADATA)
    model = new / "retriever"
    own = {"handler.py": "mine", "LICENSE": "mine", "notes/todo.txt": "mine", ".eval_results/mine.yaml": "a: 1"}
    old = {"onnx/model.onnx": "of the old weights", "3_Dense/config.json": "{}"}
    old |= {"own.py": "from .shared import Model", "shared.py": ""}
    config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoModel": "own.Model"}}
    (model / "config.json").write_text(json.dumps(config))
    for name, text in (own | old).items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    assert cli.main(["export", str(checkpoint), "--output_dir", str(new), "--max_length", "32"]) == 0
    assert not any((model / name).exists() for name in (*old, "README.md")), "made from the old weights"
    (model / "README.md").write_text("my own card")
    assert cli.main(["export", str(checkpoint), "--output_dir", str(new)]) == 0  # exported folders may be replaced
    assert json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"] == 2048
    assert {name: (model / name).read_text() for name in own} == own
    assert (model / "README.md").read_text() == "my own card"
    assert f'SentenceTransformer("{model}")' in capsys.readouterr().out, "a handler is not code of the model"


def test_the_result_of_a_run_is_not_replaced_by_one_of_its_checkpoints(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoint.parent / "run"
    run.mkdir()
    checkpoint = checkpoint.rename(run / checkpoint.name)
    (run / "run.json").write_text("{}")
    words = ["export", str(checkpoint), "--output_dir", str(run)]
    assert cli.main(words) == 0  # the run was interrupted, and exported nothing
    assert cli.main(words) == 2
    assert f"{run / 'retriever'} exists" in capsys.readouterr().err


# --- trainers


def test_a_trainer_publishes_its_retriever_after_training(
    hub: LoopbackHub, tmp_path: Path, llama_folder: Path, texts: list[str]
) -> None:
    backbones = load_backbones(str(llama_folder), str(llama_folder), group_size=2, temperature=0.1)
    settings: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 1, "lora_rank": 2, "bf16": False}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    rows = [{"group": i, "document": ["a", "b"], "text": texts[2 * i : 2 * i + 2]} for i in range(len(texts) // 2)]
    trainer = RevelaTrainer(
        backbones.model,
        RevelaTrainingArguments(output_dir=str(tmp_path / "run"), **settings),
        retriever_tokenizer=backbones.retriever_tokenizer,
        lm_tokenizer=backbones.lm_tokenizer,
        max_length=32,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    published = trainer.push_to_hub("org/pushed", private=True)
    assert hub.repositories["org/pushed"].private
    files = hub.repositories["org/pushed"].files(str(published.commit)) or {}
    assert {"modules.json", "model.safetensors", "README.md"} <= files.keys()
    assert not any("adapter" in name or name.endswith((".bin", ".pt")) for name in files)
    assert b"org/pushed" in files["README.md"]
