"""The options of commands that can use a server as the encoder, and the connection that they describe."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from revela_hub.retrieval.endpoint import EmbeddingServer


@dataclass(kw_only=True)
class EndpointOptions:
    """The server that computes the vectors of --model."""

    option_group = "server"
    basic_options: ClassVar[tuple[str, ...]] = ("endpoint",)

    endpoint: str | None = option(
        None, "Server that computes the model's vectors, e.g. http://localhost:8080 (TEI, vLLM, infinity)."
    )
    endpoint_type: Literal["auto", "tei", "openai"] = option(
        "auto", "API of the server: tei (/embed), openai (/v1/embeddings), or detect it (auto)."
    )
    endpoint_model: str | None = option(None, "Name of the model on the server (default: the first that it lists).")
    api_key_env: str | None = option(None, "Environment variable that holds the server's API key.")
    concurrency: PositiveInt = option(8, "Number of concurrent requests to the server.")
    request_timeout: PositiveFloat = option(
        60.0, "Seconds without an answer after which a request to the server fails."
    )
    retries: NonNegativeInt = option(5, "Number of times that a failed request to the server is repeated.")

    def check_endpoint(self) -> None:
        """Check that no option of the server is given without --endpoint."""
        for each in fields(EndpointOptions):
            if self.endpoint is None and getattr(self, each.name) != each.default:
                raise UserError(f"--{each.name} requires --endpoint URL")

    def server(self) -> "EmbeddingServer | None":
        """Connect to the server of --endpoint; None without that option.

        Raises:
            UserError: The URL or the key is invalid, the server does not answer, or an option has no effect.
        """
        self.check_endpoint()
        if self.endpoint is None:
            return None
        from revela_hub.data.http_client import api_key
        from revela_hub.retrieval.endpoint import EmbeddingServer

        return EmbeddingServer(
            self.endpoint,
            self.endpoint_type,
            self.endpoint_model,
            api_key=api_key(self.api_key_env),
            concurrency=self.concurrency,
            timeout=self.request_timeout,
            retries=self.retries,
        )
