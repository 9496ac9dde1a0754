"""The router in this process, with workers that are only told things; and one request on its way to a worker."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.catalogue.catalogue import Catalogue, KnownModel
from diskprefix.daemon.ollama.ollama_models import keep_alive_seconds
from diskprefix.daemon.router import own_routes, passing, router
from diskprefix.daemon.router import workers as router_workers
from diskprefix.daemon.router.listing import Listing, merged_metrics
from diskprefix.daemon.router.passing import Incoming, NotTaken, WorkerGone, pass_on
from diskprefix.daemon.router.router import RouterApp
from diskprefix.daemon.router.router_messages import refusal
from diskprefix.daemon.router.swaps import Phase
from diskprefix.daemon.router.workers import ModelWorker, Workers
from diskprefix.daemon.server import limits
from diskprefix.daemon.server.keys import ApiKeys, OwnerToken
from diskprefix.daemon.server.limits import InFlight
from diskprefix.daemon.server.process.listener import listen
from diskprefix.daemon.server.process.process import ListeningServer, uvicorn_config
from diskprefix.daemon.server.process.router_line import LOAD, UNLOAD
from diskprefix.daemon.server.share import Share
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DiskPrefixError, InvalidRequest, ModelError, NotReady
from diskprefix.runtime.files.fit import ModelNeeds, TokenState
from diskprefix.values import SHARED
from tests.daemon.server.test_auth import write_keys
from tests.daemon.server.test_bad_requests import FRAMINGS, REFUSED, refusals_of
from tests.daemon.server.test_limits import unfinished_body

LIMIT = 1 << 30
P = ParamSpec("P")


def named(name: str, *, pin: bool = False) -> KnownModel:
    return KnownModel(name=name, settings=Settings(), source=name, path=None, origin="--model", pin=pin)


class Models(Catalogue):
    def __init__(self, *models: KnownModel) -> None:
        self.known = models
        self._settings = Settings()

    def models(self) -> tuple[KnownModel, ...]:
        return self.known

    def find(self, name: str) -> KnownModel:
        return next(one for one in self.known if one.name == name)

    def read_again(self) -> None:
        self.known = self.known[:-1]


@dataclass(eq=False, kw_only=True)
class ToldWorker(ModelWorker):
    told: list[bytes | int] = field(default_factory=list)

    def tell(self, message: bytes) -> None:
        self.told.append(message)

    def kill(self, number: int) -> None:
        self.told.append(number)


class ToldWorkers:
    path, address = "/nowhere", "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.all: list[ToldWorker] = []
        self.started: list[ToldWorker] = []
        self.on_change: Callable[[ModelWorker], None]

    def start(self, worker: ToldWorker, _settings: Settings) -> None:
        worker.path = self.path
        self.all.append(worker)
        self.started.append(worker)

    def make_ready(self, worker: ToldWorker) -> None:
        worker.ready_at = 1.0
        self.on_change(worker)

    def end(self, worker: ToldWorker, code: int = 0) -> None:
        worker.code = code
        self.all.remove(worker)
        worker.ended.set()
        self.on_change(worker)


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ModelWorker", ToldWorker)


TOKEN = OwnerToken("token", SHARED)


class Told:
    """A router, and what its workers were told. `ended`: how often it wanted to end."""

    def __init__(self, listing: Listing, access: ApiKeys | OwnerToken = TOKEN) -> None:
        self.workers, self.ended = ToldWorkers(), 0
        settings = Settings(memory_limit=LIMIT)
        self.router = RouterApp(settings, listing, self.workers, access, self._end)  # type: ignore[arg-type]

    def _end(self) -> None:
        self.ended += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ToldWorkers]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait({})
        started = asyncio.Event()

        async def send(_message: Any) -> None:
            started.set()

        life = asyncio.create_task(self.router({"type": "lifespan"}, messages.get, send))
        await started.wait()
        yield self.workers
        messages.put_nowait({})
        await life

    def ask(
        self,
        model: str,
        path: str = "/v1/completions",
        method: str = "POST",
        query: bytes = b"",
        key: str = TOKEN.text,
        **fields: Any,
    ) -> asyncio.Task[tuple[int, Any]]:
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + key.encode())]
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
        }
        # As if each key were sent by a user of its own.
        scope |= {"headers": headers, "client": ("::1", 1), "state": {"share": Share("user", str(ord(key[0])))}}
        return asyncio.create_task(self._ask({"model": model} | fields, scope))

    async def _ask(self, body: Any, scope: dict[str, Any]) -> tuple[int, Any]:
        sent: list[Any] = []
        messages = [chunk(json.dumps(body).encode())]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.router(scope, receive, send)
        said = b"".join(one.get("body", b"") for one in sent[1:])
        return (sent[0]["status"], json.loads(said)) if sent else (200, None)


def needs(_settings: Settings) -> ModelNeeds | None:
    return ModelNeeds(name="one", state=TokenState(per_token=1024, positions=1024))


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **options: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **options), 30))

    return run


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_worker_that_tells_of_a_prompt_that_hangs_gives_no_sign_of_life() -> None:
    worker = ModelWorker(model="one", needed_bytes=1, waits_since=0)
    worker.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with worker.channel, theirs:
        for now, message in ((5.0, b"WATCHDOG=1"), (9.0, b"STATUS=a prompt is rendered for 65 s")):
            theirs.send(message)
            assert worker.read(now)
        assert (worker.seen_at, worker.status) == (5.0, "a prompt is rendered for 65 s")


@in_a_loop
async def test_no_worker_is_started_once_the_daemon_stops() -> None:
    told = Told(Listing(Settings(), Models(named("one")), needs))
    async with told.running() as workers:
        asked = told.ask("one")
        await until(lambda: workers.started)
        told.router.stop()
        assert UNLOAD in workers.started[0].told
        workers.end(workers.started[0])
        status, said = await asked
        assert (status, said["error"]["message"]) == (503, "the daemon is stopping")
        assert len(workers.started) == 1


@pytest.mark.parametrize("has_served", [False, True])
@in_a_loop
async def test_an_only_model_that_cannot_be_loaded_ends_the_router_at_the_start_alone(has_served: bool) -> None:
    told = Told(Listing(Settings(), None))
    async with told.running() as workers:
        await until(lambda: workers.started)
        if has_served:
            workers.make_ready(workers.started[0])
            workers.end(workers.started[0], -9)
            await until(lambda: len(workers.started) == 2)
        workers.end(last := workers.started[-1], 2)
        assert (told.ended, told.router.exit_code) == ((0, 0) if has_served else (1, 2))
        if not has_served:
            status, said = await told.ask("any")
            assert (status, said["error"]["message"]) == (503, "the daemon is stopping")
            assert workers.started == [last]


@in_a_loop
async def test_a_worker_that_loads_hears_of_new_keys_when_it_is_sure_to_listen() -> None:
    told = Told(Listing(Settings(), None))
    async with told.running() as workers:
        await until(lambda: workers.started)
        told.router.read_again()
        assert workers.started[0].told == [LOAD]
        workers.make_ready(workers.started[0])
        workers.make_ready(workers.started[0])
        assert workers.started[0].told == [LOAD, signal.SIGHUP]


@in_a_loop
async def test_a_waiting_worker_that_is_not_needed_ends_at_once() -> None:
    told = Told(Listing(Settings(), Models(named("one"))))
    async with told.running() as workers:
        asked = told.ask("one")
        await until(lambda: workers.started)
        workers.make_ready(workers.started[0])
        told.router._swaps.slots[0].is_closed = True
        again = told.ask("one")
        await until(lambda: len(workers.started) == 2)
        told.router._swaps.limit_bytes = 1
        told.router._swaps.slots[0].is_pinned = True
        again.cancel()
        await until(lambda: signal.SIGKILL in workers.started[1].told)
        assert workers.started[1].told[0] == UNLOAD
        asked.cancel()


@in_a_loop
async def test_a_pinned_model_that_found_no_room_is_loaded_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_MIN_PAUSE_S", 0.01)

    told = Told(Listing(Settings(), Models(named("one", pin=True)), needs))
    async with told.running() as workers:
        await until(lambda: workers.started)
        told.router._swaps.slots[0].phase = Phase.WAITING
        told.router._swaps.limit_bytes = 1
        told.router._apply_decision()
        assert UNLOAD in workers.started[0].told
        workers.end(workers.started[0])
        told.router._swaps.limit_bytes = LIMIT
        await until(lambda: len(workers.started) == 2)
        assert workers.started[1].told == [LOAD]
        # By order it stays away.
        told.router._swaps.slots[0].phase = Phase.WAITING
        assert (await told.ask("one", "/models/one/unload"))[1]["status"] == "unloading"
        workers.end(workers.started[1])
        await asyncio.sleep(0.05)
        assert len(workers.started) == 2


@in_a_loop
async def test_the_router_gives_pages_their_token_and_loads_no_model_for_it(tmp_path: Path) -> None:
    key = "k" * 24
    keys = ApiKeys(write_keys(tmp_path / "keys", f"someone {key}"))
    cases = ((TOKEN, TOKEN.text, 200), (TOKEN, "of-a-tenant", 401), (keys, key, 200), (keys, "token", 401))
    for listing in (Listing(Settings(), Models(named("one"))), Listing(Settings(), None)):
        for access, sent, status in cases:
            told = Told(listing, access)
            found, answer = await told.ask("", "/page-token", key=sent)
            assert found == status
            if status == 200:
                assert access.caller(f"Bearer {answer['token']}") == access.caller(f"Bearer {sent}")
            assert not told.workers.started


@pytest.mark.parametrize(("others", "bytes_per_s"), [(0, 64 << 20), (1, 8 << 20)], ids=["alone", "beside others"])
@in_a_loop
async def test_large_bodies_are_read_slowly_while_a_worker_answers_others(
    others: int, bytes_per_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, pauses, sleep = list[Incoming](), list[float](), asyncio.sleep

    async def passes(_path: str, _scope: Any, incoming: Incoming, _send: Any) -> int:
        passed.append(incoming)
        await asyncio.Event().wait()
        return 200

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(passing, "pass_on", passes)
    told = Told(Listing(Settings(), Models(named("one"))))
    async with told.running():
        asked = [told.ask("one") for _ in range(others)]
        await until(lambda: len(passed) == others)
        with monkeypatch.context() as changed:
            changed.setattr(asyncio, "sleep", pause)
            asked.append(told.ask("one", prompt="x" * (num_bytes := 2 * limits.LARGE_BYTES)))
            while len(passed) == others:
                await sleep(0.001)
        assert pauses == [pytest.approx(num_bytes / bytes_per_s, rel=0.05)]
        for task in asked:
            task.cancel()


@in_a_loop
async def test_a_request_counts_for_its_key_until_its_end_and_a_look_neither_uses_nor_keeps_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, other = "a" * 24, "o" * 24
    keys = ApiKeys(write_keys(tmp_path / "keys", f"admin {admin}", f"other {other}"))
    told = Told(Listing(Settings(), Models(named("one"))), access=keys)
    in_flight, is_passed = told.router._in_flight, asyncio.Event()
    passed: list[Incoming] = []

    async def passes(_path: str, _scope: Any, incoming: Incoming, _send: Any) -> int:
        passed.append(incoming)
        await is_passed.wait()
        return 200

    monkeypatch.setattr(passing, "pass_on", passes)
    async with told.running():
        tasks = [told.ask("one", key=key) for key in (admin, other)]
        await until(lambda: len(passed) == 2)
        assert in_flight.num == 2
        assert told.router._swaps.slots[0].shares == {Share("key", "admin")}, "for turns"
        tasks[1].cancel()
        await until(lambda: in_flight.num == 1)
        slot = told.router._swaps.slots[0]
        looked = told.ask("one", "/props", "GET", b"model=one", key=admin)
        await until(lambda: len(passed) == 3)
        slot.used_at = 5.0
        looked_up = asyncio.gather(*tasks, looked, return_exceptions=True)
        tasks[0].cancel()
        await until(lambda: slot.num_active == 0)
        used_at = slot.used_at
        slot.used_at = used_at + 1
        is_passed.set()
        await looked_up
        assert (slot.used_at, slot.num_active) == (used_at + 1, 0)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(1.5, 1.5), ("0", 0.0), ("5m", 300.0), ("5m0s", 300.0), ("1h30m", 5400.0), (-1, inf), ("-1m", inf), ("nan", inf)],
)
def test_keep_alive_is_a_number_or_a_duration_as_ollamas_clients_in_go_write_it(
    said: str | float, seconds: float
) -> None:
    assert keep_alive_seconds(said) == seconds


@pytest.mark.parametrize("said", ["", "-", "--1", "5mm", "5m x", "1.2.3s"])
def test_what_is_no_duration_is_refused(said: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a duration"):
        keep_alive_seconds(said)


@pytest.mark.parametrize("has_keys", [False, True])
@in_a_loop
async def test_a_key_unloads_with_keep_alive_what_it_alone_uses_and_the_admin_any_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    admin, alice, bob = "a" * 24 if has_keys else TOKEN.text, "l" * 24, "b" * 24
    lines = (f"admin {admin}", f"alice {alice}", f"bob {bob}")
    keys = ApiKeys(write_keys(tmp_path / "keys", *lines)) if has_keys else TOKEN

    async def passes(*_: Any) -> int:
        return 200

    monkeypatch.setattr(passing, "pass_on", passes)
    told = Told(Listing(Settings(), Models(named("one")), needs), access=keys)
    async with told.running() as workers:
        await told.ask("one", key=alice)
        workers.make_ready(workers.started[0])
        await told.ask("one", key=bob)
        await told.ask("one", key=alice, keep_alive=0)
        assert UNLOAD not in workers.started[0].told
        await told.ask("one", key=admin, keep_alive=0)
        assert UNLOAD in workers.started[0].told


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_one_model", [False, True], ids=["several", "one"])
@in_a_loop
async def test_bodies_that_wait_for_a_worker_have_a_bound_in_bytes_and_its_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chunked: bool, is_one_model: bool
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 64 * 1024)
    monkeypatch.setattr(passing, "LARGE_BYTES", 40 * 1024 if not is_one_model else 1 << 20)
    monkeypatch.setattr(router, "_TRIM_S", 0.0)
    trimmed = asyncio.Event()
    monkeypatch.setattr(router, "trim_heap", trimmed.set)
    alice, bob = "l" * 24, "b" * 24
    keys = ApiKeys(write_keys(tmp_path / "keys", f"alice {alice}", f"bob {bob}"))
    told = Told(Listing(Settings(), None if is_one_model else Models(named("one")), needs), access=keys)
    told.router._in_flight = InFlight(Settings(api_keys=tmp_path / "keys"))
    server = ListeningServer(uvicorn_config(told.router, Settings()))
    [listener] = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]

    async def take_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    worker = await asyncio.start_unix_server(take_nothing, tmp_path / "worker")
    monkeypatch.setattr(ToldWorkers, "path", str(tmp_path / "worker"))
    async with worker:
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        with ExitStack() as stack:
            make = functools.partial(unfinished_body, port, num_bytes=50 * 1024, is_chunked=is_chunked)
            for _ in range(6):
                last = stack.enter_context(await asyncio.to_thread(make, alice))
            assert (await asyncio.to_thread(last.recv, 100)).startswith(b"HTTP/1.1 503 ")
            stack.enter_context(await asyncio.to_thread(make, bob))
            await until(lambda: told.router._in_flight.bytes_of.total() == 300 * 1024)
        await until(lambda: not told.router._in_flight.bytes_of)
        if not is_one_model:
            await trimmed.wait()
        server.should_exit = True
        await serving


@in_a_loop
async def test_the_router_refuses_a_request_whose_end_may_be_seen_elsewhere() -> None:
    told = Told(Listing(Settings(), Models(named("one")), needs))
    server = ListeningServer(uvicorn_config(told.router, Settings()))
    [listener] = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    for version, headers in FRAMINGS:
        answer = await asyncio.to_thread(refusals_of, port, version, headers)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert (answer.count(b"HTTP/1.1"), REFUSED in answer) == (1, True)
    assert not told.workers.started
    server.should_exit = True
    await serving


@in_a_loop
async def test_a_request_that_is_left_at_the_end_of_a_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def passes(*_: Any) -> int:
        begun.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(passing, "pass_on", passes)
    told = Told(Listing(Settings(), Models(named("one")), needs))
    async with told.running():
        asked = told.ask("one")
        await begun.wait()
        told.router.stop()
        asked.cancel()
        status, said = await asked
        assert (status, said["error"]["code"]) == (503, "not_ready")


@in_a_loop
async def test_where_files_are_is_told_to_the_admin_alone(tmp_path: Path) -> None:
    admin, other = "a" * 24, "o" * 24
    keys = ApiKeys(write_keys(tmp_path / "keys", f"admin {admin}", f"other {other}"))

    def unreadable(_settings: Settings) -> ModelNeeds:
        raise ModelError("cannot read /srv/models/one")

    told = Told(Listing(Settings(), Models(named("one")), unreadable), access=keys)
    async with told.running():
        for key, sees_all in ((admin, True), (other, False)):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models/one")):
                _, said = await told.ask("one", path, method, key=key)
                assert ("/srv/models" in json.dumps(said)) is sees_all
                assert sees_all or "the model cannot be loaded" in json.dumps(said)
            told.router._failures["one"] = router.Failures(until=1e12, reason="cannot read /srv/models/one")
            told.router._listing._known_needs["one"] = needs(Settings())
            status, said = await told.ask("one", key=key)
            assert (status, "/srv/models" in json.dumps(said)) == (503, sees_all)
            told.router._failures.clear()
            told.router._listing._known_needs.clear()


@in_a_loop
async def test_a_worker_that_hangs_or_fails_has_no_metrics_and_those_of_others_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_asked = asyncio.Event()
    heads: list[Any] = []

    async def passes(path: str, scope: Any, _incoming: Incoming, send: Any) -> int:
        heads.append(scope["headers"])
        if path == "works":
            is_asked.set()
        await {"hangs": asyncio.Event(), "waits": is_asked}.get(path, heard).wait()
        await send({"type": "http.response.body", "body": f"{path}_total 1\n".encode()})
        return 500 if path == "fails" else 200

    heard = asyncio.Event()
    heard.set()

    monkeypatch.setattr(own_routes, "_METRICS_S", 0.05)
    monkeypatch.setattr(passing, "pass_on", passes)
    names = ("hangs", "fails", "waits", "works")
    told = Told(Listing(Settings(), Models(*map(named, names)), lambda _settings: None))
    told.router._swaps.limit_bytes = None
    async with told.running() as workers:
        for name in names:
            workers.all.append(ToldWorker(model=name, needed_bytes=1, waits_since=0, phase=Phase.READY, path=name))
        headers = [(b"host", b"h"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]
        text = bytes((await told.router._routes._metrics({"headers": headers})).body).decode()
        assert "works_total" in text
        assert "waits_total" in text, "all are asked at once"
        assert "fails_total" not in text
        assert heads == [headers[:1]] * 4, "no worker waits for the body of the client"
        assert not workers.started


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("is_empty", [True, False])
def test_the_start_lists_what_it_found_and_a_daemon_without_models_says_what_to_do(
    is_empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_empty:
        (tmp_path / "oak.gguf").write_bytes(b"GGUF" * 256)
        (tmp_path / "split-00001-of-00002.gguf").write_bytes(b"GGUF")
        (tmp_path / "split-00002-of-00002.gguf").write_bytes(b"GGUF")
    settings = Settings(models_dir=tmp_path)
    told = Told(Listing(settings, Catalogue(settings), needs))
    caplog.set_level(logging.INFO, "diskprefix")

    async def ask() -> list[tuple[int, Any]]:
        async with told.running():
            await until(lambda: "ready on" in caplog.text)
            return [await told.ask("elm"), await told.ask(None)]  # type: ignore[arg-type]

    answers = asyncio.run(ask())
    lines = [message for message in caplog.messages if message.startswith(("[models]", "diskprefix ready"))]
    ready = f"diskprefix ready on http://127.0.0.1:1 · {'0 models' if is_empty else '2 models'} · "
    assert lines[-1].startswith(ready)
    if not is_empty:
        assert lines[:-1] == ["[models] oak (1.0 KiB, --models-dir), split (8 B, --models-dir)"]
        return
    assert lines[1].startswith(f"[models] --models-dir {tmp_path} has no .gguf file and no model's folder; no model")
    for status, said in answers:
        assert status == 404
        assert re.search(r"`diskprefix pull \S+` .*, or put a .gguf file below --models-dir", said["error"]["message"])


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("model", ["gpt-4o", "claude-sonnet-4-5:latest", "", None])
@pytest.mark.parametrize("how", ["models_dir", "models_file", "strict", "several"])
def test_an_only_model_of_a_router_answers_to_names_that_programs_have_built_in(
    how: str, model: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, file = tmp_path / "models", tmp_path / "models.toml"
    folder.mkdir()
    for name in ("oak", "elm")[: 2 if how == "several" else 1]:
        (folder / f"{name}.gguf").write_bytes(b"GGUF" * 256)
    file.write_text(f'[oak]\nmodel = "{folder}/oak.gguf"\n')
    place: Any = {"models_file": file} if how == "models_file" else {"models_dir": folder}
    settings = Settings(**place, strict_model_names=how == "strict")
    told = Told(Listing(settings, Catalogue(settings), lambda _settings: None))
    caplog.set_level(logging.INFO, "diskprefix")

    async def ask() -> tuple[int | None, list[str]]:
        async with told.running() as workers:
            asked = told.ask(model)  # type: ignore[arg-type]
            await until(lambda: asked.done() or bool(workers.started))
            answered = asked.result()[0] if asked.done() else None
            asked.cancel()
            return answered, [worker.model for worker in workers.started]

    status, started = asyncio.run(ask())
    is_named = bool(model)
    if how == "several" or (how == "strict" and is_named):
        assert (status, started) == (404 if is_named else 400, [])
    else:
        assert (status, started) == (None, ["oak"])
        assert ("oak answers a request for" in caplog.text) is is_named


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("is_read", [True, False])
def test_a_list_of_models_inside_models_dir_that_is_not_read_is_named_at_the_start(
    is_read: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "oak.gguf").write_bytes(b"GGUF")
    (tmp_path / "models.toml").write_text("")
    settings = Settings(models_dir=tmp_path, models_file=tmp_path / "models.toml" if is_read else None)
    asyncio.run(Listing(settings, Catalogue(settings), needs).log_models())
    unread = f"[models] {tmp_path}/models.toml is not read; give it with --models-file"
    assert (unread in caplog.messages) is not is_read


@in_a_loop
async def test_the_list_of_models_is_read_again_beside_the_requests() -> None:
    models = Models(named("one"), named("other"))
    told = Told(Listing(Settings(), models, needs))
    async with told.running():
        told.router.read_again()
        assert len(models.models()) == 2, "that is done in a thread"
        await until(lambda: len(models.models()) == 1)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (HttpError(408, "slow"), {"connection": "close"}),
        (HttpError(401, "who?"), {"www-authenticate": "Bearer"}),
        (NotReady("wait"), {"retry-after": "2"}),
        (HttpError(404, "where?"), {}),
    ],
)
def test_a_refusal_has_the_headers_of_the_daemons_own(error: DiskPrefixError, headers: dict[str, str]) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    found = refusal(scope, error, sees_all=False).headers
    assert {name: found[name] for name in ("connection", "www-authenticate", "retry-after") if name in found} == headers


def test_a_worker_that_cannot_be_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_workers, "program", ["/nowhere"])
    workers = Workers(takes_any_name=False)
    worker = ModelWorker(model="one", needed_bytes=1, waits_since=0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        workers.start(worker, Settings())
    assert list(workers._folder.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before
    workers.kill_all()
    assert not workers._folder.exists()


@in_a_loop
async def test_a_model_of_unknown_size_is_loaded_alone_and_known_once_it_is_there() -> None:
    answers: list[ModelNeeds | DiskPrefixError | None] = [None, ModelError("cannot read one"), needs(Settings())]

    def asked(_settings: Settings) -> ModelNeeds | None:
        answer = answers.pop(0)
        if isinstance(answer, DiskPrefixError):
            raise answer
        return answer

    one = named("one")
    listing = Listing(Settings(), Models(one), asked)
    await listing.read_needs(one)
    assert listing.fit(one, one.settings, LIMIT)[0] == LIMIT
    await listing.read_needs(one)
    for _ in range(2):
        with pytest.raises(ModelError, match="cannot read one"):
            listing.fit(one, one.settings, LIMIT)
    for _ in range(2):
        await listing.read_needs(one)
        assert 0 < listing.fit(one, one.settings, LIMIT)[0] < LIMIT


def test_merged_metrics_have_each_family_once() -> None:
    one = '# HELP a_total Help.\n# TYPE a_total counter\na_total{b="x y"} 1.0\na_total 2.0\n'
    merged = merged_metrics({"m": one, 'n"': one}, {"m": True, "o": False}).decode()
    assert merged.splitlines() == [
        "# HELP a_total Help.",
        "# TYPE a_total counter",
        'a_total{b="x y",model="m"} 1.0',
        'a_total{model="m"} 2.0',
        'a_total{b="x y",model="n\\""} 1.0',
        'a_total{model="n\\""} 2.0',
        "# HELP diskprefix_model_loaded Whether a model is in memory.",
        "# TYPE diskprefix_model_loaded gauge",
        'diskprefix_model_loaded{model="m"} 1.0',
        'diskprefix_model_loaded{model="o"} 0.0',
    ]


@dataclass
class Replying:
    """A worker that reads a request up to `until`, says something, and hangs up; `rest` is what came after."""

    said: bytes
    until: bytes = b"body"
    got: bytes = b""
    rest: bytes = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.until:
            self.got = await reader.readuntil(self.until)
        writer.write(self.said)
        await writer.drain()
        if not self.said and self.until:
            self.rest = await reader.read() or b"the end"
        writer.close()


def passed(worker: Replying, tmp_path: Path, *messages: dict[str, Any], **headers: str) -> Any:
    """Returns the status and the messages that the client got. Behind its `messages`, the client waits."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "raw_path": b"/a%20b", "query_string": b"c=d", "headers": raw}
    left = list(messages)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> int:
        server = await asyncio.start_unix_server(worker, tmp_path / "s")
        async with server:
            return await asyncio.wait_for(pass_on(str(tmp_path / "s"), scope, Incoming(receive), send), 30)

    return asyncio.run(run()), sent


