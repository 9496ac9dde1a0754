"""The first prompts of conversations, which are computed before anybody asks: those that a client named, and those of
a new day, where the chat template writes the day.

They are kept as notes: for three days the first request of each conversation, if the template writes the day, and for a
week those that a client named. At the start, and when a day begins, the newest ones are rendered with the day and
computed while no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from datetime import date, datetime, time
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from diskprefix.daemon.chat.conversation_opening import decode_opening
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.server.kept_opening import KeptOpening
from diskprefix.daemon.server.remembering import StoredTurns, known_parts, stored_turns, with_turns
from diskprefix.errors import CacheError, InvalidScope
from diskprefix.prefixstore.cache.context import PromptOrigin
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.tokens import PromptDigest
from diskprefix.units import counted
from diskprefix.values import CacheOptions, Prompt, Tenant

if TYPE_CHECKING:
    from diskprefix.daemon.server.serving import Serving
    from diskprefix.daemon.server.threads import Threads

log = logging.getLogger("diskprefix")

_MAX_OPENINGS = 8
"""The most openings of a share that are computed for a day, the latest first. As many wait at most."""
_CHECK_S = 20.0
"""Seconds between two looks at the clock, which may jump."""


async def compute_openings(serving: Serving, threads: Threads) -> None:
    """Adds the openings to the work ahead, at once and, if the template writes the day, when a day begins, until it is
    cancelled. For the event loop."""
    computed: date | None = None
    # Bound: until the daemon ends.
    while True:
        if (today := serving.renderer.today()) != computed:
            try:
                num_added = await threads.run("ahead", add_openings, serving, today)
            except (CacheError, RuntimeError, MemoryError) as error:
                # Also if the system refuses the thread.
                log.debug("[template] the prompts of the last days are not read yet: %s", error)
            else:
                computed = today
                if num_added:
                    log.debug("[engine] %s may be computed ahead, for %s", counted(num_added, "prompt"), today)
        if computed is not None and not serving.renderer.writes_today:
            return
        await asyncio.sleep(_CHECK_S)


def add_openings(serving: Serving, today: date) -> int:
    """Adds to the work ahead the openings that clients named and, if the template writes the day, those of earlier
    days. Returns their number. Waits for the disk. Raises `CacheError`."""
    if serving.scope.kind == "off":
        return 0
    tenants, jobs = tenants_of_model(serving), list[AheadJob]()
    kinds = {NoteKind.ASKED_OPENING: math.inf}
    if serving.renderer.writes_today:
        kinds[NoteKind.OPENING] = datetime.combine(today, time()).timestamp()
    for kind, before in kinds.items():
        notes = serving.engine.cache.writer.notes.newest(kind, tenants, before=before, at_most=_MAX_OPENINGS)
        for note in notes:
            with suppress(ValueError, InvalidScope):
                kept = KeptOpening.decode(note.content)
                options = replace(kept.options(tenants[note.root]), share=note.share)
                opening = decode_opening(kept.content)
                jobs.append(job_of(serving, options, opening, kept.content, kept.label, note.prompt))
    # A job that is added later is computed earlier.
    for job in reversed(jobs):
        serving.engine.ahead.add_job(job)
    return sum(map(serving.engine.ahead.has, jobs))


def job_of(
    serving: Serving,
    options: CacheOptions,
    opening: Conversation,
    content: bytes,
    label: str,
    came_from: PromptDigest | None = None,
    turns: StoredTurns | None = None,
) -> AheadJob:
    """Returns the job that computes an opening, kept as `content`. `label` is a client's name for it, or "". It was the
    prompt `came_from`, which may have had another day; None: it is rendered as it was. `turns` were read for it."""
    make, cache = partial(_render, serving, opening, options, turns), serving.engine.cache
    owner, expires_at = cache.owner(options.tenant), cache.expires_at(options.ttl_s)
    origin = PromptOrigin("opening", came_from)
    return AheadJob(serving.engine, make, options, owner, (content,), expires_at, label, origin=origin)


def tenants_of_model(serving: Serving) -> dict[bytes, Tenant]:
    """Returns the tenants that have state of the served model, by their roots."""
    cache, tenants = serving.engine.cache, dict[bytes, Tenant]()
    with cache.store.reads.snapshot() as snapshot:
        for root, record in snapshot.roots():
            with suppress(ValueError):
                if cache.owner(tenant := Tenant.parse(record.tenant)).root == root:
                    tenants[root] = tenant
    return tenants


def _render(serving: Serving, opening: Conversation, options: CacheOptions, turns: StoredTurns | None) -> Prompt | None:
    """Returns the prompt of an opening. Waits for the disk, unless all that is needed of `turns` was read."""
    turns = turns or stored_turns(serving, options)
    make = partial(serving.renderer.opening, opening, turns, known_parts(serving, options))
    return make() if turns is None else with_turns(turns, make)
