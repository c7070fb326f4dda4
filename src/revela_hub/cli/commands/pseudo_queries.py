"""Generate pseudo-queries for the spans of a text with a doc2query model (docT5query).

The text is packed into spans of whole sentences, as in `revela-hub train cot-mote`, with the tokenizer of --encoder.
Spans of similar length are generated together, in bf16 on a GPU. Run the same command again to resume.

Writes JSON lines (document, text, queries) to a file per shard in --output_dir, .part until complete. When all are
complete, `train cot-mote --pseudo_queries FOLDER` reads them. Under `accelerate launch`, each process makes one shard.

Examples:
  revela-hub pseudo-queries doc2query/msmarco-t5-base-v1 --data path/to/texts --output_dir outputs/queries
  accelerate launch -m revela_hub pseudo-queries doc2query/msmarco-t5-base-v1 --data hf:wikimedia/wikipedia:20231101.en
  revela-hub pseudo-queries doc2query/msmarco-t5-base-v1 --data texts.jsonl --shard 3/64 --output_dir /shared/queries
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.source import check_apart, parse_sources
from revela_hub.errors import UserError, loading
from revela_hub.files import local_path, write_text
from revela_hub.options import option, required
from revela_hub.output import is_quiet, progress_bar
from revela_hub.ranges import PositiveInt, TextLength

POSITIONALS = ("model",)
SPANS_AT_ONCE = 512
"""Spans that are sorted by length, generated and written together: an interruption loses at most these."""
ANY_RUN = ("output_dir", "shard", "batch_tokens", "device")
"""Options that a resumed run may change."""


@dataclass(kw_only=True)
class Arguments:
    """Arguments of `revela-hub pseudo-queries`."""

    model: str = required("Doc2query model: Hub id or folder of a seq2seq model.")
    data: list[str] = required(
        "Text: folders, files, JSON lines, or data sets (hf:owner/name[:configuration][:split])."
    )
    output_dir: str = option("outputs/pseudo-queries", "Output folder; an interrupted run is resumed in it.")
    encoder: str = option("google-bert/bert-base-uncased", "Encoder to pre-train, whose tokens --max_length counts.")
    text_column: str = option("text", "Column or JSON field that holds the text.")
    language: str = option("en", "ISO 639-1 code of the text's language, used to split sentences.")
    max_documents: PositiveInt | None = option(None, "Maximum number of documents to read from each source.")
    max_length: TextLength = option(144, "Maximum number of tokens per span, including [CLS] and [SEP].")
    queries_per_span: PositiveInt = option(5, "Number of queries per span.")
    query_prefix: str = option("", "Text that the model expects before a span, e.g. 'text2query: '.")
    top_k: PositiveInt = option(10, "Sample from this many tokens.")
    max_new_tokens: PositiveInt = option(64, "Maximum number of tokens per query.")
    seed: int = option(0, "Random seed.")
    batch_tokens: PositiveInt = option(16_384, "Number of tokens per batch of spans, padding included.")
    shard: str | None = option(
        None, "Part of the documents, e.g. 7/64, counted from 0 (default: one per process).", metavar="I/N"
    )
    device: str | None = option(None, "Device to run on, e.g. cpu or cuda:1 (default: a GPU for each process).")


def run(arguments: Arguments) -> None:
    """Generate the queries of the shard that are not in its file yet."""
    from filelock import FileLock

    process = f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"  # of `accelerate launch`
    if arguments.shard and not process.endswith("/1"):
        raise UserError("--shard is for one process: under `accelerate launch`, each process generates its own shard")
    shard, shards = map(int, (arguments.shard or process).split("/"))
    if shard not in range(shards):
        raise UserError(f"--shard {arguments.shard} must be I/N with I from 0 to N - 1, e.g. 0/64 to 63/64")
    folder = local_path(arguments.output_dir)
    check_apart(parse_sources(arguments.data), folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder / ".settings.json", arguments, shards)
    file = folder / f"{shard:05}-of-{shards:05}.jsonl"
    with FileLock(folder / f".{file.name}.lock", timeout=0):  # two processes would mix their lines
        _generate(arguments, shard, shards, file)


def _generate(arguments: Arguments, shard: int, shards: int, file: Path) -> None:
    if file.exists():
        print(f"{file} is complete")
        return
    part = file.with_suffix(".jsonl.part")
    last, done, total = _written(part)
    spans = islice(_spans(arguments, shard, shards, last), done, None)
    generator = _Generator(arguments)
    bar = progress_bar(desc="Generating queries", initial=total, unit=" spans", show=not is_quiet())
    with part.open("ab") as lines, bar:
        while batch := list(islice(spans, SPANS_AT_ONCE)):
            written = generator([text for _, text in batch])
            for (document, text), queries in zip(batch, written, strict=True):
                row = {"document": document, "text": text, "queries": queries}
                lines.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            lines.flush()
            bar.update(len(batch))
            total += len(batch)
    part.rename(file)
    print(f"{total:,} spans in {file}")


def _check_settings(file: Path, arguments: Arguments, shards: int) -> None:
    """Raise a `UserError` if the folder holds queries that were generated with other settings."""
    settings = {name: value for name, value in vars(arguments).items() if name not in ANY_RUN} | {"shards": shards}
    files = (each for source in parse_sources(arguments.data) for each in local_files(source))
    settings["bytes_of_data"] = sum(each.stat().st_size for each in files)
    if not file.exists():
        write_text(file, json.dumps(settings))
    before = json.loads(file.read_text(encoding="utf-8"))
    if changed := [name for name in settings if before.get(name) != settings[name]]:
        raise UserError(
            f"{file.parent} holds queries with {changed[0]} {before.get(changed[0])}, not {settings[changed[0]]}: choose another"
            " --output_dir"
        )


def _written(file: Path) -> tuple[int, int, int]:
    """Return the last document in the file of a shard, the number of its spans there, and that of all spans.

    A line that was not written completely is removed.
    """
    last, done, total, end = -1, 0, 0, 0
    if file.exists():
        with file.open("rb+") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                document = json.loads(line)["document"]
                last, done, total, end = document, done * (document == last) + 1, total + 1, end + len(line)
            lines.truncate(end)
    return last, done, total


def _spans(arguments: Arguments, shard: int, shards: int, first: int) -> Iterator[tuple[int, str]]:
    """Yield the spans of the documents of a shard from the document `first` on, each with the number of its document."""
    from transformers import AutoTokenizer

    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.text.spans import SpanSettings, packed_spans, tokenized_documents

    settings, report = SpanSettings(arguments.max_length, language=arguments.language), ReadReport()
    with loading(f"cannot load the tokenizer of {arguments.encoder!r}", arguments.encoder):
        tokenizer = AutoTokenizer.from_pretrained(local_path(arguments.encoder))
    given: dict[str, Any] = {"text_column": arguments.text_column, "max_documents": arguments.max_documents}
    for number, document in enumerate(read_documents(arguments.data, **given)):  # it warns of what is skipped
        if number % shards == shard and number >= first:
            for run in tokenized_documents([document], tokenizer, settings, report):
                for start, end in packed_spans(run, settings, report):
                    yield number, run.span_text(start, end)


class _Generator:
    """Samples queries for passages from a seq2seq model; the same for the same list of passages."""

    def __init__(self, arguments: Arguments) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        from revela_hub.loading import bf16_is_fast, pretrained

        gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        self.arguments, self.device = arguments, arguments.device or gpu
        with loading(f"cannot load the query generator {arguments.model!r}", arguments.model):
            self.tokenizer = AutoTokenizer.from_pretrained(local_path(arguments.model))
            dtype = torch.bfloat16 if bf16_is_fast(self.device) else torch.float32
            self.model = pretrained(AutoModelForSeq2SeqLM, arguments.model, dtype=dtype).to(self.device).eval()

    def __call__(self, passages: list[str]) -> list[list[str]]:
        """Return the queries of each passage."""
        texts = [self.arguments.query_prefix + passage for passage in passages]
        ids = self.tokenizer(texts, truncation=True, max_length=512)["input_ids"]
        found: list[list[str]] = [[] for _ in passages]
        longest_first = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        start = 0
        while start < len(ids):
            batch = longest_first[start : start + max(1, self.arguments.batch_tokens // len(ids[longest_first[start]]))]
            for index, queries in zip(batch, self._queries([ids[index] for index in batch]), strict=True):
                found[index] = queries
            start += len(batch)
        return found

    def _queries(self, ids: list[list[int]]) -> list[list[str]]:
        """Return the queries of the passages of a batch."""
        import torch

        from revela_hub.loading import varying_shapes

        arguments, number = self.arguments, self.arguments.queries_per_span
        inputs: Any = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self.device)
        torch.manual_seed(arguments.seed + sum(ids[0]))  # whatever was generated before
        sampling = {"do_sample": True, "top_k": arguments.top_k, "max_new_tokens": arguments.max_new_tokens}
        with torch.inference_mode(), varying_shapes():
            tokens = self.model.generate(**inputs, **sampling, num_return_sequences=number)
        written = [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        return [list(filter(None, written[start : start + number])) for start in range(0, len(written), number)]
