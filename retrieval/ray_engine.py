"""Encoding on a Ray cluster: actors fill one vector store through `ray.data.Dataset.map_batches`.

The actors read the texts from, and write the vectors to, the folder that this process uses, so all nodes need it under the
same path. A block of texts becomes one shard of the store. If a worker dies, Ray repeats its block on another one.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from revela_hub.data.ray_cluster import RayCluster
from revela_hub.errors import UserError
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.vectors import SHARD_SIZE, VectorStore

BLOCKS_PER_ACTOR = 4
"""Minimum number of blocks per actor, so that all of them finish at about the same time."""


@dataclass(frozen=True)
class RayEngine:
    """Encodes the texts that are missing from a store.

    Attributes:
        load: Loads the encoder in each actor.
        cluster: The cluster.
    """

    load: Callable[[], Encoder]
    cluster: RayCluster = field(default_factory=RayCluster)

    def fill(self, store: VectorStore, texts: TextSource, *, batch_size: int, prompt: str | None, show: bool) -> None:
        """Encode the missing texts. The store and the file of the texts are in folders that all nodes share."""
        missing = store.missing(texts)
        if not len(missing):
            return
        with self.cluster.connected("encoding") as actors:
            import ray

            ray.data.DataContext.get_current().enable_progress_bars = show
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            size = min(SHARD_SIZE, math.ceil(len(missing) / (BLOCKS_PER_ACTOR * actors.number)))
            blocks = [pa.table({"row": missing[start : start + size]}) for start in range(0, len(missing), size)]
            encoded = ray.data.from_blocks(blocks).map_batches(
                _Actor,
                fn_constructor_args=(self.load, store, texts, batch_size, prompt),
                batch_size=size,  # a whole block; Ray requires a number for actors with GPUs
                compute=ray.data.ActorPoolStrategy(size=min(actors.number, len(blocks))),
                num_gpus=actors.num_gpus,
            )
            for batch in encoded.iter_batches(batch_size=None):
                for message in filter(None, batch["error"]):
                    raise UserError(message)
        store.refresh()


class _Actor:
    """Loads the encoder once, and encodes blocks of texts into the store."""

    def __init__(
        self, load: Callable[[], Encoder], store: VectorStore, texts: TextSource, batch_size: int, prompt: str | None
    ) -> None:
        self._load, self._store, self._texts = load, store, texts
        self._encoder: Encoder | None = None
        self._options: dict[str, Any] = {"batch_size": batch_size, "prompt": prompt}

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Our own errors are returned, because Ray would put them into a traceback and repeat the block."""
        try:
            encoder = self._encoder = self._encoder or self._load()
            self._store.add(
                self._texts, batch["row"], lambda texts, _: encode_texts(encoder, texts, "document", **self._options)
            )
        except UserError as error:
            return {"error": [str(error)]}
        return {"error": [""]}
