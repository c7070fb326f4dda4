"""The options of commands that can use a server as the encoder."""

from dataclasses import dataclass

from revela_hub.options import option
from revela_hub.ranges import PositiveInt


@dataclass(kw_only=True)
class EndpointOptions:
    """The server that computes the vectors of --model."""

    option_group = "server"

    endpoint: str | None = option(
        None, "OpenAI-compatible server that computes the model's vectors, e.g. http://localhost:8080 (vLLM, TEI)."
    )
    endpoint_model: str | None = option(None, "Name of the model on the server (default: --model).")
    api_key_env: str | None = option(None, "Environment variable that holds the server's API key.")
    concurrency: PositiveInt = option(8, "Number of concurrent requests to the server.")
