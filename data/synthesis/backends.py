"""Language models that write synthetic data: the interface of a backend, and local models.

A backend takes an iterable of requests and yields each request with its reply, in order; it takes a request only when it has
capacity for it. While replies are pending, the iterable may yield None for "no request at the moment, ask again after the
next reply". So the caller can decide by the replies how many more requests it needs, and makes no superfluous ones.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from revela_hub.errors import UserError, first_line, loading
from revela_hub.pickles import pretrained
from revela_hub.precision import loading_dtype
from revela_hub.sdpa import varying_shapes


@dataclass(frozen=True)
class Request:
    """One prompt, the sampling seed, and optionally the JSON schema of the reply."""

    prompt: str
    seed: int
    schema: Mapping[str, Any] | None = None


RequestT = TypeVar("RequestT", bound=Request)


CUT_OFF = "cut off"
"""The problem of a reply that reached the maximum number of tokens; what is whole in it can be used."""


@dataclass(frozen=True)
class Reply:
    """A reply. `problem` is the reason why it is unusable (`cut off`, `refused by the endpoint`)."""

    text: str
    problem: str | None = None


class Backend(Protocol):
    """A language model that answers prompts. An optional attribute `recorded` lists the settings its replies depend on."""

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order; the module's docstring explains None."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. The paper uses temperature 1 and top_p 1, for diversity."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise UserError("temperature must be at least 0, top_p in (0, 1], max_new_tokens at least 1")

    def recorded(self) -> dict[str, Any]:
        """Return the settings that replies depend on; not max_new_tokens, which affects only how many are cut off."""
        return {"temperature": self.temperature, "top_p": self.top_p}


def take(source: Iterator[RequestT | None], room: int) -> tuple[list[RequestT], bool]:
    """Take the next requests, at most `room`; also return whether there may be more."""
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
    """A local text-generation model of transformers, run in batches, with its chat template if it has one.

    The same seed gives the same replies on the same machine with the same batch size, because a batch is sampled together.

    Args:
        name: Hub id or folder with weights in safetensors.
        sampling: Sampling settings.
        batch_size: Prompts per batch.
        device: `cpu`, `cuda`, ...; None: the fastest available.
        trust_remote_code: Whether to run the model's own Python code.
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
        place = os.path.expanduser(name)
        with loading(f"cannot load the model {name}", name):
            model = pretrained(
                AutoModelForCausalLM, place, dtype=loading_dtype(device), trust_remote_code=trust_remote_code
            )
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            self._pipeline: Any = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        config = model.config
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            raise UserError(f"the model {name} is an encoder, which cannot generate text: use a decoder")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._tokenizer = tokenizer
        self._name, self._batch_size = name, batch_size
        self._sampling = sampling or Sampling()
        self.recorded = self._sampling.recorded() | {"weights": _fingerprint(model)}

    def replies(self, requests: Iterable[RequestT | None]) -> Iterator[tuple[RequestT, Reply]]:
        """Yield each request with its reply, in order, batch by batch."""
        source = iter(requests)
        more = True
        while more:
            batch, more = take(source, self._batch_size)
            if batch:
                yield from zip(batch, self._answer(batch), strict=True)

    @varying_shapes()
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
            # NaN logits; a prompt with its reply exceeds the model's positions; a broken chat template.
            raise UserError(f"the model {self._name} failed to generate a reply: {first_line(error)}") from error
        texts = [output[0]["generated_text"] for output in outputs]
        lengths = [len(tokens) for tokens in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]
        # A reply that the model ends is shorter, because the token that ends it is not text.
        cut = [CUT_OFF if length >= sampling.max_new_tokens else None for length in lengths]
        return list(map(Reply, texts, cut))


def _fingerprint(model: Any) -> str:
    """Return a hash of eight values of each weight: equal on all devices, different after training."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().flatten()[-8:].float().cpu().numpy().tobytes())
    return digest.hexdigest()
