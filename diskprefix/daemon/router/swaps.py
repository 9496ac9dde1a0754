"""Decides which models are in memory: which is loaded next, and which is unloaded for it. No processes, no clock.

A waiting model is loaded when it fits beside the others. If it does not fit, unpinned models are unloaded, the one that
has been idle for longest first. A model that answers is never unloaded. While another model waits for its memory, it
takes new requests for `PATIENCE_S` seconds only; later requests wait for a second slot of the same model, which is
loaded after the first is gone. Shares take turns: the next model is that of the share with the fewest loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from diskprefix.errors import ModelError
from diskprefix.units import format_size

PATIENCE_S = 15.0
"""How long a model that answers takes new requests while another model waits for its memory."""
_MAX_SHARES = 256
"""The most shares whose last request is remembered for a model: those that keep the model longest."""


class Phase(Enum):
    """The life of a slot."""

    WAITING, LOADING, READY, LEAVING = range(4)


@dataclass(eq=False, kw_only=True)
class Slot:
    """A model in memory, or one that waits for memory."""

    model: str
    needed_bytes: int
    waits_since: float
    is_pinned: bool = False
    idle_unload_s: float | None = None
    """The time after which the idle model is unloaded, None for never."""
    keep_until: dict[Hashable, float] = field(default_factory=dict)
    """Until when the last request of each share keeps the idle model. None is the owner's order to load it."""
    shares: set[Hashable] = field(default_factory=set)
    """The shares of the requests for which it is loaded."""
    phase: Phase = Phase.WAITING
    num_active: int = 0
    """Requests in progress, with those that wait for the load."""
    used_at: float = 0.0
    is_ordered: bool = False
    """Whether it is loaded although no request waits for it."""
    is_closed: bool = False
    """Whether the owner's order to unload it waits until it is idle. It takes no more requests."""
    yields: bool = False
    """Whether it takes no more requests because others wait for its memory."""

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.READY and not self.num_active

    @property
    def takes_requests(self) -> bool:
        return not (self.is_closed or self.yields or self.phase is Phase.LEAVING)

    @property
    def max_idle_s(self) -> float:
        return math.inf if self.idle_unload_s is None else self.idle_unload_s

    def expires_at(self) -> float:
        """Returns when the idle model is unloaded, infinite for never."""
        return max(self.keep_until.values(), default=self.used_at + self.max_idle_s)

    def record_use(
        self, share: Hashable, now: float, keep_alive_s: float | None = None, *, overrides: bool = False
    ) -> None:
        """Records the end of a request. It keeps the idle model for `keep_alive_s` (may be infinite), but not longer
        than `idle_unload_s`. One that `overrides` has no such limit, and replaces what other shares asked for."""
        self.used_at = now
        if keep_alive_s is None or self.is_pinned:
            keep_alive_s = self.max_idle_s
        elif overrides:
            self.keep_until.clear()
        else:
            keep_alive_s = min(keep_alive_s, self.max_idle_s)
        # There may be any number of addresses.
        longest = sorted(self.keep_until, key=self.keep_until.__getitem__)[-_MAX_SHARES:]
        self.keep_until = {other: self.keep_until[other] for other in longest if self.keep_until[other] > now}
        self.keep_until[share] = now + keep_alive_s


