"""Options for storing and searching vectors, declared once and passed as a whole."""

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from revela_hub.errors import UserError, require
from revela_hub.files import local_path
from revela_hub.options import option
from revela_hub.ranges import PositiveInt

IndexType = Literal["exact", "flat", "hnsw", "ivfpq", "milvus"]
Precision = Literal["float32", "float16"]


@dataclass(frozen=True)
class IndexOptions:
    """Options for storing and searching vectors.

    Attributes:
        type: The index type, see `revela_hub.retrieval.dense`.
        dtype: The precision in which vectors are stored on disk.
        milvus_uri: A Milvus server for the type "milvus"; None stores the index in a local file.
        truncate_dim: The number of leading components of each vector to search with; None: all. The rest stays on disk.

    Raises:
        UserError: An unknown type or dtype.
    """

    type: IndexType | str = "exact"
    dtype: Precision | str = "float32"
    milvus_uri: str | None = None
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("index type", self.type, IndexType),
            ("dtype", self.dtype, Precision),
        ):
            if value not in get_args(choices):
                raise UserError(f"the {name} must be one of {', '.join(get_args(choices))}, not {value!r}")
        if self.milvus_uri is not None and "@" in urlsplit(self.milvus_uri).netloc:
            raise UserError(
                "the address of a Milvus server must not contain a password: set MILVUS_TOKEN to user:password"
            )
        if self.truncate_dim is not None and self.truncate_dim < 1:
            raise UserError(f"truncate_dim must be at least 1, not {self.truncate_dim}")

    def check_installed(self) -> None:
        """Raise a UserError if the index needs a package that is not installed."""
        if self.type != "exact":
            require("pymilvus" if self.type == "milvus" else "faiss")


@dataclass(kw_only=True)
class IndexArguments:
    """The command-line options of an index."""

    option_group = "index"

    index_type: IndexType = option("exact", "Index type; hnsw and ivfpq (FAISS) are approximate.")
    milvus_uri: str | None = option(
        None, "Milvus server, e.g. http://host:19530, for --index_type milvus (default: a local file)."
    )

    def index_options(self, dtype: Precision = "float32") -> IndexOptions:
        """Return the options as one value."""
        return IndexOptions(self.index_type, dtype, self.milvus_address)

    @property
    def milvus_address(self) -> str | None:
        """The server, or the whole path of the file, which is then found from another folder, too."""
        uri = self.milvus_uri
        return str(local_path(uri).resolve()) if uri and uri.endswith(".db") else uri


@dataclass(kw_only=True)
class SmallVectorArguments(IndexArguments):
    """The command-line options of an index, with those of smaller vectors."""

    option_group = "vectors"
    truncate_dim: PositiveInt | None = option(
        None, "Search with the first N components of each vector (default: all, or as in the index)."
    )

    def index_options(self, dtype: Precision = "float32") -> IndexOptions:
        """Return the options as one value."""
        return IndexOptions(self.index_type, dtype, self.milvus_address, self.truncate_dim)
