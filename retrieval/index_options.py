"""Options for storing and searching vectors, declared once and passed as a whole."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from revela_hub.errors import UserError

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
    """

    type: IndexType | str = "exact"
    dtype: Precision | str = "float32"
    milvus_uri: str | None = None
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        """Reject a password."""
        if self.milvus_uri is not None and "@" in urlsplit(self.milvus_uri).netloc:  # it would be stored in index.json
            raise UserError(
                "the address of a Milvus server must not contain a password: set MILVUS_TOKEN to user:password"
            )
