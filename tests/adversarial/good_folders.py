"""Folders in which `revela-hub check` has nothing to find: tiny random models of all families, as their libraries save them.

    python tests/adversarial/good_folders.py            # builds them in a temporary folder, checks them, prints a table

A row with a failed check is a false alarm: the 51 folders have no false alarm. The folders are also what
`hostile_publish.py` plants its faults in.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.append(str(Path(__file__).resolve().parents[1]))
from fork_server import python

from revela_hub.hub_cards.method import vectors_of
from revela_hub.hub_cards.verify import verify as verify_module
from revela_hub.hub_cards.verify.verify import verify
from revela_hub.trainers.methods import METHODS

TEXTS = (
    "What is the capital of France? The capital of France is Paris; the capital of Japan is Tokyo.",
    "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock.",
    "The old river is wide and slow. The old river is narrow and fast.",
    "def area(width: float, height: float) -> float:\n    return width * height\n\ndef area(side): return side",
)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SMALL | {"max_position_embeddings": 256}
Build = Callable[[Path, Path], None]  # (where to write, a folder to work in)
PROMPTS = {"query": "Query: ", "document": "Passage: "}


def wordpiece(**special: str) -> Any:
    """As BERT's: [CLS] text [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "/think", "/no_think"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return hf.BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **special)


