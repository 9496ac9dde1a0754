"""A daemon in a thread of the test's process, so that a test sees the values that pass through it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from diskprefix.app import load_engine
from diskprefix.server.http_app import create_app
from diskprefix.server.process.process import uvicorn_config
from diskprefix.settings import Settings
from diskprefix.store.writer import Writer

_DEADLINE_S, _POLL_S = 120.0, 0.01


@contextmanager
def running(settings: Settings) -> Iterator[Client]:
    """Runs the daemon in a thread, on a free port, and gives a client. Raises what kept the model from being loaded."""
    application = create_app(settings, load_engine)
    daemon = application.state.daemon
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn_config(application, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            wait_until(lambda: server.started and daemon.status != "loading")
            if daemon.failure is not None:
                raise daemon.failure
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=_DEADLINE_S, trust_env=False) as http:
                yield Client(http, daemon.serving.engine.cache.writer)
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the daemon did not get ready within {_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Client:
    http: httpx.Client
    writer: Writer

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        """Sends a conversation and returns the text of the streamed reply. By then all state is on disk."""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        response = self.http.post("/v1/chat/completions", json=body).raise_for_status()
        self.wait_until_written()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def wait_until_written(self) -> None:
        wait_until(lambda: self.writer.pending_bytes + self.writer.notes.waiting_bytes == 0)
