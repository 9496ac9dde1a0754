"""Threads, locks, queues and clocks of a simulated history, and their way into the modules of the package.

`simulated` replaces the names `threading`, `time` and so on as the package and `concurrent.futures` see them, in their
globals, defaults and closures, and puts them back. Other threads of this process get the real ones meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import inspect
import queue
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from tests.faults.interleavings.task_scheduler import Task, TaskScheduler

_REAL = threading.get_ident
_here: list[TaskScheduler] = []
"""The scheduler of the history that is running."""
_thread: list[int] = []
refusing = [0.0]
"""The share of threads and of memory for pages that the system refuses."""
num_refused = [0]


def scheduler() -> TaskScheduler:
    return _here[0]


def is_simulated() -> bool:
    """Returns whether the caller is a task of a history."""
    return bool(_here) and _REAL() == _thread[0]


def is_refused() -> bool:
    """Returns whether the system refuses a thread, or memory, now."""
    if not (refusing[0] > 0.0 and scheduler().random.random() < refusing[0]):
        return False
    num_refused[0] += 1
    return True


def wait_in(waiting: list[Task], timeout_s: float | None) -> bool:
    """Waits among others until `wake_one`. Returns False if the time runs out first."""
    me = scheduler().current
    assert me is not None
    waiting.append(me)
    try:
        return scheduler().block(timeout_s)
    finally:
        if me in waiting:
            waiting.remove(me)


def wake_one(waiting: list[Task]) -> None:
    """Wakes one of those that wait, whichever it is."""
    if waiting:
        one = scheduler()
        one.wake(waiting.pop(int(one.random.random() * len(waiting))))


class SimulatedLock:
    """In the place of `threading.Lock` and `threading.RLock`."""

    def __init__(self, *, again: bool = False) -> None:
        self._again = again
        self._owner: object = None
        self._depth = 0
        self._waiting: list[Task] = []
        self.at_release: Callable[[], None] = lambda: None
        """Called when it is free again: what it guards must hold. It must take no lock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not _here or _REAL() != _thread[0]:
            return True
        one = _here[0]
        one.point()
        me = one.current
        if self._owner is not None and self._owner is me and self._again:
            self._depth += 1
            return True
        deadline = None if timeout < 0 else one.now + timeout
        while self._owner is not None:
            if not blocking or (deadline is not None and one.now >= deadline):
                return False
            assert me is not None
            if me.is_killed:
                return True
            wait_in(self._waiting, None if deadline is None else deadline - one.now)
        self._owner, self._depth = me, 1
        return True

    def release(self, *_: object) -> None:
        if not _here or _REAL() != _thread[0]:
            return
        one = _here[0]
        if self._owner is None:
            if one.current is not None and one.current.is_killed:
                return
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        self.at_release()
        if self._waiting:
            wake_one(self._waiting)
        one.point()

    def locked(self) -> bool:
        return self._owner is not None

    def is_mine(self) -> bool:
        return self._owner is not None and self._owner is scheduler().current

    def give_up(self) -> int:
        """Releases it wholly. Returns what `take_back` takes."""
        depth, self._owner, self._depth = self._depth, None, 0
        self.at_release()
        wake_one(self._waiting)
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    __enter__, __exit__ = acquire, release


class SimulatedCondition:
    """In the place of `threading.Condition`."""

    def __init__(self, lock: SimulatedLock | None = None) -> None:
        self._lock = SimulatedLock(again=True) if lock is None else lock
        self._waiting: list[Task] = []
        self.lock, self.acquire, self.release = self._lock, self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        one = scheduler()
        me = one.current
        assert me is not None
        assert me.is_killed or self._lock.is_mine(), "a condition is waited for with its lock"
        depth = self._lock.give_up()
        is_woken = wait_in(self._waiting, timeout)
        self._lock.take_back(depth)
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        one = scheduler()
        end = None if timeout is None else one.now + timeout
        while not (result := predicate()):
            if end is not None and one.now >= end:
                break
            self.wait(None if end is None else end - one.now)
        return result

    def notify(self, number: int = 1) -> None:
        for _ in range(min(number, len(self._waiting))):
            wake_one(self._waiting)

    def notify_all(self) -> None:
        if self._waiting and is_simulated():
            self.notify(len(self._waiting))


