"""`revela-hub synthesize` against an OpenAI-compatible server on this machine's loopback interface."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from loopback_server import Answer, LoopbackServer, Sent

from revela_hub.cli.main import main
from revela_hub.data.synthesis.backends import Request, Sampling
from revela_hub.data.synthesis.endpoint import Endpoint
from revela_hub.data.synthesis.prompts import FORMS
from revela_hub.errors import UserError

KEY = "sk-a-secret-key"
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
    form = next(form for form, prompts in FORMS.items() if f'"{prompts.parts[0].key}"' in prompt)
    return json.dumps({part.key: " ".join(random.choices(WORDS, k=20)) for part in FORMS[form].parts})


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
    return ["synthesize", "--endpoint", server.url, "--model", "m", "--output_dir", str(output), *options]


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
        body["model"] == "m" and body["temperature"] == 0.7 and body["top_p"] == 1.0 and isinstance(body["seed"], int)
    )
    assert body["max_completion_tokens"] == 99 and body["reasoning_effort"] == "low" and "max_tokens" not in body
    assert {sent.headers["authorization"] for sent in server.posts} == {f"Bearer {KEY}"}
    assert not any(KEY in file.read_text() for file in (tmp_path / "out").iterdir())
    # again: there is nothing to do; and with a higher count, three more; with other settings, none
    again = command(server, tmp_path / "out", *options[2:], "--extra_body", extra)
    assert main([*again, "--count", "12"]) == 0
    assert len(server.bodies) == 15 and "12 from earlier runs" in capsys.readouterr().out
    assert main([*again, "--count", "15"]) == 0
    assert len(pairs(tmp_path / "out")) == 15
    assert main([*again, "--count", "20", "--model", "other"]) == 2
    assert "was created with --model 'm', not 'other'" in capsys.readouterr().err and len(server.bodies) == 21
    assert main([*again, "--count", "3", "--model", "other", "--overwrite"]) == 0
    assert [row["model"] for row in pairs(tmp_path / "out")] == ["other"] * 3


def test_the_recipe_is_a_configuration_of_the_command(
    server: Server, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = repository / "examples" / "nvembed" / "synthesize.yaml"
    options = ["--config", str(recipe), "--endpoint", server.url, "--count", "3", "--output_dir", str(tmp_path)]
    assert main(["synthesize", *options]) == 0
    assert server.bodies[0]["model"] == "mistralai/Mixtral-8x22B-Instruct-v0.1" and len(pairs(tmp_path)) == 3


def test_bad_replies_are_counted_by_reason(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        if "JSON list" in body["messages"][0]["content"] or number % 2:
            return good(body, number)
        return completion("I can't help with that.") if number % 4 else completion('{"input": "wh', "length")

    server.respond = respond
    assert main(command(server, tmp_path, "--count", "6", "--forms", "short-short", "--concurrency", "1")) == 0
    assert "rejected: 3 cut off, 3 not JSON" in capsys.readouterr().out
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert reasons == ["not JSON", "cut off"] * 3


def test_evaluation_sets_are_kept_out(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(server, tmp_path / "a", "--count", "6")) == 0
    leaked = pairs(tmp_path / "a")[1]
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "queries.jsonl").write_text(json.dumps({"_id": "1", "text": leaked["anchor"].upper()}) + "\n")
    (tmp_path / "eval" / "corpus.jsonl").write_text(json.dumps({"_id": "1", "text": "Something else."}) + "\n")
    assert main(command(server, tmp_path / "b", "--count", "6", "--exclude", str(tmp_path / "eval"))) == 0
    captured = capsys.readouterr()
    assert "excluded: 2 texts of eval" in captured.err and "rejected: 1 overlapping eval" in captured.out
    assert leaked["anchor"] not in [row["anchor"] for row in pairs(tmp_path / "b")]
    assert len(pairs(tmp_path / "b")) == 6


def test_ctrl_c_stops_at_once_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    """Request 7 never comes back in time; those before and after it that have been answered are kept."""
    release = threading.Event()

    def respond(body: dict[str, Any], number: int) -> Answer:
        if number == 7:
            release.wait(60)
        return good(body, number)

    server.respond = respond
    options = command(server, tmp_path, "--count", "10", "--forms", "short-short", "--concurrency", "3")
    environment = os.environ | {"NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "revela_hub", *options],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # Processes in the background of a shell ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    # Meanwhile, up to two more requests are answered; fewer, if they came before request 7.
    seen, since = (0, 0), time.monotonic()
    while seen[0] < 7 or seen[1] != 1 or time.monotonic() < since + 0.5:
        now = (len(server.bodies), server.open)
        if now != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    took = time.monotonic() - started
    release.set()
    assert process.returncode == 130 and took < 10
    assert "run the same command again to resume" in err and "Traceback" not in err
    asked = len(server.bodies)
    kept = len(pairs(tmp_path))
    assert kept == asked - 2  # but for the list of tasks, and the reply that did not come
    server.respond = good
    assert main(options) == 0
    assert len(pairs(tmp_path)) == 10 and len(server.bodies) - asked == 10 - kept
    draws = [row["draw"] for row in pairs(tmp_path)]
    assert sorted(draws) == list(range(10))


def test_a_run_that_started_over_is_resumed_without_overwrite(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("revela_hub.data.synthesis.synthesis.synthesize", interrupted)
    assert main(command(server, tmp_path, "--overwrite")) == 130
    assert "run the same command again without --overwrite to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api_key_env", KEY], "--api_key_env: there is no environment variable of that name"),
        (["--extra_body", "{seed: 1}"], "--extra_body is not JSON"),
        (["--extra_body", "[1]"], "--extra_body must be a JSON object"),
        (["--count", "0"], "--count: must be at least 1"),
        (["--concurrency", "0"], "--concurrency: must be at least 1"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--api_key", KEY], "unknown option '--api_key': did you mean --api_key_env?"),
        ([f"--api_key={KEY}"], "unknown option '--api_key'"),
        (["--forms", "long-long"], "--forms must be distinct values of short-long"),
        (["--temperature", "-1"], "--temperature: must be at least 0"),
        (["--endpoint", "localhost:8000"], "localhost:8000 is not the URL of a server"),
        (
            ["--endpoint", f"http://me:{KEY}@127.0.0.1:1/v1"],
            "http://127.0.0.1:1/v1: remove user and password from the URL",
        ),
        (["--exclude", "nowhere/eval"], "no such file or folder: nowhere/eval"),
    ],
)
def test_options_that_do_not_work(
    server: Server, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = command(server, tmp_path / "out")
    given = given[:1] + given[3:] if "--endpoint" in options else given
    assert main([*given, *options]) == 2
    err = capsys.readouterr().err
    assert message in err and KEY not in err and err.count("\n") == 1
    assert not server.bodies and not (tmp_path / "out").exists()


def test_options_of_a_server_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synthesize", "--model", "m", "--api-key-env", "K", "--output_dir", str(tmp_path)]) == 2
    assert "--api_key_env requires --endpoint" in capsys.readouterr().err


def test_secrets_are_in_no_file_and_no_message(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a variable, in the URL's query, and among the fields of --extra-body; the server repeats them all."""
    for name in ("MY_KEY", "OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, f"{KEY}-{name}")
    given = ["synthesize", "--model", "m", "--api_key_env", "MY_KEY", "--output_dir", str(tmp_path), "--retries", "0"]
    given += ["--endpoint", f"{server.url}?key={KEY}-url", "--extra_body", json.dumps({"token": f"{KEY}-body"})]
    assert main([*given, "--count", "3"]) == 0
    assert (
        all(sent.path.endswith(f"?key={KEY}-url") for sent in server.posts)
        and server.bodies[0]["token"] == f"{KEY}-body"
    )
    server.respond = lambda body, number: (500, {}, {"error": f"{KEY}-MY_KEY {KEY}-url {KEY}-body"})
    assert main([*given, "--count", "6"]) == 2
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err and "HTTP 500 (*** *** ***)" in captured.err
    assert not any(KEY in file.read_text() for file in tmp_path.iterdir())
    headers = str([sent.headers for sent in server.posts])
    assert f"{KEY}-MY_KEY" in headers and f"{KEY}-O" not in headers


def test_without_the_package_a_hint(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main(command(server, tmp_path / "out", "--exclude", "nowhere/eval")) == 2
    err = capsys.readouterr().err
    assert "the package openai is not installed: pip install" in err and err.count("\n") == 1


# --- the endpoint


def test_examples_follow_a_schema_where_the_server_knows_it(server: Server, tmp_path: Path) -> None:
    assert main(command(server, tmp_path / "a", "--count", "2", "--forms", "long-short")) == 0
    formats = [body.get("response_format") for body in server.bodies]
    assert formats[0] is None  # the list of tasks
    schema = formats[1]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["input_text", "label", "misleading_label"]
    assert schema["additionalProperties"] is False and formats[1]["json_schema"]["strict"] is True

    def refuses(body: dict[str, Any], number: int) -> Answer:
        return (400, {}, {"error": "response_format?"}) if "response_format" in body else good(body, number)

    server.respond, asked = refuses, len(server.bodies)
    assert main(command(server, tmp_path / "b", "--count", "6", "--forms", "long-short", "--concurrency", "1")) == 0
    assert ["response_format" in body for body in server.bodies[asked:]] == [False, True] + [False] * 6
    assert len(pairs(tmp_path / "b")) == 6


def test_replies_come_in_order_and_several_are_under_way(server: Server) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        server.wait_for_open(4)
        time.sleep(0.03 if body["seed"] % 2 else 0.06)
        return completion(body["messages"][0]["content"])

    server.respond = respond
    assert ask(endpoint(server, concurrency=4), 12) == [f'Write "input" {number}' for number in range(12)]
    assert server.most_open == 4


def test_no_token_of_the_user_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    ask(endpoint(server))
    assert server.posts[0].headers["authorization"] == "Bearer EMPTY"
    headers = str([sent.headers for sent in server.posts])
    assert "hf_xx" not in headers and KEY not in headers


@pytest.mark.parametrize("status", [429, 500, 503, 0])
def test_what_fails_for_a_while_is_asked_again(server: Server, status: int) -> None:
    server.respond = lambda body, number: (status, {}, {"error": "busy"}) if number in (2, 3) else good(body, number)
    assert len(ask(endpoint(server, concurrency=1), 3)) == 3 and len(server.bodies) == 5
    assert server.bodies[1] == server.bodies[2] == server.bodies[3]


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_respected(server: Server, form: str) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        if number == 2:
            wait = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)  # 1 to 2 seconds
            return 429, {"Retry-After": wait}, {"error": {"message": "slow down"}}
        return good(body, number)

    server.respond = respond
    assert len(ask(endpoint(server, concurrency=1), 2)) == 2
    assert len(server.posts) == 3 and server.posts[2].time - server.posts[1].time > 0.9


def test_failures_end_after_as_many_tries_as_allowed(server: Server) -> None:
    server.respond = lambda body, number: (503, {}, {"error": {"message": f"no room for {KEY}"}})
    with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+/v1: HTTP 503 .*no room for \*\*\*.* \(3 times\)") as caught:
        ask(endpoint(server, retries=2, api_key=KEY))
    assert len(server.bodies) == 3 and KEY not in str(caught.value)
    server.respond = lambda body, number: (429, {"Retry-After": "86400"}, {"error": "quota"})
    with pytest.raises(UserError, match=r"HTTP 429 \(quota\); the server asks to wait \(Retry-After: 86400\)"):
        ask(endpoint(server))


def test_a_server_that_does_not_answer(server: Server) -> None:
    def respond(body: dict[str, Any], number: int) -> Answer:
        if number not in answered:
            server.closing.wait(60)
        return good(body, number)

    answered, server.respond = {3}, respond
    assert len(ask(endpoint(server, timeout=0.5, retries=2))) == 1 and len(server.bodies) == 3
    with pytest.raises(UserError, match=r"/v1 did not answer within 0\.5 seconds \(--timeout\) \(2 times\)"):
        ask(endpoint(server, timeout=0.5, retries=1))


def test_a_server_that_is_not_there(server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    started = time.monotonic()
    with pytest.raises(UserError, match=r"cannot reach http://127\.0\.0\.1:\d+/v1: .*refused") as caught:
        ask(Endpoint(f"{server.url}?key={KEY}", "m"))
    assert time.monotonic() - started < 3 and KEY not in str(caught.value)


def test_a_server_that_goes_away(server: Server) -> None:
    """After the first answer a lost connection may be a restart: it is tried again. What came is handed over."""
    server.respond = lambda body, number: good(body, number) if number == 1 else (0, {}, None)
    client = endpoint(server, retries=2, concurrency=1)
    came = client.replies([Request('Write "input"', number) for number in range(3)])
    assert next(came)[1].text
    with pytest.raises(UserError, match=r"cannot reach .* \(3 times\); run again without --overwrite to resume"):
        next(came)
    assert len(server.bodies) == 4


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (
            401,
            {"error": {"message": f"Incorrect API key: {KEY}"}},
            "HTTP 401 .*the API key was rejected: check its value",
        ),
        (403, {"error": "no"}, "HTTP 403 .*the API key was rejected"),
        (404, {"error": {"message": "The model `m` does not exist."}}, "HTTP 404 .*does not exist.*--model m"),
        (404, b"<html>nothing here</html>", r"HTTP 404; check --endpoint"),
        (400, {"error": {"message": "unknown field seed"}}, "HTTP 400 .*unknown field seed.*--extra_body"),
        (422, {"detail": [{"msg": "no such field"}]}, "HTTP 422 .*no such field"),
        (422, ["what", "is", "this"], "HTTP 422 .*--extra_body"),
        (200, {"error": {"message": "no credits left", "code": 402}}, "it answers .*no credits left"),
    ],
)
def test_what_cannot_work_fails_at_once(server: Server, status: int, answer: Any, message: str) -> None:
    server.respond = lambda body, number: (status, {}, answer)
    with pytest.raises(UserError, match=message) as caught:
        ask(endpoint(server, api_key=KEY))
    assert len(server.bodies) == 1
    assert KEY not in str(caught.value) and server.url in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"<html>Welcome</html>", b'{"choices": [{', {"choices": []}, {"error": "x"}, b"", [], {"choices": [{}]}]
)
def test_a_reply_that_is_none_is_one_bad_reply(server: Server, answer: Any) -> None:
    """A proxy's page while the server behind it restarts; a server of another kind gives nothing else."""
    server.respond = lambda body, number: (200, {}, answer) if number == 2 else good(body, number)
    first, second, third = ask(endpoint(server, concurrency=1), 3)
    assert second == "not a chat completion" and first.startswith("{") and third.startswith("{")

    server.respond = lambda body, number: (200, {}, answer)
    with pytest.raises(
        UserError, match=r"does not answer like OpenAI's chat completions API .*check --endpoint"
    ) as caught:
        ask(endpoint(server, api_key=KEY))
    assert KEY not in str(caught.value) and server.url in str(caught.value)


