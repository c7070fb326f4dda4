"""Arguments and data of ImpRAG (arXiv 2506.02279): prompts, passages and batches. Defaults are the paper's, or ours if it gives none."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import datasets
import numpy as np
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from revela_hub.data.prompts import COLUMNS, TYPES, parse_prompts, prompt_row, read_prompts, text_prompts
from revela_hub.data.row_cache import cached_file, cached_rows, rows_fingerprint
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.rows import Row
from revela_hub.data.sources.source import Document, Source, parse_sources
from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError
from revela_hub.files import atomic, local_path, one_at_a_time
from revela_hub.hub_cards.method import Method
from revela_hub.internals import fingerprint
from revela_hub.loading import varying_shapes
from revela_hub.options import option, required
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rank, TwoOrMore
from revela_hub.retrieval.encoding import batches, encode_batches
from revela_hub.retrieval.index import METADATA, PassageStore
from revela_hub.retrieval.passages import Passages, read_passages
from revela_hub.retrieval.texts import TextFile, TextList, TextSource
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments
from revela_hub.trainers.base.rows import as_dataset
from revela_hub.trainers.base.run import open_run


@dataclass
class ImpRAGCollator:
    """Make batches of rows of `tokenize_prompts`.

    >>> rows = [
    ...     {"prompt_ids": [5, 6, 7], "answer_ids": [8, 0], "row": 4, "retrieve": True},
    ...     {"prompt_ids": [5], "answer_ids": [9, 9, 0], "row": 2, "retrieve": False},
    ... ]
    >>> batch = ImpRAGCollator()(rows)
    >>> batch["input_ids"]
    tensor([[5, 6, 7, 8, 0],
            [5, 9, 9, 0, 0]])
    >>> batch["attention_mask"]
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0]])
    >>> batch["labels"]
    tensor([[-100, -100, -100,    8,    0],
            [-100,    9,    9,    0, -100]])
    >>> batch["query_input_ids"], batch["query_attention_mask"]
    (tensor([[5, 6, 7],
            [5, 0, 0]]), tensor([[1, 1, 1],
            [1, 0, 0]]))
    >>> batch["row"], batch["retrieve"]
    (tensor([4, 2]), tensor([ True, False]))
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Make a batch: `input_ids`, `attention_mask`, `labels` (B, L), `query_*` (B, M), `row` and `retrieve` (B,)."""
        query_ids, query_mask = padded([row["prompt_ids"] for row in rows])
        ids, mask = padded([[*row["prompt_ids"], *row["answer_ids"]] for row in rows])
        answer = (mask == 1) & (torch.arange(ids.shape[1]) >= query_mask.sum(1, keepdim=True))
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(~answer, -100),
            "query_input_ids": query_ids,
            "query_attention_mask": query_mask,
            "row": torch.tensor([row["row"] for row in rows]),
            "retrieve": torch.tensor([bool(row["retrieve"]) for row in rows]),
        }


@dataclass
class ImpRAGTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` with the two stages of ImpRAG: warm-up by a retriever's rankings, then self-distillation."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    warmup_steps: float = option(100, WARMUP)
    num_train_epochs: float = option(10, "Number of epochs, including the retrieval warm-up.")
    per_device_train_batch_size: int = option(8, "Number of prompts per device and forward pass.")
    retrieval_weight: NonNegativeFloat = option(1.0, "Weight of the retrieval loss (lambda in the paper).")
    retrieval_warmup_epochs: NonNegativeFloat = option(
        3, "Number of epochs with a retriever's rankings as labels, before self-distillation."
    )
    retrieval_only_steps: NonNegativeInt = option(
        0, "Warm-up: Number of first steps that train retrieval alone, with the layers up to --retrieval_layer."
    )
    temperature: PositiveFloat | None = option(
        None, "Temperature that divides the retrieval scores (default: square root of the vector dimension)."
    )
    likelihood_temperature: PositiveFloat = option(1.0, "Temperature that divides the answers' log-likelihoods.")
    num_positives: PositiveInt = option(5, "Warm-up: Number of top-ranked passages that are positives.")
    num_negatives: NonNegativeInt = option(5, "Warm-up: Number of hard negatives per prompt.")
    first_negative_rank: Rank = option(10, "Warm-up: First rank from which hard negatives are drawn.")
    last_negative_rank: Rank = option(50, "Warm-up: Last rank from which hard negatives are drawn.")
    num_candidates: TwoOrMore = option(
        10, "Self-distillation: Number of passages per prompt whose likelihoods are compared."
    )
    index_steps: NonNegativeInt = option(
        0, "Self-distillation: Rebuild the index every N steps; 0 rebuilds it every epoch."
    )
    likelihood_batch_size: PositiveInt = option(
        16, "Number of candidate passages in memory at a time while likelihoods are computed."
    )
    encode_batch_size: PositiveInt = option(32, "Number of texts per forward pass while passages are ranked.")
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or a positive may be drawn as a negative."""
        super().__post_init__()
        if not self.num_positives < self.first_negative_rank <= self.last_negative_rank:
            raise ValueError(
                f"ranks must be in this order: num_positives {self.num_positives} < first_negative_rank"
                f" {self.first_negative_rank} <= last_negative_rank {self.last_negative_rank}"
            )


