"""The front process: it holds the sockets and the keys, and passes each request on to the worker of its model.

It imports neither torch, transformers nor pydantic. `swaps.py` decides which models are loaded, `workers.py` has their
processes, `passing.py` passes requests on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import Response

from diskprefix.api.error_forms import HttpError, one_line
from diskprefix.errors import DeviceLost, DiskPrefixError, InvalidRequest, ModelNotFound, NotReady, SettingsError
from diskprefix.extras.catalogue.catalogue import listed
from diskprefix.extras.front import passing
from diskprefix.extras.front.front_messages import Named, read_named, refusal
from diskprefix.extras.front.listing import Listing
from diskprefix.extras.front.nursery import LOAD, PREPARE, UNLOAD
from diskprefix.extras.front.own_routes import OwnRoutes
from diskprefix.extras.front.passing import Incoming, NotTaken, WorkerGone
from diskprefix.extras.front.swaps import Phase, Place, Swaps
from diskprefix.extras.front.workers import MOST_UNLOAD_S, Deaths, ModelWorker, Workers, described
from diskprefix.extras.ollama.ollama_models import keep_alive_seconds
from diskprefix.model.load.memory import available_ram_bytes, trim_heap
from diskprefix.model.load.proposals import none_known
from diskprefix.printable import shown
from diskprefix.server.guards import BrowserGuard, caller_of
from diskprefix.server.keys import ApiKeys, Caller, OwnerToken
from diskprefix.server.limits import LARGE_BYTES, BodyPace, InFlight
from diskprefix.server.process.process import process_age_s
from diskprefix.server.process.systemd import notify, watchdog_s
from diskprefix.settings import Settings
from diskprefix.units import counted, format_size
from diskprefix.values import Tenant

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from diskprefix.extras.catalogue.catalogue import KnownModel

log = logging.getLogger("diskprefix")

_SHOW = "/api/show"
_ATTEMPTS = 3
"""Workers that may die before they take a request, until it fails."""
_LEAST_PAUSE_S = 1.0
_TRIM_S = 5.0
"""Seconds after the last large body until its memory goes back to the system."""
_PATIENCE_S = 30.0
"""Time for the end of a worker that has not taken a request."""


@dataclass
class Troubles:
    """The failures of a model in a row. Until `until` it is not started again."""

    deaths: Deaths = field(default_factory=Deaths)
    until: float = 0.0
    reason: str = ""


class Front:
    """ASGI application. With one model, requests are passed on as they come."""

    def __init__(
        self,
        settings: Settings,
        listing: Listing,
        workers: Workers,
        access: ApiKeys | OwnerToken,
        end: Callable[[], None],
    ) -> None:
        """`end` stops the server."""
        self.exit_code = 0
        self._settings, self._listing, self._workers, self._access, self._end = settings, listing, workers, access, end
        self._guard = BrowserGuard(self, settings.host, has_keys=settings.api_keys is not None)
        self._swaps = Swaps(None if listing.only else settings.memory_limit)
        self._by_place: dict[Place, ModelWorker] = {}
        self._routes = OwnRoutes(listing, self._swaps, self._by_place, self._ordered)
        self._troubles: dict[str, Troubles] = {}
        self._in_flight, self._pace = InFlight(settings), BodyPace()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.TimerHandle | None = None
        self._is_stopping = self._has_served = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        incoming = Incoming(receive)
        try:
            response = await self._answer(scope, incoming, send)
        except DiskPrefixError as error:
            response = refusal(scope, error, sees_all=incoming.sees_all)
        except asyncio.CancelledError:
            # At the end of a stop, uvicorn cancels the requests that are left. It would log a traceback for each.
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

    # The life of the process.

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        self._workers.on_change = self._changed
        self._workers.attach()
        if (limit_s := watchdog_s()) is not None:
            self._in_background(self._watch(limit_s))
        self._in_background(self._begin())
        if not self._listing.only:
            notify(READY=1, STATUS=f"serving {', '.join(known.name for known in self._listing.models())}")
            if self._settings.standby:
                self._workers.keep_spare(self._settings, knows_model=False)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in self._tasks:
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _begin(self) -> None:
        """Tells what is there, loads what is kept, then learns what the other models need."""
        models = self._listing.models()
        if not self._listing.only:
            await self._listing.tell()
            number, age_s = counted(len(models), "model"), process_age_s()
            log.info("diskprefix ready on %s · %s · %.1f s", self._workers.address, number, age_s)
        for known in sorted(models, key=lambda known: not self._listing.is_kept(known)):
            await (self._start_kept(known) if self._listing.is_kept(known) else self._listing.learn(known))

    def stop(self) -> None:
        """Has all workers end in order."""
        self._is_stopping = True
        notify(STOPPING=1, STATUS="stopping")
        for worker in self._workers.all.values():
            worker.tell(UNLOAD)

    def read_again(self) -> None:
        """Reads the keys and the list of models again, and has the workers read the keys."""
        notify(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000, STATUS="reading keys and models again")
        if isinstance(self._access, ApiKeys):
            self._access.read_again()
        for worker in self._workers.all.values():
            # It may have read the keys, and not yet listen.
            worker.has_old_keys = worker.ready_at is None
            worker.kill(signal.SIGHUP)
        self._in_background(self._read_models())

    def check_memory(self) -> None:
        """Has all workers check the pages of their models."""
        for worker in self._workers.all.values():
            worker.kill(signal.SIGUSR2)

    async def _read_models(self) -> None:
        try:
            await self._listing.read_again()
        except SettingsError as error:
            log.error("[front] %s; the models stay as they were", error.message)
        else:
            await self._listing.tell()
        notify(READY=1, STATUS="serving")
        for known in self._listing.models():
            await self._listing.learn(known)

    def _in_background(self, what: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := self._loop.create_task(what))
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, limit_s: float) -> None:
        """Gives the watchdog signs of life, and watches those of workers."""
        while True:
            notify(WATCHDOG=1)
            self._workers.guard(self._loop.time(), limit_s)
            await asyncio.sleep(limit_s / 4)

    async def _start_kept(self, known: KnownModel) -> None:
        await self._listing.learn(known)
        if self._is_stopping or self._swaps.of(known.name) is not None:
            return
        try:
            self._start(known, None)
            self._settle()
        except (DiskPrefixError, OSError) as error:
            delay_s = self._trouble(known.name, str(error), 0.0, _LEAST_PAUSE_S)
            log.error("[front] %s is not loaded: %s", known.name, one_line(str(error)))
            self._keep_later(delay_s, known.name)

    def _keep_later(self, delay_s: float, name: str) -> None:
        """Starts a model again after a while, if it is kept then, as the list says then."""

        def start() -> None:
            known = next((known for known in self._listing.models() if known.name == name), None)
            if known is not None and self._listing.is_kept(known):
                self._in_background(self._start_kept(known))

        self._loop.call_later(delay_s, start)

    def _start(self, known: KnownModel, caller: Tenant | None) -> ModelWorker:
        """Starts the worker of a model, which waits for its turn. Raises `DiskPrefixError` and `OSError`."""
        settings = replace(known.settings, host=self._settings.host, port=self._settings.port)
        needed, lines = 0, list[str]()
        if not self._listing.only:
            if self._settings.memory_limit is None and not self._swaps.used_bytes:
                self._swaps.limit_bytes = available_ram_bytes()
            needed, lines, settings = self._listing.sized(known, settings, self._swaps.limit_bytes or 0)
        place = Place(
            model=known.name,
            needed_bytes=needed,
            waits_since=self._loop.time(),
            is_pinned=self._listing.is_kept(known),
            idle_unload_s=self._listing.idle_unload_s(known),
            callers=set() if caller is None else {caller},
            is_ordered=caller is None or self._listing.is_kept(known),
        )
        self._swaps.require_room(place, lines)
        worker = self._workers.start(settings, place)
        self._swaps.add(place)
        self._by_place[place] = worker
        return worker

    def _changed(self, worker: ModelWorker) -> None:
        """A worker has said something, or has ended."""
        place = worker.place
        if worker.code is not None:
            self._ended(worker, worker.code)
        elif worker.ready_at is not None and place.phase is Phase.LOADING:
            self._swaps.loaded(place, self._loop.time())
            self._has_served = True
            if worker.has_old_keys:
                worker.kill(signal.SIGHUP)
            self._troubles.setdefault(place.model, Troubles()).reason = ""
            if self._listing.only:
                notify(READY=1)
                if self._settings.standby:
                    self._workers.keep_spare(self._settings, knows_model=True)
        if self._listing.only and not self._is_stopping and worker.status:
            notify(STATUS=worker.status)
        self._settle()

    def _ended(self, worker: ModelWorker, code: int) -> None:
        place = worker.place
        was_asked = place.phase is Phase.LEAVING or self._is_stopping
        self._swaps.remove(place)
        del self._by_place[place]
        if was_asked:
            log.info("[front] %s is unloaded", place.model)
            if worker.ready_at is None and not place.is_closed:
                # It had no room. If it is kept, it may have some later.
                self._keep_later(_LEAST_PAUSE_S, place.model)
            return
        if self._listing.only and not self._has_served and code > 0 and code != DeviceLost.exit_code:
            # Another start would meet it, too. From now on no request starts one.
            self.exit_code, self._is_stopping = code, True
            self._end()
            return
        served_s = 0.0 if worker.ready_at is None else self._loop.time() - worker.ready_at
        reason = worker.failure or f"its process {described(code)}"
        has_failed = worker.failure and worker.ready_at is None
        delay_s = self._trouble(place.model, reason, served_s, _LEAST_PAUSE_S if has_failed else 0.0)
        in_a_row = self._troubles[place.model].deaths.in_a_row
        next_one = "another is started" if place.is_pinned else "a request may start another"
        when = f" in {delay_s:.0f} s: it died {in_a_row} times in a row" if delay_s else ""
        log.error("[front] the worker of %s %s; %s%s", place.model, described(code), next_one, when)
        self._keep_later(delay_s, place.model)

    def _trouble(self, model: str, reason: str, served_s: float, least_s: float) -> float:
        """Notes a failure. Returns the seconds until the next start, at least `least_s`."""
        trouble = self._troubles.setdefault(model, Troubles())
        delay_s = max(least_s, trouble.deaths.delay_s(served_s))
        trouble.until, trouble.reason = self._loop.time() + delay_s, reason
        return delay_s

    def _settle(self) -> None:
        """Has models loaded and unloaded, as it is their turn."""
        if self._is_stopping:
            return
        now = self._loop.time()
        decision = self._swaps.decide(now)
        for place in decision.unload:
            log.info("[front] %s is being unloaded; it takes %s", place.model, format_size(place.needed_bytes))
            worker = self._by_place[place]
            worker.tell(UNLOAD)
            self._loop.call_later(MOST_UNLOAD_S, worker.kill, signal.SIGKILL)
            if worker.ready_at is None:
                # No model was loaded: there is nothing to save.
                worker.kill(signal.SIGKILL)
        for place in decision.load:
            self._by_place[place].tell(LOAD)
        if decision.next_one is not None and any(one.phase is Phase.LEAVING for one in self._swaps.places):
            self._by_place[decision.next_one].tell(PREPARE)
        if self._timer is not None:
            self._timer.cancel()
        due_at = self._swaps.due_at(now)
        self._timer = None if due_at is None else self._loop.call_at(due_at, self._settle)

    # Requests.

    async def _answer(self, scope: Scope, incoming: Incoming, send: Send) -> Response | None:
        """Returns the front's own answer, None if a worker has answered. Raises `DiskPrefixError` for a request that
        is refused."""
        headers = Headers(scope=scope)
        if (refusal := self._guard.refusal(scope, headers)) is not None:
            raise HttpError(403, refusal)
        # Without a valid key, nothing waits and nothing is loaded.
        caller = caller_of(self._access, scope)
        incoming.sees_all = caller.sees_all
        if self._is_stopping:
            raise NotReady("the daemon is stopping")
        if (response := await self._routes.response(scope, caller)) is not None:
            return response
        with self._in_flight.counted(scope, caller.account) as incoming.place:
            known, keep_alive_s = await self._chosen(scope, incoming)
            if scope["path"] == _SHOW and self._listing.only is None:
                return self._routes.shown(known.name, caller)
            if not incoming.has_left:
                await self._pass_on(known, scope, incoming, send, caller, keep_alive_s)
        return None

    async def _pass_on(
        self,
        known: KnownModel,
        scope: Scope,
        incoming: Incoming,
        send: Send,
        caller: Caller,
        keep_alive_s: float | None,
    ) -> None:
        for _ in range(_ATTEMPTS):
            # What others read from time to time, or watch all day, neither loads a model nor keeps it in memory.
            is_use = scope["method"] == "POST" and scope["path"] != _SHOW
            loads = is_use or scope["path"].startswith(("/v1/models", "/api/tags", _SHOW))
            worker = await self._worker_for(known, caller.account, loads=loads)
            if loads:
                self._swaps.begin_request(worker.place, caller.account)
                self._settle()
            try:
                await passing.pass_on(worker.path, scope, incoming, send)
                return
            except NotTaken:
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.ended.wait(), _PATIENCE_S)
                if incoming.has_left:
                    return
            except WorkerGone as gone:
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.ended.wait(), _LEAST_PAUSE_S)
                log.error("[front] %s %s was not answered: the worker has died", scope["method"], shown(scope["path"]))
                if gone.has_begun:
                    # Without an end, it is a failure of the connection.
                    return
                if worker.place.phase is Phase.LEAVING and worker.ready_at is None:
                    raise NotReady(f"{known.name} has no room beside what was loaded meanwhile; try again") from None
                raise NotReady(f"the process of the model {known.name} has died; try again") from None
            finally:
                if loads:
                    worker.place.num_active -= 1
                    if is_use:
                        worker.place.keep(caller.tenant, self._loop.time(), keep_alive_s, decides=caller.is_owner)
                    self._settle()
        raise NotReady(f"the processes of the model {known.name} die; its log has the reason")

    async def _worker_for(self, known: KnownModel, caller: Tenant, *, loads: bool = True) -> ModelWorker:
        """Returns the worker of a model, or a new one if the request `loads` the model. Raises `DiskPrefixError` if
        there can be none now."""
        if self._swaps.of(known.name) is None:
            if not loads and not self._listing.is_kept(known):
                raise NotReady(f"{known.name} is not loaded; a request for a reply loads it")
            await self._listing.learn(known)
        if self._is_stopping:
            raise NotReady("the daemon is stopping")
        place = self._swaps.of(known.name)
        if place is not None:
            return self._by_place[place]
        trouble = self._troubles.get(known.name)
        if trouble is not None and (left_s := trouble.until - self._loop.time()) > 0:
            again = f"it is started again in {math.ceil(left_s)} s"
            raise NotReady(
                f"{known.name}: {trouble.reason}; {again}",
                for_all=f"{known.name} cannot be served now, and the daemon's log has the reason; {again}",
            )
        try:
            return self._start(known, caller)
        except OSError as error:
            raise NotReady(f"no process can be started: {error.strerror}") from error

    async def _chosen(self, scope: Scope, incoming: Incoming) -> tuple[KnownModel, float | None]:
        """Returns the model of a request, and for how long it says to keep it. Raises `DiskPrefixError`."""
        if self._listing.only is not None and self._settings.idle_unload == 0:
            return self._listing.only, None
        named = await self._named(scope, incoming) if scope["method"] == "POST" else Named()
        keep_alive_s = None if named.keep_alive is None else keep_alive_seconds(named.keep_alive)
        if self._listing.only is not None:
            return self._listing.only, keep_alive_s
        query = parse_qs(scope["query_string"].decode("latin-1"))
        name = named.model or next(iter(query.get("model", [])), None)
        if name is not None:
            return self._listing.find(name), keep_alive_s
        if (loaded := self._loaded_one()) is not None:
            return self._listing.find(loaded), keep_alive_s
        if not (names := [known.name for known in self._listing.models()]):
            raise ModelNotFound(none_known(), param="model")
        where = "model" if scope["method"] == "POST" else "?model="
        said = f"is required: this daemon has several models ({listed(names)}); say one in {where}"
        raise InvalidRequest.at("model", said)

    def _loaded_one(self) -> str | None:
        """Returns the only model that is loaded, None if there are several or none."""
        loaded = [place.model for place in self._swaps.places if place.takes_requests]
        return loaded[0] if len(loaded) == 1 else None

    async def _named(self, scope: Scope, incoming: Incoming) -> Named:
        """Reads the body. Raises `HttpError` and `InvalidRequest`."""
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, f"content-encoding {shown(encoding)} is not supported; send the body uncompressed")
        body = await incoming.read(headers, self._pace)
        if incoming.has_left or not body:
            return Named()
        # Other clients wait while the event loop reads megabytes.
        return read_named(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(read_named, body)

    async def _ordered(self, name: str, what: str, caller: Caller) -> dict[str, str]:
        """Loads or unloads a model. Returns what is under way."""
        known = self._listing.only or self._listing.find(name)
        place = self._swaps.of(known.name)
        if what == "load":
            if place is None:
                place = (await self._worker_for(known, caller.account)).place
                place.is_ordered = True
            elif place.phase is Phase.READY:
                place.keep(None, self._loop.time())
            self._settle()
            return {"model": known.name, "status": "loaded" if place.phase is Phase.READY else "loading"}
        if place is None:
            return {"model": known.name, "status": "unloaded"}
        place.is_closed, place.is_ordered = True, False
        self._settle()
        return {"model": known.name, "status": "unloading"}
