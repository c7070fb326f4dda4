"""Data options of `revela-hub train imprag`, and functions that load the data."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from datasets import Dataset

from revela_hub.data.prompts.rows import read_prompts
from revela_hub.data.prompts.self_supervised import mix, text_prompts
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Source, parse_sources
from revela_hub.data.text.chunks import chunk_document
from revela_hub.errors import UserError
from revela_hub.ranges import NonNegativeFloat, PositiveInt


@dataclass
class ImpRAGDataArguments:
    """Data of an ImpRAG run."""

    _argument_group_name = "data"
    basic_options: ClassVar[tuple[str, ...]] = ("data", "corpus", "task", "pseudo_labels")
    old_names: ClassVar[dict[str, str]] = {
        "passages": "corpus",
        "text": "plain_text",
        "plain_text_share": "plain_text_fraction",
        "denoising_share": "denoising_fraction",
        "sentence_share": "sentence_fraction",
    }

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Prompts and answers: JSON lines in the format of SQuAD, NQ or KILT, or with prompt and answer."
        },
    )
    corpus: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Passages to search: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
        },
    )
    task: str = field(
        default="question_answering",
        metadata={"help": "Prompt template for rows that do not name a task."},
    )
    max_words: PositiveInt = field(default=100, metadata={"help": "Maximum number of words per passage."})
    max_length: PositiveInt = field(
        default=256, metadata={"help": "Maximum number of tokens of prompt and answer together."}
    )
    pseudo_labels: str = field(
        default="bm25",
        metadata={
            "help": "Retriever that ranks the passages: Hub id or folder of a sentence-transformers model, or bm25."
        },
    )
    plain_text: list[str] = field(
        default_factory=list,
        metadata={"help": "Raw text for self-supervised rows (default: the documents of --corpus)."},
    )
    plain_text_fraction: NonNegativeFloat = field(
        default=0.1, metadata={"help": "Number of plain-text rows, as a fraction of the prompts."}
    )
    denoising_fraction: NonNegativeFloat = field(
        default=0.0, metadata={"help": "Number of rows with a phrase to fill in, as a fraction of the prompts."}
    )
    sentence_fraction: NonNegativeFloat = field(
        default=0.0,
        metadata={"help": "Fraction of rows that ask for the next sentence, and the same for the previous one."},
    )

    def sources(self) -> list[Source]:
        """Return all sources."""
        return parse_sources([*self.data, *self.corpus, *self.plain_text])


class ImpRAGData(NamedTuple):
    """Prompts and the collection."""

    prompts: Dataset
    passages: list[str]


def load_data(arguments: ImpRAGDataArguments, seed: int) -> tuple[ImpRAGData, str]:
    """Read prompts and passages, make the self-supervised rows, and return them with a summary.

    Raises:
        UserError: data or corpus are missing, or `read_prompts` or `read_documents` raise an error.
    """
    if not arguments.data:
        raise UserError("there are no prompts: give JSON lines with --data")
    if not arguments.corpus:
        raise UserError("there are no passages to retrieve: give a folder or file with --corpus")
    prompts = read_prompts(arguments.data, arguments.task)
    passages = read_passage_texts(arguments.corpus, arguments.max_words)
    fractions = {
        "plain_text": arguments.plain_text_fraction,
        "phrase_denoising": arguments.denoising_fraction,
        "next_sentence": arguments.sentence_fraction,
        "previous_sentence": arguments.sentence_fraction,
    }
    parts, skipped = [], ReadReport()
    for kind, fraction in fractions.items():
        if number := round(fraction * len(prompts)):
            skipped = ReadReport()  # each kind reads the same text
            documents = read_documents(arguments.plain_text or arguments.corpus, report=skipped)
            parts.append(text_prompts(documents, kind, number, seed=seed))
    made = sum(map(len, parts))
    counts = f"{len(prompts):,} prompts, {made:,} rows made from raw text, {len(passages):,} passages"
    report = "; ".join([counts, *skipped.remarks()])
    return ImpRAGData(mix(prompts, parts, seed), passages), report


def read_passage_texts(sources: list[str], max_words: int) -> list[str]:
    """Return the passages of a collection without duplicates."""
    texts = (chunk.text for document in read_documents(sources) for chunk in chunk_document(document, max_words))
    return list(dict.fromkeys(texts))
