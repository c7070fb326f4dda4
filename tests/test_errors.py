"""The line and the exit status that an error of a library or of this package becomes."""

import pytest
from safetensors import SafetensorError

from revela_hub.errors import EXTRAS, UserError, explain, loading, require


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class GatedRepoError(OSError):
    """Named as huggingface_hub's, which derives from RepositoryNotFoundError."""


class ConnectError(Exception):
    """Named as httpx's."""


ITSELF = ValueError("no answer")


@pytest.mark.parametrize(
    ("error", "fact", "status"),
    [
        (UserError("pairs.jsonl:3: no column 'text'"), "pairs.jsonl:3", 2),
        (caused(UserError("cannot load 'x'"), RuntimeError("CUDA out of memory")), "cannot load 'x'; lower", 2),
        (caused(RuntimeError("generation failed"), ValueError("row 7 has no text")), "row 7", 2),
        (ValueError("several\nlines"), "several lines", 2),
        (OSError(28, "No space left on device", "out/model"), "out/model", 2),
        (PermissionError(13, "Permission denied", "/out"), "choose a folder", 2),
        (Exception("No space left on device (os error 28)"), "free some disk space", 2),  # of tokenizers
        (SafetensorError("header too small"), "download or copy the model again", 2),
        (GatedRepoError("401 Client Error"), "accept the terms", 2),
        (OSError("x is not a local folder and is not a valid model identifier"), "check the name", 2),
        (ConnectError("Name or service not known"), "is there a network?", 2),
        (ModuleNotFoundError("No module named 'faiss'", name="faiss.swigfaiss"), 'pip install "revela-hub[search]"', 2),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), "pip install wandb", 2),
        (MemoryError(), "MemoryError; lower --per_device_train_batch_size", 2),
        (AssertionError("Torch not compiled with CUDA enabled"), "use --device cpu", 2),
        (RuntimeError("[gloo/pair.cc:553] Connection closed by peer"), "another process", 2),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "convert the file to UTF-8", 2),
        (
            caused(UserError("Milvus cannot be opened"), caused(ITSELF, ITSELF)),
            "cannot be opened",
            2,
        ),  # as those of pymilvus
        (KeyError("text"), "KeyError: 'text'; this may be a bug", 1),
        (RuntimeError("shapes do not match"), "RuntimeError: shapes do not match; this may be a bug", 1),
    ],
)
def test_the_line_and_the_status_of_an_error(error: Exception, fact: str, status: int) -> None:
    line, code = explain(error)
    assert fact in line
    assert "\n" not in line
    assert code == status


def test_loading_names_the_model_and_keeps_the_hint() -> None:
    with pytest.raises(UserError) as caught, loading("cannot load the encoder 'a/b'", "a/b"):
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it")
    assert explain(caught.value)[0] == (
        "cannot load the encoder 'a/b': no such folder; on the Hub: You are trying to access a gated repo.;"
        " accept the terms on the model's Hub page, and log in with `hf auth login`"
    )
    with pytest.raises(UserError, match="no such folder"), loading("cannot load the encoder", "./absent"):
        raise AssertionError("a path is not looked up on the Hub")


def test_a_missing_module_names_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "no_such_module", "demo")
    with pytest.raises(UserError, match=r'pip install "revela-hub\[demo\]"'):
        require("json", "no_such_module")
