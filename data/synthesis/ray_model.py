"""A language model on a Ray cluster as a backend: each actor loads it once and answers a batch of prompts at a time.

These are plain actors, not `ray.data.Dataset.map_batches`: the next prompts depend on the replies to earlier ones, while a data
set is complete before it is mapped, and would load the models again for each round. If an actor dies, Ray starts it again and
repeats its batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import cycle
from typing import Any

from revela_hub.data.ray_cluster import RayCluster
from revela_hub.data.synthesis.backends import Backend, Reply, Request, RequestT, take
from revela_hub.errors import UserError

MAX_REPEATS = 3
"""Number of times that a batch is repeated because its actor died."""


class RayModel:
    """The backend of `ray_model`."""

    def __init__(self, actors: Sequence[Any], batch_size: int) -> None:
        import ray

        self._actors, self._batch_size = actors, batch_size
        # Loads the model in the first actor; the others load it with their first prompts.
        self.recorded: dict[str, Any] = ray.get(actors[0].recorded.remote())

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order; every actor has a batch at a time.

        The batches depend on earlier replies and the number of actors, not on which of them is the fastest.
        """
        import ray

        source, more = iter(requests), True
        window: deque[tuple[list[RequestT], Any]] = deque()
        actors = cycle(self._actors)  # replies are awaited in order, so the actor whose turn it is has no other batch
        while more or window:
            while more and len(window) < len(self._actors):
                batch, more = take(source, self._batch_size)
                if not batch:
                    break
                window.append((batch, next(actors).answer.remote(batch)))
            if window:
                batch, answer = window.popleft()
                yield from zip(batch, ray.get(answer), strict=True)


class _Actor:
    """Loads the model when it is needed, because Ray would report an error of the constructor as the actor's death."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load

    @cached_property
    def _model(self) -> Backend:
        return self._load()

    def recorded(self) -> dict[str, Any]:
        return getattr(self._model, "recorded", {})

    def answer(self, batch: list[Request]) -> list[Reply]:
        return [reply for _, reply in self._model.replies(batch)]


@contextmanager
def ray_model(load: Callable[[], Backend], cluster: RayCluster, batch_size: int = 8) -> Iterator[RayModel]:
    """Start actors that load a model, for the duration of a `with` block.

    With one actor, the replies are those of the model on this machine. With several, unusable replies are requested again
    one batch per actor later, so other prompts may share a batch, with which a sampled reply of `LocalModel` changes.
    """
    with cluster.connected("generating text") as actors:
        import ray

        if actors.num_gpus and actors.number > (gpus := int(ray.cluster_resources()["GPU"])):
            # Ray would wait for a GPU, without a message.
            raise UserError(f"--num_actors {actors.number}: each actor needs a GPU, and the cluster has {gpus}")
        options = {"num_gpus": actors.num_gpus, "max_restarts": -1, "max_task_retries": MAX_REPEATS}
        actor = ray.remote(_Actor).options(**options)
        yield RayModel([actor.remote(load) for _ in range(actors.number)], batch_size)
