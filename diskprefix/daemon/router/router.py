"""The router: it holds the sockets and the keys, and passes each request on to the worker of its model.

It imports neither torch, transformers nor pydantic.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response

from diskprefix.daemon.api.error_forms import HttpError, no_such_route, one_line, tidied_path
from diskprefix.daemon.catalogue.adviser import none_known
from diskprefix.daemon.catalogue.catalogue import listed
from diskprefix.daemon.ollama.ollama_models import keep_alive_seconds
from diskprefix.daemon.router import passing
from diskprefix.daemon.router.listing import Listing
from diskprefix.daemon.router.own_routes import OwnRoutes
from diskprefix.daemon.router.passing import Incoming, NotTaken, WorkerGone
from diskprefix.daemon.router.router_messages import Routing, read_routing, refusal
from diskprefix.daemon.router.swaps import Phase, Slot, Swaps
from diskprefix.daemon.router.workers import MAX_UNLOAD_S, ModelWorker, Workers, exit_text
from diskprefix.daemon.server.guards import BrowserGuard, caller_of, share_of
from diskprefix.daemon.server.keys import ApiKeys, OwnerToken
from diskprefix.daemon.server.limits import LARGE_BYTES, BodyPace, InFlight
from diskprefix.daemon.server.process.process import process_age_s
from diskprefix.daemon.server.process.router_line import LOAD, UNLOAD
from diskprefix.daemon.server.process.systemd import notify, watchdog_s
from diskprefix.daemon.server.share import Share, conversation_of
from diskprefix.daemon.settings import Settings
from diskprefix.errors import DeviceLost, DiskPrefixError, InvalidRequest, ModelNotFound, NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.runtime.memory import available_ram_bytes, trim_heap
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from diskprefix.daemon.catalogue.catalogue import KnownModel

log = logging.getLogger("diskprefix")

_SHOW = "/api/show"
_ATTEMPTS = 3
"""The number of workers that may die before they take a request. Then the request fails."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_SETTLED_S = 60.0
"""After this many seconds of service, a failure counts as the first in a row."""
_TRIM_S = 5.0
"""How long after the last large body its memory is given back to the system."""
_SPARE_PAUSE_S = 2.0
_SPARE_FREE_BYTES = 2 << 30
"""A spare process is started if this much memory is free."""
_WORKER_END_S = 30.0
"""The time for a worker that has not taken a request to end."""


class Failures(Struct):
    """The failures of a model in a row. It is not started again before `until`."""

    in_a_row: int = 0
    until: float = 0.0
    reason: str = ""

    def record(self, reason: str, now: float, *, served_s: float = 0.0, min_s: float = 0.0) -> float:
        """Records a failure after `served_s` of service. Returns the seconds until the next start: 0, 1, 2, 4, …, at
        most 60 and at least `min_s`."""
        self.in_a_row = 1 if served_s >= _SETTLED_S else self.in_a_row + 1
        pause_s = 0.0 if self.in_a_row == 1 else min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        pause_s = max(min_s, pause_s)
        self.until, self.reason = now + pause_s, reason
        return pause_s


