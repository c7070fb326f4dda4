"""Only the files of a model are published, and no token, key, home folder or local path is in them."""

import json
from pathlib import Path

import pytest

from revela_hub.hub_cards.contents import contents, copy_model, is_of_model
from revela_hub.hub_cards.secrets import RULES, private_faults

MODEL = """README.md LICENSE config.json modules.json tokenizer.json tokenizer_config.json special_tokens_map.json
    model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json 1_Pooling/config.json
    query_0_Transformer/model.safetensors lm_tokenizer/tokenizer.json lm_tokenizer/chat_template.jinja spiece.model
    figures/retrieval_curve.png onnx/model.onnx adapter_config.json adapter_model.safetensors modeling_x.py layers.py
    additional_chat_templates/tool_use.jinja""".split()
OTHERS = """optimizer.pt training_args.bin trainer_state.json run.json card.yaml train.jsonl notes.ipynb pytorch_model.bin
    checkpoint-3/model.safetensors stray.py modeling_old.py 1_Pooling/log.csv runs/events.out.tfevents.1 photo.png
    onnx/other.onnx rng_state.pth vectors.npy""".split()
# One example of each kind, in parts, so that no scanner takes this file for a leak.
SECRETS = {
    "a Hub token": "hf_" + "aB1" * 11,
    "an OpenAI or Anthropic key": "sk-" + "ant-api03-aB1" * 3,
    "a GitHub token": "ghp_" + "aB1" * 12,
    "a GitLab token": "glpat-" + "aB1" * 7,
    "an AWS key": "AKIA" + "ABC1" * 4,
    "a Google key": "AIza" + "aB1cd" * 7,
    "a Slack token": "xoxb-" + "123456789012",
    "a token of a package registry": "npm_" + "aB1" * 12,
    "a token of a model service": "gsk_" + "aB1" * 11,
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "a signed token": "eyJ" + "a" * 12 + ".eyJ" + "b" * 12 + "." + "c" * 12,
    "a password in an address": "https://me:" + "secret1@example.org",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*MODEL, *OTHERS, ".env", ".git/config"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text("")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.Model"}}))
    (tmp_path / "m" / "modeling_x.py").write_text("from .layers import Pool\n")
    return tmp_path / "m"


def test_the_allow_list(folder: Path) -> None:
    found = contents(folder)
    assert found.included == sorted(MODEL) and found.skipped == sorted(OTHERS)
    copy_model(folder, folder.parent / "copy")
    copied = {file.relative_to(folder.parent / "copy").as_posix() for file in (folder.parent / "copy").rglob("*.*")}
    assert copied == {name for name in MODEL if name != "LICENSE"}


def test_links_are_not_published(folder: Path) -> None:
    """A link could lead to a file outside the model; in the Hub's cache every file is a link."""
    (folder / "vocab.txt").symlink_to("/etc/hostname")
    assert "vocab.txt" in contents(folder).skipped
    assert "vocab.txt" in contents(folder, links=True).included


def test_files_that_go_with_an_earlier_model() -> None:
    replaced = "model.safetensors 3_Dense/config.json onnx/model.onnx onnx/model_quantized.onnx pytorch_model.bin"
    assert all(map(is_of_model, replaced.split()))
    assert not any(
        map(is_of_model, ("README.md", "LICENSE", "figures/a.png", "handler.py", "docs/NOTES.md", "data.bin"))
    )


@pytest.mark.parametrize("kind", RULES)
def test_secrets_are_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# A model\n\nx={SECRETS[kind]}\n")
    assert list(private_faults(tmp_path, ["README.md"])) == [f"README.md:3 contains what looks like {kind}"]


@pytest.mark.parametrize(
    "text",
    ["trained in /home/ada/runs", "on /Users/ada/x", r"C:\\Users\\ada\\x", "/root/x", f"in {Path.home()}/runs"],
)
def test_home_folders_are_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert "home folder" in next(private_faults(tmp_path, ["README.md"]))


@pytest.mark.parametrize(
    ("content", "private"),
    [
        ({"_name_or_path": "outputs/checkpoint-100"}, True),
        ({"text_config": {"_name_or_path": "../llama"}}, True),
        ({"vocab_file": "/data/vocab.txt"}, True),
        ({"_name_or_path": "org/base", "prompts": {"query": "/home is where"}}, False),
        ({"eos_token": "</s>", "path": "1_Pooling", "chat_template": "{{ /data/x }}"}, False),
    ],
)
def test_local_paths_are_found(content: dict[str, object], private: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert bool(list(private_faults(tmp_path, ["config.json"]))) == private


def test_ordinary_texts_are_not_secrets(tmp_path: Path) -> None:
    text = (
        "see https://x.org/home/ada/a, sk-learn-contrib-projects, /home/user/data, hf_transfer, task-specific-prefixes"
    )
    (tmp_path / "README.md").write_text(text)
    assert list(private_faults(tmp_path, ["README.md"])) == []
