"""Downloads are never unpickled: pickles raise an error in every loader of the product."""

import ast
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import BertForMaskedLM, BertModel, BertTokenizerFast, PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.loading import module_types, refuse_pickles
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.encoder import load_encoder, load_sparse_encoder
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.revela.checkpoint import load_backbones

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT = ("modeling", "data", "retrieval", "evaluation", "hub_cards", "trainers", "src")


def pickle_weights(folder: Path, safe: str = "model.safetensors", name: str = "pytorch_model.bin") -> None:
    torch.save(load_file(folder / safe), folder / name)
    (folder / safe).unlink()


@pytest.fixture
def no_torch_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def dense_folder(retriever_folder: Path, tmp_path: Path) -> Path:
    """A model with a dense layer behind its pooling, the layer's weights a pickle."""
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model.insert(2, Dense(32, 8))
    model.save(str(tmp_path / "dense"), create_model_card=False)
    pickle_weights(tmp_path / "dense" / "2_Dense")
    return tmp_path / "dense"


@pytest.mark.usefixtures("no_torch_load")
def test_no_command_reads_a_pickled_model(
    tmp_path: Path, tiny_bert: BertModel, wordpiece_tokenizer: BertTokenizerFast, llama_folder: Path
) -> None:
    bert = tmp_path / "bert"
    BertForMaskedLM(tiny_bert.config).save_pretrained(bert)
    wordpiece_tokenizer.save_pretrained(bert)
    pickle_weights(bert)
    pickle_weights(llama_folder)
    for load in (
        lambda: load_retriever(str(bert)),
        lambda: load_cot_mote_start(str(bert), pre_training=True),
        lambda: load_lm(str(llama_folder)),
        lambda: load_backbones(str(llama_folder), str(llama_folder)),
    ):
        with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, .* save the model again"):
            load()


@pytest.mark.usefixtures("no_torch_load")
def test_pickled_modules_are_refused_wherever_they_are(dense_folder: Path, tmp_path: Path, bert_folder: Path) -> None:
    for load in (load_encoder, load_sparse_encoder, load_retriever):
        with pytest.raises(UserError, match="2_Dense/pytorch_model.bin is a pickle|is not a sparse model"):
            load(str(dense_folder))
    routes = {name: [Transformer(str(bert_folder)), Pooling(32), Dense(32, 8)] for name in ("query", "document")}
    router = Router.for_query_document(routes["query"], routes["document"])
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "routes"), create_model_card=False)
    load_encoder(str(tmp_path / "routes"), device="cpu")
    dense = next(folder for folder in module_types(tmp_path / "routes") if folder.endswith("_Dense"))
    pickle_weights(tmp_path / "routes" / dense)
    with pytest.raises(UserError, match=f"{dense}/pytorch_model.bin is a pickle"):
        load_encoder(str(tmp_path / "routes"))


def test_a_pickled_adapter_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_folder, tmp_path / "adapter")
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / "adapter" / name).write_text("{}")
    with pytest.raises(UserError, match="adapter_model.bin is a pickle"):
        load_lm(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="the adapter in .* has no safetensors weights"):
        ImpRAGForCausalLM.from_backbone(str(tmp_path / "adapter"))


def test_a_pickle_that_nothing_reads_is_left_alone(retriever_folder: Path) -> None:
    """Pickles next to safetensors, in a checkpoint of a run, and another library's weights with the same ending."""
    for name in ("pytorch_model.bin", "checkpoint-5/pytorch_model.bin", "openvino/openvino_model.bin"):
        (retriever_folder / name).parent.mkdir(exist_ok=True)
        (retriever_folder / name).write_bytes(b"")
    assert load_encoder(str(retriever_folder), device="cpu").encode("a").shape == (32,)


@pytest.mark.parametrize("connected", [True, False])
def test_the_files_of_a_repository_are_looked_at(
    dense_folder: Path, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    """Through the Hub, and where it cannot be reached in the Hub's cache."""
    files = [str(path.relative_to(dense_folder)) for path in dense_folder.rglob("*") if path.is_file()]

    def listing(self: object, name: str) -> list[str]:
        if not connected:
            raise OSError("no connection")
        return files

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listing)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, local_files_only: str(dense_folder))
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, file, **_: _existing(dense_folder / file))
    with pytest.raises(UserError, match="cannot load org/model: 2_Dense/pytorch_model.bin is a pickle"):
        refuse_pickles("org/model")


def _existing(file: Path) -> str | None:
    return str(file) if file.is_file() else None


def test_two_threads_leave_transformers_as_it_was(retriever_folder: Path) -> None:
    """transformers replaces its own functions while it loads."""
    tie = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load_encoder(str(retriever_folder), device="cpu"), range(4)))
    assert PreTrainedModel.tie_weights is tie


LOADERS = re.compile(r"from_pretrained|pipeline|(Sentence|MLM)?Transformer|(Sparse|Cross|MultiVector)Encoder")
NO_WEIGHTS = re.compile(r".*(Tokenizer|Config|Processor)\.from_pretrained")
NEVER = re.compile(
    r"(torch|joblib|pickle|cloudpickle|dill)\.loads?\(|\.read_pickle\(|\.Unpickler\(|allow_pickle=True|weights_only=False"
    r"|^(np|numpy)\.load\((?!.*allow_pickle=False)"
)


def unsafe(source: str) -> Iterator[str]:
    """The calls of a file that may read a pickle: the function around a loader must ask for safetensors, or refuse pickles."""
    tree = ast.parse(source)
    inside = {node: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, call = ast.unparse(node.func), ast.unparse(node)
        loads = LOADERS.fullmatch(name.rpartition(".")[2]) and not NO_WEIGHTS.fullmatch(name)
        loaded = "modules=" in call or "model=model" in call  # before
        around = ast.unparse(inside.get(node, node)) if loads and not loaded else "use_safetensors"
        if NEVER.search(call) or not any(word in around for word in ("use_safetensors", "refuse_pickles(")):
            yield f"{node.lineno}: {call[:80]}"


@pytest.mark.parametrize(
    "bad",
    [
        "AutoModel.from_pretrained(name)",
        "def f(name):\n    return CrossEncoder(name)",
        "pipeline('text-generation', model=name)",
        "np.load(file)",
        "torch.load(file, weights_only=True)",
    ],
)
def test_a_loader_without_it_is_found(bad: str) -> None:
    assert list(unsafe(bad))


def test_no_loader_in_the_product_is_without_it() -> None:
    files = [file for folder in PRODUCT for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}" for file in files for line in unsafe(file.read_text(encoding="utf-8"))
    ]
    assert found == []
