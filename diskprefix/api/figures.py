"""The objects that the server adds to replies: `prefix_cache` and `timings`.

`diskprefix/server/README.md` explains their fields.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diskprefix.chat.normalisers import helpful_normalisers, shape_of
from diskprefix.engine.request import DoneEvent
from diskprefix.values import CacheReport


def figures_reply(done: DoneEvent, clamped_to: int | None) -> dict[str, Any]:
    """Returns both objects: what the cache did, and where the time went, in milliseconds."""
    own = asdict(done.timings) | {"others_ms": done.timings.others_ms}
    timings: dict[str, Any] = {
        name: value if isinstance(value, str) else round(value, 2) for name, value in own.items()
    }
    if not timings["late_restore_ms"]:
        del timings["late_restore_ms"]
    if not done.timings.drafted_tokens:
        for name in ("drafted_tokens", "accepted_tokens", "drafted_by", "draft_ms"):
            del timings[name]
    if not done.timings.image_tokens:
        for name in ("encode_ms", "image_tokens", "images_encoded", "images_restored"):
            del timings[name]
    if clamped_to is not None:
        timings["max_tokens_clamped"] = clamped_to
    return {"prefix_cache": _cache_reply(done), "timings": timings}


def written_tokens(done: DoneEvent) -> int:
    """Returns the number of prompt tokens that a request newly keeps. It is 0 for a `dropped` prompt, of which perhaps
    nothing can be restored."""
    if done.cache.saved != "queued":
        return 0
    return max(0, done.cache.selection.kept - done.usage.cached_tokens)


def _cache_reply(done: DoneEvent) -> dict[str, Any]:
    """Returns the response's `prefix_cache` object: short enough for one line of a screen."""
    report, selection = done.cache, done.cache.selection
    reply: dict[str, Any] = {"scope": str(selection.scope), "restored": report.restored}
    if report.restored or report.miss_reason is None:
        reply["source"] = report.source
    if report.miss_reason is not None:
        reply["miss_reason"] = report.miss_reason
    if report.diverged_at is not None:
        reply["diverged_at"] = report.diverged_at
    reply |= {"boundary": selection.kept, "boundary_reason": selection.reason, "saved": report.saved}
    if report.dropped_because is not None:
        reply["dropped_because"] = report.dropped_because
    if report.broken is not None:
        reply["broken_by"] = broken_by(report)
    if changes := report.rewriting.changes:
        reply["changed"] = [change._asdict() for change in changes]
    if (left_out := report.rewriting.left_out) is not None:
        reply["left_out"] = left_out._asdict()
    if report.replayed:
        reply["replayed"] = report.replayed
    return reply


def broken_by(report: CacheReport) -> dict[str, Any]:
    """Returns what kept a report's prompt from being restored further. Its `broken` must not be None."""
    assert report.broken is not None
    return {
        "at": report.broken.at,
        "line": shape_of(report.broken_line),
        "tokens": report.broken.num_tokens,
        "normalisers": helpful_normalisers(report.broken_line, report.rewriting),
    }
