"""One restore of a prompt, in steps for threads that may wait. The result is a value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal, TypeAlias

from msgspec.structs import replace

from diskprefix.cache.context import RequestContext
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.restoration import Restoration
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.note_record import NoteKind
from diskprefix.tokens import Logits
from diskprefix.values import MissReason, StateSource

Step: TypeAlias = Literal["prefetch", "seen", "match", "load"]


class Fetch:
    """Restores the longest stored prefix of a prompt into `sequence`, which has room for the prompt, and already the
    exact state of its first `have` tokens.

    The steps run one after the other, on any threads. Only `load` changes the sequence. The steps share with other
    requests: objects with locks (the writer's queues, the pins, the counters), the cost model's count of refused
    restores, and the namespace's `seen`, which one thread at a time may read. The request takes the result over with
    `CachedRequest.take`, or leaves it. Then call `close` when no step runs any more.

    `logits` are the next-token logits at the prompt's end, shape [vocab]. They are required if the sequence has the
    whole prompt, unless that is only a beginning. `on_logits` is called with the logits, on any thread, as soon as they
    are loaded. Loading the rest may still fail; the logits are right all the same. For `on_block` see `Loader`. Steps
    call `is_wanted` again and again, and end soon after it returned False.
    """

    def __init__(
        self,
        context: RequestContext,
        nodes: PromptNodes,
        sequence: KVSequence,
        have: int,
        logits: Logits | None,
        on_logits: Callable[[Logits], None],
        on_block: Callable[[int], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        assert have < len(nodes.token_ids) or logits is not None or context.goes_on, (
            "there must be something to sample from"
        )
        self.sequence, self.have = sequence, have
        source: StateSource = "memory" if have else "none"
        self.in_memory = RestoreResult(num_tokens=have, logits=logits, matched=have, source=source)
        """The result if nothing is restored."""
        self.restored = self.in_memory
        """The result."""
        self.miss_reason: MissReason | None = context.bypass or "error"
        """None once the match has an answer."""
        self.load_s = 0.0
        """Seconds that `load` took, without the wait for `prefetch`."""
        self.needs_load = False
        """Set by `match`."""
        self._context, self._nodes, self._logits, self._is_wanted = context, nodes, logits, is_wanted
        self._prefetched = Prefetched()
        self._pins = ExitStack()
        cache, notes = context.cache, context.notes()
        self._restoration = Restoration(
            nodes,
            cache.layout,
            cache.tiers,
            cache.store.evictor,
            cache.readers,
            self._pins,
            allows=lambda num_tokens: context.allows("restore", pays=cache.cost_model.allows(num_tokens)),
            pays=cache.cost_model.pays,
            noted_logits=lambda: notes.get(NoteKind.LOGITS, nodes.end_id),
            on_logits=on_logits,
            on_block=on_block,
            is_wanted=is_wanted,
            needs_logits=not context.goes_on,
            computes_last=context.options.computes_last,
        )

    @property
    def must_read_seen(self) -> bool:
        return not self._context.namespace.is_read

    def run(self) -> None:
        """Runs all steps but `prefetch`, on this thread."""
        self.run_step("seen")
        self.run_step("match")
        if self.needs_load:
            self.run_step("load")

    def run_step(self, step: Step) -> None:
        """Runs one step. `prefetch` fetches the nodes that only the shared tier has, and waits for the network. `seen`
        reads the tenant's earlier prompts from the store, once for a tenant, which may take a second. `match` finds the
        stored nodes, and sets `needs_load` if some of them are to be loaded. `load` copies these into the sequence."""
        context = self._context
        if context.bypass is not None:
            return
        if step == "prefetch":
            with context.guarded("nothing is fetched from the shared tier"):
                self._prefetched = context.prefetch(self._nodes, lambda: not self._is_wanted(), self.have)
                self._restoration.prefetched = self._prefetched.names
        elif step == "seen":
            with context.guarded("the tenant's earlier prompts are not known"):
                context.cache.namespaces.read(context.namespace, self._is_wanted)
        else:
            self._restore(loads=step == "load")

    def close(self) -> None:
        """Unpins the matched nodes."""
        self._pins.close()

    def _restore(self, *, loads: bool) -> None:
        restored, self.needs_load = None, False
        with self._context.guarded("nothing is restored"):
            self._context.require_known_bits()
            restored = self._restoration.run(self.sequence, self.have, self._logits, loads=loads)
            if restored is not None and not restored.matched and self._context.is_outdated(self._nodes):
                restored = replace(restored, refused="upgraded")
            self.needs_load = restored is None
        if restored is not None:
            self.load_s, waited_ms = restored.restore_ms / 1e3, self._prefetched.seconds * 1e3
            self.restored = replace(restored, restore_ms=restored.restore_ms + waited_ms)
            self.miss_reason = None
        elif self._restoration.num_intact < self.have:
            self.restored = RestoreResult()