def test_the_request_comes_whole(tmp_path: Path) -> None:
    worker = Replying(b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX-Own: 1\r\nConnection: close\r\n\r\nreply")
    messages = [chunk(b"whole", more=True), chunk(b"body")]
    status, sent = passed(worker, tmp_path, *messages, host="h", content_length="9", connection="te")
    lines = worker.got.decode().split("\r\n")
    assert (lines[0], lines[-1]) == ("POST /a%20b?c=d HTTP/1.1", "wholebody")
    assert status == 201
    assert (b"x-own", b"1") in sent[0]["headers"]
    assert b"connection" not in dict(sent[0]["headers"])
    assert b"".join(message.get("body", b"") for message in sent) == b"reply"


@pytest.mark.parametrize(
    ("worker", "error", "has_begun"),
    [
        (Replying(b"", until=b""), NotTaken, False),
        (Replying(b"HTTP/1.1 100 Continue\r\n\r\n"), WorkerGone, False),
        (Replying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"), WorkerGone, True),
    ],
    ids=["took nothing", "took it", "began"],
)
def test_a_worker_that_dies_fails_its_request_and_leaves_what_it_did_not_take_to_another(
    tmp_path: Path, worker: Replying, error: type[Exception], has_begun: bool
) -> None:
    with pytest.raises(error) as gone:
        passed(worker, tmp_path, chunk(b"body"), content_length="4")
    assert getattr(gone.value, "has_begun", False) == has_begun


def test_a_client_that_hangs_up_closes_the_connection_to_the_worker(tmp_path: Path) -> None:
    worker = Replying(b"")
    assert passed(worker, tmp_path, chunk(b"body"), {"type": "http.disconnect"}, content_length="4") == (499, [])
    assert worker.rest == b"the end"


def test_a_worker_may_answer_although_the_body_never_comes(tmp_path: Path) -> None:
    worker = Replying(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", until=b"\r\n\r\n")
    assert passed(worker, tmp_path, content_length="4")[0] == 408
