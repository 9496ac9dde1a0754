"""The objects that the server adds to replies: `prefix_cache` and `timings`.

`diskprefix/daemon/server/README.md` explains their fields.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from diskprefix.daemon.chat.canonicalisers import helpful_canonicalisers, shape_of
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.values import CacheReport

_SHOWN_TOGETHER = (
    ("late_restore_ms",),
    ("drafted_tokens", "accepted_tokens", "drafted_by", "draft_ms"),
    ("image_tokens", "images_encoded", "images_restored", "encode_ms"),
)
"""Groups of timings that are left out if their first timing is 0."""


def figures_reply(done: DoneEvent, clamped_to: int | None) -> dict[str, Any]:
    """Returns both objects: the report of the cache, and the times in milliseconds."""
    own = asdict(done.timings) | {"others_ms": done.timings.others_ms}
    absent = {name for names in _SHOWN_TOGETHER if not own[names[0]] for name in names}
    timings: dict[str, Any] = {
        name: value if isinstance(value, str) else round(value, 2) for name, value in own.items() if name not in absent
    }
    if clamped_to is not None:
        timings["max_tokens_clamped"] = clamped_to
    return {"prefix_cache": _cache_reply(done), "timings": timings}


def written_tokens(done: DoneEvent) -> int:
    """Returns the prompt tokens that a request newly saves; 0 for a `dropped` prompt, which may be lost."""
    if done.cache.saved != "queued":
        return 0
    return max(0, done.cache.selection.kept - done.usage.cached_tokens)


def _cache_reply(done: DoneEvent) -> dict[str, Any]:
    """Returns the response's `prefix_cache` object: short enough for one line of a screen."""
    report, selection = done.cache, done.cache.selection
    reply = {
        "scope": str(selection.scope),
        "restored": report.restored,
        "source": report.source if report.restored or report.miss_reason is None else None,
        "miss_reason": report.miss_reason,
        "stored_with": report.stored_with or None,
        "diverged_at": report.diverged_at,
        "boundary": selection.kept,
        "boundary_reason": selection.reason,
        "saved": report.saved,
        "dropped_because": report.dropped_because,
        "broken_by": None if report.broken is None else broken_by(report),
        "changed": [change._asdict() for change in report.rewriting.changes] or None,
        "left_out": [asdict(left_out) for left_out in report.rewriting.left_out] or None,
        "replayed": report.replayed or None,
        "unverified": report.unverified or None,
        "template_kwargs": report.rewriting.template_kwargs or None,
    }
    return {name: value for name, value in reply.items() if value is not None}


def broken_by(report: CacheReport) -> dict[str, Any]:
    """Describes the line at which a report's prompt differs from an earlier one. Its `broken` must not be None."""
    assert report.broken is not None
    return {
        "at": report.broken.at,
        "line": shape_of(report.broken_line),
        "tokens": report.broken.num_tokens,
        "template_date": report.broken_date,
        "canonicalisers": helpful_canonicalisers(report.broken_line, report.rewriting),
    }
