"""The verification finds real-world faults, each planted into a copy of a folder without faults."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, PreTrainedTokenizerFast

from revela_hub.hub_cards import clean_process
from revela_hub.hub_cards.clean_process import verify
from revela_hub.hub_cards.contents import Check, as_table
from revela_hub.hub_cards.verify import probe_texts

MODELING = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class ToyConfig(PretrainedConfig):
    model_type = "toy"
    hidden_size = 32


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(384, 32)
        self.post_init()

    def _init_weights(self, module):
        """Keep loaded weights."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.embeddings(input_ids) * attention_mask.unsqueeze(-1)
        return BaseModelOutput(last_hidden_state=hidden.cumsum(1))
'''


def edit(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remote_code(folder: Path, code: str = MODELING) -> None:
    """Turn the model into one with remote code."""
    auto_map = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
    config = {"model_type": "toy", "architectures": ["ToyModel"], "auto_map": auto_map, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_toy.py").write_text(code)
    weights = load_file(folder / "model.safetensors")
    save_file({"embeddings.weight": weights["embed_tokens.weight"]}, folder / "model.safetensors")


def unmerged_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )
    save_file({"base_model.model.layers.0.q.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")


def nan_weight(weights: dict[str, torch.Tensor]) -> None:
    weights["layers.1.mlp.up_proj.weight"][0, 0] = float("nan")


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def half_precision(folder: Path) -> None:
    """Finite weights, with which a text overflows float16."""
    weights = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    weights["layers.0.mlp.up_proj.weight"] *= 30000
    weights["layers.0.mlp.down_proj.weight"] *= 30000
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", lambda c: c.update(dtype="float16"))


def prompt_lost(folder: Path) -> None:
    edit(folder / "config_sentence_transformers.json", lambda c: c.update(prompts={}))


def no_maximum_length(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text("{}")
    edit(folder / "tokenizer_config.json", lambda t: t.pop("model_max_length"))
    edit(folder / "config.json", lambda c: c.update(max_position_embeddings=-1))


# fault -> (function that plants it, failing check, part of its message)
FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "remote file imports our package": (
        lambda f: remote_code(f, MODELING + "\nfrom revela_hub.data import read_documents\n"),
        "loading",
        "revela_hub",
    ),
    "remote code reads padding": (
        lambda f: remote_code(
            f, MODELING.replace("hidden.cumsum(1)", "hidden - 0.9 * self.embeddings(input_ids).mean(1, True)")
        ),
        "batching",
        "alone and in a batch, query",
    ),
    "remote code never ends": (
        lambda f: remote_code(f, MODELING + "\nwhile True:\n    pass\n"),
        "time",
        "timeout",
    ),
    "weight missing": (
        lambda f: edit_weights(f, lambda w: w.pop("layers.0.self_attn.q_proj.weight")),
        "weights",
        "layers.0.self_attn.q_proj.weight is missing",
    ),
    "weight left over": (
        lambda f: edit_weights(f, lambda w: w.update({"layers.2.norm.weight": torch.ones(2)})),
        "weights",
        "layers.2.norm.weight is not in the model",
    ),
    "NaN weight": (lambda f: edit_weights(f, nan_weight), "weights", "layers.1.mlp.up_proj.weight contains NaN"),
    "vectors do not depend on the text": (
        lambda f: edit_weights(f, lambda w: w["embed_tokens.weight"].fill_(0.5)),
        "vectors",
        "give the same vector",
    ),
    "overflow in half precision": (half_precision, "vectors", "the type of the weights"),
    "EOS missing": (
        lambda f: edit(f / "tokenizer.json", lambda t: t.update(post_processor=None)),
        "length",
        "'What is the capital of France?' ends with",
    ),
    "adapter next to the model": (unmerged_adapter, "files", "not merged"),
    "pickled weights": (as_pickle, "files", "no safetensors weights"),
    "no maximum length": (no_maximum_length, "length", "no maximum length is saved"),
    "prompt lost": (prompt_lost, "same as checkpoint", "differs by"),
    "other similarity": (
        lambda f: edit(f / "config_sentence_transformers.json", lambda c: c.update(similarity_fn_name="dot")),
        "same as checkpoint",
        "the similarity is dot, but cosine in the checkpoint",
    ),
    "remote code not trusted": (remote_code, "loading", "trust_remote_code"),
    "not a model": (
        lambda f: [(f / name).unlink() for name in ("config.json", "modules.json")],
        "files",
        "not a model",
    ),
}


@pytest.fixture(scope="module")
def planted(retriever_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The arguments of `verify` for each folder with a fault, the folder without faults, and one with remote code."""
    root = tmp_path_factory.mktemp("faults")
    plants = {name: plant for name, (plant, _, _) in FAULTS.items()}
    plants |= {"none": lambda folder: None, "none, remote code": remote_code}
    reference = root / "reference.safetensors"
    save_file(_vectors(retriever_folder), reference, metadata={"settings": '{"similarity": "cosine"}'})
    tasks = {}
    for number, (name, plant) in enumerate(plants.items()):
        folder = root / f"m{number}"
        shutil.copytree(retriever_folder, folder)
        plant(folder)
        tasks[name] = {"folder": folder, "trust_remote_code": name != "remote code not trusted"}
        tasks[name]["reference"] = None if any(folder.glob("*.py")) else reference
        tasks[name]["timeout"] = 3 if name == "remote code never ends" else None
    return tasks


def _vectors(folder: Path) -> dict[str, torch.Tensor]:
    """Compute the vectors of the folder without faults with transformers only."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    vectors = {}
    for kind, prompt in (("query", "Query: "), ("document", "Passage: ")):
        rows = []
        for text in probe_texts(64):
            batch = tokenizer(prompt + text, truncation=True, max_length=64, return_tensors="pt")
            with torch.no_grad():
                rows.append(model(**batch).last_hidden_state[0, -1])
        vectors[kind] = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
    return vectors


# Faults that only show in the clean process.
CLEAN = ["remote file imports our package", "remote code never ends"]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in CLEAN])
def test_fault_is_found(
    fault: str, planted: dict[str, dict[str, Any]], verify_in_process: Callable[..., list[Check]]
) -> None:
    found = verify_in_process(**planted[fault])
    _, name, message = FAULTS[fault]
    failed = {check.name: check.detail for check in found if not check.ok}
    assert message in failed.get(name, ""), as_table(found)


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("fault", CLEAN)
def test_fault_is_found_in_the_clean_process(fault: str, planted: dict[str, dict[str, Any]]) -> None:
    _, name, message = FAULTS[fault]
    found = verify(**planted[fault])
    failed = {check.name: check.detail for check in found if not check.ok}
    assert message in failed.get(name, ""), as_table(found)


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("name", ["none", "none, remote code", "MiniLM", "quickstart"])
def test_no_false_alarms(name: str, planted: dict[str, dict[str, Any]], minilm_folder: Path, repository: Path) -> None:
    others = {"MiniLM": minilm_folder, "quickstart": repository / "examples" / "quickstart" / "retriever"}
    found = verify(others[name]) if name in others else verify(**planted[name])
    assert all(check.ok for check in found), as_table(found)
    expected = ["files", "private data", "loading", "weights", "length", "vectors", "batching", "same as checkpoint"]
    assert [check.name for check in found] == expected


@pytest.mark.usefixtures("clean_process")
def test_a_process_that_ends_early_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_process, "_PYTHON", ("/bin/false",))
    assert [(check.name, check.ok) for check in verify(tmp_path)] == [("process", False)]


@pytest.mark.usefixtures("clean_process")
def test_decoders_without_padding_token_encode_one_text_at_a_time(tmp_path: Path, _bpe_json: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bpe_json), eos_token="<|endoftext|>")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64)
    for kind in (GPT2LMHeadModel, GPT2Model):
        kind(config).save_pretrained(tmp_path / kind.__name__)
        tokenizer.save_pretrained(tmp_path / kind.__name__)
        found = verify(tmp_path / kind.__name__)
        assert all(check.ok for check in found), as_table(found)


LATER = """
import sys, types
from importlib.util import find_spec
package = types.ModuleType("verification")
package.__path__ = [sys.argv[1]]
sys.modules["verification"] = package
from verification.clean_process import hide_other_packages
finders = sys.meta_path[:]
for requirements, found in (([], False), (["peft"], True)):
    sys.meta_path[:] = finders
    hide_other_packages(requirements)
    assert bool(find_spec("peft")) == found and not find_spec("pytest"), requirements
    assert find_spec("sentence_transformers")
"""


@pytest.mark.usefixtures("clean_process")
def test_a_folder_finds_the_packages_that_it_requires(repository: Path) -> None:
    folder = str(repository / "hub_cards")
    done = subprocess.run([sys.executable, "-c", LATER, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SLEEPER = """
import json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open(os.environ["TMPDIR"] + "/seen", "w").write(json.dumps([child.pid, dict(os.environ)]))
time.sleep(600)
"""


@pytest.mark.usefixtures("clean_process")
def test_timeout_kills_the_process_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD", "HTTPS_PROXY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    for name in ("OMP_NUM_THREADS", "HF_HOME", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(clean_process, "_CHILD", SLEEPER)
    (check,) = verify(tmp_path, timeout=1.5)
    assert (check.name, check.ok) == ("time", False) and "timeout" in check.detail
    grandchild, environment = json.loads((tmp_path / "seen").read_text())
    assert not set(secrets) & set(environment)
    assert {"PATH", "OMP_NUM_THREADS", "HF_HOME", "SSL_CERT_FILE"} <= set(environment)
    for _ in range(100):  # until init collects it
        state = Path(f"/proc/{grandchild}/stat")
        if not state.exists() or ") Z " in state.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child process is still running")
