"""Decides which models are in memory: which is loaded next, and which is unloaded for it. No processes, no clock.

A model that waits is loaded when it fits beside the others. If it does not, models that have been idle for longest go,
if they are not pinned. A model that answers is never unloaded. But while others wait for its memory, it takes new
requests for `PATIENCE_S` seconds only: later ones wait for their turn with it, in a second place, which is not loaded
before the first is gone. Callers take turns: the next model is one for which somebody waits who had the fewest loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from diskprefix.errors import ModelError
from diskprefix.units import format_size

PATIENCE_S = 15.0
"""The time for which a model that answers takes new requests while another one waits for its memory."""
_MOST_CALLERS = 256
"""Callers whose last request is remembered for a model: of more, those who keep it longest."""


class Phase(Enum):
    """The life of a place in memory."""

    WAITING, LOADING, READY, LEAVING = range(4)


@dataclass(eq=False, kw_only=True)
class Place:
    """One model in memory, or one that waits for memory."""

    model: str
    needed_bytes: int
    waits_since: float
    is_pinned: bool = False
    idle_unload_s: float | None = None
    """The time after which the idle model is unloaded, None for never."""
    kept_until: dict[Hashable, float] = field(default_factory=dict)
    """The time until which each caller's last request keeps the idle model. None stands for an order."""
    callers: set[Hashable] = field(default_factory=set)
    """Those for whom it is loaded."""
    phase: Phase = Phase.WAITING
    num_active: int = 0
    """Requests that it has, also those that wait until it is loaded."""
    used_at: float = 0.0
    is_ordered: bool = False
    """It is loaded although no request waits for it."""
    is_closed: bool = False
    """By order it takes no more requests: it will be unloaded when it is idle."""
    yields: bool = False
    """It takes no more requests because others wait for its memory."""

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.READY and not self.num_active

    @property
    def takes_requests(self) -> bool:
        return not (self.is_closed or self.yields or self.phase is Phase.LEAVING)

    @property
    def most_idle_s(self) -> float:
        return math.inf if self.idle_unload_s is None else self.idle_unload_s

    def expires_at(self) -> float:
        """Returns when the idle model is unloaded, infinite for never."""
        return max(self.kept_until.values(), default=self.used_at + self.most_idle_s)

    def keep(self, caller: Hashable, now: float, keep_alive_s: float | None = None, *, decides: bool = False) -> None:
        """Notes the end of a request that used the model. The model stays as long as the last request of any caller
        keeps it: for `keep_alive_s` (infinite for ever) or `idle_unload_s`, whichever is less. A caller who `decides`
        says it for all, without that limit."""
        self.used_at = now
        if keep_alive_s is None or self.is_pinned:
            keep_alive_s = self.most_idle_s
        elif decides:
            self.kept_until.clear()
        else:
            keep_alive_s = min(keep_alive_s, self.most_idle_s)
        # Without keys there may be any number of callers.
        longest = sorted(self.kept_until, key=self.kept_until.__getitem__)[-_MOST_CALLERS:]
        self.kept_until = {other: self.kept_until[other] for other in longest if self.kept_until[other] > now}
        self.kept_until[caller] = now + keep_alive_s


@dataclass(frozen=True)
class Decision:
    """The next steps. Of the models in `load`, one whose memory is not free yet may be prepared: `next_one`."""

    load: Sequence[Place] = ()
    unload: Sequence[Place] = ()
    next_one: Place | None = None


