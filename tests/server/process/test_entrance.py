"""The requests that are answered before the application is there, and those that wait for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from diskprefix.server.process.process import Entrance


class Making:
    """An application that is made when `go` is set, behind an entrance that a server has started."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.go = threading.Event()
        self.seen: list[str] = []
        self._failure = failure
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.entrance = Entrance(self._make, on_failure=lambda: self.seen.append("failed"))
        transport = httpx.ASGITransport(app=self.entrance)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    def _make(self) -> FastAPI:
        assert self.go.wait(30)
        if self._failure is not None:
            raise self._failure
        app = FastAPI(lifespan=self._lifespan)
        app.get("/health")(lambda: {"status": "ok"})
        app.get("/other")(lambda: "answered")
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        self.seen.append("started")
        yield
        self.seen.append("ended")

    async def __aenter__(self) -> Making:
        sent = asyncio.Event()

        async def send(message: Any) -> None:
            self.seen.append(message["type"])
            sent.set()

        self._events.put_nowait({"type": "lifespan.startup"})
        self._living = asyncio.create_task(self.entrance({"type": "lifespan"}, self._events.get, send))
        await sent.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self._events.put_nowait({"type": "lifespan.shutdown"})
        await self._living


def run(test: Callable[[Making], Awaitable[None]], failure: Exception | None = None) -> Making:
    async def within() -> Making:
        async with Making(failure) as making:
            await test(making)
        return making

    return asyncio.run(within())


def test_health_is_answered_before_the_application_is_made_and_by_the_application_after() -> None:
    async def test(making: Making) -> None:
        early = await making.client.get("/health")
        assert (early.status_code, early.json()) == (
            503,
            {"status": "loading", "message": None, "model": None, "cache": None, "queue_depth": None, "running": None},
        )
        making.go.set()
        await making.entrance.app()
        assert (await making.client.get("/health")).json() == {"status": "ok"}

    run(test)


def test_other_requests_wait_for_the_application() -> None:
    async def test(making: Making) -> None:
        asked = asyncio.create_task(making.client.get("/other"))
        posted = asyncio.create_task(making.client.post("/health"))
        await making.client.get("/health")
        assert not asked.done()
        assert not posted.done()
        making.go.set()
        assert (await asked).json() == "answered"
        assert (await posted).status_code == 405

    run(test)


def test_a_request_that_gives_up_takes_nothing_from_the_others() -> None:
    async def test(making: Making) -> None:
        one, other = (asyncio.create_task(making.entrance.app()) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.wait([one])
        making.go.set()
        assert (await other).title == "FastAPI"

    run(test)


def test_the_application_starts_when_it_is_made_and_ends_with_the_server() -> None:
    async def test(making: Making) -> None:
        assert making.seen == ["lifespan.startup.complete"]
        making.go.set()
        await making.entrance.app()
        assert making.seen[1:] == ["started"]

    assert run(test).seen[1:] == ["started", "ended", "lifespan.shutdown.complete"]


def test_a_server_that_ends_before_the_application_is_made_waits_for_it() -> None:
    async def test(_making: Making) -> None:
        pass

    assert run(test).seen[1:] == ["started", "ended", "lifespan.shutdown.complete"]


def test_an_application_that_cannot_be_made_ends_the_server_with_the_reason() -> None:
    async def test(making: Making) -> None:
        making.go.set()
        with pytest.raises(ImportError, match="a broken installation"):
            await making.entrance.app()

    assert run(test, ImportError("a broken installation")).seen[1:] == ["failed", "lifespan.shutdown.complete"]


def test_what_listens_first_imports_neither_fastapi_nor_torch() -> None:
    slow = {"fastapi", "starlette", "pydantic", "torch", "transformers", "prometheus_client", "jinja2"}
    code = (
        "import diskprefix.cli.serve_command, diskprefix.server.process.process as process, sys\n"
        "from diskprefix.settings import Settings\n"
        "process.uvicorn_config(None, Settings()).load()\n"
        f"print(*sorted({slow!r} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