@dataclass(kw_only=True)
class ImpRAGDataArguments:
    """Data of an ImpRAG run."""

    option_group = "data"

    data: list[str] = required(
        "Prompts and answers: JSON lines, data sets (hf:owner/name[:configuration][:split]), or mappings in a YAML file."
    )
    corpus: list[str] = required(
        "Passages to search: folders, files, glob patterns, JSON lines, data sets (hf:owner/name), or one index."
    )
    task: str = option("question_answering", "Prompt template for rows that do not name a task.")
    max_words: PositiveInt = option(100, "Maximum number of words per passage.")
    max_length: PositiveInt = option(256, "Maximum number of tokens of prompt and answer together.")
    pseudo_labels: str = option(
        "bm25",
        "Retriever that ranks the passages: Hub id or folder of a sentence-transformers or ImpRAG model, or bm25.",
    )
    query_text: Literal["prompt", "input"] = option(
        "prompt", "Query for this retriever: the whole prompt, or the input without its template."
    )
    ranking: str | None = option(
        None, "File of its ranking, computed once and used by later runs (default: in --output_dir)."
    )
    plain_text: list[str] = option([], "Raw text for self-supervised rows (default: the documents of --corpus).")
    plain_text_fraction: NonNegativeFloat = option(0.1, "Number of plain-text rows, as a fraction of the prompts.")
    denoising_fraction: NonNegativeFloat = option(
        0.0, "Number of rows with a phrase to recover, as a fraction of the prompts."
    )
    sentence_fraction: NonNegativeFloat = option(
        0.0, "Fraction of rows that ask for the next sentence, and the same for the previous one."
    )

    def sources(self) -> list[Source]:
        """Return all sources."""
        return [*(parse_prompts(each).source for each in self.data), *parse_sources([*self.corpus, *self.plain_text])]


def train_on_prompts(method: Method, arguments: Any, make: Callable[..., Any], model: str, **options: Any) -> Path:
    """Train and export a model on the data of `ImpRAGDataArguments`."""
    with open_run(method, arguments) as run:
        if run.finished:
            return run.output
        (prompts, passages), report = run.read(*load_data(arguments, arguments.seed))
        data: dict[str, Any] = {"train_dataset": prompts, "passages": passages}
        data |= {name: getattr(arguments, name) for name in ("pseudo_labels", "query_text", "ranking")}
        init = {"trust_remote_code": arguments.trust_remote_code} | options.pop("model_init_kwargs", {})
        trainer = make(model, arguments, max_length=arguments.max_length, model_init_kwargs=init, **data, **options)
        run.train(trainer)
        run.export(trainer, summary=report, sources=[source.path for source in arguments.sources()])
        return run.output


def load_data(arguments: ImpRAGDataArguments, seed: int) -> tuple[tuple[Dataset, TextFile], str]:
    """Read prompts and passages, add the self-supervised rows to the prompts, and return both with a summary."""
    prompts, passages = read_prompts(arguments.data, arguments.task, seed=seed), read_corpus(arguments)
    fractions = {
        "plain_text": arguments.plain_text_fraction,
        "phrase_denoising": arguments.denoising_fraction,
        "next_sentence": arguments.sentence_fraction,
        "previous_sentence": arguments.sentence_fraction,
    }

    def mixed() -> Iterator[dict[str, Any]]:
        parts = [prompts]
        for kind, fraction in fractions.items():
            if number := round(fraction * len(prompts)):
                drawn = Random(f"{seed} {kind}").sample(range(len(passages)), min(len(passages), 4 * number))
                some = (Document(str(row), passages.read([row])[0], None, "text") for row in drawn)
                documents = read_documents(arguments.plain_text) if arguments.plain_text else some
                parts.append(text_prompts(documents, kind, number, seed=seed))
        yield from datasets.concatenate_datasets(parts).shuffle(seed=seed)

    sources = parse_sources(arguments.plain_text) if arguments.plain_text else []
    made_with = fractions | {"seed": seed, "prompts": fingerprint(prompts), "passages": passages.fingerprint}
    rows, _ = cached_rows(f"mixed-{rows_fingerprint(made_with, sources)}", TYPES, mixed)
    made = counted(len(rows) - len(prompts), "row")
    summary = f"{counted(len(prompts), 'prompt')}, {made} made from raw text, {counted(len(passages), 'passage')}"
    return (rows, passages), summary


def read_corpus(arguments: ImpRAGDataArguments) -> TextFile:
    """Return the passages of an index, or cut the documents of the corpus into passages, on disk in the cache of `datasets`."""
    if len(arguments.corpus) == 1 and (local_path(arguments.corpus[0]) / METADATA).is_file():
        return PassageStore(arguments.corpus[0]).passages
    sources = parse_sources(arguments.corpus)
    name = f"passages-{rows_fingerprint({'max_words': arguments.max_words}, sources)}"
    folder = cached_file(name).with_suffix("")
    with one_at_a_time(folder):
        if not folder.is_dir():
            with atomic(folder) as new:
                read_passages(read_documents(sources), new, max_words=arguments.max_words, report=ReadReport())
    return Passages(next(folder.glob("texts-*.arrow")))


