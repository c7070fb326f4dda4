"""A local Hub with the part of the HTTP interface that uploads and downloads use.

Repositories are in memory; the names of data sets begin with `datasets/`, those of Spaces with `spaces/`. A commit maps file names to contents; large files use the
LFS batch interface. `before_request` and `after_request` are called with "METHOD /path".
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITER, READER = "hf_" + "w" * 30, "hf_" + "r" * 30  # tokens of the user "org" with and without write access
LARGE = 10_000  # minimum size in bytes of LFS files; all safetensors use LFS, too


@dataclass
class Repository:
    """Commits by hash, and branches by name; a commit maps file names to contents."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, ref: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{ref}{len(self.commits)}{message}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        self.messages.append(message)
        return oid

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.refs.get(revision, revision))


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(".safetensors") or size >= LARGE


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class LoopbackHub(ThreadingHTTPServer):
    """A server as a context manager; HF_ENDPOINT must be its `endpoint`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.before_request: Callable[[str], None] = lambda request: None
        self.after_request: Callable[[str], None] = lambda request: None
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *args: object) -> None:
        """Ignore closed connections."""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Add a repository with these files in a branch or a commit; main is empty if it is another."""
        repository = self.repositories[name] = Repository()
        repository.commit("main", {}, "initial commit")
        repository.refs[revision] = repository.commit(revision, files, "files")


