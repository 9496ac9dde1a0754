"""Traces for a simulation: requests in order of time, with the tokens of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.tokens import TokenIds, as_token_ids
from diskprefix.values import Prompt, Scope


class TraceRequest(Struct, frozen=True, eq=False):
    """One request.

    `when` is in seconds since the trace began. `reply` has the tokens computed after the prompt, empty if unknown.
    `scope` is the scope that the request set, or None. For `group`, `save` and `ttl_s` see `CacheOptions`. Requests of
    different tenants share nothing. `is_trusted`: the tenant has no salt, as always for the tenant "". `remembered`:
    the prompt counts as recent for later requests, which is False if the request failed or was cancelled. `is_ahead`:
    nobody sent this prompt; the daemon computes it from `when` on until the next request comes. `model` is empty if the
    daemon has one model.
    """

    when: float
    prompt: Prompt
    reply: TokenIds = field(default_factory=lambda: as_token_ids([]))
    scope: Scope | None = None
    group: bytes = b""
    tenant: str = ""
    is_trusted: bool = False
    save: bool = True
    ttl_s: float | None = None
    remembered: bool = True
    is_ahead: bool = False
    model: str = ""


class RecordedDaemon(Struct, frozen=True, kw_only=True):
    """The daemon of a recording: its settings, the size of its model's state (None if unknown), and the speed of
    prefill (0 if unknown)."""

    block_size: int
    min_tokens: int
    geometry: Geometry | None = None
    tokens_per_s: float = 0.0


class Trace(Struct, frozen=True, eq=False):
    """A named sequence of requests, which can be iterated any number of times.

    Each call of `replay` begins from the start, and may create the tokens of prompts on the fly. Keep no request longer
    than needed: a trace may be larger than memory. `daemon` is the recorded daemon, None for other traces. `models` has
    the daemon of each model by its name, if there are several.
    """

    name: str
    num_requests: int
    replay: Callable[[], Iterator[TraceRequest]]
    daemon: RecordedDaemon | None = None
    models: Mapping[str, RecordedDaemon] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, requests: Sequence[TraceRequest]) -> Trace:
        """Returns a trace of requests in memory."""
        return cls(name, len(requests), lambda: iter(requests))

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.replay()

    def by_model(self) -> list[Trace]:
        """Returns a trace for each model, or only this one if there are not several."""
        return [self._of_model(model, daemon) for model, daemon in self.models.items()] or [self]

    def _of_model(self, model: str, daemon: RecordedDaemon) -> Trace:
        def replay() -> Iterator[TraceRequest]:
            return (request for request in self.replay() if request.model == model)

        return Trace(f"{self.name}: {model}", sum(1 for _ in replay()), replay, daemon)