def bpe(*, eos: bool = False, bos: bool = False, pad: bool = True) -> Any:
    """As decoders': byte-level, and EOS or BOS only if asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]  # the last is what Qwen's class adds
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    before, after = "<s> " if bos else "", " </s>" if eos else ""
    if eos or bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}", pair=f"{before}$A{after} $B:1{after}", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"} | ({"pad_token": "<pad>"} if pad else {})
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def saved(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Path:
    """A plain transformers folder."""
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(name: str, tokenizer: Any, **changes: Any) -> Any:
    """A tiny random model of a class of transformers."""
    kind = getattr(hf, name)
    settings = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | SMALL
    for special in ("bos", "eos"):
        if (number := getattr(tokenizer, f"{special}_token_id")) is not None:
            settings[f"{special}_token_id"] = number
    return kind(kind.config_class(**settings | changes)).eval()


def encoder(folder: Path, backbone: Path, mode: str = "mean", *extra: Any, **options: Any) -> None:
    """A sentence-transformers folder, as its library saves it."""
    transformer = Transformer(str(backbone), **options.pop("transformer", {}))
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
    options = {"prompts": PROMPTS, "device": "cpu"} | options
    SentenceTransformer(modules=[transformer, pooling, *extra], **options).save(str(folder), create_model_card=False)


def of(
    name: str, mode: str = "mean", *, byte_level: bool = False, extra: Callable[[], list[Any]] = list, **changes: Any
) -> Build:
    """Builds a sentence-transformers folder over a model of a family."""

    def build(folder: Path, work: Path) -> None:
        tokenizer = bpe(eos=mode == "lasttoken", bos=mode != "lasttoken") if byte_level else wordpiece()
        encoder(folder, saved(model_of(name, tokenizer, **changes), tokenizer, work), mode, *extra())

    return build


def plain(name: str, *, byte_level: bool = False, pad: bool = True, **changes: Any) -> Build:
    """Builds a plain transformers folder."""

    def build(folder: Path, work: Path) -> None:
        tokenizer = bpe(bos=True, pad=pad) if byte_level else wordpiece()
        saved(model_of(name, tokenizer, **changes), tokenizer, folder)

    return build


def splade(folder: Path, work: Path) -> None:
    saved(model_of("BertForMaskedLM", tokenizer := wordpiece()), tokenizer, work)
    modules = [
        Transformer(str(work), transformer_task="fill-mask"),
        SpladePooling("max", embedding_dimension=len(tokenizer)),
    ]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)


def cross(labels: int) -> Build:
    def build(folder: Path, work: Path) -> None:
        tokenizer = wordpiece()
        saved(model_of("BertForSequenceClassification", tokenizer, num_labels=labels), tokenizer, work)
        CrossEncoder(str(work), device="cpu").save_pretrained(str(folder), create_model_card=False)

    return build


def late_interaction(folder: Path, work: Path) -> None:
    saved(model_of("BertModel", tokenizer := wordpiece()), tokenizer, work)
    MultiVectorEncoder(str(work), device="cpu").save_pretrained(str(folder), create_model_card=False)


def static(folder: Path, work: Path) -> None:
    tokenizer = wordpiece().backend_tokenizer
    modules = [StaticEmbedding(tokenizer, embedding_dim=16)]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def router(folder: Path, work: Path) -> None:
    routes = []
    for part in ("query", "document"):
        saved(model_of("BertModel", tokenizer := wordpiece()), tokenizer, work / part)
        transformer = Transformer(str(work / part))
        routes.append([transformer, Pooling(32, pooling_mode="cls")])
    model = SentenceTransformer(modules=[Router.for_query_document(*routes)], device="cpu")
    model.save(str(folder), create_model_card=False)


def without_pooler(folder: Path, work: Path) -> None:
    tokenizer = wordpiece()
    model = hf.BertModel(model_of("BertModel", tokenizer).config, add_pooling_layer=False)
    encoder(folder, saved(model, tokenizer, work))
    weights = hf.BertModel.from_pretrained(folder, add_pooling_layer=False)
    weights.save_pretrained(folder)


def over_whole(name: str) -> Build:
    """A sentence-transformers folder whose weights are those of a model with a head."""

    def build(folder: Path, work: Path) -> None:
        tokenizer = wordpiece()
        model = model_of(name, tokenizer)
        encoder(folder, saved(model, tokenizer, work))
        model.save_pretrained(folder)

    return build


def in_type(dtype: torch.dtype, name: str, mode: str) -> Build:
    def build(folder: Path, work: Path) -> None:
        tokenizer = bpe(eos=True) if mode == "lasttoken" else wordpiece()
        saved(model_of(name, tokenizer, dtype=dtype).to(dtype), tokenizer, work)
        encoder(folder, work, mode)

    return build


def sharded(folder: Path, work: Path) -> None:
    tokenizer = bpe(eos=True)
    saved(model_of("LlamaModel", tokenizer, **DECODER), tokenizer, work, max_shard_size="40KB")
    encoder(folder, work, "lasttoken")
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    hf.AutoModel.from_pretrained(work).save_pretrained(folder, max_shard_size="40KB")


CODE = '''
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import is_flash_attn_2_available

try:
    import xformers_of_nobody
except ImportError:
    xformers_of_nobody = None

if is_flash_attn_2_available():
    from flash_attn import flash_attn_func


class ToyConfig(PretrainedConfig):
    model_type = "toy"
    hidden_size = 32


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(400, 32)
        self.post_init()

    def _init_weights(self, module):
        """Leaves loaded weights alone."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return BaseModelOutput(last_hidden_state=(self.embeddings(input_ids) * attention_mask.unsqueeze(-1)).cumsum(1))
