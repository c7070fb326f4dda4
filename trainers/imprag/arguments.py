"""Training and data arguments of ImpRAG (arXiv 2506.02279); defaults are the paper's, or ours if it gives no value."""

from dataclasses import dataclass
from typing import NamedTuple

from datasets import Dataset

from revela_hub.data.prompts.rows import read_prompts
from revela_hub.data.prompts.self_supervised import mix, text_prompts
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import Source, parse_sources
from revela_hub.data.text.chunks import chunk_document
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rank, TwoOrMore
from revela_hub.retrieval.index_options import IndexArguments
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments


@dataclass
class ImpRAGTrainingArguments(IndexArguments, AdapterArguments, RunArguments):
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
    encode_batch_size: PositiveInt = option(32, "Number of texts per forward pass while the index is rebuilt.")
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or ranks are not in order."""
        super().__post_init__()
        self.index_options().check_installed()
        if self.retrieval_only_steps and not self.retrieval_weight:
            raise ValueError("retrieval_only_steps would train nothing: set retrieval_weight above 0")
        if not self.num_positives < self.first_negative_rank <= self.last_negative_rank:
            raise ValueError(
                f"ranks must be in this order: num_positives {self.num_positives} < first_negative_rank"
                f" {self.first_negative_rank} <= last_negative_rank {self.last_negative_rank}"
            )
        ranks = self.last_negative_rank - self.first_negative_rank + 1
        if self.num_negatives > ranks:
            raise ValueError(
                f"num_negatives {self.num_negatives} cannot be drawn from {ranks} ranks, {self.first_negative_rank} to"
                f" {self.last_negative_rank}: lower it or raise last_negative_rank"
            )


@dataclass
class ImpRAGDataArguments:
    """Data of an ImpRAG run."""

    option_group = "data"

    data: list[str] = option(
        [], "Prompts and answers: JSON lines in the format of SQuAD, NQ or KILT, or with prompt and answer."
    )
    corpus: list[str] = option(
        [], "Passages to search: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
    )
    task: str = option("question_answering", "Prompt template for rows that do not name a task.")
    max_words: PositiveInt = option(100, "Maximum number of words per passage.")
    max_length: PositiveInt = option(256, "Maximum number of tokens of prompt and answer together.")
    pseudo_labels: str = option(
        "bm25", "Retriever that ranks the passages: Hub id or folder of a sentence-transformers model, or bm25."
    )
    plain_text: list[str] = option([], "Raw text for self-supervised rows (default: the documents of --corpus).")
    plain_text_fraction: NonNegativeFloat = option(0.1, "Number of plain-text rows, as a fraction of the prompts.")
    denoising_fraction: NonNegativeFloat = option(
        0.0, "Number of rows with a phrase to fill in, as a fraction of the prompts."
    )
    sentence_fraction: NonNegativeFloat = option(
        0.0, "Fraction of rows that ask for the next sentence, and the same for the previous one."
    )

    def sources(self) -> list[Source]:
        """Return all sources."""
        return parse_sources([*self.data, *self.corpus, *self.plain_text])


class ImpRAGData(NamedTuple):
    """Prompts and the collection."""

    prompts: Dataset
    passages: list[str]


def load_data(arguments: ImpRAGDataArguments, seed: int) -> tuple[ImpRAGData, str]:
    """Read prompts and passages, make the self-supervised rows, and return them with a summary."""
    if not arguments.data:
        raise UserError("there are no prompts: give JSON lines with --data")
    if not arguments.corpus:
        raise UserError("there are no passages to retrieve: give a folder or file with --corpus")
    prompts = read_prompts(arguments.data, arguments.task)
    collection = read_documents(arguments.corpus)
    chunks = (chunk for document in collection for chunk in chunk_document(document, arguments.max_words))
    passages = list(dict.fromkeys(chunk.text for chunk in chunks))
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
    counts = f"{counted(len(prompts), 'prompt')}, {counted(made, 'row')} made from raw text, {counted(len(passages), 'passage')}"
    report = "; ".join([counts, *skipped.remarks()])
    return ImpRAGData(mix(prompts, parts, seed), passages), report
