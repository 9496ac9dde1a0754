"""The process of the daemon: its start, its signals, and its end."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from diskprefix.daemon.server.keys import ApiKeys, OwnerToken
from diskprefix.daemon.server.process.listener import BACKLOG, open_listeners
from diskprefix.daemon.server.process.router_line import RouterLine
from diskprefix.daemon.server.process.systemd import is_heard, notify, watchdog_s
from diskprefix.daemon.server.process.token_file import published_token, shown_link
from diskprefix.daemon.settings import Settings
from diskprefix.errors import CacheError, DeviceLost, DiskPrefixError
from diskprefix.prefixstore.store.folder import crash_file, make_folder
from diskprefix.thread_pool import start_helper
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from diskprefix.daemon.engine.loop import Engine
    from diskprefix.daemon.server.daemon import Daemon, EngineLoader, Progress
    from diskprefix.daemon.server.serving import Serving

log = logging.getLogger("diskprefix")

GRACE_S = 5.0
"""Time in seconds for a running request to finish after SIGTERM."""
_SLOW_CLIENT_S = 3
"""Time in seconds after that for clients to read what was sent."""
_DEVICE_LOST_S = 60.0
"""Time in seconds for a process that lost its accelerator to end in order."""
_FAILED_S = 5.0
"""Time in seconds for a process that failed to say why and to end, whatever its threads do."""
_OF_A_POOL = re.compile(r"_[0-9]+$")
"""The end of the names that `ThreadPoolExecutor` gives to its threads."""
_THREADS_END_S = 1.0
"""Time in seconds for threads without work to end."""
_KEEP_ALIVE_S = 75
"""Time that an idle connection is kept open for another request."""
_FORCED_EXIT_CODE = 130
_OTHER_FILES, _MIN_CONNECTIONS, _ACCEPTS = 64, 16, 32
"""The numbers of open files besides connections (model, store, libraries), of connections that are always accepted, and
of connections that are accepted before requests are read again."""

_TICK_S = 0.1
"""uvicorn's header of the date and its check of `should_exit` are as old as this."""
_PERIOD_S = 5.0
"""Time between two notifications to systemd."""


