"""A Hugging Face hub of one process: as much of its HTTP API as `huggingface_hub` uses to fetch a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from diskprefix.runtime.fetch import hub_library

_LARGE = (".safetensors", ".gguf", ".bin")
"""Ends of the names of files that the hub keeps elsewhere: their tags are SHA-256, and they are redirected."""
MOST_BYTES = 64 << 20


class FakeHub:
    """Serves the folders in `repos` ("org/name" → folder) at `url`; `gated`, `private`, `broken` repos answer 403, 401
    and 500.

    As a hostile mirror does, `tags`, `commits` and `names` replace those of all files, by where they are said
    (`header`, `info`, `listing`), `listing` changes what is said of all repositories, `is_missing` answers 404 for
    files, and `is_damaged` sends other bytes of large ones. The first `num_honest` requests are answered without these
    lies, and request number `refused` (from 1) with a 403. Of what `endless` names, the answer has no end and no
    length: a "file" (a large one), a "small" one, the "listing", or a "redirect"; after `MOST_BYTES` it ends
    nevertheless.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # Another host for the library, which then sends it no token.
        self.other_url = url.replace("127.0.0.1", "localhost")
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.broken: set[str] = set()
        self.sent: list[str] = []
        self.tags: dict[str, str] = {}
        self.commits: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.listing: Any = {}
        self.is_missing = self.is_damaged = False
        self.num_honest = self.refused = self.num_requests = self.num_endless_bytes = 0
        self.endless = ""
        self.tags_of: dict[str, str] = {}
        """Tags that are announced for small files, by name."""
        self.later_sizes: dict[str, int | None] = {}
        """Sizes that are announced for small files from the second time on; None: never one."""
        self.num_heads = 0

    def commit_of(self, repo: str) -> str:
        names = sorted(str(path.relative_to(self.repos[repo])) for path in self.repos[repo].rglob("*"))
        return hashlib.sha1("\n".join([repo, *names]).encode()).hexdigest()

    def lie(self, lies: dict[str, str], where: str) -> str | None:
        return lies.get(where) if self.num_requests > self.num_honest else None

    def fetched(self) -> list[str]:
        return sorted({path.rpartition("/")[2] for path in self.sent if "/resolve/" in path or path[:9] == "elsewhere"})


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        # The library asks now and then what programs it knows.
        self.hub.num_requests += path != "api/agent-harnesses"
        if self.command == "GET":
            self.hub.sent.append(path)
        parts = path.split("/")
        if parts[0] == "elsewhere":
            self._file("/".join(parts[1:3]), "/".join(parts[3:]))
            return
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if self.hub.num_requests == self.hub.refused:
            self._send(403, b"{}")
        elif repo in self.hub.broken:
            self._send(500, b"{}")
        elif repo in self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo in self.hub.private:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repo not in self.hub.repos:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api" and self.hub.endless == "listing":
            self._send_endless(200, {"Content-Type": "application/json"})
        elif parts[0] == "api":
            self._send(200, json.dumps(self._api(repo, parts[4:])).encode())
        else:
            self._resolve(repo, "/".join(parts[4:]))

    do_HEAD = do_GET

    def _resolve(self, repo: str, name: str) -> None:
        file = self.hub.repos[repo] / name
        headers = {"X-Repo-Commit": self.hub.lie(self.hub.commits, "header") or self.hub.commit_of(repo)}
        if self.hub.is_missing or not file.is_file():
            self._send(404, b"{}", headers | {"X-Error-Code": "EntryNotFound"})
            return
        entry = _entry(file, name)
        if (tag := self.hub.lie(self.hub.tags, "header")) is not None:
            entry |= {"oid": tag, "lfs": {"oid": tag}}
        headers["ETag"] = f'"{entry["oid"]}"'
        if "lfs" not in entry:
            headers["ETag"] = f'"{self.hub.tags_of.get(name, entry["oid"])}"'
            if self.command == "HEAD" and name in self.hub.later_sizes:
                self._send_head(headers, entry["size"], self.hub.later_sizes[name])
            elif self.hub.endless == "small" and self.command == "GET":
                self._send_endless(200, headers)
            else:
                content = file.read_bytes()
                self._send(200, bytes(len(content)) if self.hub.is_damaged else content, headers)
            return
        headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
        headers["Location"] = f"{self.hub.other_url}/elsewhere/{repo}/{quote(name)}"
        self._send(302, b"", headers)

    def _file(self, repo: str, name: str) -> None:
        """Sends the bytes of a large file, or of a part of it, as another host does that knows nothing of the hub."""
        if self.hub.endless == "file" and self.command == "GET":
            self._send_endless(200, {})
            return
        if self.hub.endless == "redirect" and self.command == "GET":
            self._send_endless(302, {"Location": self.path})
            return
        content = (self.hub.repos[repo] / name).read_bytes()
        content = bytes(len(content)) if self.hub.is_damaged else content
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, content, {"Accept-Ranges": "bytes"})
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(content)
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
        self._send(206, content[int(first) : end], headers)

    def _api(self, repo: str, what: list[str]) -> Any:
        folder = self.hub.repos[repo]
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        entries = [_entry(path, name) for name, path in files.items()]
        where = "listing" if what and what[0] == "tree" else "info"
        if (name := self.hub.lie(self.hub.names, where)) is not None:
            entries = [one | {"path": name} for one in entries]
        if where == "listing":
            if (tag := self.hub.lie(self.hub.tags, where)) is not None:
                entries = [
                    one | {"lfs": one.get("lfs", {"size": 1, "pointerSize": 1}) | {"oid": tag}, "xetHash": "0" * 64}
                    for one in entries
                ]
            return entries
        siblings = [{"rfilename": one["path"], "size": one["size"], "blobId": one["oid"]} for one in entries]
        commit = self.hub.lie(self.hub.commits, where) or self.hub.commit_of(repo)
        said = {"id": repo, "sha": commit, "siblings": siblings}
        return said | self.hub.listing if isinstance(self.hub.listing, dict) else self.hub.listing

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_head(self, headers: dict[str, str], first: int, later: int | None) -> None:
        self.hub.num_heads += 1
        size = first if self.hub.num_heads == 1 and later is not None else later
        self.send_response(200)
        for name, value in (headers | ({} if size is None else {"Content-Length": str(size)})).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_endless(self, status: int, headers: dict[str, str]) -> None:
        """Sends bytes until the client closes the connection, or far too many were sent."""
        self.send_response(status)
        for name, value in (headers | {"Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while self.hub.num_endless_bytes < MOST_BYTES:
                self.wfile.write(bytes(1 << 16))
                self.hub.num_endless_bytes += 1 << 16

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests look at `sent`."""


def _entry(path: Path, name: str) -> dict[str, Any]:
    """A file as the hub lists it: by git's digest, and a large one by its own as well."""
    content = path.read_bytes()
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    found["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if name.endswith(_LARGE):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running hub that huggingface_hub talks to as to the official one, with `cache` as its cache folder; it is down
    after the block."""
    from huggingface_hub import constants

    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(hub_library, "OFFICIAL", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
