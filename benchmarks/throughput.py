"""Measure how fast models are trained and used: tokens per second, memory, and the fraction of the GPU's peak.

Weights and token ids are random; the shapes are those of the models named in the rows. Each row runs in its own process. A
training row is a whole step of the package's trainer (collator, forward and backward pass, optimizer), with texts of one length. The
arithmetic of a row is 2 FLOPs per weight and token in a forward pass, and 2 more for the gradients of the activations and for
those of the weights, as far as they are computed. Attention, embeddings and recomputation (checkpointing) are not counted, so the fraction of the peak is a
lower limit.

    python benchmarks/throughput.py --device cuda --peak 989        # NVIDIA H100: 989 TFLOP/s in bf16 (dense)
    python benchmarks/throughput.py --scale tiny                    # tries every row on a CPU
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from revela_hub.modeling import ImpRAGForCausalLM, NVEmbedModel

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
Result = dict[str, Any]


def shape(scale: str, **sizes: int) -> dict[str, int]:
    """Return the arguments of a configuration, or tiny ones to try the row."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    if "num_key_value_heads" in sizes:
        tiny["num_key_value_heads"] = 2
    return sizes if scale == "full" else sizes | tiny


def llama(scale: str, size: str) -> LlamaConfig:
    """Return the shape of SmolLM2-135M or of Llama 3.2 1B."""
    widths = {"135M": (576, 1536, 30, 9, 3), "1B": (2048, 8192, 16, 32, 8)}[size]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    vocabulary = {"135M": 49152, "1B": 128256}[size] if scale == "full" else 12288
    sizes = shape(scale, **dict(zip(names, widths, strict=True)))
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, **sizes)  # type: ignore[arg-type]


def on_device(build: Callable[[], Any], device: str, dtype: torch.dtype) -> Any:
    """Build a model with random weights where it is used, which takes a minute less for 7 billion weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build()
    finally:
        torch.set_default_dtype(before)


def weights(model: torch.nn.Module) -> int:
    """Return the number of weights in products: all but embeddings that are only looked up."""
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name.lower())


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call in seconds, after one call to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


class StepTimes(TrainerCallback):
    """Notes the time of each training step."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.began = device, list[float](), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock; the last step ended here, because batches are made in between."""
        synchronize(self.device)
        now = time.perf_counter()
        if self.began:
            self.seconds.append(now - self.began)
        self.began = now


def step_seconds(trainer: Any, device: str) -> float:
    """Train, and return the median time from one step to the next, without the first two."""
    times = StepTimes(device)
    trainer.add_callback(times)
    trainer.train()
    return statistics.median(times.seconds[2:])


def words(count: int) -> str:
    """Return a text of `count` tokens or a little more: random words of the README."""
    drawn = random.choices((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split(), k=count)
    return " ".join(drawn)


def nvembed_model(scale: str, device: str) -> NVEmbedModel:
    """Return NV-Embed with the shape of Mistral 7B, in bf16, and 512 latents."""
    sizes = shape(
        scale,
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    config = MistralConfig(vocab_size=32000, sliding_window=None, max_position_embeddings=4096, **sizes)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backbone = on_device(lambda: MistralModel(config), device, dtype)
    model: NVEmbedModel = NVEmbedModel.from_backbone(backbone, num_latents=512 if scale == "full" else 8)
    return model.to(device)  # type: ignore[arg-type]


def nvembed_forward(given: argparse.Namespace) -> Result:
    """Time the forward pass of 32 texts of 512 tokens, with each attention implementation that is installed."""
    model = nvembed_model(given.scale, given.device).eval()
    model.set_attn_implementation(given.attention)
    batch, length = (32, 512) if given.scale == "full" else (2, 16)
    ids = torch.randint(10, 12000, (batch, length), device=given.device)
    with torch.no_grad(), torch.autocast(given.device, torch.bfloat16, enabled=given.device == "cuda"):
        seconds = timed(lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)), given.device, given.repeats)
    return {"tokens": ids.numel(), "seconds": seconds, "work": 2 * weights(model) * ids.numel()}


