"""All kinds of tokens and keys are found in all files, without false alarms."""

from pathlib import Path

import pytest

from revela_hub.hub_cards.verify.secrets import secret_faults

LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD" * 4
HEX = "0a1b2c3d4e5f6789" * 4

# Split in two, so that secret scanners do not report this file.
FOUND = {
    "a Hub token": ["hf" + f"_{LETTERS[:34]}", "api_org" + f"_{LETTERS[:34]}"],
    "an AWS key": ["AKIA" + "IOSFODNN7EXAMPLE", "A3TX" + "IOSFODNN7EXAMPLE", f'aws_secret_access_key = "{LETTERS[:40]}"'],
    "an OpenAI or Anthropic key": ["sk" + f"-{LETTERS[:20]}T3BlbkFJ{LETTERS[:20]}", "sk" + f"-ant-api03-{LETTERS[:90]}", "sk" + f"-{HEX[:32]}"],
    "a private key": [
        *(f"-----BEGIN {kind}PRIVATE KEY-----" for kind in ("", "RSA ", "DSA ", "EC ", "OPENSSH ", "ENCRYPTED ")),
        "-----BEGIN PGP PRIVATE KEY" + " BLOCK-----", "---- BEGIN SSH2 ENCRYPTED" + " PRIVATE KEY ----",
        "PuTTY-User-Key-File" + "-2: ssh-rsa",
    ],
    "a GitHub token": [*(f"gh{kind}" + f"_{LETTERS[:36]}" for kind in "pousr"), "github_pat" + f"_{LETTERS[:22]}_{LETTERS[:59]}"],
    "a GitLab token": [f"gl{kind}" + f"-{LETTERS[:25]}" for kind in ("pat", "dt", "ft", "soat", "rt", "cbt", "imt", "ptt", "oas")],
    "a Google key": ["AIza" + LETTERS[:35], "ya29" + f".{LETTERS[:60]}"],
    "a Slack token": ["xoxb" + f"-123456789012-{LETTERS[:24]}", "https://hooks.slack.com/services" + "/T0AB12CD/B0EF34GH/x9Yz"],
    "a messenger's token": [f"123456789:AA{LETTERS[:33]}"],
    "a token of a package registry": ["npm" + f"_{LETTERS[:36]}", "pypi-AgE" + f"IcHlwaS5vcmc{LETTERS[:80]}"],
    "a payment or mail key": [
        "sk_live" + f"_{LETTERS[:24]}", "rk_live" + f"_{LETTERS[:24]}", "SG" + f".{LETTERS[:22]}.{LETTERS[:43]}",
        HEX[:32] + "-us12", "sq0csp" + f"-{LETTERS[:43]}",
    ],
    "a storage key": ["AccountKey=" + LETTERS[:86] + "=="],
    "a signed token": ["eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0." + LETTERS[:43]],
    "a password in an address": ["https://jane" + ":hunter2pass@proxy.org/simple", f"https://{LETTERS[:36]}" + "@hub.example.org/x.git"],
    "a token of a web service": [
        "dop_v1" + f"_{HEX}", "hvs" + f".{LETTERS[:40]}", "glsa" + f"_{LETTERS[:32]}_{HEX[:8]}", "ATATT3xFf" + f"GF0{LETTERS[:90]}",
    ],
    "a login": ["machine huggingface.co login jane " + "password hunter2longpw", "curl -u jane:" + "hunter2pass https://x.org"],
    "a key or password": ["//registry.example.org/:_authToken=" + "1f2e3d4c-aaaa-4bbb-8ccc-0123456789ab"],
}  # fmt: skip
CASES = [(kind, secret) for kind, secrets in FOUND.items() for secret in secrets]


def faults(folder: Path, name: str, content: bytes) -> list[str]:
    (folder / name).write_bytes(content)
    return list(secret_faults(folder, [name]))


@pytest.mark.parametrize(("kind", "secret"), CASES, ids=[f"{kind}, {secret[:12]}" for kind, secret in CASES])
def test_every_kind_is_found_in_every_file(kind: str, secret: str, tmp_path: Path) -> None:
    for content in (
        f"# A model\nwith {secret}\n".encode(),
        f"# A model\n{secret}\n".encode("utf-16"),
        f'{{\n"note": "its first line\\n{secret}\\nits last"}}'.encode(),  # in JSON, n precedes it
        b"\x89PNG\n\xff\xfe" + secret.encode() + b"\xff",
    ):
        assert any(
            f"README.md:2 contains what looks like {kind}" in fault for fault in faults(tmp_path, "README.md", content)
        )
    head = b"\x40\0\0\0\0\0\0\0" + f'{{"__metadata__": {{"by": "{secret}"}}}}'.encode()
    assert faults(tmp_path, "model.safetensors", head)


@pytest.mark.parametrize(
    "text",
    [
        "hf_model and hf_token are names, HF_TOKEN=$HF_TOKEN a variable, hf_xxx a placeholder",
        "commit 0a1b2c3d4e5f67890a1b2c3d4e5f67890a1b2c3d, sha256 " + HEX,
        "task-AbstractiveSummarization-2024-base, disk-Usage1-of-the-tokenizer-files",
        "password: ask your administrator; api_key = os.environ['OPENAI_API_KEY']",
        "git@hub.example.org:org/model.git, https://example.org:8080/a@b, s3://bucket/a",
        "```\n-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n-----END PUBLIC KEY-----\n```",
        '{"eos_token": "<|endoftext|>", "pad_token_id": 151643, "token_type_ids": [0, 1]}',
        "clone https://user:password@hub.example.org/m, curl -u user:password https://x.org, machine learning login",
        "1234567890: AABBCC is a row of the table, 12:34:56 a time, data:image/png;base64,iVBORw0KGgoAAAANSUhEUg==",
    ],
)
def test_similar_texts_are_not_reported(text: str, tmp_path: Path) -> None:
    assert faults(tmp_path, "README.md", text.encode()) == []


@pytest.mark.parametrize(
    "path",
    [
        "/net/home/jane/x",
        "/homes/jane/x",
        "C:\\Users\\jane\\x",
        "C:\\Documents and Settings\\jane",
        "smb://nas/home/jane/x",
    ],
)
def test_home_folders_are_found(path: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "README.md", f"# M\ntrained from {path}\n".encode())
    assert fault.startswith("README.md:2 contains a home folder, ")
