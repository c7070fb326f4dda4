"""Errors of libraries that read or write a model, and the messages that they become."""

import errno
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from revela_hub.errors import EXTRAS, UserError, damaged_file, install_hint, is_file_error, loading, packages_of, reason


@contextmanager
def no_room(size: int = 1000) -> Iterator[None]:
    """Every file ends after `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_tokenizer(path: Path) -> None:
    Tokenizer(models.BPE(vocab={str(number): number for number in range(5000)}, merges=[])).save(str(path))


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (lambda path: save_file({"a": torch.ones(5000)}, path), "the file is larger than the system allows"),
        (save_tokenizer, "the file is larger than the system allows"),
        (lambda path: torch.save({"a": torch.ones(5000)}, path), "torch cannot write the whole file"),
        (lambda path: path.write_text("a" * 5000), "the file is larger than the system allows"),
    ],
    ids=["safetensors", "tokenizers", "torch", "Python"],
)
def test_no_room_is_not_called_damage(save: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    with no_room(), pytest.raises(Exception) as caught:
        save(tmp_path / "file")
    assert is_file_error(caught.value)
    assert said in reason(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_as_the_rust_tokenizer_reports_it() -> None:
    with pytest.raises(Exception) as caught:
        save_tokenizer(Path("/dev/full"))
    assert reason(caught.value) == "the disk is full: free some space, or write to another disk"


def test_arguments_are_printed_as_the_options_of_the_command() -> None:
    error = UserError("./max_length/a.max_length: column 'max_length' (max_length=3): lower max_length or min_tokens")
    options = {"max_length", "device"}
    assert error.line(options) == (
        "./max_length/a.max_length: column 'max_length' (--max_length=3): lower --max_length or min_tokens"
    )
    assert UserError("max_length: no such file; raise --max_length.").line(options) == (
        "max_length: no such file; raise --max_length."
    )
    assert "--" not in str(error)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "1_Dense/model.safetensors": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "model.safetensors": lambda file: file.write_bytes(b"PK\3\4 a zip archive"),
    "tokenizer.json": lambda file: file.write_text('{"model": '),
    "config.json": lambda file: file.write_bytes(b"\xff\xfe\0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "1_Dense").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")  # of a run, not of the model
    for part in ("model.safetensors", "1_Dense/model.safetensors"):
        save_file({"a": torch.ones(5)}, tmp_path / part)
    for part in ("config.json", "tokenizer.json"):
        (tmp_path / part).write_text("{}")
    assert damaged_file(tmp_path) is None
    DAMAGE[name](tmp_path / name)
    with pytest.raises(UserError) as caught, loading("cannot load the encoder", tmp_path):
        raise ValueError("a library's words")
    assert str(caught.value).startswith(f"cannot load the encoder: {tmp_path / name} is damaged or incomplete: ")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("You are trying to access a gated repo.\nMake sure to have access to it.", "accept the terms on its Hub page"),
        (
            "no-one/nothing is not a local folder and is not a valid model identifier listed on",
            "check the name, or log in",
        ),
        ("We couldn't connect to 'https://huggingface.co' to load the files", "the Hub cannot be reached"),
    ],
)
def test_failures_of_the_hub(message: str, said: str) -> None:
    with pytest.raises(UserError, match=said), loading("cannot load the encoder", "no-one/nothing"):
        raise OSError(message)


def test_a_gated_model_has_also_no_repository_to_be_found() -> None:
    class RepositoryNotFoundError(OSError):
        pass

    class GatedRepoError(RepositoryNotFoundError):
        pass

    assert "restrict access" in reason(GatedRepoError("401 Client Error"), "no-one/nothing")
    assert "check the name" in reason(RepositoryNotFoundError("401 Client Error"), "no-one/nothing")


def test_what_is_no_file_is_as_it_was() -> None:
    assert damaged_file("no-one/nothing") is None
    assert reason(ValueError("a wrong value\nand more")) == "a wrong value"
    assert not is_file_error(RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(MemoryError), loading("cannot load it", "no-one/nothing"):
        raise MemoryError


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with pytest.raises(UserError, match=f"cannot load it: {tmp_path} holds no model: config.json is missing"):
        with loading("cannot load it", tmp_path):
            raise ValueError(f"{tmp_path} (None) is not an encoder")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert damaged_file(tmp_path) is None


def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()

    def forbidden(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert damaged_file(tmp_path) == f"{tmp_path / 'model.safetensors'}: permission denied"


@pytest.mark.parametrize("module", EXTRAS)
def test_the_packages_of_an_extra_are_named_because_ours_is_not_on_pypi(module: str) -> None:
    hint = install_hint(f"{module}.submodule")
    assert hint == f"the package {module} is not installed: pip install {packages_of(EXTRAS[module])}"
    assert "revela-hub" not in hint and hint.endswith('"')


def test_packages_of_an_extra_are_quoted_for_the_shell() -> None:
    assert re.fullmatch(
        r'"beautifulsoup4[^" ]+" "markitdown\[docx,pptx\][^" ]+" "pypdfium2[^" ]+"', packages_of("documents")
    )