def nvembed_step(given: argparse.Namespace) -> Result:
    """Time a step with LoRA and gradient checkpointing: queries with a positive and a hard negative, 512 tokens each."""
    from revela_hub.trainers.nvembed.checkpoint import nvembed_encoder
    from revela_hub.trainers.nvembed.data import NVEmbedTrainingArguments
    from revela_hub.trainers.nvembed.trainer import NVEmbedTrainer

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "lm")
    model = nvembed_model(given.scale, given.device)
    rows, length = (8, 512) if given.scale == "full" else (2, 16)
    encoder = nvembed_encoder(model, tokenizer, max_length=length, prompts={"query": "", "document": ""})
    texts = [{name: words(length) for name in ("anchor", "positive", "negative_1")} for _ in range(8 * rows)]
    arguments = NVEmbedTrainingArguments(
        **common(given), max_steps=7, per_device_train_batch_size=rows, gradient_checkpointing=True, lora_rank=16
    )
    trainer = NVEmbedTrainer(encoder, arguments, train_dataset=Dataset.from_list(texts))
    body, tokens = weights(model), 3 * rows * length
    return {"tokens": tokens, "seconds": step_seconds(trainer, given.device), "work": 4 * body * tokens}


def retromae_step(given: argparse.Namespace) -> Result:
    """Time a step of BERT base with 64 spans of 512 tokens."""
    from revela_hub.trainers import RetroMAETrainer, RetroMAETrainingArguments

    batch, length = (64, 512) if given.scale == "full" else (2, 32)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "retriever")
    sizes = shape(given.scale, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    bert = BertForMaskedLM(BertConfig(vocab_size=30522, max_position_embeddings=512, **sizes))  # type: ignore[arg-type]
    bert.save_pretrained(given.folder)
    mask_tokenizer(tokenizer).save_pretrained(given.folder)
    drawn = random.Random(0)
    rows = [
        {
            "span": n,
            "input_ids": [drawn.randrange(10, 12000) for _ in range(length - 2)],
            "word_starts": [1] * (length - 2),
        }
        for n in range(8 * batch)
    ]
    arguments = RetroMAETrainingArguments(
        **common(given), max_steps=7, per_device_train_batch_size=batch, dataloader_num_workers=given.workers
    )
    trainer = RetroMAETrainer(given.folder, arguments, train_dataset=Dataset.from_list(rows))
    tokens = batch * length
    head = 768 * 30522 if given.scale == "full" else 64 * 30522
    decoder = weights(bert) // 12
    work = (
        6 * tokens * (weights(bert) + decoder + head * 1.15)
    )  # the head: all tokens of the decoder, 15% of the encoder's
    return {"tokens": tokens, "seconds": step_seconds(trainer, given.device), "work": work}


def mask_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the special tokens that masked models need."""
    tokenizer.add_special_tokens(
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    )
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def common(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that all trainers share."""
    return {
        "output_dir": given.folder, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "quiet": True,
        "bf16": given.device == "cuda", "use_cpu": given.device == "cpu", "logging_strategy": "no", "warmup_steps": 0,
    }  # fmt: skip


def imprag(given: argparse.Namespace) -> Result:
    """Time answering with the shape of Llama 3.2 1B: 10 passages of 160 tokens, 8 prompts of 32, 64 new tokens."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    lm = on_device(lambda: LlamaForCausalLM(llama(given.scale, "1B")), given.device, dtype).eval()
    batch, k, length = (8, 10, 160) if given.scale == "full" else (2, 2, 8)
    new = 64 if given.scale == "full" else 4
    prompt, passages = (
        torch.randint(10, 12000, size, device=given.device) for size in ((batch, 32), (batch, k, length))
    )
    model: Any = lm
    inputs, extra = torch.cat([passages.flatten(1), prompt], 1), {}
    if given.way == "imprag":
        model = ImpRAGForCausalLM.from_backbone(lm, k=k, l_max=length).eval()
        inputs, extra = prompt, {"passage_input_ids": passages}

    def generate(count: int) -> None:
        model.generate(inputs, **extra, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    with torch.no_grad():
        first = timed(lambda: generate(1), given.device, given.repeats)
        whole = timed(lambda: generate(1 + new), given.device, given.repeats)
    return {"first": first, "next": (whole - first) / new, "batch": batch}


def encoding(given: argparse.Namespace) -> Result:
    """Time `encode_texts`, which `encode` and `index` use: passages of 120 words, tokenizer included."""
    from revela_hub.retrieval.encoding import encode_texts

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "retriever")
    if given.model == "MiniLM":
        sizes = shape(given.scale, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
        body: PreTrainedModel = BertModel(BertConfig(vocab_size=30522, **sizes))  # type: ignore[arg-type]
    else:
        body = LlamaModel(llama(given.scale, given.model))
    body.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    options = {"model_kwargs": {"dtype": torch.float16 if given.device == "cuda" else torch.float32}}
    transformer = Transformer(given.folder, max_seq_length=512, **options)
    model = SentenceTransformer(modules=[transformer, Pooling(body.config.hidden_size)], device=given.device)
    count = {"MiniLM": 16384, "135M": 8192, "1B": 2048}[given.model] if given.scale == "full" else 8
    texts = [words(120) for _ in range(count)]
    tokens = sum(len(ids) for ids in tokenizer(texts)["input_ids"])
    seconds = timed(lambda: encode_texts(model, texts, "document"), given.device, 2)
    return {"tokens": tokens, "seconds": seconds, "work": 2 * weights(body) * tokens, "texts": count}


ROWS: dict[str, tuple[Callable[[argparse.Namespace], Result], dict[str, str]]] = {
    "encoding, MiniLM": (encoding, {"model": "MiniLM"}),
    "encoding, decoder of 135M": (encoding, {"model": "135M"}),
    "encoding, decoder of 1B": (encoding, {"model": "1B"}),
    "NV-Embed 7B, forward pass, SDPA": (nvembed_forward, {"attention": "sdpa"}),
    "NV-Embed 7B, forward pass, flash attention": (nvembed_forward, {"attention": "flash_attention_2"}),
    "NV-Embed 7B, training step, LoRA": (nvembed_step, {}),
    "RetroMAE, BERT base, training step": (retromae_step, {}),
    "ImpRAG 1B, answering": (imprag, {"way": "imprag"}),
    "the same decoder, passages in the prompt": (imprag, {"way": "pasted"}),
}


def measure(given: argparse.Namespace) -> None:
    """Run one row and print its result as JSON."""
    call, options = ROWS[given.measure]
    vars(given).update(options)
    random.seed(0)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        given.folder = folder
        result = call(given)
    if given.device == "cuda":
        result["memory"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(result))


def line(name: str, found: Result, peak: float) -> str:
    """Return a row of the tables."""
    memory = f"{found['memory']:.1f} GiB" if "memory" in found else "-"
    if "first" in found:
        rate = found["batch"] / found["next"]
        return f"| {name} | {1e3 * found['first']:.0f} ms | {1e3 * found['next']:.1f} ms | {rate:,.0f} | {memory} |"
    rate, work = found["tokens"] / found["seconds"], found["work"] / found["seconds"]
    texts = f"{found['texts'] / found['seconds']:,.0f}" if "texts" in found else "-"
    fraction = f"{100 * work / (1e12 * peak):.0f}%" if peak else "-"
    return f"| {name} | {1e3 * found['seconds']:,.0f} ms | {rate:,.0f} | {texts} | {work / 1e12:.0f} | {fraction} | {memory} |"


def main() -> None:
    """Measure each row in its own process, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--scale", default="full", choices=["full", "tiny"], help="tiny: try every row")
    parser.add_argument("--peak", type=float, default=0, help="peak of the GPU in TFLOP/s")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches (RetroMAE)")
    parser.add_argument("--measure", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        return measure(given)
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"`python benchmarks/throughput.py {' '.join(sys.argv[1:])}`\n{name}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    lines: dict[bool, list[str]] = {False: [], True: []}
    for row in given.rows:
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", row]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            reason = next((text for text in reversed(ended.stderr.splitlines()) if text.strip()), "?")
            print(f"{row}: not measured: {reason}", flush=True)
            continue
        found = json.loads(ended.stdout.splitlines()[-1])
        lines["first" in found].append(line(row, found, given.peak))
        print(f"  {lines['first' in found][-1]}", flush=True)
    print("\n| | time | tokens / s | texts / s | TFLOP/s | of the peak | memory |\n|---|---|---|---|---|---|---|")
    print("\n".join(lines[False]))
    if lines[True]:
        print(
            "\n| 8 prompts, 10 passages of 160 tokens | first token | each further token | tokens / s | memory |\n|---|---|---|---|---|"
        )
        print("\n".join(lines[True]))


if __name__ == "__main__":
    main()
