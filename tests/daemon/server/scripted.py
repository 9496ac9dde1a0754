"""The real application over an engine that does what a test tells it to, behind a real socket.

What a real engine does too fast, too rarely or not at all: standing still in the middle, failing, never becoming ready.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
from msgspec import Struct

from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.gauges import EngineFigures
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJobs
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import (
    DoneEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    ReadEvent,
    TextEvent,
    Timings,
    Usage,
)
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.http_app import create_app
from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.daemon.server.process.listener import listen
from diskprefix.daemon.server.process.process import ListeningServer, uvicorn_config
from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.cache.cost_model import CostModel
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.runtime.files.fit import ModelNeeds, TokenState, fitted
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheReport, Scope, Selection, Tenant
from tests.daemon.engine.driving import Cancelled, serve_one_at_a_time
from tests.daemon.server.chat_model import POSITIONS, VOCAB_SIZE
from tests.daemon.server.daemon_process import wait_until
from tests.runtimes import RUNTIME

Emit = Callable[[Event], None]
Script = Callable[[GenerateRequest, Emit, Callable[[], bool]], None]

STATS: dict[str, Any] = {
    "scope": "auto:30",
    "dir": "kv",
    "state": "ok",
    "error": None,
    "entries": 1,
    "blocks": 2,
    "used_bytes": 3,
    "budget_bytes": 4,
    "room_bytes": 4,
    "pending_bytes": 5,
    "pending": 1,
    "buffer_bytes": 50,
    "misses": {"not_stored": 7, "diverged": 8},
    "lost": [],
    "prompt_tokens": 20,
    "restored_tokens": {"memory": 2, "disk": 7, "remote": 0},
    "restored_bytes": 10,
    "saved_s": 17.5,
    "saved_tokens": 11,
    "saved_bytes": 12,
    "dropped": 13,
    "unaffordable": 14,
    "process_disk_written_bytes": 13,
    "disk_written_bytes": 15,
    "disk_written_last_day_bytes": 16,
    "write_budget_bytes": 17,
    "evicted_blocks": 14,
    "expired_blocks": 15,
    "file_bytes": 16,
    "ghost_bytes": 2,
    "quarantined": 15,
    "stalled_reads": 16,
    "outdated": 17,
    "ahead_tokens": 18,
    "errors": 16,
    "remote": None,
    "gate": CostModel("auto", lambda num_tokens: 23_040 * num_tokens).as_dict(),
}


KV_MEMORY = {
    "limit_bytes": 1000,
    "used_bytes": 500,
    "kept_bytes": 400,
    "kept_tokens": 300,
    "running": 1,
}

CHOSEN = Selection(scope=Scope("auto", 30), prompt_tokens=10, reason="no_match", recent=2, common=3)


def done(completion_tokens: int = 2, cached_tokens: int = 0, **report: Any) -> DoneEvent:
    figures: dict[str, Any] = {"selection": CHOSEN, "restored": cached_tokens, **report}
    return DoneEvent(
        Usage(prompt_tokens=10, completion_tokens=completion_tokens, cached_tokens=cached_tokens),
        CacheReport(**figures),
        Timings(
            queue_ms=1,
            lookup_ms=2,
            restore_ms=3.14159,
            prefill_ms=4,
            ttft_ms=5,
            decode_ms=6,
            decode_tokens_per_s=7,
        ),
    )


def say_hello(request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
    if request.reading is not None:
        emit(ReadEvent(np.ones(2, np.float32)))
    for choice in range(request.sampling.n):
        emit(TextEvent(choice, "Hello", (1,)))
        emit(TextEvent(choice, " world", (2,)))
        emit(FinishEvent(choice, "stop"))
    emit(done())


class ScriptedEngine:
    """Runs `script` for every request. `entered` is set while one runs, `cancelled` once one was cancelled."""

    def __init__(self, script: Script = say_hello) -> None:
        self.script = script
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self.stats = dict(STATS)
        self.requests: list[GenerateRequest] = []
        self.config = SimpleNamespace(get_text_config=lambda **_: SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=2))
        self.device, self.dtype = "cpu", "float32"
        self.runtime = SimpleNamespace(vocab_size=VOCAB_SIZE, has_hidden=True)
        self.tokenizer: Any = None
        self.processor: Any = None
        self.origin = Path()
        self.max_positions = self.model_positions = POSITIONS
        needs = ModelNeeds(name="scripted", weights={"bfloat16": 1 << 20}, state=TokenState(1))
        self.fit = fitted(needs, 1 << 30)
        self.positions_limit = "the context of this model"
        self.max_sequences = 1
        self.end_ids: frozenset[int] = frozenset()
        self.model_name = "scripted"
        self.identity = {"root": "0123456789abcdef0123456789abcdef"}
        self.startup_timings = {"weights": 0.5}
        self.cache = ScriptedCache(self)
        self.figures = EngineFigures()
        self.pages = SimpleNamespace(stats=self.memory_stats, sequences=list)
        self.ahead = AheadJobs(0)

    @property
    def last_prompt(self) -> str:
        text: str = self.tokenizer.decode(self.requests[-1].prompt.token_ids)
        return text

    def load(self, settings: Settings, progress: Callable[[str], None]) -> Engine:
        progress("reading the tokenizer")
        self.origin = Path(settings.model or "")
        self.tokenizer = read_tokenizer(self.origin, None)
        self.constraints = ConstraintCompiler(self.tokenizer, {self.tokenizer.eos_token_id}, VOCAB_SIZE)
        return cast("Engine", self)

    def memory_stats(self) -> dict[str, int]:
        return dict(KV_MEMORY)

    def on_request(self) -> None:
        """Nothing is done ahead."""

    def finish_load(self) -> None:
        """There are no weights."""

    def serve(self, inbox: Inbox) -> None:
        serve_one_at_a_time(self._run)(inbox)

    def _run(self, request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        self.requests.append(request)
        self.entered.set()
        try:
            self.script(request, emit, is_cancelled)
        except Cancelled:
            self.cancelled.set()
            raise

    def close(self) -> bool:
        self.constraints.close()
        self.closed.set()
        return True


class ScriptedCache:
    """Shows the engine's `stats`. Reading them waits while `is_readable` is not set, as for a slow disk."""

    layout = SimpleNamespace(states=())

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.cost_model = CostModel("auto", lambda num_tokens: 23_040 * num_tokens)
        self.is_readable = threading.Event()
        self.is_readable.set()
        self.is_waited_for = threading.Event()
        self.noted: dict[tuple[Tenant, NoteKind, str], bytes] = {}
        self.on_forget: list[Callable[[], None]] = []

    def expires_at(self, _ttl_s: float | None) -> float:
        return math.inf

    def epoch(self, _tenant: Tenant) -> Epoch:
        return Epoch()

    def owner(self, tenant: Tenant) -> Hashable:
        return tenant

    def is_gone(self, _owner: Hashable) -> bool:
        return False

    def lasts_s(self, _ttl_s: float | None) -> float:
        return 1.0

    @property
    def health(self) -> tuple[str, str | None]:
        return self._engine.stats["state"], self._engine.stats["error"]

    def stats(self) -> dict[str, Any]:
        if not self.is_readable.is_set():
            self.is_waited_for.set()
            assert self.is_readable.wait(30)
        return self._engine.stats

    def notes(self, tenant: Tenant) -> TenantNotes:
        return cast("TenantNotes", ScriptedNotes(self.noted, tenant))


