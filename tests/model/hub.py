"""A Hugging Face hub of one process: as much of its HTTP API as `snapshot_download` uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class FakeHub:
    """Serves the folders in `repos` ("org/name" → folder) at `url`; `gated` and `broken` repos answer 403 and 500."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.requested: list[str] = []

    def commit_of(self, repo: str) -> str:
        names = sorted(str(path.relative_to(self.repos[repo])) for path in self.repos[repo].rglob("*"))
        return hashlib.sha1("\n".join([repo, *names]).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requested.append(path)
        parts = path.split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo in self.hub.broken:
            self._send(500, b"{}")
        elif repo in self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo not in self.hub.repos:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "api":
            self._send(200, json.dumps(self._api(repo, parts[4:])).encode())
        else:
            content = (self.hub.repos[repo] / "/".join(parts[4:])).read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit_of(repo)})

    do_HEAD = do_GET

    def _api(self, repo: str, what: list[str]) -> Any:
        folder = self.hub.repos[repo]
        if what and what[0] == "tree":
            files = [path for path in folder.rglob("*") if path.is_file()]
            return [
                {
                    "type": "file",
                    "path": str(path.relative_to(folder)),
                    "size": path.stat().st_size,
                    "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                }
                for path in files
            ]
        return {"id": repo, "sha": self.hub.commit_of(repo), "siblings": []}

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests look at `requested`."""


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running hub that huggingface_hub talks to, with `cache` as its cache folder; it is down after the block."""
    from huggingface_hub import constants

    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
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
