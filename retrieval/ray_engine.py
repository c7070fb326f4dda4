"""Encoding on a Ray cluster: actors fill one vector store through `ray.data.Dataset.map_batches`.

The actors read the texts from, and write the vectors to, the folder that this process uses, so all nodes need it under the
same path. A block of texts becomes one shard of the store. If a worker dies, Ray repeats its block on another one.
"""

import logging
import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from revela_hub.errors import UserError, first_line, require
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.vectors import SHARD_SIZE, VectorStore

BLOCKS_PER_ACTOR = 4
"""Minimum number of blocks per actor, so that all of them finish at about the same time."""

CONNECT_SECONDS = 10.0
"""Time limit for reaching a cluster."""
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/:]+):(\d+)")


@dataclass(frozen=True)
class RayEngine:
    """Encodes the texts that are missing from a store.

    Attributes:
        load: Loads the encoder in each actor.
        address: Address of the cluster, or "auto"; None: that of RAY_ADDRESS, or else a cluster of this machine's cores.
        num_actors: Number of actors; None: one per GPU of the cluster, or one per CPU core if it has none.
    """

    load: Callable[[], Encoder]
    address: str | None = None
    num_actors: int | None = None

    def fill(self, store: VectorStore, texts: TextSource, *, batch_size: int, prompt: str | None, show: bool) -> None:
        """Encode the missing texts.

        Args:
            store: The store, in a folder that all nodes share.
            texts: The texts, in a file of such a folder.
            batch_size: Texts per forward pass.
            prompt: A prompt that replaces the encoder's own.
            show: Whether to show Ray's progress bars.

        Raises:
            UserError: Ray is not installed, the cluster cannot be reached, or the encoder fails.
        """
        require("ray")
        missing = store.missing(texts)
        if not len(missing):
            return
        import ray

        with _cluster(self.address, show):
            gpus = int(ray.cluster_resources().get("GPU", 0))
            actors = self.num_actors or gpus or int(ray.cluster_resources()["CPU"])
            size = min(SHARD_SIZE, math.ceil(len(missing) / (BLOCKS_PER_ACTOR * actors)))
            blocks = [missing[start : start + size] for start in range(0, len(missing), size)]
            encoded = ray.data.from_numpy(blocks).map_batches(
                _Actor,
                fn_constructor_args=(self.load, store, texts, batch_size, prompt),
                batch_size=None,  # a whole block
                compute=ray.data.ActorPoolStrategy(size=min(actors, len(blocks))),
                num_gpus=1 if gpus else None,
            )
            try:
                for batch in encoded.iter_batches(batch_size=None):
                    for message in filter(None, batch["error"]):
                        raise UserError(message)
            except ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                raise UserError(f"encoding on the Ray cluster failed: {last}") from error
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
                self._texts, batch["data"], lambda texts, _: encode_texts(encoder, texts, "document", **self._options)
            )
        except UserError as error:
            return {"error": [str(error)]}
        return {"error": [""]}


@contextmanager
def _cluster(address: str | None, show: bool) -> Iterator[None]:
    """Connects to a cluster, or starts one of this machine's cores; an existing connection is used and kept."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = show
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS")
    try:
        if found := _HOST_AND_PORT.fullmatch(where or ""):  # ray.init waits for many minutes
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster answers at --address {where} ({first_line(error)})") from error
    try:
        yield
    finally:
        ray.shutdown()
