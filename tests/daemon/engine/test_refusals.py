"""What a system may refuse, it refuses once: a thread, a place in a pool, memory for an array. At most one request
fails. All others get their bits, the engine goes on, and nothing is left behind."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.engine.idle.cpu_waits import CpuWaits
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent, ErrorEvent, GenerateRequest
from diskprefix.errors import DeviceLost
from diskprefix.thread_pool import ThreadPool
from diskprefix.tokens import as_token_ids, picture_ids
from diskprefix.values import SHARED, Prompt
from tests.daemon.engine.driving import WORDS, Client, load, request, said, tokens, wait_until_idle
from tests.daemon.server.picture_models import image_bytes, write_llava
from tests.examples import examples
from tests.waiting import wait_for


class Refusal:
    """Notes from where calls of one kind come, and refuses one of them."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error, self._lock = error, threading.Lock()
        self.places: Counter[str] = Counter()
        """The number of calls by place: a kind of thread and a line of a function."""
        self._at: tuple[str, int] | None = None

    def begin(self, place: str | None = None, number: int = 1) -> None:
        """Forgets all calls. Has the call with this number from a place refused, none without a place."""
        self._at = None if place is None else (place, number)
        self.places.clear()

    def __call__(self) -> None:
        frame, thread = sys._getframe(2), threading.current_thread().name.rpartition("_")
        place = f"{thread[0] or thread[2]}: {frame.f_code.co_qualname}:{frame.f_lineno}"
        with self._lock:
            self.places[place] += 1
            is_refused = (place, self.places[place]) == self._at
        if is_refused:
            raise self._error()


class Arrays(ModuleType):
    """In the place of numpy: memory for an array may be refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__("numpy")
        for name in ("empty", "zeros", "full", "array", "arange", "append", "concatenate"):
            setattr(self, name, _asking(refusal, getattr(np, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _asking(refusal: Refusal, call: Callable[..., Any]) -> Callable[..., Any]:
    def asking(*args: Any, **kwargs: Any) -> Any:
        refusal()
        return call(*args, **kwargs)

    return asking


@contextmanager
def refusing(kind: str) -> Iterator[Refusal]:
    """Yields what refuses calls of a kind."""
    with pytest.MonkeyPatch.context() as patch:
        refusal = Refusal(MemoryError if kind == "array" else lambda: RuntimeError("can't start new thread"))
        if kind == "thread":
            patch.setattr(threading.Thread, "start", _asking(refusal, threading.Thread.start))
        elif kind == "place":
            patch.setattr(ThreadPool, "submit", _asking(refusal, ThreadPool.submit))
        else:
            names = tuple(f"diskprefix.{name}." for name in ("daemon.engine", "prefixstore", "runtime"))
            modules = [module for name, module in sys.modules.items() if name.startswith(names)]
            for module in modules:
                if getattr(module, "np", None) is np:
                    patch.setattr(module, "np", Arrays(refusal))
        yield refusal


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that takes pictures."""
    return write_llava(tmp_path_factory.mktemp("llava") / "model")