def run(settings: Settings, load_engine: EngineLoader, router: RouterLine | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then returns. Raises the error that prevented the daemon from serving.

    With a `router`, the process is a worker and serves the requests that the router forwards. Without one, it opens
    sockets of its own.
    """
    faulthandler.enable()
    leave_plugins_out()
    # Until the server handles SIGTERM: nothing has started that must be stopped. A thread that loads cannot be stopped.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: os._exit(0))
    page_secret = None if router is None else router.order.page_secret
    keys = None if settings.api_keys is None else ApiKeys(settings.api_keys, page_secret)
    # Ignored until the server runs: the keys are fresh, and there are no pages to check yet.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    token: OwnerToken | None
    if router is None:
        settings, listeners = open_listeners(settings)
        token = made_token(settings)
        address = announce_listening(listeners, settings, token)
    else:
        listeners, address, token = [router.listener], router.order.address, router.order.token
    # A crash, and the watchdog's SIGABRT, write the stacks of the threads. The next start logs them, and checks the
    # store's file, which may have caused it. If the folder is unusable, opening the store raises the error.
    with suppress(OSError, CacheError):
        make_folder(settings.kv_cache_dir)
        faulthandler.enable(crash_file(settings.kv_cache_dir))
    # Modules and the model stay. Searching them for garbage takes a fifth of the time until the daemon is ready.
    gc.disable()
    # Two threads that import one package at the same time may each get half of it: the imports of a load come first.
    for name in ("daemon.engine.loop", "runtime.choose_runtime", "runtime.files.template_sandbox"):
        import_module(f"diskprefix.{name}")
    loading = BegunLoad(partial(load_engine, settings))
    # The server's libraries and routes are imported here, while the port is open already and the model loads.
    from diskprefix.daemon.server.http_app import create_app

    def on_ready(serving: Serving) -> None:
        daemon.doing = f"serving {serving.model_name} on {address}"
        _announce(serving, serving.counts.last, settings, address)
        gc.freeze()
        gc.enable()

    if router is None:
        warn_without_keys(settings, address)
    app = create_app(settings, loading, keys or token)
    daemon: Daemon = app.state.daemon
    daemon.prior_s = process_age_s() if router is None else time.monotonic() - router.order.sent_at
    daemon.takes_any_name = router is not None and router.order.takes_any_name
    server = _Server(uvicorn_config(app, settings, is_behind_router=router is not None), daemon, keys, router)
    daemon.on_ready, daemon.on_failure = on_ready, server.fail
    with server.while_listening as listening:
        if router is None:
            listening.enter_context(published_token(token.text if token else "", listeners, asdict(settings)))
        server.run(sockets=listeners)
    _end(daemon)


def leave_plugins_out() -> None:
    """Keeps pydantic from looking for plugins in the metadata of all installed packages, while the first request
    waits."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


class BegunLoad:
    """An `EngineLoader` that has begun before it is called, on a thread of its own."""

    def __init__(self, load: Callable[[Progress], Engine]) -> None:
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._engine: Future[Engine] = Future()
        threading.Thread(target=self._run, args=(load,), name="load", daemon=True).start()

    def _run(self, load: Callable[[Progress], Engine]) -> None:
        try:
            self._engine.set_result(load(self._lines.put))
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self._engine.set_exception(error)
        self._lines.put(None)

    def __call__(self, _settings: Settings, progress: Progress) -> Engine:
        while (line := self._lines.get()) is not None:
            progress(line)
        return self._engine.result()


def made_token(settings: Settings) -> OwnerToken | None:
    """Returns the token of the owner of a daemon, None if it has API keys."""
    return OwnerToken.drawn() if settings.api_keys is None else None


def announce_listening(listeners: list[socket.socket], settings: Settings, token: OwnerToken | None) -> str:
    """Logs the address of the daemon and of its chat page, and returns the first."""
    host, name, is_path = settings.host, listeners[0].getsockname(), listeners[0].family == socket.AF_UNIX
    address = f"unix:{name}" if is_path else f"http://{f'[{host}]' if ':' in host else host}:{name[1]}"
    log.info("listening on %s; /health says when the model is loaded", address)
    if not is_path:
        log.info("chat in a browser: %s", shown_link(address, token.text if token else "", "chat"))
    return address


def warn_without_keys(settings: Settings, address: str) -> None:
    from diskprefix.daemon.server.guards import is_loopback

    if settings.api_keys is None and not is_loopback(settings.host):
        log.warning("no API keys (--api-keys): everybody who reaches %s is served", address)


def uvicorn_config(app: ASGIApp, settings: Settings, *, is_behind_router: bool = False) -> uvicorn.Config:
    """Returns the limits and timeouts of uvicorn. Its access log is off: the daemon has its own."""
    from diskprefix.daemon.server.guards import is_loopback
    from diskprefix.daemon.server.limits import InFlight
    from diskprefix.daemon.server.process.connection import OTHER_CONNECTIONS, LimitedConnection
    from diskprefix.daemon.server.process.peer_user import user_of
    from diskprefix.daemon.server.process.places import Places

    # A failure after the status leaves the body without an end. Such a failure has been logged already.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing" not in str(record.msg))
    in_flight, files = InFlight(settings).max_requests, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = sys.maxsize if files == resource.RLIM_INFINITY else files
    # A router also has a connection to a worker for each request in flight.
    max_connections = min(in_flight + OTHER_CONNECTIONS, max(_MIN_CONNECTIONS, files - _OTHER_FILES - in_flight))
    spare = max(1, min(OTHER_CONNECTIONS, max_connections) // 2)
    places = Places(max_connections, most_new=spare, most_of_share=max_connections - spare)
    # On other addresses, a root process may forward the port of a container.
    user_of_client = partial(user_of, takes_root=os.geteuid() == 0 and is_loopback(settings.host))
    # Keys identify the caller, and a router has asked the kernel itself.
    peer_user = None if settings.api_keys is not None or is_behind_router else user_of_client
    return uvicorn.Config(
        app,
        http=partial(LimitedConnection, places, peer_user, is_behind_router=is_behind_router),  # type: ignore[arg-type]
        # asyncio accepts this many in one turn of the loop, before it reads requests. One above the limit is closed.
        backlog=min(_ACCEPTS, max(_MIN_CONNECTIONS, files - _OTHER_FILES - max_connections)),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(GRACE_S) + _SLOW_CLIENT_S,
    )


class ListeningServer(uvicorn.Server):
    """uvicorn's server, which accepts few connections in a turn of the loop. The others wait in the kernel."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            # asyncio has set the kernel's number to its own.
            listener.listen(BACKLOG)


class SignalledServer(ListeningServer):
    """A server with exit code 0 after SIGTERM."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._wake: Callable[[], object] = lambda: None
        self.while_listening = ExitStack()
        """Closed when the server stops listening. Requests may go on after that, while another program has the port."""

    async def main_loop(self) -> None:
        # uvicorn's own loop finds only at its next tick that a signal has come. Another model may wait for that.
        is_over = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, is_over.set)
        for number in itertools.count():
            if await self.on_tick(number):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.while_listening.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method raises the signal again in the end, which would kill the process.
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        if self.should_exit and sig == signal.SIGINT:
            self.force_end()
        self.should_exit = True
        # The loop may have ended.
        with suppress(RuntimeError):
            self._wake()

    def force_end(self) -> None:
        """Ends the process at once, after a second interrupt."""
        os._exit(_FORCED_EXIT_CODE)


class _Server(SignalledServer):
    """The server of a daemon, with time for the running request to finish."""

    def __init__(self, config: uvicorn.Config, daemon: Daemon, keys: ApiKeys | None, router: RouterLine | None) -> None:
        super().__init__(config)
        self._daemon, self._keys, self._router = daemon, keys, router

    def fail(self, error: DiskPrefixError) -> None:
        """Ends the process, which then raises `error`. A lost accelerator may prevent it from ending in order."""
        self.should_exit = True
        if self._router is not None:
            self._router.fail(error.message)
        if isinstance(error, DeviceLost):
            log.critical("[server] %s; the daemon ends, for its supervisor to start it again", error.message)
            _exit_after(_DEVICE_LOST_S, error.exit_code)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._check_memory)
        await super().startup(sockets)
        self._signs_of_life = asyncio.create_task(give_signs_of_life(self._daemon))

    def _reload(self) -> None:
        """Reads the keys again; requests go on. systemd gets RELOADING only after the first READY."""
        is_ready = self._daemon.serving is not None
        if is_ready:
            notify(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000, STATUS="reading the API keys again")
        if self._keys is not None:
            self._keys.read_again()
        if is_ready:
            notify(READY=1, STATUS=self._daemon.status_line)

    def _check_memory(self) -> None:
        if (serving := self._daemon.serving) is not None:
            # On a thread of its own: it waits for a lock.
            start_helper(serving.engine.check_memory, "kv-check")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        num_running = self._daemon.in_flight.num
        grace = f": {counted(num_running, 'request')} may take {GRACE_S:.0f} s to finish" if num_running else ""
        if self._daemon.failure is None:
            log.info("stopping%s", grace)
        notify(STOPPING=1, STATUS=f"stopping{grace}")
        self._daemon.hibernates = self._router is not None and self._router.is_unloaded
        drain = asyncio.create_task(self._daemon.drain(GRACE_S))
        await super().shutdown(sockets)
        await drain


