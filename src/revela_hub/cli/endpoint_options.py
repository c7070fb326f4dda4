"""The options of commands that can use a server as the encoder, and the connection that they describe."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from revela_hub.errors import UserError
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from revela_hub.retrieval.endpoint import EmbeddingServer


@dataclass(kw_only=True)
class EndpointOptions:
    """The server that computes the vectors of --model."""

    _argument_group_name = "server"
    basic_options: ClassVar[tuple[str, ...]] = ("endpoint",)

    endpoint: str | None = field(
        default=None,
        metadata={
            "help": "Server that computes the model's vectors, e.g. http://localhost:8080 (TEI, vLLM, infinity)."
        },
    )
    endpoint_type: Literal["auto", "tei", "openai"] = field(
        default="auto",
        metadata={"help": "API of the server: tei (/embed), openai (/v1/embeddings), or detect it (auto)."},
    )
    endpoint_model: str | None = field(
        default=None,
        metadata={"help": "Name of the model on the server (default: the first that it lists).", "metavar": "NAME"},
    )
    api_key_env: str | None = field(
        default=None, metadata={"help": "Environment variable that holds the server's API key."}
    )
    concurrency: PositiveInt = field(default=8, metadata={"help": "Number of concurrent requests to the server."})
    request_timeout: PositiveFloat = field(
        default=60.0, metadata={"help": "Seconds without an answer after which a request to the server fails."}
    )
    retries: NonNegativeInt = field(
        default=5, metadata={"help": "Number of times that a failed request to the server is repeated."}
    )

    def check_endpoint(self) -> None:
        """Check that no option of the server is given without --endpoint.

        Raises:
            UserError: An option has no effect.
        """
        for option in fields(EndpointOptions):
            if self.endpoint is None and getattr(self, option.name) != option.default:
                raise UserError(f"--{option.name} requires --endpoint URL")

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
