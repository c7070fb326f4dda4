"""Publish with the real client to a local Hub."""

import errno
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from clean_environment import make_environment
from huggingface_hub import HfApi
from loopback_hub import READER, WRITER, LoopbackHub, Repository
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.checkpoints import publish
from revela_hub.cli import main as cli
from revela_hub.data.own_folder import is_ours
from revela_hub.errors import UserError
from revela_hub.hub_cards import Assembly, Check, Destination, ModelCardMetadata, Result, with_eos, write_card
from revela_hub.hub_cards.assemble import assemble_part, assemble_parts
from revela_hub.hub_cards.repository import hub_errors
from revela_hub.modeling import RevelaForCausalLM
from revela_hub.trainers.revela import REVELA

# The module, not the function of the same name.
publishing = importlib.import_module("revela_hub.hub_cards.upload")

METADATA = ModelCardMetadata(
    description="A tiny one.",
    license="apache-2.0",
    languages=("en",),
    results=(Result("SciFact", {"ndcg_at_10": 0.5}, dataset="mteb/scifact"),),
)

# Loads the models by id and runs the code in the card, in an environment without this package.
READER_CODE = """
import json, sys
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM
texts, code, out = json.loads(sys.argv[1])
exec(code)
try:
    import revela_hub
except ImportError:
    pass
else:
    raise SystemExit("the environment is not clean")
retriever = SentenceTransformer("org/retriever", device="cpu")
adapter = SentenceTransformer("org/adapter", device="cpu")
model, loading = AutoModel.from_pretrained("org/both", trust_remote_code=True, output_loading_info=True)
assert not any(loading.values()), loading
assert type(model).__name__ == "RevelaForCausalLM" and type(model).__module__.startswith("transformers_modules")
lm, loading = AutoModelForCausalLM.from_pretrained("org/lm", output_loading_info=True)
assert not any(loading.values()), loading
ids = torch.arange(2, 12)[None]
with torch.no_grad():
    logits = lm(input_ids=ids).logits
    both = model.lm(input_ids=ids).logits
np.savez(out, query=retriever.encode_query(texts), adapter=adapter.encode_query(texts), lm=logits, both=both)
"""


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the verification, for tests of the upload, and return the folders to verify."""
    folders: list[Path] = []

    def verify(folder: Path, **options: object) -> list[Check]:
        folders.append(Path(folder))
        return [Check("all", True, "not looked at")]

    monkeypatch.setattr(publishing, "verify", verify)
    return folders


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


@pytest.mark.slow
def test_all_parts_load_in_a_clean_environment(
    hub: LoopbackHub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    retriever = publish(
        checkpoint, Destination("org/retriever", tag="v1", collection="Tiny ones"), Assembly(metadata=METADATA)
    )
    assert retriever.commit == hub.repositories["org/retriever"].refs["v1"]
    assert list(hub.collections.values()) == [["org/retriever"]]
    # Skips the verification of downloads, because the clean environment below loads them.
    verify = publishing.verify
    monkeypatch.setattr(
        publishing, "verify", lambda folder, **k: [] if "revela-hub-download" in str(folder) else verify(folder, **k)
    )
    publish(checkpoint, Destination("org/adapter"), Assembly(adapter_only=True))
    publish(checkpoint, Destination("org/both"), Assembly(part="model"))
    publish(checkpoint, Destination("org/lm", private=True), Assembly(part="lm"))

    card = hub.repositories["org/retriever"].files("v1")["README.md"].decode()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    python = make_environment(tmp_path / "environment", "transformers", "sentence-transformers", "peft")
    arguments = json.dumps([texts, code.group(1), str(tmp_path / "vectors.npz")])
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
    subprocess.run([python, "-c", READER_CODE, arguments], check=True, env=environment, cwd=tmp_path)

    from revela_hub.trainers import load_checkpoint

    loaded = load_checkpoint(checkpoint)
    batch = loaded.retriever_tokenizer(["Query: " + text for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = loaded.model.embed(batch["input_ids"], batch["attention_mask"]).numpy()
        logits = loaded.model.lm(input_ids=torch.arange(2, 12)[None]).logits.numpy()
    got = np.load(tmp_path / "vectors.npz")
    for name, array in {"query": expected, "adapter": expected, "lm": logits, "both": logits}.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5, err_msg=name)
    assert WRITER not in "".join(path.read_text(errors="ignore") for path in tmp_path.rglob("*.json"))


def test_assembled_files(hub: LoopbackHub, checkpoint: Path, tmp_path: Path, unverified: list[Path]) -> None:
    published = publish(
        checkpoint, Destination("org/x"), Assembly(metadata=METADATA), dry_run=True, keep=tmp_path / "kept"
    )
    assert published.url is None
    assert "org/x" not in hub.repositories
    folder = tmp_path / "kept" / "model"
    assert {"README.md", "figures/training_curve.png", "model.safetensors", "modules.json"} <= published.files.keys()
    card = (folder / "README.md").read_text()
    assert "base_model: org/base-retriever" in card
    assert "- revela\n" in card
    assert len(load_file(tmp_path / "kept" / "reference.safetensors")["query"]) == 6
    publish(checkpoint, Destination("org/x"), Assembly(adapter_only=True), dry_run=True, keep=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base-retriever"
    assert not (tmp_path / "adapter" / "model" / "model.safetensors").exists()


def test_no_part_keeps_a_local_path(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for part in ("retriever", "lm"):
        config[part]["_name_or_path"] = str(tmp_path / part)
    (checkpoint / "config.json").write_text(json.dumps(config))
    for part in ("retriever", "lm", "model"):
        folder = assemble_part(REVELA, checkpoint, tmp_path / f"out-{part}", Assembly(part=part)).folder
        for file in filter(Path.is_file, folder.rglob("*")):
            assert str(tmp_path) not in file.read_text(errors="ignore"), file


def test_a_checkpoint_is_loaded_once_for_all_its_parts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the parts do not depend on the order of export."""
    module = importlib.import_module("revela_hub.trainers.revela.checkpoint")
    load, loaded = module.load_checkpoint, []
    monkeypatch.setattr(module, "load_checkpoint", lambda folder: loaded.append(folder) or load(folder))
    together = {tmp_path / "together" / part: part for part in ("lm", "retriever", "model")}
    assemble_parts(REVELA, checkpoint, together, Assembly())
    assert loaded == [str(checkpoint)]
    for folder, part in together.items():
        alone = assemble_part(REVELA, checkpoint, tmp_path / "alone" / part, Assembly(part=part)).folder
        written = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert written == {file.relative_to(alone): file.read_bytes() for file in alone.rglob("*") if file.is_file()}
    assert len(loaded) == 4


