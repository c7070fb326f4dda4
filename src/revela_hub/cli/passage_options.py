"""The options that `encode` and `index` share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from revela_hub.cli.encoders import encoder_identity, load_dense
from revela_hub.cli.endpoint_options import EndpointOptions
from revela_hub.errors import UserError
from revela_hub.output import note, shows_progress
from revela_hub.ranges import PositiveInt, TextLength
from revela_hub.retrieval.index_options import IndexOptions, Precision

if TYPE_CHECKING:
    from revela_hub.retrieval import Passages, RankerSettings


@dataclass(kw_only=True)
class PassageOptions(EndpointOptions):
    """The passages, the model and the output folder."""

    _argument_group_name = "passages"
    old_names: ClassVar[dict[str, str]] = {"passages": "corpus", "output": "output_dir", "max_seq_length": "max_length"}

    model: str = field(metadata={"help": "Sentence-transformers folder or Hub id."})
    corpus: list[str] = field(
        metadata={"help": "Passages to encode: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."}
    )
    output_dir: str = field(metadata={"help": "Folder of the index."})
    max_words: PositiveInt = field(default=120, metadata={"help": "Maximum number of words per passage."})
    text_column: str = field(default="text", metadata={"help": "Column or JSON field that holds the text."})
    metadata_columns: list[str] = field(
        default_factory=list,
        metadata={"help": "Columns of the corpus to keep, e.g. for search --filter.", "metavar": "COLUMN"},
    )
    document_prompt: str | None = field(
        default=None, metadata={"help": "Text to prepend to every passage (default: the model's own prompt)."}
    )
    dtype: Precision = field(default="float32", metadata={"help": "Type of the stored vectors."})
    batch_size: PositiveInt = field(default=32, metadata={"help": "Number of passages per forward pass."})
    device: str | None = field(
        default=None, metadata={"help": "Device to run on, e.g. cpu, cuda:1 or mps (default: the fastest one)."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow a model to run its own code from the Hub."})
    max_length: TextLength | None = field(
        default=None, metadata={"help": "Maximum number of tokens per passage (default: the model's own limit)."}
    )


class Loaded(NamedTuple):
    """The encoder, its settings, and a function that writes the passages to a folder."""

    encoder: Any
    settings: "RankerSettings"
    write: "Callable[[Path], Passages]"


def check_output(corpus: list[str], folder: str, option: str = "--output_dir") -> None:
    """Check that an output folder is separate from the user's files.

    Raises:
        UserError: It is or lies in a folder of the corpus, or contains files that this program did not write.
    """
    from revela_hub.data.own_folder import check_apart
    from revela_hub.data.sources.source import parse_sources
    from revela_hub.retrieval.disk import check_folder

    output = Path(folder).expanduser()
    check_apart(parse_sources(corpus), output, option)
    check_folder(output, option)


def load_passage_encoder(options: PassageOptions, index: IndexOptions) -> Loaded:
    """Load the model.

    Raises:
        UserError: It cannot be loaded, or a path of the corpus does not exist.
    """
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.retrieval import RankerSettings, read_passages

    if options.model == "bm25":
        raise UserError("bm25 has no vectors and needs no index: use revela-hub search bm25 --corpus PATH")
    report = ReadReport()
    columns: dict[str, Any] = {"text_column": options.text_column}
    columns |= {"metadata_columns": options.metadata_columns} if options.metadata_columns else {}
    documents = read_documents(options.corpus, report=report, **columns)  # raises errors before the model is loaded
    encoder = load_dense(
        options.model,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        max_seq_length=options.max_length,
        prompt=options.document_prompt,
        server=options.server(),
    )
    settings = RankerSettings(
        identity=encoder_identity(encoder, options.model, options.max_length),
        document_prompt=options.document_prompt,
        batch_size=options.batch_size,
        index=index,
        device=encoder.device,
        show_progress_bar=shows_progress(),
    )

    def write(folder: Path) -> "Passages":
        passages = read_passages(
            documents,
            folder,
            max_words=options.max_words,
            metadata=bool(options.metadata_columns),
            report=report,
            show_progress_bar=shows_progress(),
        )
        if remarks := report.remarks():  # the index lacks what was not read
            note("; ".join(remarks))
        return passages

    return Loaded(encoder, settings, write)
