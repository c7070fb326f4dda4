"""The content of `index.json`, the metadata of a passage index (`store`)."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from revela_hub.errors import UserError
from revela_hub.paths import local_path
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.ranking import RankerSettings, document_store

METADATA = "index.json"


@dataclass(frozen=True)
class IndexMetadata:
    """The content of `index.json`, in which the field `type` of `options` is stored as `index`, and its others under their names.

    Attributes:
        model: The Hub id or folder from which the model was loaded.
        fingerprint: `encoder.model_identity` of the model.
        texts: The fingerprint of the passages.
        passages: The number of passages.
        dimension: The dimension of the vectors.
        similarity: "cosine" or "dot".
        document_prompt: The prompt for passages, None for the model's own.
        max_length: The number of tokens to which passages were truncated, None for the model's own limit.
        options: How vectors are stored and searched.
        endpoint: The server that computed the vectors: its kind, address and model; None for this machine.
        canary: The name of the canary (`Canary.write`).
    """

    model: str
    fingerprint: str
    texts: str
    passages: int
    dimension: int
    similarity: str
    document_prompt: str | None = None
    max_length: int | None = None
    options: IndexOptions = IndexOptions()
    endpoint: str | None = None
    canary: str = ""

    @property
    def store_name(self) -> str:
        """The name of the store of the vectors."""
        return document_store(self.fingerprint, self.document_prompt)

    def to_json(self) -> str:
        """Return the content of the file."""
        values = asdict(self) | {"index": self.options.type, **asdict(self.options)}
        for name in ("options", "type", *(["endpoint"] if self.endpoint is None else [])):
            del values[name]
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "IndexMetadata":
        """Read the content of the file.

        Raises:
            ValueError, TypeError, UserError: It is not such metadata.
        """
        values = dict(json.loads(text))
        names = {"index": "type"} | {each.name: each.name for each in fields(IndexOptions) if each.name != "type"}
        options = {field: values.pop(name) for name, field in names.items() if name in values}
        return cls(**values, options=IndexOptions(**options))


def with_index_settings(settings: RankerSettings, metadata: IndexMetadata) -> RankerSettings:
    """Return the settings with the options and the prompt that an index was built with."""
    asked, built = settings.index, metadata.options
    for name, value, default, found in (
        ("truncate_dim", asked.truncate_dim, None, built.truncate_dim),
        ("precision", asked.precision, "float32", built.precision),
        ("dtype", asked.dtype, "float32", built.dtype),
        ("index_type", asked.type, "exact", built.type),
        ("milvus_uri", asked.milvus_uri, None, built.milvus_uri),
        ("document_prompt", settings.document_prompt, None, metadata.document_prompt),
    ):
        if value not in (default, found):
            none = f"none ({metadata.dimension} dimensions)" if name == "truncate_dim" else "none"
            raise UserError(
                f"the index was built with --{name} {none if found is None else found}, not {value}: leave out --{name}, or"
                " build another index"
            )
    return replace(settings, index=metadata.options, document_prompt=metadata.document_prompt)


def read_metadata(folder: str | Path) -> IndexMetadata:
    """Read the metadata of an index."""
    path = local_path(folder) / METADATA
    if not path.is_file():
        raise UserError(f"{folder} is not an index ({METADATA} is missing): build one with revela-hub index")
    try:
        return IndexMetadata.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{path} is damaged ({error}): build the index again") from error