class NeverFits(ModelError):
    """A model that has no room even if all that may be unloaded is."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "model_too_large"


class Swaps:
    """The places in memory, within `limit_bytes`; without a limit (None), all models are loaded at once."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.places: list[Place] = []
        self._num_loads: Counter[Hashable] = Counter()
        """By caller, while models wait."""

    @property
    def used_bytes(self) -> int:
        return sum(place.needed_bytes for place in self.places if place.phase is not Phase.WAITING)

    def of(self, model: str) -> Place | None:
        """Returns the place of a model that takes requests."""
        return next((one for one in self.places if one.model == model and one.takes_requests), None)

    def require_room(self, place: Place, lines: Sequence[str]) -> None:
        """Raises `NeverFits` for a model that can never fit. `lines` is the table of what the model needs."""
        pinned = [one for one in self.places if one.is_pinned and one.phase is not Phase.LEAVING]
        held = sum(one.needed_bytes for one in pinned)
        if self.limit_bytes is not None and place.needed_bytes + held > self.limit_bytes:
            others = "".join(f"; {one.model} is pinned and takes {format_size(one.needed_bytes)}" for one in pinned)
            table = ", ".join(" ".join(line.split()) for line in lines)
            raise NeverFits(
                f"{place.model} does not fit: {format_size(place.needed_bytes)} of memory needed ({table}), and all "
                f"models together may take {format_size(self.limit_bytes)}{others}"
            )

    def add(self, place: Place) -> None:
        self.places.append(place)

    def remove(self, place: Place) -> None:
        """Ends a place: its process is gone, and its memory free."""
        self.places.remove(place)

    def begin_request(self, place: Place, caller: Hashable) -> None:
        place.num_active += 1
        if place.phase is Phase.WAITING:
            place.callers.add(caller)

    def loaded(self, place: Place, now: float) -> None:
        place.phase, place.used_at = Phase.READY, now
        if place.is_ordered:
            place.keep(None, now)

    def decide(self, now: float) -> Decision:
        """Returns what to do, and takes it for done: places to load are LOADING, those to unload LEAVING."""
        unload = [one for one in self.places if one.phase is Phase.WAITING and self._is_in_vain(one)]
        for place in unload:
            place.phase = Phase.LEAVING
        yielded = {one for one in self.places if one.yields}
        again = {one.model for one in self.places if one.phase is Phase.WAITING}
        for place in self.places:
            place.yields = place.phase is not Phase.WAITING and place.model in again
        unload += [one for one in self.places if one.is_idle and (not one.takes_requests or one.expires_at() <= now)]
        for place in unload:
            place.phase = Phase.LEAVING
        load: list[Place] = []
        next_one = None
        for place in self._in_turn():
            if any(one.model == place.model and one.phase is not Phase.WAITING for one in self.places):
                # There may be no room for two of them.
                next_one = next_one or place
                continue
            used = self.used_bytes + (0 if self.limit_bytes is None else place.needed_bytes)
            if self.limit_bytes is None or used <= self.limit_bytes:
                place.phase = Phase.LOADING
                self._num_loads.update(place.callers)
                load.append(place)
                continue
            unload += self._make_room(place, used - self.limit_bytes, now, unload, yielded)
            next_one = next_one or place
            # Nobody passes it: a large model would wait for ever.
            break
        if next_one is None:
            self._num_loads.clear()
        for place in unload:
            place.phase = Phase.LEAVING
        return Decision(load, unload, next_one)

    def due_at(self, now: float) -> float | None:
        """Returns when the next decision may be another one although nothing has happened."""
        times = [one.expires_at() for one in self.places if one.is_idle]
        times += [one.waits_since + PATIENCE_S for one in self.places if one.phase is Phase.WAITING]
        return min((at for at in times if now < at < math.inf), default=None)

    def _is_in_vain(self, waiting: Place) -> bool:
        """Returns whether those who waited for a place have left, or it can never fit beside what is pinned now."""
        held = [one for one in self.places if one.is_pinned and one.phase in (Phase.LOADING, Phase.READY)]
        needed = waiting.needed_bytes + sum(one.needed_bytes for one in held if one.model != waiting.model)
        return not (waiting.num_active or waiting.is_ordered) or needed > (self.limit_bytes or needed)

    def _in_turn(self) -> list[Place]:
        """Returns the waiting places, the next first."""
        waiting = [one for one in self.places if one.phase is Phase.WAITING]

        def turn(place: Place) -> tuple[int, float]:
            return min((self._num_loads[caller] for caller in place.callers), default=0), place.waits_since

        return sorted(waiting, key=turn)

    def _idle(self, besides: Collection[Place] = ()) -> list[Place]:
        """Returns the places that may be unloaded, the one that was idle for longest first."""
        idle = [one for one in self.places if one.is_idle and not one.is_pinned and one not in besides]
        return sorted(idle, key=lambda one: one.used_at)

    def _make_room(
        self, place: Place, missing: int, now: float, leaving: Collection[Place], yielded: Collection[Place]
    ) -> list[Place]:
        """Returns what to unload for a place that misses so many bytes. Models that answer yield, those that `yielded`
        before first, if it waits for too long."""
        missing -= sum(one.needed_bytes for one in self.places if one.phase is Phase.LEAVING or one in leaving)
        unload: list[Place] = []
        for idle in self._idle(leaving):
            if missing <= 0:
                return unload
            unload.append(idle)
            missing -= idle.needed_bytes
        if missing <= 0 or now < place.waits_since + PATIENCE_S:
            # Idle ones that are not enough stay, unless the others have to go too.
            return unload if missing <= 0 else []
        busy = [one for one in self.places if one.phase in (Phase.LOADING, Phase.READY) and one.num_active]
        for one in sorted(busy, key=lambda one: (one.takes_requests and one not in yielded, one.used_at)):
            if missing > 0 and not one.is_pinned:
                one.yields = True
                missing -= one.needed_bytes
        return unload
