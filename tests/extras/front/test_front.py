"""The front in this process, with workers that are only told things."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from diskprefix.errors import DiskPrefixError, InvalidRequest, ModelError
from diskprefix.extras.front.front import Front, read_named
from diskprefix.extras.front.listing import Listing
from diskprefix.extras.front.nursery import LOAD, UNLOAD
from diskprefix.extras.front.swaps import Place
from diskprefix.extras.front.workers import ModelWorker
from diskprefix.model.load.fit import ModelNeeds, TokenState
from diskprefix.settings import Settings

LIMIT = 1 << 30


@dataclass(frozen=True)
class Named:
    name: str
    settings: Settings = field(default_factory=Settings)
    aliases: tuple[str, ...] = ()
    pin: bool = False
    idle_unload_s: float | None = None


class Models:
    """A catalogue."""

    def __init__(self, *models: Named) -> None:
        self.known = models

    def models(self) -> tuple[Named, ...]:
        return self.known

    def find(self, name: str) -> Named:
        return next(one for one in self.known if one.name == name)

    def read_again(self) -> None:
        self.known = self.known[:-1]


@dataclass(eq=False)
class ToldWorker(ModelWorker):
    told: list[bytes | int] = field(default_factory=list)

    def tell(self, message: bytes) -> None:
        self.told.append(message)

    def kill(self, number: int) -> None:
        self.told.append(number)


class ToldWorkers:
    def __init__(self) -> None:
        self.all: dict[int, ToldWorker] = {}
        self.on_change: Callable[[ModelWorker], None]

    def attach(self) -> None: ...

    def start(self, _settings: Settings, place: Place) -> ToldWorker:
        number = len(self.all) + 1
        self.all[number] = worker = ToldWorker(number, None, place=place, path="/nowhere")  # type: ignore[arg-type]
        return worker

    def make_ready(self, worker: ToldWorker) -> None:
        worker.ready_at = 1.0
        self.on_change(worker)

    def end(self, worker: ToldWorker, code: int = 0) -> None:
        worker.code = code
        worker.ended.set()
        self.on_change(worker)


class Told:
    """A front, and what its workers were told. `ended`: how often it wanted to end."""

    def __init__(self, listing: Listing) -> None:
        self.workers, self.ended = ToldWorkers(), 0
        settings = Settings(memory_limit=LIMIT)
        self.front = Front(settings, listing, self.workers, None, self._end)  # type: ignore[arg-type]

    def _end(self) -> None:
        self.ended += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ToldWorkers]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait({})
        started = asyncio.Event()

        async def send(_message: Any) -> None:
            started.set()

        life = asyncio.create_task(self.front({"type": "lifespan"}, messages.get, send))
        await started.wait()
        yield self.workers
        messages.put_nowait({})
        await life

    def ask(self, model: str, path: str = "/v1/completions") -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self._ask({"model": model}, path))

    async def _ask(self, body: Any, path: str) -> tuple[int, Any]:
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.front(scope | {"headers": [(b"host", b"localhost")]}, receive, send)
        return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


def needs(_settings: Settings) -> ModelNeeds | None:
    return ModelNeeds(name="one", tensors=(), state=TokenState(per_token=1024, positions=1024))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_no_worker_is_started_once_the_daemon_stops() -> None:
    async def test() -> None:
        told = Told(Listing(Settings(), Models(Named("one")), needs))
        async with told.running() as workers:
            asked = told.ask("one")
            await until(lambda: workers.all)
            told.front.stop()
            assert UNLOAD in workers.all[1].told
            workers.end(workers.all[1])
            status, said = await asked
            assert (status, said["error"]["message"]) == (503, "the daemon is stopping")
            assert len(workers.all) == 1

    run(test())


@pytest.mark.parametrize("has_served", [False, True])
def test_an_only_model_that_cannot_be_loaded_ends_the_front_at_the_start_alone(has_served: bool) -> None:
    async def test() -> None:
        told = Told(Listing(Settings(), None))
        async with told.running() as workers:
            await until(lambda: workers.all)
            if has_served:
                workers.make_ready(workers.all[1])
                workers.end(workers.all[1], -9)
                await until(lambda: len(workers.all) == 2)
            workers.end(workers.all[len(workers.all)], 2)
            assert (told.ended, told.front.exit_code) == ((0, 0) if has_served else (1, 2))

    run(test())


def test_a_worker_that_was_loading_hears_of_new_keys_when_it_is_ready() -> None:
    async def test() -> None:
        told = Told(Listing(Settings(), None))
        async with told.running() as workers:
            await until(lambda: workers.all)
            told.front.read_again()
            assert signal.SIGHUP not in workers.all[1].told
            workers.make_ready(workers.all[1])
            assert workers.all[1].told == [LOAD, signal.SIGHUP]

    run(test())


def test_a_waiting_worker_that_is_not_needed_ends_at_once() -> None:
    async def test() -> None:
        told = Told(Listing(Settings(), Models(Named("one"))))
        async with told.running() as workers:
            asked = told.ask("one")
            await until(lambda: workers.all)
            workers.make_ready(workers.all[1])
            told.front._swaps.places[0].is_closed = True
            again = told.ask("one")
            await until(lambda: len(workers.all) == 2)
            told.front._swaps.limit_bytes = 1
            told.front._swaps.places[0].is_pinned = True
            again.cancel()
            await until(lambda: signal.SIGKILL in workers.all[2].told)
            assert workers.all[2].told[0] == UNLOAD
            asked.cancel()

    run(test())


def test_json_that_is_too_deep_is_a_400() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_named(b'{"x": ' + b"[" * 100_000)
    assert refused.value.code == "invalid_json"


def test_a_model_of_unknown_size_is_loaded_alone_and_known_once_it_is_there() -> None:
    answers: list[ModelNeeds | DiskPrefixError | None] = [None, ModelError("cannot read one"), needs(Settings())]

    def asked(_settings: Settings) -> ModelNeeds | None:
        answer = answers.pop(0)
        if isinstance(answer, DiskPrefixError):
            raise answer
        return answer

    async def test() -> None:
        one = Named("one")
        listing = Listing(Settings(), Models(one), asked)
        await listing.learn(one)
        assert listing.sized(one, one.settings, LIMIT)[0] == LIMIT
        await listing.learn(one)
        for _ in range(2):
            with pytest.raises(ModelError, match="cannot read one"):
                listing.sized(one, one.settings, LIMIT)
        for _ in range(2):
            await listing.learn(one)
            assert 0 < listing.sized(one, one.settings, LIMIT)[0] < LIMIT

    run(test())