class ScriptedNotes(Struct):
    noted: dict[tuple[Tenant, NoteKind, str], bytes]
    tenant: Tenant
    ttl_s: float = 1.0
    patience: Patience | None = None
    share: str = ""

    def put(self, kind: NoteKind, id_: str, content: bytes, _prompt: TokenIds | None = None) -> bool:
        # The tokens of scripted replies are made up, so they must not stand in a prompt.
        if kind is not NoteKind.TURN:
            self.noted[self.tenant, kind, id_] = content
        return True

    def get(self, kind: NoteKind, id_: str) -> bytes | None:
        return self.noted.get((self.tenant, kind, id_))

    def holder(self, _kind: NoteKind, _id: str) -> ScriptedNotes:
        return self

    def recent(self, kind: NoteKind, id_: str) -> tuple[bool, bytes | None]:
        return True, self.get(kind, id_)

    def settle(self, _kind: NoteKind, _id: str) -> bool:
        return True

    def delete(self, kind: NoteKind, id_: str) -> bool:
        return self.noted.pop((self.tenant, kind, id_), None) is not None


def until_cancelled(_request: GenerateRequest, _emit: Emit, is_cancelled: Callable[[], bool]) -> None:
    """A prefill that does not end by itself."""
    wait_until(is_cancelled, "the request is cancelled")
    raise Cancelled


class QuickServer(ListeningServer):
    """Looks ten times as often whether it is to end: hundreds of servers end in a run of the tests."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


class AppServer:
    """The application behind a socket, with uvicorn in a thread."""

    def __init__(self, settings: Settings, load_engine: Any) -> None:
        self.app = create_app(settings, load_engine)
        self.daemon: Daemon = self.app.state.daemon
        [self.listener] = listen("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = QuickServer(uvicorn_config(self.app, settings))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.listener]})

    def client(self) -> httpx.Client:
        """A client of the owner, if there are no keys."""
        access = self.app.state.access
        headers = {"Authorization": f"Bearer {access.text}"} if isinstance(access, OwnerToken) else {}
        return httpx.Client(base_url=self.url, timeout=30, headers=headers)

    def start(self) -> None:
        self._thread.start()

    @property
    def connections(self) -> set[Any]:
        """The connections that are open, as the server sees them."""
        return set(self._server.server_state.connections)

    @property
    def engine(self) -> Any:
        assert self.daemon.serving is not None
        return self.daemon.serving.engine

    def wait_ready(self) -> None:
        wait_until(lambda: self.daemon.serving, "the scripted engine is loaded")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 20):
        received += part
    return received


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@contextmanager
def scripted_app(model: Path, engine: ScriptedEngine | None = None, **changes: Any) -> Iterator[AppServer]:
    engine = engine or ScriptedEngine()
    with started_app(model, engine.load, **changes) as server:
        server.wait_ready()
        yield server


@contextmanager
def started_app(model: Path, load_engine: Any, **changes: Any) -> Iterator[AppServer]:
    usual: dict[str, Any] = {"max_sequences": 1, "ahead": "off", "runtime": RUNTIME}
    server = AppServer(Settings(model=str(model), port=0, **usual | changes), load_engine)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def real_app(model: Path, folder: Path, **changes: Any) -> Iterator[AppServer]:
    """A ready server over the real engine, with small blocks. Prompts of any length are saved in `folder`."""
    from diskprefix.daemon.app import load_engine

    settings: dict[str, Any] = {"kv_cache_dir": folder, "block_size": 16, "kv_cache_min_tokens": 16}
    with started_app(model, load_engine, **settings | {"kv_cache_budget": 64 << 20} | changes) as server:
        server.wait_ready()
        yield server
