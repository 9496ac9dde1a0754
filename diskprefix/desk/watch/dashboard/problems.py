"""Finds the problems of a daemon, with advice, in its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.daemon.server.recent import EndedRequest

Level: TypeAlias = Literal["error", "warning", "hint"]

_FULL = 0.9
"""The share of the budget above which the store counts as full."""
_MAX_LOST, _MAX_FAILURES = 3, 5
_MIN_LOST_TOKENS = 1024
"""The fewest recomputed tokens for which there is a hint."""
_ORDER: tuple[Level, ...] = ("error", "warning", "hint")

_COUNTED: tuple[tuple[str, Level, str, str], ...] = (
    ("quarantined", "error", "damaged records were set aside", "run `diskprefix verify`, and look at the disk"),
    ("errors", "warning", "errors of the cache became misses", "read the daemon's log"),
    ("dropped", "warning", "prompts were not saved whole", "raise --kv-cache-budget, or use a faster disk"),
    ("unaffordable", "hint", "prompts were left out, or a part of them", "raise --kv-cache-write-budget"),
)
"""Counts of the cache. Each is a problem if it is above 0."""

_ADVICE = {
    400: "change the request as the message says",
    401: "give the client one of the keys in the file of --api-keys",
    403: "use the key named admin, or call the daemon by a name of its own",
    404: "look at /v1/models for what is served, and at /docs for the routes",
    408: "look at the client's network: the body came too slowly",
    413: "send less at once",
    415: "send the body as application/json",
    429: "send fewer requests at once with this key, or raise --max-queue",
    503: "try again later; raise --max-queue or --max-sequences if this is common",
}
_OTHER_ADVICE = "read the daemon's log of that time"
_STREAM_ADVICE = "the reply failed after it had begun; the daemon's log of that time says why"


class Problem(Struct, frozen=True):
    """A problem for the daemon's owner. `todo` is advice. `last_at` is the end of the last failed request."""

    level: Level
    what: str
    todo: str
    count: int = 1
    last_at: float | None = None


def problems(
    cache: dict[str, Any] | None, lost: Sequence[dict[str, Any]], ended: Iterable[EndedRequest]
) -> list[Problem]:
    """Returns the problems, the worst first, from the counts of the cache, from the rows of `advised` and from ended
    requests."""
    unsorted = [*_cache_problems(cache or {}), *_lost_problems(lost), *_request_problems(ended)]
    return sorted(unsorted, key=lambda problem: (_ORDER.index(problem.level), -(problem.last_at or 0.0)))


def _cache_problems(cache: dict[str, Any]) -> Iterator[Problem]:
    match cache.get("state"):
        case "degraded":
            todo = "the daemon tries again by itself; `diskprefix verify` checks the folder"
            yield Problem("error", f"prompts are not saved, or not all: {cache['error']}", todo)
        case "unsupported":
            what = "this model is served without the cache: it has layers that cannot be cached"
            yield Problem("warning", what, "see `diskprefix list --architectures`")
    for name, level, what, todo in _COUNTED:
        if count := cache.get(name, 0):
            cause = cache.get("full_disk") if name == "dropped" else None
            yield Problem(level, what, cause or todo, count)
    yield from _remote_problems(cache.get("remote") or {})
    if cache.get("gate", {}).get("state") == "closed":
        what = "computing is faster than restoring on this machine, so little is saved and restored"
        yield Problem("hint", what, "use a faster disk or a larger model, or force it with --kv-cache-gate off")
    used, budget, evicted = (cache.get(name, 0) for name in ("used_bytes", "budget_bytes", "evicted_blocks"))
    if evicted and used > _FULL * budget:
        todo = "raise --kv-cache-budget if repeated prompts miss"
        yield Problem("hint", "the store is full, and blocks are evicted", todo, evicted)


def _remote_problems(remote: dict[str, Any]) -> Iterator[Problem]:
    if problem := remote.get("problem"):
        yield Problem("error", f"nothing is shared: {problem}", "start the daemon again with the right credentials")
    elif remote.get("state") == "failing":
        todo = "look at the network, the endpoint and the access keys; the daemon's log names the failure"
        yield Problem("warning", f"{remote['url']} does not answer, and is left alone for a while", todo)
    if refused := {reason: count for reason, count in remote.get("refused", {}).items() if count}:
        what = f"objects of {remote['url']} were refused: {', '.join(refused)}"
        todo = "see *Refused objects* in prefixstore/remote/README.md: `mac` may mean that somebody plants state"
        yield Problem("warning", what, todo, sum(refused.values()))
    if dropped := remote.get("dropped", 0):
        todo = "make room in the bucket, let the daemon write to it, or start with --remote-write off"
        yield Problem("hint", f"prompts could not be uploaded to {remote['url']}", todo, dropped)


def _lost_problems(lost: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    for row in lost[:_MAX_LOST]:
        if row["tokens"] >= _MIN_LOST_TOKENS and row["solved_since"] is None:
            what = f"{row['tokens']:,} tokens of the last day were computed again: {row['what']}"
            yield Problem("hint", what, row["advice"], row["requests"])


def _request_problems(ended: Iterable[EndedRequest]) -> Iterator[Problem]:
    """Yields a problem for each kind of failed requests. A client that left is no problem: people press stop."""
    groups: dict[tuple[int, str], list[EndedRequest]] = {}
    for request in ended:
        if request.prefix_cache is None and (request.error is not None or request.status >= 500):
            groups.setdefault((request.status, request.error or "internal error"), []).append(request)
    latest = sorted(groups.items(), key=lambda item: -item[1][-1].ended_at)[:_MAX_FAILURES]
    for (status, message), group in latest:
        level: Level = "error" if status >= 500 and status != 503 else "warning"
        todo = _STREAM_ADVICE if status == 200 else _ADVICE.get(status, _OTHER_ADVICE)
        yield Problem(level, f"{group[-1].route} answered {status}: {message}", todo, len(group), group[-1].ended_at)