async def give_signs_of_life(daemon: Daemon) -> None:
    """Notifies systemd, or the router, every few seconds. Returns at once if nobody listens."""
    limit_s = watchdog_s()
    signs = SignsOfLife(daemon, limit_s)
    while is_heard():
        signs.give()
        await asyncio.sleep(_PERIOD_S if limit_s is None else min(_PERIOD_S, limit_s / 4))


class SignsOfLife:
    """The notifications while the daemon runs.

    The watchdog gets a sign of life if the event loop calls `give`, no prompt is rendered for too long, and the engine
    is idle, has made progress since the last call, or is in a step that may take longer. A hanging step, event loop or
    chat template thus ends with a new process. Loading a model is no step: it may take as long as `TimeoutStartSec=`
    allows.
    """

    def __init__(self, daemon: Daemon, limit_s: float | None) -> None:
        self._daemon = daemon
        self._limit_s = limit_s
        self._status = ""
        self._is_reported = False

    def give(self) -> None:
        heartbeat = self._daemon.inbox.heartbeat
        has_stopped, hang = heartbeat.has_stopped(), self._daemon.hang
        if self._limit_s is not None:
            if not (has_stopped or hang):
                notify(WATCHDOG=1)
                self._is_reported = False
            elif (hang or heartbeat.working_s > self._limit_s / 2) and not self._is_reported:
                self._is_reported = True
                what = hang or f"the engine has hung in one step for {heartbeat.working_s:.0f} s"
                log.error("[server] %s; the watchdog's limit is %.0f s. The threads:", what, self._limit_s)
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        status = self._daemon.status_line
        if status != self._status and self._daemon.status in ("ok", "degraded"):
            self._status = status
            notify(STATUS=status)


