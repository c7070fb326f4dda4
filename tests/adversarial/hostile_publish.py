"""Faults of all kinds, planted one by one into good folders: which of them `revela-hub publish` lets through.

    python tests/adversarial/hostile_publish.py                  # all, one table of kinds
    python tests/adversarial/hostile_publish.py --list           # every case with its message

A case is caught if publishing raises an error, or if the planted file stays on the machine. Each is decided by a dry run whose
verification is made for all folders together, in one clean process, with a minute for each.

All 179 cases are caught:

| kind | cases | caught |
|---|---:|---:|
| files that stay | 12 | 12 |
| links | 5 | 5 |
| secrets | 20 | 20 |
| content | 13 | 13 |
| shards | 5 | 5 |
| contradictions | 13 | 13 |
| home folders | 8 | 8 |
| missing weights | 6 | 6 |
| half precision | 5 | 5 |
| large batches | 2 | 2 |
| process ends | 5 | 5 |
| no text in the vector | 11 | 11 |
| tokenizer and model | 11 | 11 |
| tokenizer files | 11 | 11 |
| settings | 15 | 15 |
| tied weights | 3 | 3 |
| never ends | 2 | 2 |
| code elsewhere | 3 | 3 |
| card and folder | 6 | 6 |
| not as trained | 9 | 9 |
| damaged files | 14 | 14 |
| all | 179 | 179 |

The first version of `publish` was not tested with these cases; of 141 others, planted by a reader of its
tests, it let 84 through. A case that passes is a bug here or in the check: say in its commit which.
"""

from __future__ import annotations

import argparse
import base64
import collections
import io
import json
import pickle
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from good_folders import CODE, build, forked
from safetensors.torch import load_file, save_file

from revela_hub.checkpoints import publish
from revela_hub.hub_cards import Assembly, Check, Destination, upload
from revela_hub.hub_cards.verify.verify import verify

BERT, LLAMA, TOY = "BERT, normalised", "Llama, last token", "custom code"
PLAIN, CAUSAL = "plain BertModel", "plain LlamaForCausalLM"
HEADED = "BERT with MaskedLM head, embedded"
HALF, SHARDS, DENSE, ROUTER = "BERT in float16", "Llama in shards", "BERT, dense layer", "Router of query and document"


