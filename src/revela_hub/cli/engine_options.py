"""The options of commands that can encode passages on a Ray cluster."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.cli.encoders import load_dense
from revela_hub.errors import UserError
from revela_hub.ranges import PositiveInt

if TYPE_CHECKING:
    from revela_hub.retrieval.ray_engine import RayEngine


@dataclass(kw_only=True)
class EngineOptions:
    """The machines that encode the passages."""

    _argument_group_name = "engine"

    engine: Literal["local", "ray"] = field(
        default="local", metadata={"help": "Encode on this machine (local), or on a Ray cluster (ray)."}
    )
    address: str | None = field(
        default=None,
        metadata={
            "help": "Ray: Address of the cluster, or auto (default: RAY_ADDRESS, or else the CPU cores of this machine)."
        },
    )
    num_actors: PositiveInt | None = field(
        default=None,
        metadata={
            "help": "Ray: Number of actors (default: one per GPU of the cluster, or one per CPU core without GPUs)."
        },
    )

    def ray_engine(self, load: Callable[[], Any]) -> "RayEngine | None":
        """Return the engine of --engine ray; None for local.

        Args:
            load: Loads the encoder in an actor.

        Raises:
            UserError: Ray is not installed, or an option has no effect.
        """
        if self.engine == "local":
            for name in ("address", "num_actors"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} requires --engine ray")
            return None
        if getattr(self, "endpoint", None):
            raise UserError(
                "--engine ray and --endpoint exclude each other: a server encodes for any number of clients"
            )
        from revela_hub.errors import require
        from revela_hub.retrieval.ray_engine import RayEngine

        require("ray")
        return RayEngine(load, self.address, self.num_actors)


def load_for_workers(options: Any) -> Any:  # noqa: ANN401 (options of a command; an `Encoder`)
    """Load the encoder of a command's --model in an actor. Ray assigns the device, unless --device is given."""
    model = Path(options.model).expanduser()
    return load_dense(
        str(model.resolve()) if model.exists() else options.model,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        max_seq_length=options.max_length,
        prompt=options.document_prompt,
    )
