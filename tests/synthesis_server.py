"""An OpenAI-compatible server on this machine's loopback interface, whose model writes synthetic examples."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from loopback_server import Answer, LoopbackServer, Sent

from revela_hub.data.synthesis.prompts import FORMS

WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "lu", "mo", "ne", "ri") for b in "kmnprstvxz"]

Respond = Callable[[dict[str, Any], int], Answer]


def completion(text: str | None, finish_reason: str = "stop") -> Answer:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    return 200, {}, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def write(body: dict[str, Any]) -> str:
    """The reply of a good model; depends on prompt and seed alone."""
    prompt = body["messages"][0]["content"]
    random = Random(f"{prompt}{body.get('seed')}")
    if "JSON list" in prompt:
        return json.dumps([f"Find {' '.join(random.choices(WORDS, k=6))}." for _ in range(20)])
    form = next(form for form, prompts in FORMS.items() if f'"{prompts["parts"][0]["key"]}"' in prompt)
    return json.dumps({part["key"]: " ".join(random.choices(WORDS, k=20)) for part in FORMS[form]["parts"]})


def good(body: dict[str, Any], number: int) -> Answer:
    return completion(write(body))


class Server(LoopbackServer):
    """Answers with `respond(body, number of the request)`."""

    def __init__(self) -> None:
        self.respond: Respond = good
        super().__init__()
        self.url = f"{self.root}/v1"

    def on_post(self, sent: Sent, number: int) -> Answer:
        return self.respond(sent.body, number)

    @property
    def bodies(self) -> list[Any]:
        return [sent.body for sent in self.posts]
