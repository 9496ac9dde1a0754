"""The swaps of a recorded workload of several models under a memory limit: the front's own decisions, with a simulated
clock. A model that is unloaded gives its memory back at once."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from diskprefix.errors import DiskPrefixError
from diskprefix.extras.front.swaps import Phase, Place, Swaps
from diskprefix.extras.simulate.trace import Trace, TraceRequest


@dataclass(kw_only=True)
class SwapTotals:
    """The fate of a workload under a memory limit.

    `loads` counts them by model, `swaps` the models that were unloaded for another one. `waits_s` has the waits of the
    requests that came for a model that was not loaded; `waited_tokens` are the tokens of their prompts, and
    `waited_restored` those that were restored. `refused` requests found too many waiting, or are for a model that never
    fits.
    """

    trace: str
    memory_limit: int
    requests: int = 0
    refused: int = 0
    swaps: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    restored_tokens: int = 0
    waited_tokens: int = 0
    waited_restored: int = 0

    def wait_s(self, part: float) -> float:
        """Returns the wait that this part of the waiting requests did not exceed."""
        return sorted(self.waits_s)[max(0, math.ceil(part * len(self.waits_s)) - 1)] if self.waits_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        figures = dict(vars(self))
        waits = {"waited": len(figures.pop("waits_s"))}
        return figures | waits | {f"wait_{name}_s": round(self.wait_s(part), 3) for name, part in _PARTS.items()}


_PARTS = {"median": 0.5, "p95": 0.95, "max": 1.0}


class SwapReplay:
    """A front without processes. `restored` returns the tokens that are restored of a prompt."""

    def __init__(self, trace: Trace, memory_limit: int, restored: Callable[[TraceRequest], int]) -> None:
        self.totals = SwapTotals(trace=trace.name, memory_limit=memory_limit)
        self._trace, self._restored = trace, restored
        self._swaps = Swaps(memory_limit)
        self._now, self._due_at = 0.0, -1.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: defaultdict[Place, list[TraceRequest]] = defaultdict(list)

    def run(self) -> SwapTotals:
        """Replays the trace."""
        for request in self._trace:
            self._pass_time(request.when)
            self._arrive(request)
            self._settle()
        self._pass_time(math.inf)
        return self.totals

    def _pass_time(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._settle()
        self._now = until

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _arrive(self, request: TraceRequest) -> None:
        totals, model = self.totals, self._trace.models[request.model]
        totals.requests += 1
        place = self._swaps.of(request.model)
        if place is None:
            place = Place(
                model=request.model,
                needed_bytes=model.memory_bytes,
                waits_since=self._now,
                callers={request.caller},
            )
            try:
                self._swaps.require_room(place, ())
            except DiskPrefixError:
                totals.refused += 1
                return
            self._swaps.add(place)
        self._swaps.begin_request(place, request.caller)
        num_tokens, restored = len(request.prompt.token_ids), self._restored(request)
        totals.prompt_tokens += num_tokens
        totals.restored_tokens += restored
        if place.phase is Phase.READY:
            self._begin(request, place)
        else:
            self._waiting[place].append(request)
            totals.waited_tokens += num_tokens
            totals.waited_restored += restored

    def _begin(self, request: TraceRequest, place: Place) -> None:
        self._at(self._now + request.took_s, lambda: self._swaps.end_request(place, self._now))

    def _ready(self, place: Place) -> None:
        place.phase, place.used_at = Phase.READY, self._now
        for request in self._waiting.pop(place, ()):
            self.totals.waits_s.append(self._now - request.when)
            self._begin(request, place)

    def _settle(self) -> None:
        """Does what the front would do now."""
        while (decision := self._swaps.decide(self._now)).unload or decision.load:
            for place in decision.unload:
                self._swaps.remove(place)
                self.totals.swaps += 1
            for place in decision.load:
                self.totals.loads[place.model] += 1
                self._at(self._now + self._trace.models[place.model].load_s, partial(self._ready, place))
        due_at = self._swaps.due_at(self._now)
        if due_at is not None and due_at != self._due_at:
            self._due_at = due_at
            self._at(due_at, lambda: None)
