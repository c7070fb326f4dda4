"""The connection to a Ray cluster, the number of actors and the errors: what the engines of all commands share."""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from revela_hub.errors import UserError, first_line, require

CONNECT_SECONDS = 10.0
"""Time limit for reaching a cluster."""
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/:]+):(\d+)")


class Actors(NamedTuple):
    """The number of actors, and of GPUs for each of them (None: the cluster has no GPU)."""

    number: int
    num_gpus: int | None


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster.

    Attributes:
        address: Address of the cluster, or "auto"; None: that of RAY_ADDRESS, or else a cluster of this machine's cores.
        num_actors: Number of actors; None: one per GPU of the cluster, or one per CPU core if it has none.
    """

    address: str | None = None
    num_actors: int | None = None

    @contextmanager
    def connected(self, task: str) -> Iterator[Actors]:
        """Connect to the cluster, or start one of this machine's cores; an existing connection is used and kept.

        Error messages name the task of the actors, e.g. `encoding`.
        """
        require("ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if ours := not ray.is_initialized():
            self._connect()
        try:
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0))
            yield Actors(self.num_actors or gpus or int(resources["CPU"]), 1 if gpus else None)
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), UserError):
                raise cause from None
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"{task} on the Ray cluster failed: {last}") from error
        finally:
            if ours:
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        where, reached = self.address or os.environ.get("RAY_ADDRESS"), False
        try:
            if found := _HOST_AND_PORT.fullmatch(where or ""):  # ray.init waits for many minutes
                socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
                reached = True
            ray.init(address=self.address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # the last: without its token
            hint = "; the port is open: does the cluster need a token (RAY_AUTH_TOKEN)?" if reached else ""
            raise UserError(f"no Ray cluster answers at --address {where} ({first_line(error)}{hint})") from error
