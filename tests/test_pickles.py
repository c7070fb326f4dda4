"""Downloads are never unpickled: pickles raise an error in every loader of the product."""

import ast
import re
import shutil
import threading
from collections.abc import Iterator
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


def test_two_threads_leave_the_libraries_as_they_were(dense_folder: Path, retriever_folder: Path) -> None:
    """To open a model replaced torch.load for all threads; transformers replaces its own functions while it loads."""
    load, tie = torch.load, PreTrainedModel.tie_weights
    names = [str(dense_folder), str(retriever_folder)] * 2
    refused = []

    def opened(name: str) -> None:
        try:
            load_encoder(name, device="cpu")
        except UserError:
            refused.append(name)

    threads = [threading.Thread(target=opened, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.load is load and PreTrainedModel.tie_weights is tie and refused == [str(dense_folder)] * 2


# --- no loader without it

OPENERS = {
    "SentenceTransformer",
    "SparseEncoder",
    "CrossEncoder",
    "MultiVectorEncoder",
    "Transformer",
    "MLMTransformer",
}
BUILDERS = {"load_backbone", "from_backbone", "from_backbones", "from_encoder"}
NEVER = re.compile(r"(torch|joblib|pickle|cloudpickle|dill)\.loads?|.*\.read_pickle|.*\.Unpickler")
NO_WEIGHTS = re.compile(r".*(Tokenizer|Config|Processor|GenerationConfig)")


def called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def unsafe(source: str, alone: bool = False) -> Iterator[str]:
    """The calls of a file that may read a pickle; `alone` is one that cannot import the package."""
    tree = ast.parse(source)
    inside = {node: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, last = ast.unparse(node.func), called(node)
        if last in {"from_pretrained", "pipeline"} | OPENERS | BUILDERS:
            around = ast.unparse(inside.get(node, node))
            safe = "'use_safetensors': True" in around or "use_safetensors=True" in around
            checked = "refuse_pickles(" in around
            first = ast.unparse(node.args[0]) if node.args else ""
        if last == "from_pretrained":
            unsafe_load = not (checked or (safe and alone) or NO_WEIGHTS.fullmatch(name.rpartition(".")[0]))
        elif last == "pipeline":
            unsafe_load = "model=model" not in ast.unparse(node)  # one that is loaded already
        elif last in OPENERS:
            unsafe_load = not (safe and first) and "modules" not in {keyword.arg for keyword in node.keywords}
        elif last in BUILDERS:  # our models; `cut` is one that is loaded already
            unsafe_load = not (alone or checked or first == "cut")
        elif name in ("np.load", "numpy.load"):
            unsafe_load = "allow_pickle=False" not in ast.unparse(node)
        else:
            words = {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords}
            unsafe_load = bool(NEVER.fullmatch(name) or words & {"allow_pickle=True", "weights_only=False"})
        if unsafe_load:
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


@pytest.mark.parametrize(
    "bad",
    [
        "AutoModel.from_pretrained(name)",
        "SentenceTransformer(name, device='cpu')",
        "def f(name):\n    return CrossEncoder(name)",
        "NVEmbedModel.from_backbone(backbone)",
        "pipeline('text-generation', model=name)",
        "np.load(file)",
        "torch.load(file, weights_only=True)",
        "pickle.loads(data)",
    ],
)
def test_a_loader_without_it_is_found(bad: str) -> None:
    assert list(unsafe(bad))


def test_no_loader_in_the_product_is_without_it() -> None:
    found = {
        f"{file.relative_to(REPOSITORY)}:{line}"
        for folder in PRODUCT
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
        for line in unsafe(
            file.read_text(encoding="utf-8"), file.parent.name in ("modeling",) or file.name == "verify.py"
        )
    }
    assert sorted(found) == []