def test_without_a_key_a_refusal_says_how_to_give_one(server: Server) -> None:
    server.respond = lambda body, number: (401, {}, {"error": "who are you?"})
    with pytest.raises(UserError, match=r"is required: set an environment variable \(--api_key_env NAME\)"):
        ask(endpoint(server))


def test_a_prompt_that_the_server_refuses_is_one_bad_reply(server: Server) -> None:
    server.respond = lambda body, number: (400, {}, {"error": "policy"}) if number == 2 else good(body, number)
    first, second, third = ask(endpoint(server, concurrency=1), 3)
    assert second == "refused by the endpoint" and first.startswith("{") and third.startswith("{")


def test_replies_without_text(server: Server) -> None:
    server.respond = lambda body, number: completion(None)
    assert ask(endpoint(server)) == [""]


def test_the_url_may_be_of_the_server_or_of_its_api(server: Server) -> None:
    for url in (server.url, server.url.removesuffix("/v1"), f"{server.url}/chat/completions"):
        ask(endpoint(server, url=url))
    assert [sent.path for sent in server.posts] == ["/v1/chat/completions"] * 3


def test_the_key_is_in_no_log_and_no_representation(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = endpoint(server, url=f"{server.url}?key={KEY}", api_key=KEY, sampling=Sampling(max_new_tokens=7))
    ask(client)
    assert server.bodies[0]["max_tokens"] == 7
    assert KEY not in caplog.text and KEY not in repr(client)