def test_an_adapter_of_a_local_model_is_an_error(
    hub: LoopbackHub, checkpoint: Path, tmp_path: Path, unverified: list[Path]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["retriever"]["_name_or_path"] = str(tmp_path / "retriever")
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a Hub id"):
        publish(checkpoint, Destination("org/x"), Assembly(adapter_only=True), dry_run=True)


def test_nothing_is_published_if_a_check_fails(
    hub: LoopbackHub, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Check("weights", True, ""), Check("end of text", False, "EOS is not added")]
    monkeypatch.setattr(publishing, "verify", lambda *args, **options: rows)
    with pytest.raises(UserError, match="not published: end of text: EOS is not added"):
        publish(retriever_folder, Destination("org/x"))
    assert not [request for request in hub.requests if not request.startswith("GET")]


def test_branch_pull_request_and_update(hub: LoopbackHub, retriever_folder: Path, unverified: list[Path]) -> None:
    publish(retriever_folder, Destination("org/x", private=True))
    repository = hub.repositories["org/x"]
    assert repository.private
    assert repository.messages[-1].startswith("Publish with revela-hub ")
    with pytest.raises(UserError, match="org/x already contains a model"):
        publish(retriever_folder, Destination("org/x"), Assembly(metadata=METADATA))
    head = dict(repository.commits[repository.refs["main"]])
    spared = {"LICENSE": b"mine", "docs/NOTES.md": b"mine", "onnx/model.onnx": b"of the old weights"}
    stale = {"model-00002-of-00002.safetensors": b"old", "modeling_old.py": b"old", "3_Dense/config.json": b"{}"}
    repository.commit("main", head | stale | spared, "an earlier version")
    said: list[str] = []
    destination = Destination("org/x", update=True)
    dry = publish(retriever_folder, destination, dry_run=True, log=said.append)
    assert (dry.deleted, dry.stale, said) == (sorted(stale), ["onnx/model.onnx"], [])
    publish(retriever_folder, destination, log=said.append)
    assert repository.files("main") == head | spared
    assert [line.split()[2] for line in said] == [*sorted(stale), "onnx/model.onnx"]
    with pytest.raises(UserError, match="add --update"):
        Destination("org/x", delete_stale=True)
    repository.commit("main", head | spared | {"training_args.bin": b"pickle"}, "an earlier version")
    asked = Destination("org/x", update=True, delete_stale=True)
    dry = publish(retriever_folder, asked, dry_run=True)
    assert (dry.deleted, dry.stale) == (["onnx/model.onnx", "training_args.bin"], [])
    publish(retriever_folder, asked)
    spared.pop("onnx/model.onnx")
    assert repository.files("main") == head | spared
    publish(retriever_folder, Destination("org/x", revision="smaller"))
    assert repository.files("smaller") == repository.files("main")
    repository.commit("main", head | spared | stale, "an earlier version")
    said.clear()  # a new branch starts with the files of main
    publish(retriever_folder, Destination("org/x", revision="next", update=True), log=said.append)
    assert repository.files("next") == head | spared and len(said) == len(stale)
    repository.commit("main", head | spared, "the files of the model")
    repository.refs["smaller"] = repository.refs["main"]
    for _ in range(2):  # the second run finds the pull request of the first
        published = publish(retriever_folder, Destination("org/x", pull_request=True), Assembly(metadata=METADATA))
        assert str(published.url).endswith("/org/x/discussions/1")
    assert repository.files("main") == head | spared
    for number, status in enumerate(("closed", "merged"), 1):
        repository.statuses[str(number)] = status
        published = publish(retriever_folder, Destination("org/x", pull_request=True), Assembly(metadata=METADATA))
        assert str(published.url).endswith(f"/org/x/discussions/{number + 1}")


def test_an_update_keeps_the_files_of_the_user(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path]
) -> None:
    publish(retriever_folder, Destination("org/x"), Assembly(metadata=METADATA))
    repository = hub.repositories["org/x"]
    head = dict(repository.files("main"))
    (results,) = (name for name in head if name.startswith(".eval_results/"))
    own = ["handler.py", "examples/train.py", "eval_06_scifact/scores.json", "results_2024/mteb.json",
           "v2_notes/todo.txt", ".eval_results/mine.yaml", "Experiment_1_plots/data.json"]  # fmt: skip
    old = [
        "configuration_old.py",
        "query_0_Transformer/config.json",
        "query_tokenizer/vocab.txt",
        "own.py",
        "shared.py",
    ]
    config = {**json.loads(head["config.json"]), "auto_map": {"AutoModel": "own.Model"}}
    earlier = head | {"config.json": json.dumps(config).encode()} | dict.fromkeys([*own, *old], b"{}")
    repository.commit("main", earlier | {"own.py": b"from .shared import Model"}, "manually")
    published = publish(retriever_folder, Destination("org/x", update=True))
    assert published.deleted == sorted([*old, results])
    assert set(repository.files("main")) == (head.keys() | {*own}) - {results}
    other = hub.repositories["org/y"] = Repository()
    other.commit("main", dict.fromkeys(own, b"{}"), "not a model")
    publish(retriever_folder, Destination("org/y"))