class Case(NamedTuple):
    """A fault: its kind, the folder it is planted in, what plants it, and the file that must not go up, if it is about one."""

    kind: str
    name: str
    base: str
    plant: Callable[[Path], object]
    leaks: str | None = None
    reference: bool = False


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    """Changes values of a JSON file; None takes one out."""

    def plant(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        content.update(changes)
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return plant


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Writes a file."""

    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return plant


def weights(
    change: Callable[[dict[str, torch.Tensor]], object], name: str = "model.safetensors"
) -> Callable[[Path], object]:
    """Changes the weights."""

    def plant(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return plant


def link(name: str, target: str) -> Callable[[Path], object]:
    """Makes a symbolic link."""
    return lambda folder: (folder / name).symlink_to(target)


def both(*plants: Callable[[Path], object]) -> Callable[[Path], object]:
    """Several at once."""
    return lambda folder: [plant(folder) for plant in plants]


def code(text: str, *, before: str = "class ToyConfig") -> Callable[[Path], object]:
    """Puts lines into the model's own code."""
    return lambda folder: (folder / "modeling_toy.py").write_text(CODE.replace(before, f"{text}\n\n\n{before}", 1))


def in_init(line: str) -> Callable[[Path], object]:
    """Puts a line into the constructor of the model's own code."""
    mark = "        self.post_init()"
    return lambda folder: (folder / "modeling_toy.py").write_text(CODE.replace(mark, f"        {line}\n{mark}", 1))


def scaled(part: str, factor: float) -> Callable[[dict[str, torch.Tensor]], object]:
    """Multiplies all weights of a name."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if part in name:
                tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)

    return change


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes tokenizer.json."""

    def plant(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return plant


def drop(*names: str) -> Callable[[Path], object]:
    """Deletes files or folders."""

    def plant(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return plant


def metadata_secret(folder: Path) -> None:
    """A token in the free text at a safetensors file's head."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "by": "ghp_" + "a1B2" * 9})


def as_integers(folder: Path) -> None:
    weights(lambda t: t.update({k: (v * 100).to(torch.int8) for k, v in t.items() if k.endswith("dense.weight")}))(
        folder
    )


def pickled(folder: Path) -> None:
    """The dense layer's weights as torch saves them."""
    (module,) = folder.glob("*_Dense")
    torch.save(load_file(module / "model.safetensors"), module / "pytorch_model.bin")
    (module / "model.safetensors").unlink()


def module(kind: str, **changes: Any) -> Callable[[Path], object]:
    """Changes the configuration of a module of a kind."""

    def plant(folder: Path) -> None:
        (found,) = folder.glob(f"*_{kind}")
        edit(f"{found.name}/config.json", **changes)(folder)

    return plant


def without_module(kind: str) -> Callable[[Path], object]:
    """Takes a module out of modules.json."""

    def plant(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(
            json.dumps([entry for entry in listed if not entry["type"].endswith(kind)])
        )

    return plant


def modules_in_order(*places: int) -> Callable[[Path], object]:
    """Lists the modules in another order."""

    def plant(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        entries = [listed[place] | {"idx": number, "name": str(number)} for number, place in enumerate(places)]
        (folder / "modules.json").write_text(json.dumps(entries))

    return plant


def prompts(**changed: str) -> Callable[[Path], object]:
    """Changes prompts."""
    return edit("config_sentence_transformers.json", prompts={"query": "Query: ", "document": "Passage: "} | changed)


def other_route(folder: Path) -> None:
    """Gives the document route a projection to another dimension."""
    file = folder / "router_config.json"
    config = json.loads(file.read_text())
    target = folder / "document_2_Dense"
    target.mkdir()
    settings = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (target / "config.json").write_text(json.dumps(settings))
    save_file({"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}, target / "model.safetensors")
    config["types"]["document_2_Dense"] = "sentence_transformers.base.modules.dense.Dense"
    config["structure"]["document"].append("document_2_Dense")
    file.write_text(json.dumps(config))


def in_forward(line: str) -> Callable[[Path], object]:
    """Puts a line before what the model's own code computes."""
    mark = "        return BaseModelOutput"
    return lambda folder: (folder / "modeling_toy.py").write_text(CODE.replace(mark, f"        {line}\n{mark}", 1))


def message(template: str) -> Callable[[Path], object]:
    """Has every text go through a chat template."""
    how = {"method": "forward", "method_output_name": "last_hidden_state"}
    modality = {"text": how, "message": how | {"format": "flat"}}
    return both(
        edit("tokenizer_config.json", chat_template=template),
        edit(
            "sentence_bert_config.json",
            transformer_task="feature-extraction",
            modality_config=modality,
            module_output_name="token_embeddings",
        ),
    )


def late_rows(tensors: dict[str, torch.Tensor]) -> None:
    """Positions that only long texts reach, which are too large for float16 together with the token's type."""
    tensors["embeddings.token_type_embeddings.weight"][:, 0] = 30
    tensors["embeddings.position_embeddings.weight"][100:, 0] = 65504


def special(**token: Any) -> dict[str, Any]:
    """A special token as tokenizer.json has it."""
    return {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | token


def other_output(tensors: dict[str, torch.Tensor]) -> None:
    """An output matrix that is not the embeddings."""
    name = next(name for name in tensors if "embed_tokens" in name or "word_embeddings" in name)
    output = "lm_head.weight" if "embed_tokens" in name else "cls.predictions.decoder.weight"
    tensors[output] = torch.randn_like(tensors[name])


def loop(folder: Path) -> None:
    (folder / "a.json").symlink_to("b.json")
    (folder / "b.json").symlink_to("a.json")


def large(name: str, size: int) -> Callable[[Path], object]:
    """A file of a size, which takes no room on the disk."""

    def plant(folder: Path) -> None:
        with (folder / name).open("wb") as stream:
            stream.truncate(size)

    return plant


def archive(name: str, mode: str, text: str) -> Callable[[Path], object]:
    """An archive with one file, under the name of another kind."""

    def plant(folder: Path) -> None:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
            entry = tarfile.TarInfo("notes.txt")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        (folder / name).write_bytes(stream.getvalue())

    return plant


def adapter(name: str, *keys: str, config: bool = False) -> Callable[[Path], object]:
    """Weights of an adapter."""

    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({key: torch.ones(2, 2) for key in keys}, folder / name)
        if config:
            settings = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "target_modules": ["query"]}
            (folder / name).with_name("adapter_config.json").write_text(json.dumps(settings))

    return plant


def index(change: Callable[[dict[str, str], list[str]], object]) -> Callable[[Path], object]:
    """Changes the table from weights to shards, whose names are given, too."""

    def plant(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text())
        change(content["weight_map"], sorted(set(content["weight_map"].values())))
        file.write_text(json.dumps(content))

    return plant


def forget_shard(placed: dict[str, str], shards: list[str]) -> None:
    for name in [name for name, shard in placed.items() if shard == shards[-1]]:
        del placed[name]


def compressed_text(folder: Path) -> None:
    """A token in the compressed comment of a picture that the card shows."""
    comment = b"zTXtComment\0\0" + zlib.compress(f"made with {TOKEN}".encode())
    (folder / "m.png").write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(comment) - 4) + comment + b"\0\0\0\0")
    (folder / "README.md").write_text("![m](m.png)")


def renamed(name: str, other: str) -> Callable[[Path], object]:
    """Gives a file another name."""
    return lambda folder: (folder / name).rename(folder / other)


TOKEN = "hf" + "_aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD12"
AUTO = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
SECRET = "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc"
KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIrYSSNQFaA2Hwf1duRSxKtLYX5CB04fSeQ6tF1aY/PuoAoGCCqGSM49\n"
TEMPLATE = "{% for m in messages %}{{ m.role }}{% endfor %}"
DATED = "{% for m in messages %}Today is {{ strftime_now('%d %B %Y') }}. {{ m.content }}{% endfor %}"

CUTTING = "{% for m in messages %}{{ m.content[:200] }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"

CASES = [
    *(
        Case("files that stay", name, BERT, write(name, "x"), leaks=name)
        for name in ("wandb/run-1.wandb", "lora.pt", "scheduler.pt", "data/train.parquet", "eval/similarity.csv", "nohup.out",
                     ".env", "results.pkl", "vectors.npy", "1_Pooling/debug.log", "ideas.docx", "config.json.bak")
    ),
    Case("links", "folder outside", BERT, link("2_Extra", "/etc")),
    Case("links", "file outside", BERT, link("vocab.txt", "/etc/passwd")),
    Case("links", "relative, upwards", BERT, link("merges.txt", "../../etc/passwd")),
    Case("links", "to nothing", BERT, link("LICENSE", "/no/such/licence")),
    Case("links", "loop", BERT, loop),
    Case("secrets", "GitHub token in the card", BERT, write("README.md", "# M\nclone with ghp_" + "aB3d" * 9)),
    Case("secrets", "Slack hook in config.json", BERT, edit("config.json", hook="hooks.slack.com/services/T0AB12/B0CD/x9Yz")),
    Case("secrets", "private key in the licence", BERT, write("LICENSE", f"MIT\n{KEY}")),
    Case("secrets", "payment key in code", TOY, code(f'KEY = "{SECRET}"')),
    Case("secrets", "token in the head of the weights", LLAMA, metadata_secret),
    Case("secrets", "Google key as UTF-16", BERT, write("NOTICE", ("AIza" + "Sy0aB-_" * 5).encode("utf-16"))),
    Case("secrets", "password in an address", BERT, edit("tokenizer_config.json", proxy="http://jane:hunter2pass@proxy.org")),
    Case("secrets", "signed token in a picture", BERT, both(
        write("README.md", "![m](m.png)"), write("m.png", b"\x89PNG\0\xffeyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT"))),
    Case("secrets", "password in an address in tokenizer.json", LLAMA, tokenizer(
        lambda t: t.update(source="https://jane:hunter2pass@proxy.org/tokenizer.json"))),
    Case("secrets", "base64 in the card", BERT, write("README.md", b"# M\nkey " + base64.b64encode(TOKEN.encode()) + b"\n")),
    Case("secrets", "base64 of a login in code", TOY, code('HEADERS = {"Authorization": "Basic amFuZTpodW50ZXIycGFzcw=="}')),
    Case("secrets", "escaped in JSON", BERT, lambda f: write("config.json", (f / "config.json").read_text().replace(
        "{", '{"note": "' + "".join(f"\\u{ord(c):04x}" for c in TOKEN) + '",', 1))(f)),
    Case("secrets", "escaped in an address", BERT, write("NOTICE", "see https://x.org/?t=" + TOKEN.replace("_", "%5F"))),
    Case("secrets", "hexadecimal in the results", BERT, both(
        write("README.md", "# M"), write(".eval_results/a.yaml", f"- notes: {TOKEN.encode().hex()}\n"))),
    Case("secrets", "in a picture's comment", BERT, compressed_text),
    Case("secrets", "in a chat template", BERT, write("chat_template.jinja", "{# " + TOKEN + " #}{{ messages }}")),
    Case("content", "archive as licence", BERT, archive("LICENSE.tar.gz", "w:gz", TOKEN)),
    Case("content", "plain archive as notice", BERT, archive("NOTICE", "w", TOKEN)),
    Case("content", "pickle as tokenizer.model", BERT, write("tokenizer.model", pickle.dumps(collections.OrderedDict(a=1)))),
    Case("content", "pickle as spiece.model, protocol 0", BERT, write(
        "spiece.model", pickle.dumps(collections.OrderedDict(a=1), protocol=0))),
    Case("content", "cut SentencePiece model", BERT, write("tokenizer.model", b"\x0a\x08\x0a\x06<unk>\x0a\x08")),
    Case("content", "torch's pickle as vocabulary", BERT, lambda f: torch.save({"a": torch.ones(2)}, f / "vocab.txt")),
    Case("content", "program as CITATION.cff", BERT, write("CITATION.cff", b"\x7fELF\2\1\1" + bytes(60))),
    Case("content", "archive behind a picture", BERT, both(write("README.md", "![m](m.png)"), lambda f: write(
        "m.png", b"\x89PNG\r\n\x1a\n" + b"PK\3\4" + bytes(30) + b"PK\5\6" + bytes(18))(f))),
    Case("content", "pickle as a dense layer's safetensors", DENSE, lambda f: torch.save(
        {"linear.weight": torch.ones(8, 32)}, next(f.glob("*_Dense")) / "model.safetensors")),
    Case("content", "prompt tuning as adapter_model.safetensors", BERT, adapter("adapter_model.safetensors", "prompt_embeddings")),
    Case("content", "a gigabyte of merges.txt", BERT, large("merges.txt", 10**9)),
    Case("content", "100 megabytes of config.json", BERT, lambda f: write(
        "config.json", (f / "config.json").read_bytes() + b" " * 10**8)(f)),
    Case("content", "pointer of Git-LFS as licence", BERT, write("LICENSE", "version https://git-lfs.github.com/spec/v1\n")),
    Case("shards", "missing from the index", SHARDS, index(forget_shard)),
    Case("shards", "a weight missing from the index", SHARDS, index(lambda placed, shards: placed.pop(next(iter(placed))))),
    Case("shards", "outside the folder", SHARDS, index(lambda placed, shards: placed.update(
        {next(iter(placed)): "../elsewhere.safetensors"}))),
    Case("shards", "a weight in another shard", SHARDS, index(lambda placed, shards: placed.update({next(iter(placed)): shards[-1]}))),
    Case("shards", "index of a list", SHARDS, write("model.safetensors.index.json", '{"weight_map": []}')),
    Case("contradictions", "adapter in a subfolder", BERT, adapter(
        "adapter/adapter_model.safetensors", "base_model.model.encoder.layer.0.attention.self.query.lora_A.weight", config=True)),
    Case("contradictions", "adapter under another name", BERT, adapter("extra/weights.safetensors", "layer.0.query.lora_A.weight")),
    Case("contradictions", "2_Normalize not listed", BERT, without_module("Normalize")),
    Case("contradictions", "empty 3_Dense not listed", BERT, lambda f: (f / "3_Dense").mkdir()),
    Case("contradictions", "1_Pooling/CONFIG.json", BERT, renamed("1_Pooling/config.json", "1_Pooling/CONFIG.json")),
    Case("contradictions", "Tokenizer.json", BERT, renamed("tokenizer.json", "Tokenizer.json")),
    Case("contradictions", "a second Pooling/config.json by case", BERT, write("1_Pooling/Config.json", "{}")),
    Case("contradictions", "a module without configuration", DENSE, lambda f: (next(f.glob("*_Dense")) / "config.json").unlink()),
    Case("contradictions", "weights next to the routes", ROUTER, lambda f: save_file({"a": torch.ones(1)}, f / "model.safetensors")),
    Case("contradictions", "a route through nothing", ROUTER, lambda f: edit("router_config.json", structure=(
        s := json.loads((f / "router_config.json").read_text())["structure"]) | {"document": [*s["document"], "document_9_Dense"]})(f)),
    Case("contradictions", "a default route that does not exist", ROUTER, edit("router_config.json", parameters={"default_route": "passage"})),
    Case("contradictions", "a name twice in JSON", BERT, lambda f: write("config.json", (f / "config.json").read_text().replace(
        "{", '{"hidden_size": 64,', 1))(f)),
    Case("contradictions", "one folder for two modules", BERT, lambda f: write("modules.json", json.dumps(
        [m | {"path": m["path"].replace("2_Normalize", "1_Pooling")} for m in json.loads((f / "modules.json").read_text())]))(f)),
    Case("home folders", "in a sentence", BERT, write("README.md", "# M\nTrained from /home/alice.smith/corpora, twice.\n")),
    Case("home folders", "with a space", BERT, write("README.md", "see '/Users/Jane Doe/models/7'")),
    Case("home folders", "of Windows, in JSON", BERT, edit("config.json", note="from C:\\Users\\jane\\models")),
    Case("home folders", "in a comment of the code", TOY, code("# copied from /data/home/bob/toy.py")),
    Case("home folders", "of a cluster, as address", BERT, edit("tokenizer_config.json", note="see file:///home1/carol/t.json")),
    Case("home folders", "in a chat template", BERT, edit("tokenizer_config.json", chat_template="{# /Users/dan/t.jinja #}hi")),
    Case("missing weights", "a norm", LLAMA, weights(lambda t: t.pop("norm.weight"))),
    Case("missing weights", "a whole layer", BERT, weights(lambda t: [t.pop(k) for k in list(t) if ".layer.1." in k])),
    Case("missing weights", "a shard", SHARDS, lambda f: sorted(f.glob("model-*.safetensors"))[0].unlink()),
    Case("missing weights", "under other names", LLAMA, weights(
        lambda t: [t.__setitem__(f"net.{k}", t.pop(k)) for k in list(t) if "layers.0" in k])),
    Case("missing weights", "of another shape", LLAMA, weights(lambda t: t.update({"norm.weight": torch.ones(31)}))),
    Case("missing weights", "half of a dense layer", DENSE, lambda f: weights(
        lambda t: t.pop("linear.bias"), f"{next(f.glob('*_Dense')).name}/model.safetensors")(f)),
    Case("half precision", "overflow between layers", HALF, weights(scaled("intermediate.dense.weight", 5e5))),
    Case("half precision", "overflow behind attention", HALF, weights(
        lambda t: [scaled(part, 1e4)(t) for part in ("self.value.weight", "attention.output.dense.weight")])),
    Case("half precision", "stored in full, read in half", LLAMA, both(
        weights(scaled("mlp", 4e2)), edit("config.json", dtype="float16", torch_dtype="float16"))),
    Case("half precision", "overflow on long texts", HALF, weights(late_rows)),
    Case("half precision", "another vector in large batches", TOY, both(edit("config.json", dtype="float16"), in_forward(
        "input_ids = (input_ids + (len(input_ids) > 19) * (self.embeddings.weight.dtype == torch.float16)) % 400"))),
    Case("large batches", "from 20 texts on", TOY, in_forward("input_ids = (input_ids + (len(input_ids) > 19)) % 400")),
    Case("large batches", "the end of long ones", TOY, in_forward(
        "attention_mask = attention_mask * (torch.arange(input_ids.shape[1]) < 40) if len(input_ids) > 8 else attention_mask")),
    Case("process ends", "exit in the constructor", TOY, in_init("raise SystemExit")),
    Case("process ends", "hard exit at import", TOY, code("import os\nos._exit(0)")),
    Case("process ends", "kills itself", TOY, in_init("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")),
    Case("process ends", "interrupt", TOY, in_init("raise KeyboardInterrupt")),
    Case("process ends", "abort", TOY, in_init("import os; os.abort()")),
    Case("no text in the vector", "first token of a causal model", LLAMA, module("Pooling", pooling_mode="cls")),
    Case("no text in the vector", "embeddings all alike", LLAMA, weights(
        lambda t: t.update({"embed_tokens.weight": torch.ones_like(t["embed_tokens.weight"])}))),
    Case("no text in the vector", "zero norm", LLAMA, weights(lambda t: t["norm.weight"].zero_())),
    Case("no text in the vector", "zero projection", DENSE, lambda f: weights(
        lambda t: [x.zero_() for x in t.values()], f"{next(f.glob('*_Dense')).name}/model.safetensors")(f)),
    Case("no text in the vector", "four tokens", BERT, edit("tokenizer_config.json", model_max_length=4)),
    Case("no text in the vector", "prompt longer than the length", BERT, both(
        prompts(query="find the passage that answers this " * 9), edit("sentence_bert_config.json", max_seq_length=40))),
    Case("no text in the vector", "normaliser eats the text", LLAMA, tokenizer(lambda t: t.update(
        normalizer={"type": "Replace", "pattern": {"Regex": ".+"}, "content": "river"}))),
    Case("no text in the vector", "template without the text", BERT, message(TEMPLATE)),
    Case("no text in the vector", "template that cuts the text", BERT, message(CUTTING)),
    Case("no text in the vector", "normaliser that cuts the text", LLAMA, tokenizer(lambda t: t.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "(?m)\\A.{200}\\K.*"}, "content": ""}))),
    Case("no text in the vector", "empty text without a token", LLAMA, both(
        tokenizer(lambda t: t.update(post_processor=None)), module("Pooling", pooling_mode="mean"),
        edit("config_sentence_transformers.json", prompts={"query": "", "document": ""}))),
    Case("tokenizer and model", "vocabulary of another language", BERT, tokenizer(lambda t: t["model"].update(vocab={
        w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(0x3041, 0x30C0))])}))),
    Case("tokenizer and model", "more tokens than rows", BERT, weights(lambda t: t.update({
        k: v[:100].clone() for k, v in t.items() if "word_embeddings" in k}))),
    Case("tokenizer and model", "added tokens beyond the rows", LLAMA, tokenizer(lambda t: t["added_tokens"].append({
        "id": 5000, "content": "<late>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True}))),
    Case("tokenizer and model", "no padding token", LLAMA, edit("tokenizer_config.json", pad_token=None)),
    Case("tokenizer and model", "no padding token, plain encoder", PLAIN, both(edit(
        "tokenizer_config.json", pad_token=None, tokenizer_class="PreTrainedTokenizerFast"))),
    Case("tokenizer and model", "template with a date", LLAMA, message(DATED)),
    Case("tokenizer and model", "declared dimension", BERT, module("Pooling", embedding_dimension=48, word_embedding_dimension=48)),
    Case("tokenizer and model", "routes of two dimensions", ROUTER, other_route),
    Case("tokenizer and model", "int8 without configuration", BERT, as_integers),
    Case("tokenizer and model", "activation of another library", DENSE, module("Dense", activation_function="mylib.act.Swish")),
    Case("tokenizer and model", "pickled module", DENSE, pickled),
    *(
        Case("tokenizer files", name, BERT, plant)
        for name, plant in (
            ("upper case kept by one file", edit("tokenizer_config.json", do_lower_case=False)),
            ("upper case kept by the other", tokenizer(lambda t: t["normalizer"].update(lowercase=False))),
            ("accents stripped by one file", edit("tokenizer_config.json", strip_accents=False)),
            ("[CLS] with another id", tokenizer(lambda t: t["post_processor"]["special_tokens"]["[CLS]"].update(ids=[7]))),
            ("[CLS] is [MASK] in one file", edit("tokenizer_config.json", cls_token="[MASK]")),
            ("[CLS] and [SEP] swapped", edit("tokenizer_config.json", cls_token="[SEP]", sep_token="[CLS]")),
            ("[CLS] and [SEP] not added by one file", tokenizer(lambda t: t.update(post_processor=None))),
            ("[CLS] and [SEP] not added", both(tokenizer(lambda t: t.update(post_processor=None)),
                edit("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"))),
            ("unknown class", edit("tokenizer_config.json", tokenizer_class="MyTokenizer")),
            ("a word is special", tokenizer(lambda t: t["added_tokens"].append(
                special(id=t["model"]["vocab"]["the"], content="the")))),
            ("a word is special, in the configuration", edit("tokenizer_config.json", extra_special_tokens=["river"])),
        )
    ),
    *(
        Case("settings", name, base, plant)
        for name, base, plant in (
            ("unknown similarity", BERT, edit("config_sentence_transformers.json", similarity_fn_name="cosin")),
            ("prompts as a list", BERT, edit("config_sentence_transformers.json", prompts=["query: "])),
            ("default prompt that does not exist", BERT, edit("config_sentence_transformers.json", default_prompt_name="search")),
            ("Normalize before Pooling", BERT, modules_in_order(0, 2, 1)),
            ("pooling in two forms", BERT, module("Pooling", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)),
            ("no pooling in the old form", BERT, write("1_Pooling/config.json", json.dumps(
                {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}))),
            ("other vocab.txt", BERT, lambda f: (f / "vocab.txt").write_text(
                "\n".join(sorted(json.loads((f / "tokenizer.json").read_text())["model"]["vocab"])))),
            ("other merges.txt", LLAMA, write("merges.txt", "#version: 0.2\na b\n")),
            ("an added token with the id of another", BERT, tokenizer(
                lambda t: t["added_tokens"].append(special(id=4, content="the") | {"special": False}))),
            ("bias in int8", BERT, weights(lambda t: t.update(
                {k: (v * 100).to(torch.int8) for k, v in t.items() if k.endswith("dense.bias")}))),
            ("weights as yes and no", BERT, weights(lambda t: t.update(
                {k: v > 0 for k, v in t.items() if k.endswith("query.weight")}))),
            ("layer norms of zeros", BERT, weights(lambda t: [x.zero_() for k, x in t.items() if "LayerNorm" in k])),
            ("NaN where nothing is read", BERT, weights(
                lambda t: [x.fill_(float("nan")) for k, x in t.items() if "pooler" in k])),
            ("a dense layer on its side", DENSE, lambda f: weights(
                lambda t: t.update({"linear.weight": t["linear.weight"].T}), f"{next(f.glob('*_Dense')).name}/model.safetensors")(f)),
            ("fewer layers than weights", LLAMA, edit("config.json", num_hidden_layers=1)),
        )
    ),
    Case("secrets", "login of netrc", BERT, write("README.md", "# M\nmachine huggingface.co login jane password hunter2longpw\n")),
    Case("secrets", "login of curl", BERT, write("NOTICE", "curl -u jane:hunter2pass https://x.org\n")),
    Case("secrets", "token of a cloud", BERT, write("NOTICE", "use dop_v1_" + "0a1b2c3d" * 8)),
    Case("secrets", "token as the user of an address", BERT, write("NOTICE", "https://" + "a1B2" * 10 + "@hub.example.org/x.git")),
    Case("home folders", "of Windows XP", BERT, write("README.md", "# M\nfrom C:\\Documents and Settings\\jane\\m\n")),
    Case("home folders", "on a server", BERT, write("README.md", "# M\nfrom smb://nas/home/jane/m\n")),
    Case("tied weights", "output of a language model", LLAMA, both(
        edit("config.json", tie_word_embeddings=True, architectures=["LlamaForCausalLM"]), weights(other_output))),
    Case("tied weights", "output of a masked language model", "SPLADE", weights(other_output)),
    Case("tied weights", "of the whole, where the body is published", HEADED, weights(other_output)),
    Case("never ends", "template with nested loops", BERT, message(ENDLESS)),
    Case("never ends", "code in the constructor", TOY, in_init("while True: pass")),
    Case("code elsewhere", "configuration", TOY, edit("config.json", auto_map=AUTO | {"AutoConfig": "org/x--modeling_toy.ToyConfig"})),
    Case("code elsewhere", "tokenizer", LLAMA, edit("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "org/y--tok.Tok"]})),
    Case("code elsewhere", "missing file", TOY, edit("config.json", auto_map=AUTO | {"AutoModel": "modeling_other.M"})),
    Case("card and folder", "modules.json lost", BERT, drop("modules.json")),
    Case("card and folder", "YAML with a tab", BERT, write("README.md", "---\nlicense:\tmit\n\ttags: x\n---\n# M")),
    Case("card and folder", "licence written out", BERT, write("README.md", "---\nlicense: Apache License 2.0\n---\n# M")),
    Case("card and folder", "base model a folder", BERT, write("README.md", "---\nbase_model: outputs/run/checkpoint-9\n---\n# M")),
    Case("card and folder", "language no", BERT, write("README.md", "---\nlanguage:\n- no\n---\n# M")),
    Case("card and folder", "results of the wrong shape", BERT, write("README.md", "---\nmodel-index:\n- name: 3\n---\n# M")),
    *(
        Case("not as trained", name, base, plant, reference=True)
        for name, base, plant in (
            ("other pooling", BERT, module("Pooling", pooling_mode="max")),
            ("not normalised", BERT, without_module("Normalize")),
            ("other prompt", LLAMA, prompts(document="passage: ")),
            ("prompts swapped", LLAMA, prompts(query="Passage: ", document="Query: ")),
            ("other similarity", LLAMA, edit("config_sentence_transformers.json", similarity_fn_name="euclidean")),
            ("casing", BERT, edit("tokenizer_config.json", do_lower_case=False)),
            ("shorter", LLAMA, edit("tokenizer_config.json", model_max_length=50)),
            ("rounded weights", LLAMA, weights(lambda t: [t.__setitem__(k, v.mul(8).round().div(8)) for k, v in list(t.items())])),
            ("EOS gone, mean pooling instead", LLAMA, module("Pooling", pooling_mode="mean")),
        )
    ),
    Case("damaged files", "pointer of Git-LFS", BERT, write(
        "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 90868376\n")),
    Case("damaged files", "empty weights", BERT, write("model.safetensors", b"")),
    Case("damaged files", "cut weights", LLAMA, lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-5000])),
    Case("damaged files", "weights of zeros", LLAMA, write("model.safetensors", b"\0" * 5000)),
    Case("damaged files", "header that lies", LLAMA, write("model.safetensors", struct.pack("<Q", 2**62) + b"{}")),
    Case("damaged files", "header that is no JSON", LLAMA, write("model.safetensors", struct.pack("<Q", 4) + b"nope")),
    Case("damaged files", "one file next to shards", SHARDS, lambda f: save_file({"a": torch.ones(1)}, f / "model.safetensors")),
    Case("damaged files", "longer than the positions", BERT, both(
        edit("tokenizer_config.json", model_max_length=4000), edit("sentence_bert_config.json", max_seq_length=4000))),
    Case("damaged files", "a folder for config.json", BERT, both(drop("config.json"), lambda f: (f / "config.json").mkdir())),
    Case("damaged files", "a list for config.json", BERT, write("config.json", "[]")),
    Case("damaged files", "a number for modules.json", BERT, write("modules.json", "7")),
    Case("damaged files", "tokenizer of noise", BERT, write("tokenizer.json", bytes(range(256)))),
    Case("damaged files", "JSON without an end", BERT, write("config.json", "[" * 200_000)),
    Case("damaged files", "module outside", BERT, write("modules.json", json.dumps([
        {"idx": 0, "name": "0", "path": "../..", "type": "sentence_transformers.models.Transformer"}]))),
]  # fmt: skip


class Outcome(NamedTuple):
    """Whether the case was caught, and the message."""

    caught: bool
    said: str


def vectors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The vectors of a good folder, as its reference."""
    from sentence_transformers import SentenceTransformer

    from revela_hub.hub_cards.verify.texts import probe_texts

    model, vectors = SentenceTransformer(str(folder), device="cpu"), {}
    for kind in ("query", "document"):
        texts = probe_texts(model.max_seq_length)
        encode = getattr(model, f"encode_{kind}")
        vectors[kind] = torch.cat([encode(part, convert_to_tensor=True) for part in (texts[:-1], texts[-1:])])
    return vectors


def run(cases: list[Case], root: Path) -> list[Outcome]:
    """Plants the cases, and publishes each folder as a dry run."""
    good = build(root / "good", sorted({case.base for case in cases}))
    references = {}
    for name in {case.base for case in cases if case.reference}:
        references[name] = root / f"{len(references)}.safetensors"
        settings = json.dumps({"max_length": "128", "similarity": "cosine"})
        save_file(vectors_of(good[name]), references[name], metadata={"settings": settings})
    outcomes = []
    for number, case in enumerate(cases):
        folder = root / f"case{number}"
        shutil.copytree(good[case.base], folder)
        case.plant(folder)
        expected = references[case.base] if case.reference else None

        def checked(verified: Path, case: Case = case, expected: Path | None = expected, **options: Any) -> list[Check]:
            return [] if case.leaks else verify(verified, **options | {"reference": expected, "timeout": 60})

        upload.verify = checked  # type: ignore[assignment]
        trust = Assembly(trust_remote_code=any(folder.glob("*.py")))
        try:
            published = publish(folder, Destination("org/x"), trust, dry_run=True, keep=root / f"work{number}")
        except Exception as error:
            outcomes.append(Outcome(type(error).__name__ == "UserError", f"{type(error).__name__}: {error}"))
            continue
        if case.leaks:
            outcomes.append(Outcome(case.leaks not in published.files, published.skipped.get(case.leaks, "skipped")))
        else:
            outcomes.append(Outcome(False, "passed"))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every case")
    parser.add_argument("--only", help="cases of this kind")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in (None, case.kind)]
    forked()
    with tempfile.TemporaryDirectory() as root:
        outcomes = run(cases, Path(root))
    if arguments.list:
        for case, outcome in zip(cases, outcomes, strict=True):
            print(f"{'caught' if outcome.caught else 'MISSED'}  {case.kind}: {case.name}: {outcome.said[:230]}")
        print()
    print("| kind | cases | caught |\n|---|---:|---:|")
    for kind in dict.fromkeys(case.kind for case in cases):
        caught = [outcome.caught for case, outcome in zip(cases, outcomes, strict=True) if case.kind == kind]
        print(f"| {kind} | {len(caught)} | {sum(caught)} |")
    print(f"| all | {len(cases)} | {sum(outcome.caught for outcome in outcomes)} |")


if __name__ == "__main__":
    main()