class NeverFits(ModelError):
    """The model has no room even if everything that may be unloaded is unloaded."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "model_too_large"


S = TypeVar("S", bound=Slot)


class Swaps(Generic[S]):
    """Decides about `slots`, to which others add and from which they remove. Models in memory take at most
    `limit_bytes`, or any size if that is None."""

    def __init__(self, slots: list[S], limit_bytes: int | None) -> None:
        self.slots, self.limit_bytes = slots, limit_bytes
        self._num_loads: Counter[Hashable] = Counter()
        """The loads of each share since a model last had to wait."""

    @property
    def used_bytes(self) -> int:
        return sum(slot.needed_bytes for slot in self.slots if slot.phase is not Phase.WAITING)

    def find(self, model: str) -> S | None:
        """Returns the slot in which a model takes requests."""
        return next((slot for slot in self.slots if slot.model == model and slot.takes_requests), None)

    def require_room(self, slot: Slot, lines: Sequence[str]) -> None:
        """Raises `NeverFits` for a model that can never fit. `lines` is the table of what the model needs."""
        pinned = [other for other in self.slots if other.is_pinned and other.phase is not Phase.LEAVING]
        pinned_bytes = sum(other.needed_bytes for other in pinned)
        if self.limit_bytes is not None and slot.needed_bytes + pinned_bytes > self.limit_bytes:
            others = "".join(
                f"; {other.model} is pinned and takes {format_size(other.needed_bytes)}" for other in pinned
            )
            table = ", ".join(" ".join(line.split()) for line in lines)
            raise NeverFits(
                f"{slot.model} does not fit: {format_size(slot.needed_bytes)} of memory needed ({table}), and all "
                f"models together may take {format_size(self.limit_bytes)}{others}"
            )

    def begin_request(self, slot: Slot, share: Hashable) -> None:
        slot.num_active += 1
        if slot.phase is Phase.WAITING:
            slot.shares.add(share)

    def set_ready(self, slot: Slot, now: float) -> None:
        slot.phase, slot.used_at = Phase.READY, now
        if slot.is_ordered:
            slot.record_use(None, now)

    def decide(self, now: float) -> tuple[list[S], list[S]]:
        """Returns what to load and what to unload, and sets the phases as if it were done: LOADING and LEAVING."""
        unload = [slot for slot in self.slots if slot.phase is Phase.WAITING and self._is_obsolete(slot)]
        for slot in unload:
            slot.phase = Phase.LEAVING
        yielded = {slot for slot in self.slots if slot.yields}
        waiting_models = {slot.model for slot in self.slots if slot.phase is Phase.WAITING}
        for slot in self.slots:
            slot.yields = slot.phase is not Phase.WAITING and slot.model in waiting_models
        idle = [slot for slot in self.slots if slot.is_idle]
        unload += [slot for slot in idle if not slot.takes_requests or slot.expires_at() <= now]
        for slot in unload:
            slot.phase = Phase.LEAVING
        load: list[S] = []
        waiting = self._in_turn()
        for slot in waiting:
            if any(other.model == slot.model and other.phase is not Phase.WAITING for other in self.slots):
                # There may be no room for the model twice.
                continue
            used = self.used_bytes + (0 if self.limit_bytes is None else slot.needed_bytes)
            if self.limit_bytes is None or used <= self.limit_bytes:
                slot.phase = Phase.LOADING
                self._num_loads.update(slot.shares)
                load.append(slot)
                continue
            unload += self._make_room(slot, used - self.limit_bytes, now, yielded)
            # If smaller models went first, a large one might wait for ever.
            break
        if len(load) == len(waiting):
            self._num_loads.clear()
        for slot in unload:
            slot.phase = Phase.LEAVING
        return load, unload

    def due_at(self, now: float) -> float | None:
        """Returns when to decide again even if nothing has happened, None for never."""
        times = [slot.expires_at() for slot in self.slots if slot.is_idle]
        times += [slot.waits_since + PATIENCE_S for slot in self.slots if slot.phase is Phase.WAITING]
        return min((at for at in times if now < at < math.inf), default=None)

    def _is_obsolete(self, waiting: Slot) -> bool:
        """Returns whether nobody waits for a slot any more, or it can never fit beside the models pinned now."""
        pinned = [slot for slot in self.slots if slot.is_pinned and slot.phase in (Phase.LOADING, Phase.READY)]
        needed = waiting.needed_bytes + sum(slot.needed_bytes for slot in pinned if slot.model != waiting.model)
        return not (waiting.num_active or waiting.is_ordered) or needed > (self.limit_bytes or needed)

    def _in_turn(self) -> list[S]:
        """Returns the waiting slots, the next first."""
        waiting = [slot for slot in self.slots if slot.phase is Phase.WAITING]

        def turn(slot: Slot) -> tuple[int, float]:
            return min((self._num_loads[share] for share in slot.shares), default=0), slot.waits_since

        return sorted(waiting, key=turn)

    def _make_room(self, slot: Slot, missing: int, now: float, yielded: Collection[S]) -> list[S]:
        """Returns what to unload for a slot that lacks `missing` bytes. If it has waited for too long, models that
        answer yield, first those that `yielded` before."""
        missing -= sum(other.needed_bytes for other in self.slots if other.phase is Phase.LEAVING)
        unload: list[S] = []
        idle = [other for other in self.slots if other.is_idle and not other.is_pinned]
        for other in sorted(idle, key=lambda other: other.used_at):
            if missing > 0:
                unload.append(other)
                missing -= other.needed_bytes
        if missing <= 0:
            return unload
        if now < slot.waits_since + PATIENCE_S:
            # Unloading idle models helps nobody if it does not make enough room.
            return []
        busy = [other for other in self.slots if other.phase in (Phase.LOADING, Phase.READY) and other.num_active]
        for other in sorted(busy, key=lambda other: (other.takes_requests and other not in yielded, other.used_at)):
            if missing > 0 and not other.is_pinned:
                other.yields = True
                missing -= other.needed_bytes
        return unload