def test_not_allowed(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, repo_id, message in (
        ("", "org/x", "not logged in to the Hub"),
        ("hf_" + "x" * 30, "org/x", "the token is not valid"),
        ("hf_ä", "org/x", "the token is not valid"),
        (READER, "org/x", "no write access to org/x"),
        (WRITER, "other/x", "no write access to other/x"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=message) as caught:
            publish(retriever_folder, Destination(repo_id))
        assert not token or token not in str(caught.value)
    assert not hub.repositories


def test_nothing_is_published_if_the_connection_fails(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], tmp_path: Path
) -> None:
    hub.cut_uploads = True
    with pytest.raises(UserError, match="connection to the Hub failed .* run the same command again"):
        publish(retriever_folder, Destination("org/x"), keep=tmp_path / "kept")
    assert set(hub.repositories["org/x"].files("main")) == {".gitattributes"}
    hub.cut_uploads = False
    publish(retriever_folder, Destination("org/x"), keep=tmp_path / "kept")
    assert "model.safetensors" in hub.repositories["org/x"].files("main")


def test_a_commit_in_progress_is_not_an_existing_model(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "loopback_hub.Handler.commit", lambda self, **_: self._answer(409, {"error": "A commit is in progress"})
    )
    with pytest.raises(UserError, match="status 409: A commit is in progress; .* run the same command again"):
        publish(retriever_folder, Destination("org/x"))


def test_an_interrupted_command_can_be_repeated(
    retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("revela_hub.hub_cards.upload.verify", verify)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            publish(retriever_folder, Destination("org/x"), dry_run=True, keep=tmp_path / "kept")
        assert is_ours(tmp_path / "kept")  # not read as text


def test_uploaded_files_are_not_sent_again(hub: LoopbackHub, retriever_folder: Path, unverified: list[Path]) -> None:
    publish(retriever_folder, Destination("org/x"))
    hub.requests.clear()
    publish(retriever_folder, Destination("org/y"))
    assert not [request for request in hub.requests if request.startswith("PUT")]


def test_a_download_that_differs_is_reported(hub: LoopbackHub, retriever_folder: Path, unverified: list[Path]) -> None:
    hub.corrupt_downloads = True
    with pytest.raises(
        UserError, match=r"model.safetensors differs from the uploaded file; it was reverted by a second commit"
    ):
        publish(retriever_folder, Destination("org/x", tag="v1"))
    repository = hub.repositories["org/x"]
    assert set(repository.files("main")) == {".gitattributes"}
    assert "v1" not in repository.refs
    hub.corrupt_downloads = False
    publish(retriever_folder, Destination("org/x"))
    first = dict(repository.files("main"))
    hub.corrupt_downloads = True
    with pytest.raises(UserError, match="reverted"):
        publish(retriever_folder, Destination("org/x", update=True), Assembly(metadata=METADATA))
    assert repository.files("main") == first


def test_disk_full(hub: LoopbackHub, checkpoint: Path, unverified: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: (os error 28)"),
        OSError([("a", "b", "[Errno 28] No space left on device")]),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # as raised by tokenizers
    ):

        def save_pretrained(*args: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_pretrained)
        with pytest.raises(UserError, match="no space left on the disk"):
            publish(checkpoint, Destination("org/x"))
        assert "org/x" not in hub.repositories


def test_full_disk_of_output_dir(
    hub: LoopbackHub, checkpoint: Path, unverified: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def save_pretrained(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_pretrained)
    with pytest.raises(UserError, match="nothing was published. Free some, or choose another --output_dir"):
        publish(checkpoint, Destination("org/x"), keep=tmp_path / "kept", dry_run=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "/cache"),
        (OSError(errno.EIO, "Input/output error", "/m"), "/m"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (RuntimeError("dictionary changed size during iteration"), "dictionary changed size during iteration"),
        (AttributeError("'NoneType' object has no attribute 'sha'"), "'NoneType' object has no attribute 'sha'"),
    ],
)  # fmt: skip
def test_other_errors_are_not_reported_as_connection_errors(
    error: Exception, said: str, hub: LoopbackHub, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_info(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises((UserError, type(error))) as caught:
        publish(retriever_folder, Destination("org/x"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("timed out"),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        RuntimeError("Data processing error: CAS service error : Reqwest Error: error sending request"),
    ],
)
def test_connection_errors(error: Exception) -> None:
    for cause in (None, error):
        raised = error if cause is None else RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
        with pytest.raises(UserError, match=r"the connection to the Hub failed .*; the state"):
            with hub_errors("org/x", "the state"):
                raise raised from cause


def test_invalid_model_ids() -> None:
    for repo_id, message in (
        ("a b/c", "is not a valid model id"),
        ("name", "has no namespace"),
        ("a/b/c", "is not a valid model id"),
    ):
        with pytest.raises(UserError, match=message):
            Destination(repo_id)


def test_command_line(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "metadata.yaml"
    metadata.write_text("license: mit\nresults:\n  - {name: SciFact, ndcg_at_10: 0.25, queries: 3}\n")
    assert (
        cli.main(["publish", str(retriever_folder), "org/x", "--card", str(metadata), "--dry-run", "--timeout", "9"])
        == 0
    )
    assert "nothing was uploaded" in capsys.readouterr().out
    assert cli.main(["publish", str(retriever_folder), "org/x", "--card", str(metadata)]) == 0
    assert f"published and verified: {hub.endpoint}/org/x" in capsys.readouterr().out
    card = hub.repositories["org/x"].files("main")["README.md"].decode()
    assert "license: mit" in card
    assert "| SciFact | **x** | 0.2500 |" in card
    metadata.write_text("licence: mit\n")
    assert cli.main(["publish", str(retriever_folder), "org/x", "--card", str(metadata)]) == 2
    assert f"{metadata}: unknown key 'licence'" in capsys.readouterr().err


def test_a_pickled_module_is_an_error(retriever_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(retriever_folder, folder)
    modules = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(
        json.dumps([*modules, {"idx": 3, "name": "3", "path": "3_Dense", "type": kind}])
    )
    (folder / "3_Dense").mkdir()
    (folder / "3_Dense" / "config.json").write_text("{}")
    torch.save({}, folder / "3_Dense" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"3_Dense/pytorch_model\.bin is a pickle.*save the module as safetensors"):
        publish(folder, Destination("org/x"), dry_run=True)


def test_check_of_a_model_on_the_hub(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(retriever_folder, Destination("org/x"))
    assert cli.main(["check", "org/x"]) == 0
    assert "org/x: all 2 checks passed" in capsys.readouterr().out
    assert cli.main(["check", "org/absent"]) == 2
    assert "org/absent is not on the Hub" in capsys.readouterr().err
    assert cli.main(["check", "no/such/folder"]) == 2
    assert "neither a folder nor a valid model id" in capsys.readouterr().err


def test_a_failed_check_is_exit_status_1(
    retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publishing, "verify", lambda *args, **options: [Check("values", False, "NaN")])
    with pytest.raises(SystemExit, match="1"):
        cli.main(["check", str(retriever_folder)])
    assert "1 of 2 checks failed: values" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        cli.main(["check", str(retriever_folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["checks"][1]) == (False, {"name": "values", "ok": False, "detail": "NaN"})


def test_a_finished_folder_keeps_its_card(
    hub: LoopbackHub, retriever_folder: Path, unverified: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "finished"
    shutil.copytree(retriever_folder, folder)
    (folder / "README.md").write_text("# My own words\n")
    publish(folder, Destination("org/x"))
    assert hub.repositories["org/x"].files("main")["README.md"] == b"# My own words\n"


def test_the_card_of_the_author_is_only_replaced_by_metadata(
    retriever_folder: Path, unverified: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-500"
    shutil.copytree(retriever_folder, folder)
    (folder / "README.md").write_text("# My own words\n")
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "mine.yaml").write_text("- value: 1\n")
    history = [{"step": step, "loss": 5.0 - step} for step in range(1, 4)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    said: list[str] = []
    publish(folder, Destination("org/x"), dry_run=True, keep=tmp_path / "kept", log=said.append)
    assert (tmp_path / "kept" / "model" / "README.md").read_text() == "# My own words\n"
    assert said == []
    given = Assembly(metadata=METADATA)
    published = publish(folder, Destination("org/x"), given, dry_run=True, keep=tmp_path / "new", log=said.append)
    assert "license: apache-2.0" in (tmp_path / "new" / "model" / "README.md").read_text()
    assert said == [f"{folder / 'README.md'} is replaced by a card made from --card"]
    assert {".eval_results/mine.yaml", ".eval_results/mteb__scifact-SciFact.yaml"} <= published.files.keys()


@pytest.mark.parametrize(("option", "value"), [("dtype", "float16"), ("max_length", "32")])
def test_a_finished_model_is_published_as_it_is(
    option: str, value: str, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", str(retriever_folder), "org/x", "--dry_run", f"--{option}", value]) == 2
    assert f"--{option} applies to checkpoints, but {retriever_folder} is a finished model" in capsys.readouterr().err


def test_export_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "exported"
    (output / f"lm.{'0' * 32}.tmp").mkdir(parents=True)  # of a process that was killed
    assert cli.main(["export", str(checkpoint), "--output_dir", str(output), "--lm", "--max_length", "99"]) == 0
    assert {path.name for path in output.iterdir()} == {"retriever", "lm"}
    assert f'SentenceTransformer("{output / "retriever"}")' in capsys.readouterr().out
    assert json.loads((output / "retriever" / "sentence_bert_config.json").read_text())["max_seq_length"] == 99
    from transformers import AutoModel, AutoModelForCausalLM

    from revela_hub.trainers import load_checkpoint

    merged = load_checkpoint(checkpoint).model
    for auto, folder, expected in (
        (AutoModel, output / "retriever", merged.retriever),
        (AutoModelForCausalLM, output / "lm", merged.lm),
    ):
        model, loading = auto.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values())
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    assert cli.main(["export", str(tmp_path), "--output_dir", str(output)]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert cli.main(["publish", str(output), "org/x", "--dry-run"]) == 2  # the folder with the exported models
    assert f"did you mean the exported model {output / 'retriever'}?" in capsys.readouterr().err


def test_export_does_not_replace_files_of_the_user(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "here" / "retriever" / "model.safetensors"  # such as the base model, with --output_dir .
    own.parent.mkdir(parents=True)
    own.write_bytes(b"the user's")
    assert cli.main(["export", str(checkpoint), "--output_dir", str(tmp_path / "here")]) == 2
    assert "retriever contains files that revela-hub did not write" in capsys.readouterr().err
    assert own.read_bytes() == b"the user's"
    new = tmp_path / "new"
    assert cli.main(["export", str(checkpoint), "--output_dir", str(new)]) == 0
    write_card(new / "retriever", METADATA)
    model = new / "retriever"
    own = {"handler.py": "mine", "LICENSE": "mine", "notes/todo.txt": "mine", ".eval_results/mine.yaml": "a: 1"}
    old = {"onnx/model.onnx": "of the old weights", "modeling_old.py": "", "3_Dense/config.json": "{}"}
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
    assert f"{run / 'retriever'} is the exported model of the run in {run}: choose" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["lm", "model"])
def test_parts_without_a_maximum_length(part: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--max_length has no effect on the part {part} of Revela: leave it out"):
        publish(checkpoint, Destination("org/x"), Assembly(part=part, max_length=32), dry_run=True)


def test_a_finished_model_is_not_exported_again(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(retriever_folder), "--output_dir", str(tmp_path / "new")]) == 2
    printed = capsys.readouterr().err
    assert "is a finished model, not a checkpoint" in printed and "--format onnx" in printed
    assert not (tmp_path / "new").exists()
