"""The options of what ranks, which `search`, `mine` and `evaluate` share, and the models that they name."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from revela_hub.cli.encoders import load_dense
from revela_hub.errors import UserError
from revela_hub.output import shows_progress
from revela_hub.ranges import NonNegativeFloat, PositiveInt, TextLength

if TYPE_CHECKING:
    from revela_hub.retrieval import RankerSettings


@dataclass(kw_only=True)
class RankerOptions:
    """Options of what ranks."""

    _argument_group_name = "what ranks"

    parts: list[str] = field(
        default_factory=lambda: ["dense", "bm25"],
        metadata={"help": "Of a hybrid: two or three of dense, sparse, bm25."},
    )
    fusion: Literal["minmax", "sum", "rrf"] = field(
        default="minmax",
        metadata={"help": "Of a hybrid: add scores scaled to 0..1 per query, add scores, or reciprocal rank fusion."},
    )
    weights: list[float] | None = field(
        default=None, metadata={"help": "Of a hybrid: one for each part, by default all the same."}
    )
    depth: PositiveInt = field(default=100, metadata={"help": "Of a hybrid: how many hits of each part are joined."})
    sparse_model: str | None = field(
        default=None, metadata={"help": "SparseEncoder folder or Hub id, where it is not the model itself."}
    )
    max_terms: PositiveInt = field(default=256, metadata={"help": "Terms kept of a passage, the heaviest."})
    max_query_terms: PositiveInt | None = field(default=None, metadata={"help": "Terms kept of a query."})
    bm25: Literal["bm25s", "anserini"] = field(
        default="bm25s", metadata={"help": "Settings: k1 1.5, b 0.75, Snowball; or k1 0.9, b 0.4, Porter."}
    )
    bm25_k1: NonNegativeFloat | None = field(default=None, metadata={"help": "In place of the preset's."})
    bm25_b: NonNegativeFloat | None = field(default=None, metadata={"help": "In place of the preset's, 0 to 1."})
    bm25_stemmer: str | None = field(
        default=None, metadata={"help": "A stemmer of PyStemmer (english, porter, german ...), or none."}
    )
    bm25_stopwords: str | None = field(default=None, metadata={"help": "A language of bm25s (en, de ...), or none."})
    bm25_method: Literal["lucene", "robertson", "atire", "bm25l", "bm25+"] | None = field(
        default=None, metadata={"help": "The variant of the formula."}
    )
    query_prompt: str | None = field(
        default=None, metadata={"help": "Goes before every query, in place of the model's own prompt for queries."}
    )
    document_prompt: str | None = field(
        default=None, metadata={"help": "Goes before every passage, in place of the model's own prompt for documents."}
    )
    dtype: Literal["float32", "float16"] = field(default="float32", metadata={"help": "What vectors are kept as."})
    index_type: Literal["exact", "flat", "hnsw", "ivfpq", "milvus"] = field(
        default="exact", metadata={"help": "How vectors are searched; hnsw and ivfpq (FAISS) are approximate."}
    )
    milvus_uri: str | None = field(
        default=None, metadata={"help": "Milvus server (http://host:19530); by default a file in the cache."}
    )
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where vectors are kept; by default in the user's cache folder."}
    )
    batch_size: PositiveInt = field(default=32, metadata={"help": "Texts per forward pass."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, mps; by default the fastest there is."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model."})
    max_length: TextLength | None = field(default=None, metadata={"help": "Cut texts at this many tokens."})


def check_used(options: RankerOptions, modes: Sequence[str | None]) -> None:
    """Options that none of the modes reads are refused: passed over in silence they would seem to hold.

    Raises:
        UserError: There is one.
    """
    of_mode: dict[str, tuple[str, ...]] = {"hybrid": ("parts", "fusion", "weights", "depth")}
    if "hybrid" not in modes and "sparse" not in modes:
        of_mode |= {"sparse": ("sparse_model",)}
    for mode, names in of_mode.items():
        for name in sorted(given(options) & {*names}) if mode not in modes else ():
            raise UserError(f"--{name} is of --mode {mode}: give that, or leave it out")


def given(options: Any) -> set[str]:
    """The names of those fields of a dataclass that are not as they are by default, or have none."""
    defaults = ((e.name, e.default if e.default_factory is MISSING else e.default_factory()) for e in fields(options))
    return {name for name, default in defaults if getattr(options, name) != default}


class Models(NamedTuple):
    """What `build_ranker` wants."""

    settings: "RankerSettings"
    dense: Any
    sparse: Any


def load_models(options: RankerOptions, model: str, mode: str | None) -> Models:
    """Loads the models that a mode needs.

    Args:
        options: The options.
        model: A folder, a Hub id, or "bm25".
        mode: "dense", "sparse", "bm25", "hybrid"; None: dense, or bm25 if that is the model's name.

    Raises:
        UserError: A model cannot be loaded, or does not fit its mode.
    """
    from revela_hub.retrieval import RankerSettings
    from revela_hub.retrieval.bm25 import bm25_settings
    from revela_hub.retrieval.encoder import load_sparse_encoder, model_identity

    if model == "bm25" and mode not in (None, "bm25"):
        raise UserError(f"--mode {mode} needs a model besides bm25: give its folder or Hub id")
    values: dict[str, Any] = {
        name: getattr(options, name)
        for name in RankerSettings.__dataclass_fields__
        if name in RankerOptions.__dataclass_fields__ and name not in ("bm25", "device")
    } | {"index": options.index_type}
    own = ("k1", "b", "stemmer", "stopwords", "method")
    bm25 = bm25_settings(options.bm25, **{name: getattr(options, f"bm25_{name}") for name in own})
    settings = RankerSettings(
        **values, mode="bm25" if model == "bm25" else mode or "dense", bm25=bm25, show_progress_bar=shows_progress()
    )
    loading: dict[str, Any] = {
        "device": options.device,
        "trust_remote_code": options.trust_remote_code,
        "max_seq_length": options.max_length,
    }
    dense = sparse = None
    found: dict[str, Any] = {}
    if "dense" in settings.used:
        prompt = settings.query_prompt or settings.document_prompt
        dense = load_dense(model, **loading, prompt=prompt)
        found |= {
            "identity": model_identity(model, options.max_length),
            "device": dense.device,
        }
    if "sparse" in settings.used:
        name = options.sparse_model or model
        sparse = load_sparse_encoder(name, **loading)
        found["sparse_identity"] = model_identity(name, options.max_length)
    return Models(RankerSettings(**vars(settings) | found), dense, sparse)
