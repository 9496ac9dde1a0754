"""The first prompts of a new day, where the chat template writes the day: they are computed before anybody asks.

The first request of each conversation is kept as a note for three days. When a day begins, and at the first start on
it, the newest ones are rendered with the new day and computed while no request waits.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import date, datetime, time
from functools import partial
from typing import TYPE_CHECKING

from diskprefix.chat.conversation_opening import decode_opening
from diskprefix.chat.messages import Conversation
from diskprefix.engine.idle.ahead_jobs import AheadJob
from diskprefix.errors import CacheError
from diskprefix.server.remembering import known_parts
from diskprefix.store.note_record import NoteKind
from diskprefix.units import counted
from diskprefix.values import CacheOptions, Prompt, Tenant

if TYPE_CHECKING:
    from diskprefix.server.serving import Serving
    from diskprefix.server.threads import Threads

log = logging.getLogger("diskprefix")

_MAX_OPENINGS = 8
"""The most openings that are computed for a day, the latest first. As many wait at most."""
_CHECK_S = 20.0
"""Seconds between two looks at the clock, which may jump."""


async def compute_each_day(serving: Serving, threads: Threads) -> None:
    """Adds the openings to the work ahead when a day begins, until it is cancelled. For the event loop."""
    computed: date | None = None
    # Bound: until the daemon ends.
    while True:
        if (today := serving.renderer.today()) != computed:
            try:
                num_added = await threads.run("reading", add_openings, serving, today)
            except CacheError as error:
                log.debug("[template] the prompts of the last days are not read yet: %s", error)
            else:
                computed = today
                if num_added:
                    log.info("[template] computing %s with the date of %s", counted(num_added, "prompt"), today)
        await asyncio.sleep(_CHECK_S)


def add_openings(serving: Serving, today: date) -> int:
    """Adds the openings of earlier days to the work ahead. Returns their number. Waits for the disk. Raises
    `CacheError`."""
    cache = serving.engine.cache
    if serving.scope.kind == "off":
        return 0
    tenants, openings = _tenants(serving), list[tuple[Tenant, Conversation, bytes]]()
    midnight = datetime.combine(today, time()).timestamp()
    notes = cache.writer.notes.newest(NoteKind.OPENING, tenants, before=midnight, at_most=_MAX_OPENINGS)
    for root, content in notes:
        with suppress(ValueError):
            openings.append((tenants[root], decode_opening(content), content))
    # A job that is added later is computed earlier.
    for tenant, opening, content in reversed(openings):
        options = CacheOptions(scope=serving.scope, tenant=tenant)
        make, owner = partial(_render, serving, opening, options), cache.owner(tenant)
        serving.engine.ahead.add_job(AheadJob(serving.engine, make, options, owner, (content,)))
    return len(openings)


def _tenants(serving: Serving) -> dict[bytes, Tenant]:
    """Returns the tenants that have state of the served model, by their roots."""
    cache, tenants = serving.engine.cache, dict[bytes, Tenant]()
    with cache.store.reads.snapshot() as snapshot:
        for root, record in snapshot.roots():
            with suppress(ValueError):
                if cache.owner(tenant := Tenant.parse(record.tenant)).root == root:
                    tenants[root] = tenant
    return tenants


def _render(serving: Serving, opening: Conversation, options: CacheOptions) -> Prompt | None:
    return serving.renderer.opening(opening, known_parts(serving, options))