class SimulatedSemaphore:
    """In the place of `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._changed, self._value = SimulatedCondition(), value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if blocking:
                self._changed.wait_for(lambda: self._value, timeout)
            if not self._value:
                return False
            self._value -= 1
            return True

    def release(self, number: int = 1) -> None:
        with self._changed:
            self._value += number
            self._changed.notify(number)


class SimulatedEvent:
    """In the place of `threading.Event`."""

    def __init__(self) -> None:
        self._changed, self._is_set = SimulatedCondition(), False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class SimulatedBarrier:
    """In the place of `threading.Barrier`, for one use."""

    def __init__(self, parties: int) -> None:
        self._changed, self._missing = SimulatedCondition(), parties

    def wait(self) -> None:
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._missing <= 0)


class SimulatedThread:
    """In the place of `threading.Thread`."""

    def __init__(
        self,
        group: None = None,  # noqa: ARG002 (as the real one)
        target: Callable[..., object] = lambda: None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._work = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None
        # A pool has its threads in a set, whose order must be that of the seed.
        self._number = scheduler().number()

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def start(self) -> None:
        one = scheduler()
        assert one.current is not None
        if is_refused():
            raise RuntimeError("can't start new thread")
        self._task = one.spawn(self.name, one.current.process, self._work)
        one.point()

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        scheduler().join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and self._task in scheduler().tasks


class SimulatedQueue:
    """In the place of `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if is_simulated():
            wake_one(self._waiting)
            _here[0].point()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        one = scheduler()
        one.point()
        while not self._items:
            if not block:
                raise queue.Empty
            if not wait_in(self._waiting, timeout):
                raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class Shim(ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self._real = real
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _either(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        return (simulated if is_simulated() else real)(*args, **kwargs)

    return made


def _wait(futures: Iterable[Future[Any]], timeout: float | None = None) -> Any:
    """In the place of `concurrent.futures.wait`, which takes locks in the order of addresses."""
    futures = list(futures)
    for future in futures:
        with suppress(Exception):
            future.result(timeout)
    return SimpleNamespace(not_done=[future for future in futures if not future.done()])


def _now() -> float:
    # A clock never shows one time twice.
    _here[0].now += 1e-7
    return _here[0].now


_REPLACED: dict[Any, Any] = {
    threading.Lock: _either(SimulatedLock, threading.Lock),
    threading.RLock: _either(lambda: SimulatedLock(again=True), threading.RLock),
    threading.Condition: _either(SimulatedCondition, threading.Condition),
    threading.Semaphore: _either(SimulatedSemaphore, threading.Semaphore),
    threading.Event: _either(SimulatedEvent, threading.Event),
    threading.Barrier: _either(SimulatedBarrier, threading.Barrier),
    threading.Thread: _either(SimulatedThread, threading.Thread),
    queue.SimpleQueue: _either(SimulatedQueue, queue.SimpleQueue),
    time.monotonic: _either(_now, time.monotonic),
    time.perf_counter: _either(_now, time.perf_counter),
    time.time: _either(_now, time.time),
    concurrent.futures.wait: _either(_wait, concurrent.futures.wait),
    time.sleep: _either(lambda seconds: _here[0].block(seconds), time.sleep),
    secrets.token_bytes: _either(lambda size: _here[0].random.randbytes(size), secrets.token_bytes),
    secrets.randbits: _either(lambda bits: _here[0].random.getrandbits(bits), secrets.randbits),
    random.random: _either(lambda: _here[0].random.random(), random.random),
}
_MODULES = (threading, queue, time, secrets, random)


@contextmanager
def patched() -> Iterator[None]:
    """Replaces what makes and joins threads, and tells the time, in all modules of the package that are imported."""
    shims = {
        module: Shim(module, **{name: _REPLACED[value] for name, value in vars(module).items() if _is_replaced(value)})
        for module in _MODULES
    }
    undo: list[Callable[[], None]] = []
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("diskprefix.")]
    for module in (*modules, concurrent.futures.thread, concurrent.futures._base):
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value in shims:
                _set(module, name, shims[value], undo)
            elif _is_replaced(value):
                _set(module, name, _REPLACED[value], undo)
            elif getattr(value, "__module__", None) == module.__name__:
                _patch_defaults(value, undo)
    _set(concurrent.futures.thread, "_global_shutdown_lock", SimulatedLock(), undo)
    # Its threads are not those of this process. What is killed is reported there.
    _set(concurrent.futures.thread, "_threads_queues", WeakKeyDictionary(), undo)
    _set(concurrent.futures._base.LOGGER, "disabled", True, undo)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


@contextmanager
def running(one: TaskScheduler) -> Iterator[None]:
    """Makes `one` the scheduler of this thread's tasks."""
    _here.append(one)
    _thread.append(_REAL())
    try:
        yield
    finally:
        _here.clear()
        _thread.clear()
        vars(concurrent.futures.thread)["_threads_queues"].clear()


def _is_replaced(value: object) -> bool:
    try:
        return value in _REPLACED
    except TypeError:
        return False


def _set(holder: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    before = getattr(holder, name)
    undo.append(lambda: setattr(holder, name, before))
    setattr(holder, name, value)


def _patch_defaults(value: Any, undo: list[Callable[[], None]]) -> None:
    """Replaces defaults of functions, and factories of the fields of dataclasses."""
    functions = [value] if isinstance(value, FunctionType) else []
    if inspect.isclass(value):
        functions = [one for one in vars(value).values() if isinstance(one, FunctionType)]
    for function in functions:
        if any(map(_is_replaced, function.__defaults__ or ())):
            _set(function, "__defaults__", tuple(map(_replaced, function.__defaults__ or ())), undo)
        if any(map(_is_replaced, (function.__kwdefaults__ or {}).values())):
            named = {name: _replaced(default) for name, default in (function.__kwdefaults__ or {}).items()}
            _set(function, "__kwdefaults__", named, undo)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # Of a cell without a value.
                if _is_replaced(cell.cell_contents):
                    _set(cell, "cell_contents", _REPLACED[cell.cell_contents], undo)


def _replaced(value: Any) -> Any:
    return _REPLACED[value] if _is_replaced(value) else value
