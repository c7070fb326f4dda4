"""Language models that write synthetic data: a local model of transformers, or a server with OpenAI's API.

A backend takes an iterable of requests, from which it takes no more than it can work on, and yields each request with its reply, in order.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

from revela_hub.data.openai_server import concurrently, openai_client, server_errors
from revela_hub.errors import loading
from revela_hub.loading import loading_dtype, pretrained, varying_shapes


@dataclass(frozen=True)
class Request:
    """One prompt and the sampling seed."""

    prompt: str
    seed: int


RequestT = TypeVar("RequestT", bound=Request)


CUT_OFF = "cut off"
"""The problem of a reply that reached the maximum number of tokens; what is whole in it can be used."""


@dataclass(frozen=True)
class Reply:
    """A reply. `problem` is the reason why it is unusable (`cut off`, `refused by the endpoint`)."""

    text: str
    problem: str | None = None


class Backend(Protocol):
    """A language model that answers prompts."""

    def replies(self, requests: Iterable[RequestT]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. The paper uses temperature 1 and top_p 1, for diversity."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048


class LocalModel:
    """A local text-generation model of transformers, run in batches, with its chat template if it has one.

    The same seed gives the same replies on the same machine with the same batch size, because a batch is sampled together.

    `name` is a Hub id or folder; `device` is `cpu`, `cuda`, ..., or None for the fastest one.
    """

    def __init__(
        self,
        name: str,
        sampling: Sampling | None = None,
        *,
        batch_size: int = 8,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

        place = os.path.expanduser(name)
        with loading(f"cannot load the model {name}", name):
            model = pretrained(
                AutoModelForCausalLM, place, dtype=loading_dtype(device), trust_remote_code=trust_remote_code
            )
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            self._pipeline: Any = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._tokenizer, self._batch_size, self._sampling = tokenizer, batch_size, sampling or Sampling()

    def replies(self, requests: Iterable[RequestT]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order, batch by batch."""
        source = iter(requests)
        while batch := list(islice(source, self._batch_size)):
            yield from zip(batch, self._answer(batch), strict=True)

    @varying_shapes()
    def _answer(self, batch: Sequence[Request]) -> list[Reply]:
        from transformers import set_seed

        sampling = self._sampling
        prompts: list[Any] = [f"{request.prompt}\n\n" for request in batch]
        if self._tokenizer.chat_template:
            prompts = [[{"role": "user", "content": request.prompt}] for request in batch]
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": sampling.max_new_tokens}
        if sampling.temperature > 0:
            settings |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        set_seed(batch[0].seed)
        outputs = self._pipeline(prompts, batch_size=len(batch), return_full_text=False, **settings)
        texts = [output[0]["generated_text"] for output in outputs]
        lengths = [len(tokens) for tokens in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]
        # A reply that the model ends is shorter, because the token that ends it is not text.
        cut = [CUT_OFF if length >= sampling.max_new_tokens else None for length in lengths]
        return list(map(Reply, texts, cut))


@dataclass
class Endpoint:
    """A server with OpenAI's chat-completions API, accessed with the `openai` client, which repeats temporary failures.

    `extra_body` has more fields of the request, or replacements of ours; None removes a field.
    """

    url: str = field(repr=False)
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling: Sampling = field(default_factory=Sampling)
    concurrency: int = 8
    retries: int = 5
    extra_body: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Makes the client, which sends nothing yet."""
        self._client = openai_client(self.url, self.api_key, retries=self.retries)
        self._answered = False

    def replies(self, requests: Iterable[RequestT]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order, with up to `concurrency` concurrent requests."""
        with server_errors(self.url, self.api_key):
            yield from concurrently(self._ask, requests, self.concurrency)

    def _ask(self, request: Request) -> Reply:
        import openai

        body = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": request.seed,
            **self.extra_body,
        }
        try:
            completion = self._client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": request.prompt}],
                extra_body={name: value for name, value in body.items() if value is not None},
            )
        except openai.APIStatusError as error:
            if not self._answered or error.status_code not in (400, 413, 422):
                raise
            return Reply("", "refused by the endpoint")  # only this prompt: too long, or against the policy
        self._answered = True
        [choice] = completion.choices
        text, refusal = choice.message.content or "", choice.message.refusal
        cut = choice.finish_reason == "length"
        return Reply(text, CUT_OFF if cut else "refused by the endpoint" if refusal and not text else None)