class RouterApp:
    """The ASGI application of the router."""

    def __init__(
        self,
        settings: Settings,
        listing: Listing,
        workers: Workers,
        access: ApiKeys | OwnerToken,
        stop_server: Callable[[], None],
    ) -> None:
        self.exit_code = 0
        self._settings, self._listing, self._workers = settings, listing, workers
        self._access, self._stop_server = access, stop_server
        self._guard = BrowserGuard(
            self, settings.host, has_keys=settings.api_keys is not None, origins=settings.origins
        )
        self._swaps = Swaps(workers.all, None if listing.only else settings.memory_limit)
        self._routes = OwnRoutes(listing, self._swaps, self._load_or_unload, access.page_token)
        self._failures: defaultdict[str, Failures] = defaultdict(Failures)
        self._in_flight = InFlight(settings)
        self._pace = BodyPace(lambda: any(slot.num_active for slot in self._swaps.slots))
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.TimerHandle | None = None
        self._sparing: asyncio.TimerHandle | None = None
        self._is_stopping = self._has_served = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        incoming = Incoming(receive)
        try:
            response = await self._answer(scope, incoming, send)
        except DiskPrefixError as error:
            response = refusal(scope, error, sees_all=incoming.sees_all)
        except asyncio.CancelledError:
            # uvicorn cancels the last requests at a stop, and would log a traceback for each.
            if not self._is_stopping:
                raise
            stopping = NotReady("the daemon is stopping")
            response = None if incoming.is_answered else refusal(scope, stopping, sees_all=incoming.sees_all)
        finally:
            incoming.drop()
            if incoming.is_large:
                if self._trimming is not None:
                    self._trimming.cancel()
                self._trimming = self._loop.call_later(_TRIM_S, trim_heap)
        if response is not None:
            await response(scope, receive, send)

    # The process.

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self._workers.on_change = self._on_change
        if (limit_s := watchdog_s()) is not None:
            self._in_background(self._watch(limit_s))
        self._in_background(self._start_models())
        if not self._listing.only:
            notify(READY=1, STATUS=f"serving {', '.join(known.name for known in self._listing.models())}")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in self._tasks:
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start_models(self) -> None:
        """Logs the models, loads those that stay loaded, and reads what the others need."""
        models = self._listing.models()
        if not self._listing.only:
            await self._listing.log_models()
            number, age_s = counted(len(models), "model"), process_age_s()
            log.info("diskprefix ready on %s · %s · %.1f s", self._workers.address, number, age_s)
        for known in sorted(models, key=lambda known: not self._listing.stays_loaded(known)):
            if self._listing.stays_loaded(known):
                await self._keep_loaded(known.name)
            else:
                await self._listing.read_needs(known)

    def stop(self) -> None:
        """Tells all workers to end in order."""
        self._is_stopping = True
        notify(STOPPING=1, STATUS="stopping")
        for worker in self._workers.all:
            worker.tell(UNLOAD)

    def read_again(self) -> None:
        """Reads the keys and the list of models again. The workers read the keys again, too."""
        notify(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000, STATUS="reading keys and models again")
        if isinstance(self._access, ApiKeys):
            self._access.read_again()
        for worker in self._workers.all:
            # A worker that loads may have read the old keys, and the signal may end it.
            worker.has_old_keys = worker.ready_at is None
            if not worker.has_old_keys:
                worker.kill(signal.SIGHUP)
        self._in_background(self._read_models())

    def check_memory(self) -> None:
        """Tells all workers to check the pages of their models."""
        for worker in self._workers.all:
            if worker.ready_at is not None:
                worker.kill(signal.SIGUSR2)

    async def _read_models(self) -> None:
        try:
            await self._listing.read_again()
        except SettingsError as error:
            log.error("[router] %s; the models stay as they were", error.message)
        else:
            await self._listing.log_models()
        notify(READY=1, STATUS="serving")
        for known in self._listing.models():
            await self._listing.read_needs(known)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := self._loop.create_task(coroutine))
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, limit_s: float) -> None:
        """Sends signs of life to systemd's watchdog, and kills workers that send none."""
        while True:
            notify(WATCHDOG=1)
            self._workers.kill_hung(self._loop.time(), limit_s)
            await asyncio.sleep(limit_s / 4)

    async def _keep_loaded(self, name: str, pause_s: float = 0.0) -> None:
        """Starts a model after a pause, if it should then stay loaded and is not loaded."""
        await asyncio.sleep(pause_s)
        known = next((known for known in self._listing.models() if known.name == name), None)
        if known is None or not self._listing.stays_loaded(known):
            return
        await self._listing.read_needs(known)
        if self._is_stopping or self._swaps.find(name) is not None:
            return
        try:
            self._start(known, None)
            self._apply_decision()
        except (DiskPrefixError, OSError) as error:
            log.error("[router] %s is not loaded: %s", name, one_line(str(error)))
            pause_s = self._failures[name].record(str(error), self._loop.time(), min_s=_MIN_PAUSE_S)
            self._in_background(self._keep_loaded(name, pause_s))

    def _start(self, known: KnownModel, share: Share | None) -> ModelWorker:
        """Starts the worker of a model. It waits for its turn to load. Raises `DiskPrefixError` and `OSError`."""
        settings = replace(known.settings, host=self._settings.host, port=self._settings.port)
        needed, lines = 0, list[str]()
        if not self._listing.only:
            if self._settings.memory_limit is None and not self._swaps.used_bytes:
                self._swaps.limit_bytes = available_ram_bytes()
            needed, lines, settings = self._listing.fit(known, settings, self._swaps.limit_bytes or 0)
        worker = ModelWorker(
            model=known.name,
            needed_bytes=needed,
            waits_since=self._loop.time(),
            is_pinned=self._listing.stays_loaded(known),
            idle_unload_s=self._listing.idle_unload_s(known),
            shares=set() if share is None else {share},
            is_ordered=share is None or self._listing.stays_loaded(known),
        )
        self._swaps.require_room(worker, lines)
        self._workers.start(worker, settings)
        if self._sparing is not None:
            self._sparing.cancel()
        self._sparing = self._loop.call_later(_SPARE_PAUSE_S, self._keep_spare)
        return worker

    def _keep_spare(self) -> None:
        """Starts a spare process for the next worker, once nothing computes and if there is memory for it."""
        if any(slot.num_active or slot.phase is not Phase.READY for slot in self._swaps.slots):
            self._sparing = self._loop.call_later(_SPARE_PAUSE_S, self._keep_spare)
        elif not self._is_stopping and available_ram_bytes() > _SPARE_FREE_BYTES:
            # Without it, the next worker starts a little later.
            with suppress(OSError):
                self._workers.keep_spare()

    def _on_change(self, worker: ModelWorker) -> None:
        """Acts on a message of a worker, or on its end."""
        if worker.code is not None:
            self._on_end(worker, worker.code)
        elif worker.ready_at is not None and worker.phase is Phase.LOADING:
            self._swaps.set_ready(worker, self._loop.time())
            self._has_served = True
            if worker.has_old_keys:
                worker.kill(signal.SIGHUP)
            self._failures[worker.model].reason = ""
            if self._listing.only:
                notify(READY=1)
        if self._listing.only and not self._is_stopping and worker.status:
            notify(STATUS=worker.status)
        self._apply_decision()

    def _on_end(self, worker: ModelWorker, code: int) -> None:
        if self._is_stopping or worker.phase is Phase.LEAVING:
            log.info("[router] %s is unloaded", worker.model)
            if worker.ready_at is None and not worker.is_closed:
                # It had no room. A model that stays loaded may have room later.
                self._in_background(self._keep_loaded(worker.model, _MIN_PAUSE_S))
            return
        if self._listing.only and not self._has_served and code > 0 and code != DeviceLost.exit_code:
            # Another start would fail, too.
            self.exit_code, self._is_stopping = code, True
            self._stop_server()
            return
        now, failures = self._loop.time(), self._failures[worker.model]
        pause_s = failures.record(
            worker.failure or f"its process {exit_text(code)}",
            now,
            served_s=0.0 if worker.ready_at is None else now - worker.ready_at,
            min_s=_MIN_PAUSE_S if worker.failure and worker.ready_at is None else 0.0,
        )
        then = "another is started" if worker.is_pinned else "a request may start another"
        when = f" in {pause_s:.0f} s: it died {failures.in_a_row} times in a row" if pause_s else ""
        log.error("[router] the worker of %s %s; %s%s", worker.model, exit_text(code), then, when)
        self._in_background(self._keep_loaded(worker.model, pause_s))

    def _apply_decision(self) -> None:
        """Loads and unloads the models whose turn it is."""
        if self._is_stopping:
            return
        now = self._loop.time()
        load, unload = self._swaps.decide(now)
        for worker in unload:
            log.info("[router] %s is being unloaded; it takes %s", worker.model, format_size(worker.needed_bytes))
            worker.tell(UNLOAD)
            self._loop.call_later(MAX_UNLOAD_S, worker.kill, signal.SIGKILL)
            if worker.ready_at is None:
                # It has nothing to save.
                worker.kill(signal.SIGKILL)
        for worker in load:
            worker.tell(LOAD)
        if self._timer is not None:
            self._timer.cancel()
        due_at = self._swaps.due_at(now)
        self._timer = None if due_at is None else self._loop.call_at(due_at, self._apply_decision)

    # Requests.

    async def _answer(self, scope: Scope, incoming: Incoming, send: Send) -> Response | None:
        """Returns the router's own answer, or None if a worker has answered. Raises `DiskPrefixError` to refuse."""
        headers = Headers(scope=scope)
        if (refusal := self._guard.refusal(scope, headers)) is not None:
            raise HttpError(403, refusal)
        caller = caller_of(self._access, scope)
        incoming.sees_all = caller.sees_all
        if self._is_stopping:
            raise NotReady("the daemon is stopping")
        if (response := await self._routes.response(scope, caller)) is not None:
            return response
        if (meant := tidied_path(path := scope["path"])) != path:
            # Refused here: the body may name no model, and then no worker could refuse it.
            raise HttpError(404, no_such_route(scope["method"], path, meant))
        share = share_of(scope, caller)
        with self._in_flight.counted(scope, share, conversation_of(scope)) as incoming.counted:
            known, keep_alive_s = await self._choose_model(scope, incoming)
            if scope["path"] == _SHOW and self._listing.only is None:
                return self._routes.shown(known.name, caller)
            if not incoming.has_disconnected:
                keep = partial(Slot.record_use, keep_alive_s=keep_alive_s, overrides=caller.is_owner)
                await self._pass_on(known, scope, incoming, send, share, keep)
        return None

    async def _pass_on(
        self,
        known: KnownModel,
        scope: Scope,
        incoming: Incoming,
        send: Send,
        share: Share,
        record_use: Callable[[Slot, Share, float], None],
    ) -> None:
        """`record_use` records the end of a request in a worker's slot."""
        for _ in range(_ATTEMPTS):
            # Programs that poll, such as the dashboard, neither load a model nor keep it in memory.
            is_use = scope["method"] == "POST" and scope["path"] != _SHOW
            loads = is_use or scope["path"].startswith(("/v1/models", "/api/tags", _SHOW))
            worker = await self._worker_for(known, share, loads=loads)
            if loads:
                self._swaps.begin_request(worker, share)
                self._apply_decision()
            try:
                await passing.pass_on(worker.path, scope, incoming, send)
                return
            except NotTaken:
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.ended.wait(), _WORKER_END_S)
                if incoming.has_disconnected:
                    return
            except WorkerGone as gone:
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.ended.wait(), _MIN_PAUSE_S)
                log.error("[router] %s %s was not answered: the worker has died", scope["method"], shown(scope["path"]))
                if gone.has_begun:
                    # The client sees that the connection ends before the response.
                    return
                if worker.phase is Phase.LEAVING and worker.ready_at is None:
                    raise NotReady(f"{known.name} has no room beside what was loaded meanwhile; try again") from None
                raise NotReady(f"the process of the model {known.name} has died; try again") from None
            finally:
                if loads:
                    worker.num_active -= 1
                    if is_use:
                        record_use(worker, share, self._loop.time())
                    self._apply_decision()
        raise NotReady(f"the processes of the model {known.name} die; its log has the reason")

    async def _worker_for(self, known: KnownModel, share: Share, *, loads: bool = True) -> ModelWorker:
        """Returns the worker of a model, or a new one if the request `loads` the model. Raises `DiskPrefixError`."""
        if self._swaps.find(known.name) is None:
            if not loads and not self._listing.stays_loaded(known):
                raise NotReady(f"{known.name} is not loaded; a request for a reply loads it")
            await self._listing.read_needs(known)
        if self._is_stopping:
            raise NotReady("the daemon is stopping")
        if (worker := self._swaps.find(known.name)) is not None:
            return worker
        failures = self._failures[known.name]
        if (left_s := failures.until - self._loop.time()) > 0:
            again = f"it is started again in {math.ceil(left_s)} s"
            raise NotReady(
                f"{known.name}: {failures.reason}; {again}",
                for_all=f"{known.name} cannot be served now, and the daemon's log has the reason; {again}",
            )
        try:
            return self._start(known, share)
        except OSError as error:
            raise NotReady(f"no process can be started: {error.strerror}") from error

    async def _choose_model(self, scope: Scope, incoming: Incoming) -> tuple[KnownModel, float | None]:
        """Returns the model of a request, and its `keep_alive` in seconds. Raises `DiskPrefixError`."""
        if self._listing.only is not None and self._settings.idle_unload == 0:
            return self._listing.only, None
        routing = await self._read_routing(scope, incoming) if scope["method"] == "POST" else Routing()
        keep_alive_s = None if routing.keep_alive in (None, "") else keep_alive_seconds(routing.keep_alive)
        if self._listing.only is not None:
            return self._listing.only, keep_alive_s
        query = parse_qs(scope["query_string"].decode("latin-1"))
        name = routing.model or next(iter(query.get("model", [])), None)
        loaded = [slot.model for slot in self._swaps.slots if slot.takes_requests]
        if name is None and len(loaded) == 1:
            [name] = loaded
        if name is not None:
            return self._listing.find(name), keep_alive_s
        if not (models := self._listing.models()):
            raise ModelNotFound(none_known(), param="model")
        if len(models) == 1:
            return models[0], keep_alive_s
        names = [known.name for known in models]
        where = "model" if scope["method"] == "POST" else "?model="
        raise InvalidRequest.at(
            "model", f"is required: this daemon has several models ({listed(names)}); say one in {where}"
        )

    async def _read_routing(self, scope: Scope, incoming: Incoming) -> Routing:
        """Reads the body. Raises `HttpError` and `InvalidRequest`."""
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, f"content-encoding {shown(encoding)} is not supported; send the body uncompressed")
        body = await incoming.read(headers, self._pace)
        if incoming.has_disconnected or not body:
            return Routing()
        # The event loop would hold up other clients while it reads megabytes.
        return read_routing(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(read_routing, body)

    async def _load_or_unload(self, name: str, action: str, share: Share) -> dict[str, str]:
        """Loads or unloads a model. Returns the body of the answer."""
        known = self._listing.only or self._listing.find(name)
        slot = self._swaps.find(known.name)
        if action == "load":
            if slot is None:
                slot = await self._worker_for(known, share)
                slot.is_ordered = True
            elif slot.phase is Phase.READY:
                slot.record_use(None, self._loop.time())
            self._apply_decision()
            return {"model": known.name, "status": "loaded" if slot.phase is Phase.READY else "loading"}
        if slot is None:
            return {"model": known.name, "status": "unloaded"}
        slot.is_closed, slot.is_ordered = True, False
        self._apply_decision()
        return {"model": known.name, "status": "unloading"}
