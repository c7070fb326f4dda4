"""Language models that write synthetic data: what one is to the generator, and models on this machine.

A backend takes an iterable of requests and gives each request with its reply, in order, taking a request only when there
is room for it. While a reply is due the iterable may give None: nothing to ask just now, come back after that reply. So the
caller decides by what came back so far how much more is asked for, and no request is made that is not needed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from revela_hub.errors import UserError, first_line
from revela_hub.pickles import pretrained
from revela_hub.precision import loading_dtype


@dataclass(frozen=True)
class Request:
    """One prompt, the seed to sample its reply with, and the JSON schema that the reply is to follow, if one is."""

    prompt: str
    seed: int
    schema: Mapping[str, Any] | None = None


RequestT = TypeVar("RequestT", bound=Request)


@dataclass(frozen=True)
class Reply:
    """What came back. `problem` says why there is no text to read (`cut off`, `refused by the endpoint`)."""

    text: str
    problem: str | None = None


class Backend(Protocol):
    """A language model that answers prompts. `recorded`, if it has that, is what its replies depend on."""

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Each request with its reply, in order; see the module for None."""


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled. The paper samples at temperature 1 and top_p 1, for variety."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise UserError("the temperature must be 0 or more, top_p in (0, 1], the number of new tokens 1 or more")

    def recorded(self) -> dict[str, Any]:
        """What replies depend on: not their greatest length, which only decides how many are cut off and rejected."""
        return {"temperature": self.temperature, "top_p": self.top_p}


def take(source: Iterator[RequestT | None], room: int) -> tuple[list[RequestT], bool]:
    """The next requests, as many as there is room for, and whether more may come."""
    taken: list[RequestT] = []
    while len(taken) < room:
        try:
            request = next(source)
        except StopIteration:
            return taken, False
        if request is None:
            break
        taken.append(request)
    return taken, True


class LocalModel:
    """A text generation model of transformers on this machine, in batches; with its chat template where it has one.

    The same seed gives the same replies on the same machine with the same batch size: a batch is sampled together.

    Args:
        name: Hub id or folder; its weights must be safetensors.
        sampling: Of the replies.
        batch_size: Prompts at once.
        device: `cpu`, `cuda`, ...; None: the fastest there is.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UserError: The model cannot be loaded, or an option is out of range.
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
        from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer, pipeline

        if batch_size < 1:
            raise UserError(f"--batch_size must be at least 1, not {batch_size}")
        try:
            model = pretrained(
                AutoModelForCausalLM, name, dtype=loading_dtype(device), trust_remote_code=trust_remote_code
            )
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            self._pipeline: Any = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
            raise UserError(f"cannot load the model {name}: {first_line(error)}") from error
        config = model.config
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            raise UserError(f"the model {name} is an encoder, which writes no text: it has to be a decoder")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._tokenizer = tokenizer
        self._name, self._batch_size = name, batch_size
        self._sampling = sampling or Sampling()
        self.recorded = self._sampling.recorded() | {"weights": _fingerprint(model)}

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Each request with its reply, in order, batch by batch.

        Raises:
            UserError: The device has too little memory for a batch, or the model's numbers overflow.
        """
        source = iter(requests)
        more = True
        while more:
            batch, more = take(source, self._batch_size)
            if batch:
                yield from zip(batch, self._answer(batch), strict=True)

    def _answer(self, batch: Sequence[Request]) -> list[Reply]:
        import torch
        from jinja2 import TemplateError
        from transformers import set_seed

        has_template = bool(self._tokenizer.chat_template)
        prompts: list[Any] = [
            [{"role": "user", "content": request.prompt}] if has_template else f"{request.prompt}\n\n"
            for request in batch
        ]
        sampling = self._sampling
        sampled = sampling.temperature > 0
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p} if sampled else {}
        set_seed(batch[0].seed)
        try:
            outputs = self._pipeline(
                prompts,
                batch_size=len(batch),
                do_sample=sampled,
                max_new_tokens=sampling.max_new_tokens,
                return_full_text=False,
                **settings,
            )
        except torch.OutOfMemoryError as error:
            raise UserError("the device has too little memory: lower --batch_size or --max_new_tokens") from error
        except (RuntimeError, ValueError, IndexError, TypeError, TemplateError) as error:
            # NaN among the logits; a prompt and reply longer than the model's positions; a broken chat template.
            raise UserError(f"the model {self._name} cannot write a reply: {first_line(error)}") from error
        return [Reply(output[0]["generated_text"]) for output in outputs]


def _fingerprint(model: Any) -> str:
    """A hash of eight values of each weight: the same on every device, another one after training."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().flatten()[-8:].float().cpu().numpy().tobytes())
    return digest.hexdigest()
