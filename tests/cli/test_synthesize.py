"""`revela-hub synthesize` against an OpenAI-compatible server on this machine's loopback interface."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_server import Answer
from synthesis_server import Server, completion

from revela_hub.cli.main import main
from revela_hub.data.synthesis.backends import Endpoint, Request

pytestmark = pytest.mark.slow  # a server

KEY = "sk-a-secret-key"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    server = Server()
    yield server
    server.close()


def endpoint(server: Server, **options: Any) -> Endpoint:
    return Endpoint(**{"url": server.url, "model": "m"} | options)


def ask(endpoint: Endpoint, count: int = 1) -> list[str]:
    requests = [Request(f'Write "input" {number}', number) for number in range(count)]
    answered = list(endpoint.replies(requests))
    assert [request for request, _ in answered] == requests
    return [reply.problem or reply.text for _, reply in answered]


def pairs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def command(server: Server, output: Path, *options: str) -> list[str]:
    return ["synthesize", "--endpoint", server.url, "--model", "vendor/m@1", "--output_dir", str(output), *options]


# --- the command


def test_the_command_makes_what_was_asked_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    options = ["--count", "12", "--api_key_env", "MY_KEY", "--temperature", "0.7", "--max_new_tokens", "99"]
    extra = json.dumps({"max_tokens": None, "max_completion_tokens": 99, "reasoning_effort": "low"})
    assert main(command(server, tmp_path / "out", *options, "--extra-body", extra)) == 0
    out = capsys.readouterr().out
    assert "12 pairs (4 short-long, 4 long-short, 4 short-short) of 6 tasks" in out
    assert str(tmp_path / "out" / "pairs.jsonl") in out
    assert len(pairs(tmp_path / "out")) == 12
    assert {sent.path for sent in server.posts} == {"/v1/chat/completions"} and len(server.bodies) == 15
    body = server.bodies[-1]
    assert (
        body["model"] == "vendor/m@1"
        and body["temperature"] == 0.7
        and body["top_p"] == 1.0
        and isinstance(body["seed"], int)
    )
    assert body["max_completion_tokens"] == 99 and body["reasoning_effort"] == "low" and "max_tokens" not in body
    assert {sent.headers["authorization"] for sent in server.posts} == {f"Bearer {KEY}"}
    assert not any(KEY in file.read_text() for file in (tmp_path / "out").iterdir())
    # again: there is nothing to do; and with a higher count, three more; with other settings, none
    again = command(server, tmp_path / "out", *options[2:], "--extra_body", extra)
    assert main([*again, "--count", "12"]) == 0
    assert len(server.bodies) == 15
    assert main([*again, "--count", "15"]) == 0
    assert len(pairs(tmp_path / "out")) == 15
    assert main([*again, "--count", "20", "--model", "other"]) == 2
    assert "has examples of vendor/m@1" in capsys.readouterr().err and len(server.bodies) == 21
    assert main([*again, "--count", "3", "--model", "other", "--overwrite"]) == 0
    assert [row["model"] for row in pairs(tmp_path / "out")] == ["other"] * 3


def test_keys_are_in_no_file_and_no_message(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    given = command(server, tmp_path, "--api_key_env", "MY_KEY", "--retries", "0")
    assert main([*given, "--count", "3"]) == 0
    server.respond = lambda body, number: (500, {}, {"error": {"message": KEY}})
    assert main([*given, "--count", "6"]) == 2
    assert main([*command(server, tmp_path), "--api_key_env", KEY]) == 2  # the key instead of its name
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
    assert not any(KEY in file.read_text() for file in tmp_path.iterdir())
    assert KEY not in repr(endpoint(server, api_key=KEY))


# --- the endpoint


def test_replies_come_in_order_and_several_are_under_way(server: Server) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        if number > 1:  # the first is asked alone: it shows whether the server works
            server.wait_for_open(4)
        time.sleep(0.03 if body["seed"] % 2 else 0.06)
        return completion(body["messages"][0]["content"])

    server.respond = respond
    assert ask(endpoint(server, concurrency=4), 12) == [f'Write "input" {number}' for number in range(12)]
    assert server.most_open == 4


def test_a_prompt_that_the_server_refuses_and_a_reply_without_text(server: Server) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        return (400, {}, {"error": "policy"}) if number == 2 else completion("yes" if number == 1 else None)

    server.respond = respond
    assert ask(endpoint(server, concurrency=1), 3) == ["yes", "refused by the endpoint", ""]