def as_prompts(rows: Dataset | IterableDataset) -> Dataset:
    """Return questions with answers as prompts; prompts as `read_prompts` returns them are not changed."""
    rows = as_dataset(rows)
    if set(COLUMNS) <= set(rows.column_names):
        return rows
    made = (prompt_row(Row(f"train_dataset:{number}", row), "question_answering") for number, row in enumerate(rows))
    return Dataset.from_list(list(made))


def as_texts(passages: Sequence[str] | Dataset | TextSource) -> TextSource:
    """Return a collection: texts on disk are not changed; others are a sequence of texts, or a data set with a column `text`."""
    if isinstance(passages, TextFile | TextList):
        return passages
    return TextList(list(passages["text"]) if isinstance(passages, Dataset) else passages)


def passage_hashes(passages: TextSource, numbers: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return `text_hash` of the passages with these numbers, in the same shape; -1 for -1, which is no passage."""
    hashes = np.full(numbers.shape, -1, np.int64)
    hashes[numbers >= 0] = [text_hash(text) for text in passages.read(numbers[numbers >= 0].tolist())]
    return hashes


def eos_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of EOS, which ends passages and answers."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token: set one")
    return int(tokenizer.eos_token_id)


def pair_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of prompts, and of their completions (a space and the answer) with EOS.

    An empty prompt (plain text) becomes the tokenizer's BOS token or EOS, because the model needs at least one token.
    """
    end = eos_of(tokenizer)
    completed = tokenizer(list(completions), add_special_tokens=False)["input_ids"]
    return [ids or [end] for ids in tokenizer(list(prompts))["input_ids"]], [[*ids, end] for ids in completed]


def tokenize_prompts(
    prompts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, log: Callable[[str], None]
) -> Dataset:
    """Add the columns `prompt_ids`, `answer_ids` (first accepted answer and EOS), `source_row` and `row` (old and new index).

    Rows longer than `max_length` are dropped; their number and the location of the first are passed to `log`.
    """

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions = [f" {answers[0]}" for answers in rows["answers"]]
        prompt_ids, answer_ids = pair_tokens(tokenizer, rows["prompt"], completions)
        return {"prompt_ids": prompt_ids, "answer_ids": answer_ids}

    data = map_once(prompts, tokenized, batched=True, desc="Tokenizing prompts")
    fits = [len(p) + len(a) <= max_length for p, a in zip(data["prompt_ids"], data["answer_ids"], strict=True)]
    kept = [row for row, fit in enumerate(fits) if fit]
    if long := len(fits) - len(kept):
        first = prompts[fits.index(False)]["where"]
        what = f"{long} of {len(fits)} prompts have more than {max_length} tokens, answer included (first: {first})"
        if not kept:
            raise UserError(f"{what}: raise max_length")
        log(f"{what}: dropped; raise max_length to keep them")
        data = data.select(kept)
    return data.add_column("source_row", kept).add_column("row", list(range(len(data))))


def map_once(rows: Dataset, function: Callable[..., Any], **options: Any) -> Dataset:
    """Return `rows.map(...)`. Of rows on disk, one process of a machine makes it, and the others read its cache."""
    with one_at_a_time(cached_file(f"map-{fingerprint(rows)}")) if rows.cache_files else nullcontext():
        return rows.map(function, **options)


def tokenize_passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> tuple[list[NDArray[np.int32]], int]:
    """Tokenise passages to at most `max_length` tokens, the last of which is EOS, and count those that are truncated."""
    end, cut = eos_of(tokenizer), 0
    passages: list[NDArray[np.int32]] = []
    for ids in tokenizer(list(texts))["input_ids"] if texts else ():
        ids = ids[:-1] if ids[-1:] == [end] else ids
        cut += len(ids) >= max_length
        passages.append(np.array([*ids[: max_length - 1], end], np.int32))
    return passages, cut


def padded(rows: Iterable[Sequence[int] | NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Return tokens and mask (N, L) of texts, padded on the right.

    >>> padded([[7, 8], [], [9]])
    (tensor([[7, 8],
            [0, 0],
            [9, 0]]), tensor([[1, 1],
            [0, 0],
            [1, 0]]))
    """
    tokens = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones_like(row) for row in tokens]
    return pad_sequence(tokens, batch_first=True), pad_sequence(masks, batch_first=True)


@varying_shapes()
@torch.no_grad()
def encode_rows(
    embed: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[Sequence[int] | NDArray[np.int32]],
    device: torch.device,
    batch_size: int = 32,
) -> NDArray[np.float32]:
    """Return the (N, E) vectors of texts, given as tokens, in batches of similar length."""

    def encoded(numbers: NDArray[np.int64]) -> Tensor:
        ids, mask = padded(rows[number] for number in numbers)
        return embed(ids.to(device), mask.to(device)).float().cpu()

    lengths = np.array([len(row) for row in rows])
    vectors: NDArray[np.float32] = encode_batches(list(batches(lengths, sys.maxsize, batch_size)), encoded).numpy()
    return vectors