def _end(daemon: Daemon) -> None:
    """Raises the error that ended the daemon. Exits at once if a thread, which cannot be stopped, still works."""
    if daemon.failure is not None:
        if _has_working_thread():
            _exit_after(_FAILED_S, daemon.failure.exit_code)
        raise daemon.failure
    log.info("stopped")
    leave(0, at_once=daemon.is_loading or daemon.threads.are_busy)


def leave(code: int, *, at_once: bool = False) -> None:
    """Exits at once if the code is not 0, or if a thread still works, such as a read from a bucket that does not
    answer: Python would wait for it. Otherwise returns, so that the process ends in order."""
    if code or at_once or _has_working_thread():
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


def _has_working_thread() -> bool:
    """Returns whether a thread still works that Python would wait for: a thread of a pool, or another one that is no
    daemon thread. Waits up to `_THREADS_END_S` for these threads to end."""
    deadline = time.monotonic() + _THREADS_END_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and (not thread.daemon or _OF_A_POOL.search(thread.name)):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return True
    return False


def _exit_after(seconds: float, code: int) -> None:
    def exit_now() -> None:
        time.sleep(seconds)
        os._exit(code)

    # Without this thread, the process ends in order, or its supervisor ends it.
    start_helper(exit_now, "exit")


def _announce(serving: Serving, stats: dict[str, Any], settings: Settings, address: str) -> None:
    name, cache, seconds = serving.model_name, _describe_cache(serving, stats, settings), serving.startup_s["total"]
    log.debug("[start] %s", ", ".join(f"{part} {part_s * 1000:.0f} ms" for part, part_s in serving.startup_s.items()))
    log.info("diskprefix ready on %s · %s · %s · %.1f s", address, name, cache, seconds)
    if stats["state"] == "ok" and stats["room_bytes"] < stats["budget_bytes"]:
        room, budget = format_size(stats["room_bytes"]), _budget_text(settings, stats["budget_bytes"])
        log.warning("[disk-cache] the disk has room for %s of saved prompts, less than %s", room, budget)
    notify(READY=1, STATUS=f"serving {name} on {address}, {cache}")


def _budget_text(settings: Settings, budget_bytes: int) -> str:
    """Names a budget with what has set it."""
    size = format_size(budget_bytes)
    if budget_bytes == settings.kv_cache_budget:
        return f"--kv-cache-budget {size}"
    if budget_bytes == settings.kv_cache_new_budget:
        return f"{size}, the budget of a new folder; --kv-cache-budget sets another"
    return f"{size}, the budget that an earlier start has set for this folder; --kv-cache-budget sets another"


def _describe_cache(serving: Serving, stats: dict[str, Any], settings: Settings) -> str:
    """Returns for example `cache auto (30 recent prompts) in /srv/kv (12 saved prompts, 210.0 MiB of 4.0 GiB)`."""
    if serving.scope.kind == "off":
        return "cache off"
    if stats["state"] == "unsupported":
        return "cache bypassed (layers that are not supported yet)"
    if stats["state"] == "degraded":
        return f"cache degraded ({stats['error']})"
    fill = f"{format_size(stats['used_bytes'])} of {format_size(stats['budget_bytes'])}"
    scope = str(serving.scope)
    if serving.scope.kind == "auto":
        scope = f"auto ({counted(serving.scope.value, 'recent prompt')})"
    return f"cache {scope} in {settings.kv_cache_dir} ({counted(stats['entries'], 'saved prompt')}, {fill})"


def process_age_s() -> float:
    """Returns the seconds since this process was started; 0 on systems without /proc."""
    try:
        # The name of the process, in parentheses, may contain blanks and parentheses.
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
