"""The options of commands that can run their model on a Ray cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.paths import local_path
from revela_hub.ranges import PositiveInt
from revela_hub.search.encoders import load_dense

if TYPE_CHECKING:
    from revela_hub.data.ray_cluster import RayCluster
    from revela_hub.retrieval.ray_engine import RayEngine


@dataclass(kw_only=True)
class EngineOptions:
    """The machines that run the model."""

    option_group = "engine"

    engine: Literal["local", "ray"] = option(
        "local", "Run the model on this machine (local), or on a Ray cluster (ray)."
    )
    address: str | None = option(
        None, "Ray: Address of the cluster, or auto (default: RAY_ADDRESS, or else the CPU cores of this machine)."
    )
    num_actors: PositiveInt | None = option(
        None, "Ray: Number of actors (default: one per GPU of the cluster, or one per CPU core without GPUs)."
    )


def ray_cluster(options: EngineOptions) -> "RayCluster | None":
    """Return the cluster of --engine ray; None for local.

    Raises:
        UserError: Ray is not installed, or an option has no effect.
    """
    if options.engine == "local":
        for name in ("address", "num_actors"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} requires --engine ray")
        return None
    if getattr(options, "endpoint", None):
        raise UserError(
            "--engine ray and --endpoint exclude each other: a server runs the model for any number of clients"
        )
    from revela_hub.data.ray_cluster import RayCluster
    from revela_hub.errors import require

    require("ray")
    return RayCluster(options.address, options.num_actors)


def ray_engine(options: EngineOptions, load: Callable[[], Any]) -> "RayEngine | None":
    """Return the engine that loads the encoder on the cluster of --engine ray; None for local."""
    from revela_hub.retrieval.ray_engine import RayEngine

    cluster = ray_cluster(options)
    return None if cluster is None else RayEngine(load, cluster)


def path_for_workers(model: str) -> str:
    """Return the absolute path of a model's folder or file, or its Hub id."""
    path = local_path(model)
    return str(path.resolve()) if path.exists() else model


def load_for_workers(options: Any) -> Any:  # noqa: ANN401 (options of a command; an `Encoder`)
    """Load the encoder of a command's --model in an actor. Ray assigns the device, unless --device is given."""
    return load_dense(
        path_for_workers(options.model),
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        max_seq_length=options.max_length,
        prompt=options.document_prompt,
    )