class Handler(BaseHTTPRequestHandler):
    """Routes by regular expression; the name in `do` is a method of this class."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits up to 40 ms for the acknowledgement of the headers
    server: LoopbackHub

    ROUTES = (
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/whoami-v2", "who"),
        ("POST", r"/api/repos/create", "create"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?P<path>/.*)?", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<revision>[^/]+)", "paths"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
        ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._route()

    do_POST = do_PUT = do_HEAD = do_GET

    def _route(self) -> None:
        request = f"{self.command} {urlsplit(self.path).path}"
        self.server.before_request(request)
        self._dispatch()
        self.server.after_request(request)

    def _dispatch(self) -> None:
        address = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(address.query).items()}
        self.server.requests.append(f"{self.command} {address.path}")
        kind = re.match(r"(/api)?/(datasets/|spaces/)", address.path)
        prefix = kind[2] if kind else ""
        path = ("/api/models/" if kind[1] else "/") + address.path[kind.end() :] if kind else address.path
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                found = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                if "repo" in found:
                    found["repo"] = f"{prefix}{found['repo']}"
                if name == "put":
                    return self.put(**found)
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                return getattr(self, name)(**found)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self._answer(404, {"error": f"no route for {self.command} {address.path}"})

    def _answer(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("Length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _may(self, namespace: str) -> bool:
        """Return whether the token can write to the namespace; if not, send the response."""
        namespace = namespace.rpartition("/")[2]
        if self._token() not in (WRITER, READER):
            self._answer(401, {"error": "Invalid username or password."})
        elif self._token() != WRITER or namespace != "org":
            self._answer(403, {"error": "Forbidden"}, X_Error_Message="You don't have the rights to create here")
        else:
            return True
        return False

    def _repository(self, repo: str) -> Repository | None:
        """Send the response of the Hub for a missing or inaccessible repository."""
        repository = self.server.repositories.get(repo)
        if self._token() not in ("", WRITER, READER):
            self._answer(
                401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials in Authorization header"
            )
        elif repository is None or (repository.private and self._token() != WRITER):
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            return repository
        return None

    # --- the interface

    def validate(self) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def who(self) -> None:
        if self._token() in (WRITER, READER):
            self._answer(200, {"type": "user", "name": "org", "auth": {}})
        else:
            self._answer(
                401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials in Authorization header"
            )

    def create(self) -> None:
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or 'org'}/{wanted['name']}"
        if not self._may(repo.rpartition("/")[0]):
            return
        name, prefix = repo, {"dataset": "datasets/", "space": "spaces/"}.get(wanted.get("type"), "")
        repo = f"{prefix}{repo}"
        if repo in self.server.repositories:
            url = f"{self.server.endpoint}/{repo}"
            self._answer(409, {"error": "You already created this model repo", "url": url})
            return
        repository = Repository(private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.server.repositories[repo] = repository
        self._answer(200, {"url": f"{self.server.endpoint}/{repo}", "id": "0", "name": name})

    def info(self, repo: str, revision: str = "main") -> None:
        if (repository := self._repository(repo)) is None:
            return
        files = repository.files(revision)
        if files is None:
            self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        sha = repository.refs.get(revision, revision)
        siblings = [{"rfilename": name} | self._metadata(content, name) for name, content in files.items()]
        self._answer(
            200,
            {
                "id": "/".join(repo.split("/")[-2:]),
                "modelId": repo,
                "sha": sha,
                "private": repository.private,
                "siblings": siblings,
                "tags": [],
            },
        )

    def _metadata(self, content: bytes, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"size": len(content), "blobId": blob_id(content)}
        if is_lfs(name, len(content)):
            digest = hashlib.sha256(content).hexdigest()
            found["lfs"] = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 130}
        return found

    def tree(self, repo: str, revision: str, path: str = "") -> None:
        if (repository := self._repository(repo)) is None:
            return
        files, folder = repository.files(revision) or {}, path.strip("/")
        inside = {name: content for name, content in files.items() if not folder or name.startswith(f"{folder}/")}
        if folder and not inside:
            self._answer(404, {}, X_Error_Code="EntryNotFound")
            return
        entries = {name: self._entry(name, content) for name, content in inside.items()}
        if self.query.get("recursive", "False") in ("False", "false"):
            deep = {name for name in inside if "/" in name.removeprefix(f"{folder}/")}
            folders = {str(PurePosixPath(folder, Path(name).relative_to(folder).parts[0])) for name in deep}
            entries = {name: entry for name, entry in entries.items() if name not in deep}
            entries |= {name: {"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders}
        self._answer(200, list(entries.values()))

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "oid": blob_id(content)} | self._metadata(content, name)

    def paths(self, repo: str, revision: str) -> None:
        if (repository := self._repository(repo)) is None:
            return
        files = repository.files(revision) or {}
        wanted = (
            parse_qs(self.body.decode()).get("paths", []) if self.body[:1] != b"{" else json.loads(self.body)["paths"]
        )
        self._answer(200, [self._entry(name, files[name]) for name in wanted if name in files])

    def preupload(self, repo: str, revision: str) -> None:
        if (repository := self._repository(repo)) is None or not self._may(repo.rpartition("/")[0]):
            return
        now, files = repository.files(revision) or {}, []
        for file in json.loads(self.body)["files"]:
            path, large = file["path"], is_lfs(file["path"], file["size"])
            answer = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in now:
                answer["oid"] = hashlib.sha256(now[path]).hexdigest() if large else blob_id(now[path])
            files.append(answer)
        self._answer(200, {"files": files})

    def batch(self, repo: str) -> None:
        objects = json.loads(self.body)["objects"]
        for item in objects:
            if item["oid"] not in self.server.large:
                item["actions"] = {"upload": {"href": f"{self.server.endpoint}/lfs/{item['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if hashlib.sha256(content).hexdigest() == oid:
            self.server.large[oid] = content
        self._answer(200, {})

    def commit(self, repo: str, revision: str) -> None:
        repository = self._repository(repo)
        if repository is None or not self._may(repo.rpartition("/")[0]):
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", repository.refs[revision]) != repository.refs[revision]:
            self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(repository.commits[repository.refs[revision]])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                del files[value["path"]]
        pull_request = "create_pr" in self.query
        ref = (
            f"refs/pr/{sum(name.startswith('refs/pr/') for name in repository.refs) + 1}" if pull_request else revision
        )
        oid = repository.commit(ref, files, header["summary"])
        url = f"{self.server.endpoint}/{repo}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        if pull_request:
            answer["pullRequestUrl"] = f"{url}/discussions/{ref.rpartition('/')[2]}"
        self._answer(200, answer)

    def branch(self, repo: str, revision: str) -> None:
        repository = self._repository(repo)
        if repository is None or not self._may(repo.rpartition("/")[0]):
            return
        if revision in repository.refs:
            self._answer(409, {"error": "Reference already exists"})
            return
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repository.refs[revision] = repository.refs.get(start, start)
        self._answer(200, {})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        if (repository := self._repository(repo)) is None:
            return
        files = repository.files(revision)
        if files is None:
            self._answer(404, {}, X_Error_Code="RevisionNotFound")
            return
        sha = repository.refs.get(revision, revision)
        if path not in files:
            self._answer(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        content = files[path]
        headers = {"X_Repo_Commit": sha, "ETag": f'"{blob_id(content)}"', "Accept_Ranges": "bytes"}
        if is_lfs(path, len(content)):
            headers |= {"X_Linked_Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Linked_Size": str(len(content))}
        if part := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            self._answer(206, content[int(part[1]) : int(part[2]) + 1], **headers)
            return
        self._answer(200, content, **headers)
