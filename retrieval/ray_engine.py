"""Encoding on a Ray cluster: the actors of `ray.data.Dataset.map_batches` fill one vector store.

The actors read the texts from, and write the vectors to, the folder that this process uses, so all nodes need it under the
same path. A block of texts becomes one shard of the store. If a worker dies, Ray repeats its block on another one.
"""

import logging
import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa

from revela_hub.errors import UserError, require
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.vectors import SHARD_SIZE, VectorStore

BLOCKS_PER_ACTOR = 4
"""Minimum number of blocks per actor, so that all of them finish at about the same time."""


def connect(address: str) -> None:
    """Connect to a Ray cluster by its address; "auto": the one of this machine; "local": a new one of this machine's cores."""
    require("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if not ray.is_initialized():
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def encode_on_ray(
    load: Callable[[], Encoder],
    store: VectorStore,
    texts: TextSource,
    part: slice = slice(None),
    *,
    num_actors: int | None = None,
    **options: Any,
) -> None:
    """Encode the texts in a part that are missing from a store on the connected cluster; all nodes share the folder of both.

    `load` is called once in each of `num_actors` actors (default: one per GPU of the cluster, or per CPU core if it has none).
    The options are those of `encode_texts`.
    """
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    missing = store.missing(texts, part)
    if not len(missing):
        return
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    actors = num_actors or gpus or int(resources["CPU"])
    size = min(SHARD_SIZE, math.ceil(len(missing) / (BLOCKS_PER_ACTOR * actors)))
    blocks = [pa.table({"row": missing[start : start + size]}) for start in range(0, len(missing), size)]
    encoded = ray.data.from_blocks(blocks).map_batches(
        _Actor,
        fn_constructor_args=(load, store, texts, options),
        batch_size=size,  # a whole block; Ray requires a number for actors with GPUs
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(blocks))),
        num_gpus=1 if gpus else None,
    )
    for batch in encoded.iter_batches(batch_size=None):
        for message in filter(None, batch["error"]):
            raise UserError(message)
    store.refresh()


class _Actor:
    """Loads the encoder once, and encodes blocks of texts into the store."""

    def __init__(
        self, load: Callable[[], Encoder], store: VectorStore, texts: TextSource, options: dict[str, Any]
    ) -> None:
        self._encoder, self._store, self._texts, self._options = cache(load), store, texts, options

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Our own errors are returned, because Ray would put them into a traceback and repeat the block."""
        try:
            encoder = self._encoder()
            self._store.add(
                self._texts, batch["row"], lambda texts: encode_texts(encoder, texts, "document", **self._options)
            )
        except UserError as error:
            return {"error": [str(error)]}
        return {"error": [""]}