'''


def remote_code(folder: Path, work: Path) -> None:
    """Custom code, with imports that depend on the installed packages, and a stray script next to it."""
    of("LlamaModel", "lasttoken", byte_level=True, **DECODER)(folder, work)
    weights = torch.nn.Embedding(400, 32).weight.data
    from safetensors.torch import save_file

    save_file({"embeddings.weight": weights}, folder / "model.safetensors", metadata={"format": "pt"})
    auto_map = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
    config = {"model_type": "toy", "architectures": ["ToyModel"], "auto_map": auto_map, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_toy.py").write_text(CODE)
    (folder / "train.py").write_text("import wandb, my_own_package\n")


def slashes(folder: Path, work: Path) -> None:
    """Labels, special tokens and prompts that begin with a slash, and words that look like addresses."""
    of("BertModel")(folder, work)
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "/m/02mk9", "1": "/home"}, "label2id": {"/m/02mk9": 0, "/home": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"extra_special_tokens": ["/think", "/no_think"]})
    )
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings["prompts"]["query"] = "/search: "
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    text = "# M\nSee https://example.com/home/alice and put it into /home/user/models or ~/models; docs/home/page.\n"
    (folder / "README.md").write_text(text)


def documented(folder: Path, work: Path) -> None:
    """Other files that may be in a model folder: texts, pictures, a SentencePiece model, a training checkpoint."""
    of("BertModel", extra=lambda: [Normalize()])(folder, work)
    piece = b"\x0a\x05\x0a\x03the"
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    card = f"""# M
![loss](figures/loss.png) ![pixel](data:image/png;base64,{pixel})
Commit 0a1b2c3d4e5f67890a1b2c3d4e5f67890a1b2c3d, sha256 {"0a1b2c3d4e5f6789" * 4}; https://x.org/a%20b%2Fc?q=%68%65llo.
Set HF_TOKEN=$HF_TOKEN; clone https://user:$TOKEN@hub.example.org/m; Authorization: Bearer $TOKEN.
"""
    for name, content in {
        "README.md": card.encode(),
        "LICENSE": "Copyright \xa9 2024\f".encode("latin-1"),
        "License-Apache-2.0.txt": b"Apache",
        "NOTICE": "third parties".encode("utf-16"),
        "CITATION.cff": b"cff-version: 1.2.0\nmessage: cite it\nauthors:\n- family-names: A.\n",
        "tokenizer.model": piece * 40 + b"\x12\x03\x0a\x01a",
        "vocab.tiktoken": b"IQ== 0\nIg== 1\n",
        "figures/loss.png": base64.b64decode(pixel) + b"tEXtSoftware\0matplotlib",
        ".eval_results/a.yaml": b"- value: 0.5\n",
        "checkpoint-3/adapter_config.json": b"{}",
        "Train.py": b"import wandb\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def shifted(folder: Path, work: Path) -> None:
    """RoBERTa's positions begin after the padding token."""
    tokenizer = bpe(bos=True)
    saved(model_of("RobertaModel", tokenizer, max_position_embeddings=130), tokenizer, work)
    encoder(folder, work)


def chat_template(folder: Path, work: Path) -> None:
    """Every text goes through a chat template."""
    of("BertModel")(folder, work)
    how = {"method": "forward", "method_output_name": "last_hidden_state"}
    modality = {"text": how, "message": how | {"format": "flat"}}
    settings = {"modality_config": modality, "module_output_name": "token_embeddings"}
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    changes = {"sentence_bert_config.json": settings | {"transformer_task": "feature-extraction"}}
    for name, change in (changes | {"tokenizer_config.json": template}).items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | change))


FAMILIES: dict[str, Callable[[Path, Path], None]] = {
    "BERT, mean": of("BertModel"),
    "BERT, first token": of("BertModel", "cls"),
    "BERT, max": of("BertModel", "max"),
    "BERT, normalised": of("BertModel", extra=lambda: [Normalize()]),
    "BERT, dense layer": of("BertModel", extra=lambda: [Dense(32, 8), Normalize()]),
    "BERT, layer norm": of("BertModel", extra=lambda: [LayerNorm(32)]),
    "BERT without pooler": without_pooler,
    "BERT with MaskedLM head, embedded": over_whole("BertForMaskedLM"),
    "BERT with PreTraining heads, embedded": over_whole("BertForPreTraining"),
    "BERT in float16": in_type(torch.float16, "BertModel", "mean"),
    "BERT in bfloat16": in_type(torch.bfloat16, "BertModel", "cls"),
    "RoBERTa": shifted,
    "DistilBERT": of("DistilBertModel", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    "MPNet": of("MPNetModel", byte_level=True),
    "ALBERT": of("AlbertModel", embedding_size=16),
    "ELECTRA": of("ElectraModel", "cls", embedding_size=16),
    "XLM-RoBERTa": of("XLMRobertaModel", byte_level=True, max_position_embeddings=130),
    "CamemBERT": of("CamembertModel", byte_level=True, max_position_embeddings=130),
    "DeBERTa v2": of("DebertaV2Model"),
    "ModernBERT": of("ModernBertModel", "cls", cls_token_id=2, sep_token_id=3),
    "T5 encoder": of("T5EncoderModel", byte_level=True, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4),
    "Llama, last token": of("LlamaModel", "lasttoken", byte_level=True, **DECODER),
    "Llama, mean": of("LlamaModel", byte_level=True, **DECODER),
    "Llama in bfloat16": in_type(torch.bfloat16, "LlamaModel", "lasttoken"),
    "Llama in shards": sharded,
    "Qwen 2": of("Qwen2Model", "lasttoken", byte_level=True, num_key_value_heads=2, **DECODER),
    "Qwen 3": of("Qwen3Model", "lasttoken", byte_level=True, num_key_value_heads=2, head_dim=8, **DECODER),
    "Mistral": of("MistralModel", "lasttoken", byte_level=True, num_key_value_heads=2, **DECODER),
    "Gemma": of("GemmaModel", "lasttoken", byte_level=True, num_key_value_heads=2, head_dim=8, **DECODER),
    "Gemma 2": of("Gemma2Model", "lasttoken", byte_level=True, num_key_value_heads=2, head_dim=8, **DECODER),
    "Gemma 3": of("Gemma3TextModel", byte_level=True, num_key_value_heads=2, head_dim=8, **DECODER),
    "Phi 3": of("Phi3Model", "lasttoken", byte_level=True, num_key_value_heads=2, **DECODER),
    "GPT-2": of("GPT2Model", "lasttoken", byte_level=True, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "GPT-NeoX": of("GPTNeoXModel", "lasttoken", byte_level=True, **DECODER),
    "static embeddings": static,
    "Router of query and document": router,
    "SPLADE": splade,
    "CrossEncoder": cross(1),
    "CrossEncoder, three labels": cross(3),
    "MultiVectorEncoder": late_interaction,
    "custom code": remote_code,
    "slashes in labels and words": slashes,
    "chat template": chat_template,
    "files next to the model": documented,
    "plain BertModel": plain("BertModel"),
    "plain BertForMaskedLM": plain("BertForMaskedLM"),
    "plain BertForPreTraining": plain("BertForPreTraining"),
    "plain BertForSequenceClassification": plain("BertForSequenceClassification"),
    "plain RobertaForMaskedLM": plain("RobertaForMaskedLM", byte_level=True, max_position_embeddings=130),
    "plain LlamaForCausalLM": plain("LlamaForCausalLM", byte_level=True, **DECODER),
    "plain LlamaForCausalLM without padding token": plain("LlamaForCausalLM", byte_level=True, pad=False, **DECODER),
    "plain T5ForConditionalGeneration": plain(
        "T5ForConditionalGeneration", byte_level=True, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4
    ),
}  # fmt: skip


def build(root: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Builds the folders, and returns where each is."""
    torch.manual_seed(0)
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    folders = {}
    for number, (name, make) in enumerate(FAMILIES.items()):
        if names is None or name in names:
            folders[name] = root / f"good{number}"
            with tempfile.TemporaryDirectory() as work:
                make(folders[name], Path(work))
    return folders


def forked() -> None:
    """Verify in processes of the fork server, which has imported the libraries."""
    os.environ.setdefault("HF_HOME", tempfile.mkdtemp())
    verify_module._PYTHON = tuple(python("readers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of families")
    parser.add_argument("--also", nargs="*", default=[], type=Path, help="other folders, of real models")
    arguments = parser.parse_args()
    forked()
    with tempfile.TemporaryDirectory() as root:
        folders = build(Path(root), arguments.only) | {str(path): path for path in arguments.also}
        start = time.monotonic()
        results = [
            verify(folder, trust_remote_code=any(folder.glob("*.py")), vectors=vectors_of(folder, METHODS))
            for folder in folders.values()
        ]
        seconds = time.monotonic() - start
    print("| folder | checks | false alarm |\n|---|---:|---|")
    for name, checks in zip(folders, results, strict=True):
        failed = "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.ok)
        print(f"| {name} | {len(checks)} | {failed[:200]} |")
    wrong = sum(any(not check.ok for check in checks) for checks in results)
    print(f"\n{wrong} false alarms in {len(folders)} folders, {seconds:.0f} seconds")


if __name__ == "__main__":
    main()
