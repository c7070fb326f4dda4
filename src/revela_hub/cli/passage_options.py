"""The options that `encode` and `index` share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.output import note, shows_progress
from revela_hub.paths import local_path
from revela_hub.ranges import PositiveInt, TextLength
from revela_hub.retrieval.index_options import IndexOptions, Precision
from revela_hub.search.encoders import OnDevices, encoder_identity, load_dense
from revela_hub.search.endpoint_options import EndpointOptions
from revela_hub.search.reading_options import ReadingOptions

if TYPE_CHECKING:
    from revela_hub.retrieval import Passages, RankerSettings


@dataclass(kw_only=True)
class PassageOptions(ReadingOptions, EndpointOptions):
    """The passages, the model and the output folder."""

    option_group = "passages"
    old_names: ClassVar[dict[str, str]] = {"passages": "corpus", "output": "output_dir", "max_seq_length": "max_length"}

    model: str = required("Sentence-transformers folder or Hub id.")
    corpus: list[str] = required(
        "Passages to encode: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
    )
    output_dir: str = required("Folder of the index.")
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")
    document_prompt: str | None = option(None, "Text to prepend to every passage (default: the model's own prompt).")
    dtype: Precision = option("float32", "Type of the stored vectors.")
    batch_size: PositiveInt = option(32, "Number of passages per forward pass.")
    device: str | None = option(
        None, "Device to run on, e.g. cpu or mps, or several: cuda:0,cuda:1 (default: the fastest one)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per passage (default: the model's own limit)."
    )


class Loaded(NamedTuple):
    """The encoder, its settings, and a function that writes the passages to a folder."""

    encoder: Any
    settings: "RankerSettings"
    write: "Callable[[Path], Passages]"


def check_output(corpus: list[str], folder: str, option: str = "--output_dir", exclude: Sequence[str] = ()) -> None:
    """Check that an output folder is separate from the user's files."""
    from revela_hub.data.own_folder import check_apart
    from revela_hub.data.sources.source import parse_sources
    from revela_hub.retrieval.disk import check_folder

    output = local_path(folder)
    check_apart(parse_sources(corpus, exclude=exclude), output, option)
    check_folder(output, option)


def load_encoder_of(options: PassageOptions) -> Any:  # noqa: ANN401 (an `Encoder`)
    """Load the encoder, on several devices if --device lists some."""
    devices = (options.device or "").split(",")
    encoder = load_dense(
        options.model,
        device=devices[0] or None,
        trust_remote_code=options.trust_remote_code,
        max_seq_length=options.max_length,
        prompt=options.document_prompt,
        server=options,
    )
    return OnDevices(encoder, devices) if len(devices) > 1 else encoder


def load_passage_encoder(options: PassageOptions, index: IndexOptions) -> Loaded:
    """Load the model."""
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.retrieval import RankerSettings, read_passages

    if options.model == "bm25":
        raise UserError("bm25 has no vectors and needs no index: use revela-hub search bm25 --corpus PATH")
    report = ReadReport()
    # Raises errors before the model is loaded.
    documents = read_documents(options.corpus, report=report, **options.reading())
    encoder = load_encoder_of(options)
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
            report=report,
            show_progress_bar=shows_progress(),
        )
        note("; ".join(report.remarks()))  # the index lacks what was not read
        return passages

    return Loaded(encoder, settings, write)
