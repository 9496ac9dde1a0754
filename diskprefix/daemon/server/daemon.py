"""The engine that the routes use, from `loading` through `ok` to `stopping` or `failed`.

The model is loaded in a thread, so that `/health` answers from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from diskprefix.daemon import hooks
from diskprefix.daemon.catalogue.built_in_names import BuiltInNames
from diskprefix.daemon.chat.canonicalisers import Canonicalisers
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.template_cost import template_cost
from diskprefix.daemon.chat.template_date import TemplateClock
from diskprefix.daemon.compression.compression import open_compression
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.server.body import Bodies
from diskprefix.daemon.server.import_checks import ImportChecks
from diskprefix.daemon.server.limits import InFlight, Turns
from diskprefix.daemon.server.openings import compute_openings
from diskprefix.daemon.server.process.systemd import notify
from diskprefix.daemon.server.recent import BrokenLines, RecentRequests
from diskprefix.daemon.server.serving import CacheCounts, Serving
from diskprefix.daemon.server.threads import Threads
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.memo import PREFILL_SPEEDS
from diskprefix.runtime.fetch.named_model import path_of
from diskprefix.runtime.fetch.recommended_sampling import sampling_defaults, sampling_line
from diskprefix.runtime.files.gguf.gguf_file import forget_headers
from diskprefix.scope import parse_scope

if TYPE_CHECKING:
    from diskprefix.daemon.engine.loop import Engine
    from diskprefix.daemon.server.metrics import ServerMetrics

log = logging.getLogger("diskprefix")

Status: TypeAlias = Literal["loading", "ok", "degraded", "stopping", "failed"]
Progress: TypeAlias = Callable[[str], None]
EngineLoader: TypeAlias = "Callable[[Settings, Progress], Engine]"

_LONG_STEP_S = 10.0
"""Seconds after which the status line says how long a step has taken."""
_SETTLES_WITHIN_S = 60
"""Seconds after which the daemon does not wait for requests to end before it does what the first ones do not need."""


class Daemon:
    """Owns the engine. All public methods must be called on the event loop."""

    def __init__(self, settings: Settings, load_engine: EngineLoader) -> None:
        self.settings = settings
        self.sampling = sampling_defaults(settings, None)
        """The sampling of a request that does not set its own. Until the model's files are read, it is the one of a
        model whose files say nothing."""
        self._built_in_names = BuiltInNames(
            are_refused=settings.strict_model_names, models_here=partial(hooks.known_names, settings)
        )
        self.broken_lines = BrokenLines()
        self.recent = RecentRequests()
        self.serving: Serving | None = None
        self.failure: DiskPrefixError | None = None
        self.prior_s = 0.0
        """Age of the process in seconds when this object was made; part of the start-up times."""
        self.doing = "starting"
        """One line for `/health` and systemd: the current step of the load, then what is served."""
        self.takes_any_name = False
        """True if a router has chosen the model of each request by its name."""
        self.hibernates = False
        """True if state that is only in memory is saved at the end, because the model is unloaded."""
        self.on_ready: Callable[[Serving], None] = lambda _serving: None
        self.on_failure: Callable[[DiskPrefixError], None] = lambda _error: None
        """Called when the load fails, and when the accelerator is lost."""
        self._load_engine = load_engine
        self._made_at = time.perf_counter()
        self._stopping = False
        self._is_ending = threading.Event()
        self._is_decided = asyncio.Event()
        """Set when the daemon is ready, and when the load fails or the daemon stops."""
        self.inbox = Inbox(
            lambda inbox: self._engine.serve(inbox), on_fatal=lambda error: _call_soon(self._loop, self._failed, error)
        )
        """The requests for the engine, which does not exist while the model loads."""
        self._engine: Engine
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self.imports: ImportChecks | None = None
        self._background_tasks: list[asyncio.Task[None]] = []
        """What looks for work ahead from time to time."""
        self.threads = Threads(self._is_computing)
        self.in_flight = InFlight(settings)
        self.stored_turns = Turns(2)
        """For requests that read stored responses, which may be a hundred times as large as the body."""
        self.bodies = Bodies(self.threads, self._is_computing)

    @cached_property
    def metrics(self) -> ServerMetrics:
        """The metrics, whose library is imported when the first request has ended."""
        from diskprefix.daemon.server.metrics import ServerMetrics

        return ServerMetrics()

    def _is_computing(self) -> bool:
        return self.inbox.num_running > 0

    @property
    def status(self) -> Status:
        if self._stopping:
            return "stopping"
        if self.failure is not None:
            return "failed"
        if self.serving is None:
            return "loading"
        return "degraded" if self.hang or self.serving.engine.cache.health[0] == "degraded" else "ok"

    @property
    def hang(self) -> str:
        """Describes the work beside the engine that should have ended by now; empty if there is none."""
        if (overdue := self.threads.overdue) is None:
            return ""
        return f"a prompt has been prepared for {overdue.seconds:.0f} s; step: {overdue.step}"

    @property
    def status_line(self) -> str:
        """One line for people: the current step of the load, or what is served and how busy the engine is."""
        if self.serving is None:
            return self.doing
        inbox = self.inbox
        state, error = self.serving.engine.cache.health
        problem = f"; the cache is degraded ({error})" if state == "degraded" else ""
        step_s = inbox.heartbeat.working_s
        hangs = f"; one step has taken {step_s:.0f} s" if step_s >= _LONG_STEP_S else ""
        hangs += f"; {self.hang}" if self.hang else ""
        return f"{self.doing}; {inbox.num_running} running, {inbox.queue_depth} waiting{problem}{hangs}"

    @property
    def num_arriving(self) -> int:
        """Requests that are being read or rendered, or wait for the model."""
        return max(0, self.in_flight.num - self.inbox.queue_depth - self.inbox.num_running)

    @property
    def is_loading(self) -> bool:
        """Returns whether the loading thread still runs. It cannot be stopped."""
        return self._thread is not None and self._thread.is_alive()

    def require_serving(self) -> Serving:
        """Returns the loaded model. Raises `NotReady` while the daemon loads or stops, and after a failure."""
        if self._stopping:
            raise NotReady("the daemon is stopping")
        if self.failure is not None:
            what = "the model could not be loaded" if self.serving is None else "the daemon cannot go on and ends"
            # The message of an unforeseen error may hold anything, so callers do not see it.
            is_unforeseen = type(self.failure) is DiskPrefixError
            logged = f"{what}: its log has the reason"
            raise NotReady(logged if is_unforeseen else f"{what}: {self.failure.message}", for_all=logged)
        if self.serving is None:
            waits = "/health tells when it is ready"
            raise NotReady(
                f"the model is still loading ({self.doing}); {waits}", for_all=f"the model is still loading; {waits}"
            )
        return self.serving

    async def ready(self) -> Serving:
        """Returns the loaded model, and waits for it while it loads.

        Raises `NotReady` when the load fails or the daemon stops.
        """
        await self._is_decided.wait()
        return self.require_serving()

    def start_loading(self) -> None:
        """Starts the thread that loads; `on_ready` or `on_failure` is called on the running event loop."""
        self._loop = loop = asyncio.get_running_loop()
        line = f"loading {self.settings.model or 'the embedded model'}"
        log.info("%s", line)
        self._progressed(line)
        self._thread = threading.Thread(target=self._load, args=(loop,), name="load", daemon=True)
        self._thread.start()

    async def drain(self, grace_s: float) -> None:
        """Refuses new and waiting requests, gives running ones `grace_s` seconds, then cancels them."""
        self._stopping = True
        self._is_ending.set()
        self._is_decided.set()
        if self.serving is not None:
            await self.threads.run("stopping", self.serving.inbox.stop, grace_s)

    async def close(self) -> None:
        """Drains without grace, then flushes and closes the cache."""
        await self.drain(0)
        for task in self._background_tasks:
            task.cancel()
        serving, self.serving = self.serving, None
        if serving is not None:
            notify(STATUS="stopping: writing what is not on disk yet")
            if self.hibernates:
                await self.threads.run("stopping", serving.engine.save_idle)
            if (speed := serving.engine.cache.cost_model.prefill_s_per_token) is not None:
                await self.threads.run("stopping", PREFILL_SPEEDS.put, serving.model_name, speed)
            if not await self.threads.run("stopping", serving.engine.close):
                log.warning("[disk-cache] not everything could be written in time; what was written is intact")
        self.threads.close()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        def report(line: str) -> None:
            log.info("%s", line)
            loop.call_soon_threadsafe(self._progressed, line)

        try:
            serving = self._serve(report)
            if not self.takes_any_name:
                self._built_in_names.prepare(serving.engine.origin, serving.model_name)
            _call_soon(loop, self._loaded, serving)
            # Prompts that are wholly stored are answered while the weights are read.
            serving.engine.finish_load()
            log.debug("[start] all weights are in memory after %.1f s", self._elapsed_s())
            self._settle(serving)
        except DiskPrefixError as error:
            _call_soon(loop, self._failed, error)
        except BaseException as error:
            # Every failure of this thread must be reported, also a panic of a library, which is no `Exception`.
            log.exception("loading failed unexpectedly")
            _call_soon(loop, self._failed, DiskPrefixError(f"loading failed unexpectedly: {error}"))

    def _serve(self, progress: Progress) -> Serving:
        scope = parse_scope(self.settings.disk_prefix_cache, param="--disk-prefix-cache")
        canonicalisers = Canonicalisers.parse(self.settings.canonicalise, param="--canonicalise")
        server_s = self._elapsed_s()
        path = self._path()
        self.sampling = sampling_defaults(self.settings, path)
        engine = self._load_engine(self.settings, progress)
        if engine.origin != path:
            # It was fetched, or is newer than what was here.
            self.sampling = sampling_defaults(self.settings, engine.origin)
            forget_headers()
        log.info("replies, where a request says nothing: %s", sampling_line(self.sampling.record))
        try:
            compress = open_compression(self.settings, engine.model_positions, engine.max_positions)
        except SettingsError:
            engine.close()
            raise
        renderer = PromptRenderer(
            engine.tokenizer,
            vocab_size=engine.runtime.vocab_size,
            max_positions=engine.max_positions,
            positions_limit=engine.positions_limit,
            processor=engine.processor,
            canonicalisers=canonicalisers,
            compress=compress,
            end_ids=engine.end_ids,
            # Without states a prompt is restored at any token, so the position of the question does not matter.
            finds_question=bool(engine.cache.layout.states),
            template_variables=self.settings.template_variables,
            clock=TemplateClock(self.settings.template_day),
        )
        renderer.warm_up()
        engine.cache.on_forget.append(partial(renderer.known_parts.forget, engine.cache.is_gone))
        self._engine = engine
        self.inbox.start()
        seconds = {"server": server_s} | engine.startup_timings
        return Serving(
            engine=engine,
            inbox=self.inbox,
            renderer=renderer,
            scope=scope,
            model_name=self.settings.served_model_name or engine.model_name,
            counts=CacheCounts(self.threads, engine.cache.stats),
            built_in_names=self._built_in_names,
            takes_any_name=self.takes_any_name,
            fingerprint=f"fp_{str(engine.identity.get('root', ''))[:16]}",
            loaded_at=int(time.time()),
            startup_s={name: round(s, 3) for name, s in (seconds | {"total": self._elapsed_s()}).items()},
        )

    def _settle(self, serving: Serving) -> None:
        """Does what the first requests do not need, once there is none, or after a while. Other threads wait for
        it."""
        for _ in range(_SETTLES_WITHIN_S):
            if self._is_ending.wait(1.0):
                return
            if not self.in_flight.num:
                break
        try:
            serving.engine.tokenizer.make_whole()
        except Exception:
            # The first request that needs it tries again, and gets the error.
            log.exception("[model] the whole vocabulary could not be made")
        _log_template_cost(serving.renderer)

    def _path(self) -> Path | None:
        """Returns the model's files, None if they are not here, or if the load will say what is wrong with them."""
        with suppress(DiskPrefixError, OSError):
            return path_of(self.settings.model)
        return None

    def _elapsed_s(self) -> float:
        return self.prior_s + time.perf_counter() - self._made_at

    def _progressed(self, line: str) -> None:
        self.doing = line
        notify(STATUS=line)

    def _loaded(self, serving: Serving) -> None:
        self.serving = serving
        self._is_decided.set()
        if not self._stopping:
            self.on_ready(serving)
            if self.settings.ahead_s:
                self.imports = ImportChecks(serving)
                looks = (self.imports.run(self.threads), compute_openings(serving, self.threads))
                self._background_tasks += map(asyncio.create_task, looks)

    def _failed(self, error: DiskPrefixError) -> None:
        self.failure = error
        self._is_decided.set()
        self.on_failure(error)


def _log_template_cost(renderer: PromptRenderer) -> None:
    """Logs once what the chat template costs the cache. The model is served already."""
    if renderer.template_source:
        try:
            cost = template_cost(renderer)
        except Exception:
            # A line of the log must not keep the model from being served.
            log.exception("[template] its cost could not be measured")
            return
        if cost.advice:
            log.warning("the chat template costs computing: %s; %s", cost.line, cost.advice)
        else:
            log.debug("[template] %s", cost.line)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *values: Any) -> None:
    """Calls `call` on the event loop, unless that has ended meanwhile."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *values)