class Life:
    """An engine with stored prompts, and the requests that come to it: each kind of read, of reply and of work."""

    def __init__(self, model: Path, kv: Path) -> None:
        self._open = partial(load, model, kv, max_sequences=8)
        self.engine: Engine = self._open()
        self.engine.read_encoder()
        stored, new = tokens(300), tokens(200, 1)
        self.ahead = np.concatenate([stored, tokens(90, 2)])
        self.asked = [
            request(stored, n=2, logprobs=0),
            request(np.concatenate([stored, tokens(70, 3)]), logprobs=0),
            request(new, logprobs=0, constraint=WORDS),
            request(tokens(150, 4), logprobs=0, scope="off"),
            self._with_picture(tokens(80, 5)),
        ]
        self.later = [request(self.ahead, logprobs=0), request(stored, logprobs=0)]
        self.expected: dict[int, list[Any]] = {}
        self._places: dict[str, list[tuple[str, int]]] = {}

    def open_again(self) -> None:
        assert self.engine.close()
        self.engine = self._open()
        self.engine.read_encoder()

    def _with_picture(self, token_ids: Any) -> GenerateRequest:
        processor: Any = self.engine.processor
        picture = processor.read_image(image_bytes((200, 30, 30)), detail="auto", param="")
        part = as_token_ids(self.engine.tokenizer.encode(picture.text, add_special_tokens=False))
        part[part == self.engine.config.image_token_id] = picture_ids(picture.name, picture.num_tokens)
        prompt = Prompt(np.concatenate([token_ids[:40], part, token_ids[40:]]), pictures=(picture,))
        return replace(request(token_ids, logprobs=0), prompt=prompt)

    def live(self, begin: Callable[[], None] = lambda: None) -> list[Client]:
        """Has all requests served, the last ones after idle work, and returns them. Calls `begin` before the first."""
        engine, fatal = self.engine, list[DeviceLost]()
        engine.pages.forget_idle()
        # So nobody gives a read up because computing is faster.
        engine.cache.cost_model.prefill_s_per_token = None
        inbox = Inbox(engine.serve, fatal.append)
        inbox.start()
        begin()
        clients = [Client(inbox, one) for one in self.asked]
        wait_until_idle(inbox)
        options = request(self.ahead).cache
        engine.ahead.add_job(AheadJob(engine, lambda: Prompt(self.ahead), options, engine.cache.owner(SHARED)))
        wait_for(lambda: not engine.ahead._jobs or fatal)
        clients += [Client(inbox, one) for one in self.later]
        wait_until_idle(inbox)
        inbox.stop(30)
        assert not fatal
        return clients

    def places(self, kind: str, refusal: Refusal) -> list[tuple[str, int]]:
        """Returns the places from which calls of a kind come in a life in which nothing is refused, each with the
        number of calls, in a random order."""
        if kind not in self._places:
            assert not self.require_bits(self.live(refusal.begin))
            self._places[kind] = sorted(refusal.places.items())
            random.Random(kind).shuffle(self._places[kind])
        return self._places[kind]

    def require_bits(self, clients: list[Client]) -> int:
        """Returns the number of requests that failed. All others must have their bits."""
        num_failed = 0
        for number, client in enumerate(clients):
            if isinstance(client.events[-1], ErrorEvent):
                num_failed += 1
                continue
            assert isinstance(client.events[-1], DoneEvent)
            assert said(client) == self.expected.setdefault(number, said(client))
        return num_failed

    def require_nothing_left(self) -> None:
        engine, cache = self.engine, self.engine.cache
        wait_for(lambda: not engine.pages._sequences)
        assert engine.pages.check() == []
        cache.finish_aside()
        assert cache.writer.flush(30)
        wait_for(lambda: not engine.pages.pool.holds)
        assert not cache.store.evictor.pinned()
        assert not cache.writer._reserved_bytes


def begin_idle_work_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    patch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    patch.setattr(CpuWaits, "are_long", lambda _: False)


@pytest.fixture(autouse=True)
def closes_engines() -> None:
    """The life closes its engines, which outlive a test."""


@pytest.fixture(scope="module")
def life(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    life = Life(llava, tmp_path_factory.mktemp("kv") / "kv")
    with pytest.MonkeyPatch.context() as patch:
        begin_idle_work_at_once(patch)
        # The second life finds what the first one has saved.
        for _ in range(2):
            assert not life.require_bits(life.live())
            life.require_nothing_left()
        yield life
    assert life.engine.close()


@pytest.mark.cases(5)
@pytest.mark.parametrize("number", range(examples(20)))
@pytest.mark.parametrize("kind", ["thread", "place", "array"])
def test_what_is_refused_once_fails_one_request_and_leaves_nothing_behind(kind: str, number: int, life: Life) -> None:
    with refusing(kind) as refusal:
        if kind == "thread":
            # Its pools have no more than their first threads.
            life.open_again()
        places = life.places(kind, refusal)
        place, num_calls = places[number % len(places)]
        if kind == "thread":
            assert not any(place.startswith("engine:") for place, _ in places)
            life.open_again()
        at = random.Random(number).randint(1, num_calls)
        print(place, at, "of", num_calls, "of", len(places), "places")
        assert life.require_bits(life.live(partial(refusal.begin, place, at))) <= 1
        refusal.begin()
        life.require_nothing_left()
        assert not life.require_bits(life.live())
