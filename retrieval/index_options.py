"""How vectors are stored and searched: the options of an index, declared once and passed as a whole."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from revela_hub.errors import UserError

IndexType = Literal["exact", "flat", "hnsw", "ivfpq", "milvus"]
Precision = Literal["float32", "float16"]


@dataclass(frozen=True)
class IndexOptions:
    """How vectors are stored and searched.

    Attributes:
        type: The index type, see `revela_hub.retrieval.dense`.
        dtype: The precision in which vectors are stored on disk.
        milvus_uri: A Milvus server for the type "milvus"; None stores the index in a local file.

    Raises:
        UserError: An unknown type or precision, or a Milvus server for another index type.
    """

    type: IndexType | str = "exact"
    dtype: Precision | str = "float32"
    milvus_uri: str | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, value, choices in (("index type", self.type, IndexType), ("dtype", self.dtype, Precision)):
            if value not in get_args(choices):
                raise UserError(f"the {name} must be one of {', '.join(get_args(choices))}, not {value!r}")
        if self.milvus_uri is not None and self.type != "milvus":
            raise UserError(f"a Milvus server needs the index type milvus, not {self.type}")


@dataclass(kw_only=True)
class IndexArguments:
    """The command-line options of an index."""

    _argument_group_name = "index"
    basic_options: ClassVar[tuple[str, ...]] = ("index_type",)

    index_type: IndexType = field(
        default="exact", metadata={"help": "Index type; hnsw and ivfpq (FAISS) are approximate."}
    )
    milvus_uri: str | None = field(
        default=None,
        metadata={"help": "Milvus server, e.g. http://host:19530, for --index_type milvus (default: a local file)."},
    )

    def index_options(self, dtype: Precision = "float32") -> IndexOptions:
        """Return the options as one value."""
        return IndexOptions(self.index_type, dtype, self.milvus_uri)
