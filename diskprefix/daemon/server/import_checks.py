"""Prompts of packs that this machine computes before it uses them, while nobody waits; then it compares their state.

Nothing of such a pack but its tokens is used: what is stored is what this machine has computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.server.openings import tenants_of_model
from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.cache.context import PromptOrigin
from diskprefix.prefixstore.cache.imported_prompt import Comparison, ImportedPrompt, compare, decode_imported
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.tokens import LEAST_TOKENS, PromptDigest
from diskprefix.values import CacheOptions, Prompt, Scope, Tenant

if TYPE_CHECKING:
    from diskprefix.daemon.server.serving import Serving
    from diskprefix.daemon.server.threads import Threads

log = logging.getLogger("diskprefix")

_CHECK_S = 20.0
"""Seconds between two looks for imported prompts, which another process adds."""
_FLUSH_S = 10.0
_MAX_READ, _MAX_TRIES = 64, 3
"""The imported prompts that are read at once, and how often a prompt is computed of which blocks are missing."""


class _Computed(Struct):
    """The beginnings of a prompt that are `left` to compute, by their numbers of tokens, and the `job` of the one that
    is computed. The prompt was begun so many times (`tries`)."""

    job: AheadJob | None = None
    left: list[int] = field(default_factory=list)
    tries: int = 0


class ImportChecks(Struct):
    """The imported prompts of one daemon. `equal` and `different` count those that were compared, `unkept` those that
    could not be computed or kept, and `waiting` those that are left."""

    serving: Serving
    equal: int = 0
    different: int = 0
    unkept: int = 0
    waiting: int = 0
    _computed: dict[str, _Computed] = field(default_factory=dict)
    """What was computed of a prompt, by its id."""

    @property
    def figures(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("waiting", "equal", "different", "unkept")}

    async def run(self, threads: Threads) -> None:
        """Looks for imported prompts until it is cancelled. For the event loop."""
        # Bound: until the daemon ends.
        while True:
            try:
                await threads.run("ahead", self.look)
            except (CacheError, RuntimeError, MemoryError) as error:
                # Also if the system refuses the thread.
                log.debug("[import] imported prompts are not read yet: %s", error)
            await asyncio.sleep(_CHECK_S)

    def look(self) -> None:
        """Settles the prompts that were computed, and has the next one computed. Waits for the disk. Raises
        `CacheError`."""
        cache = self.serving.engine.cache
        tenants, prompts = tenants_of_model(self.serving), list[tuple[Tenant, bytes, ImportedPrompt, PromptDigest]]()
        notes = cache.writer.notes.newest(NoteKind.IMPORTED, tenants, before=math.inf, at_most=_MAX_READ)
        for note in notes:
            with suppress(ValueError):
                prompts.append((tenants[note.root], note.root, decode_imported(note.content), note.prompt))
        prompts.sort(key=lambda item: (item[2].digest, item[2].number))
        self.waiting = len(prompts)
        if cache.must_recheck:
            return
        for tenant, root, prompt, digest in prompts:
            if not self._is_computed(tenant, root, prompt, digest):
                return
            self._settle(tenant, prompt, self._compared(root, prompt))

    def _is_computed(self, tenant: Tenant, root: bytes, prompt: ImportedPrompt, digest: PromptDigest) -> bool:
        """Returns whether a prompt was computed, or could not be. Has its next part computed otherwise."""
        cache, computed = self.serving.engine.cache, self._computed.setdefault(prompt.id, _Computed())
        ahead = self.serving.engine.ahead
        if computed.job is not None and ahead.has(computed.job):
            return False
        if computed.job is not None and computed.job.was_dropped:
            # Nobody has tried to compute it.
            ahead.add_job(computed.job)
            return False
        if computed.tries and not computed.left:
            # What was computed is compared as it is on the disk.
            cache.writer.flush(_FLUSH_S)
            compared = self._compared(root, prompt)
            if not compared.missing or compared.differs_at is not None or computed.tries == _MAX_TRIES:
                return True
        if not computed.left:
            computed.left, computed.tries = prompt.ends(has_states=bool(cache.layout.states)), computed.tries + 1
        computed.job = self._job(tenant, prompt, computed.left.pop(0), digest)
        ahead.add_job(computed.job)
        return False

    def _compared(self, root: bytes, prompt: ImportedPrompt) -> Comparison:
        cache = self.serving.engine.cache
        try:
            return compare(cache.store, root, prompt, cache.payload_layout, cache.bits.accepts)
        except StoreCorrupt as error:
            # A restore finds and removes what is damaged, and the prompt is computed again.
            log.debug("[import] %s: %s", prompt.pack, error)
            return Comparison(missing=prompt.num_tokens)

    def _job(self, tenant: Tenant, prompt: ImportedPrompt, end: int, digest: PromptDigest) -> AheadJob:
        engine = self.serving.engine
        options, owner = CacheOptions(scope=Scope("full"), tenant=tenant), engine.cache.owner(tenant)
        make, label = partial(self._prompt, prompt, end), prompt.pack
        origin = PromptOrigin("imported", digest)
        return AheadJob(engine, make, options, owner, prompt.id.encode(), label=label, origin=origin)

    def _prompt(self, imported: ImportedPrompt, end: int) -> Prompt | None:
        """Returns the first `end` tokens; None for tokens that the model does not have, or too many."""
        token_ids, renderer = imported.token_ids[:end], self.serving.renderer
        is_known = len(token_ids) >= LEAST_TOKENS and token_ids.min() >= 0 and token_ids.max() < renderer.vocab_size
        fits = len(token_ids) < self.serving.engine.max_positions
        # The preview in the pack may be of another text.
        return Prompt(token_ids, text=renderer.preview_of_tokens(token_ids.tolist())) if is_known and fits else None

    def _settle(self, tenant: Tenant, prompt: ImportedPrompt, compared: Comparison) -> None:
        """Reports the result for a prompt, and forgets it."""
        self._computed.pop(prompt.id, None)
        self.serving.engine.cache.notes(tenant).delete(NoteKind.IMPORTED, prompt.id)
        self.waiting -= 1
        place = f"{prompt.pack}, prompt {prompt.number + 1}"
        if compared.differs_at is not None:
            self.different += 1
            differs = "tokens %d to %d have other state than this machine computes: the pack is damaged, forged, or of"
            log.warning(f"[import] %s: {differs} another build; nothing of it was used", place, *compared.differs_at)
        elif compared.missing:
            self.unkept += 1
            log.warning("[import] %s: %d tokens could not be computed or kept", place, compared.missing)
        else:
            self.equal += 1
            log.info("[import] %s: %d tokens were computed, with the state of the pack", place, compared.compared)
