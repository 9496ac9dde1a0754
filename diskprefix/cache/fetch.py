"""One restore of a prompt: its steps, which threads of their own may run, and its result, which is a value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from diskprefix.cache.context import RequestContext
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.restoration import Restoration
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.note_record import NoteKind
from diskprefix.values import MissReason

Step: TypeAlias = Literal["prefetch", "seen", "match", "load"]


class Fetch:
    """Restores the longest stored prefix of a prompt into `sequence`, whose first `have` tokens are the prompt's
    already, with their exact state. The sequence has room for the prompt.

    The steps run one after the other, on any threads. Only `load` changes the sequence. With other requests they share
    what has a lock of its own (the writer's queues, the pins, the counters), the cost model's count of refused
    restores, and the namespace's `seen`, which one thread at a time may read. The request takes the result over with
    `CachedRequest.take`, or leaves it. Then call `close` when no step runs any more.

    `logits` are the next-token logits at the prompt's end (shape [vocab]). They are required if the sequence has the
    whole prompt, unless that is only a beginning. `on_logits` is called with the logits, on any thread, as soon as they
    are loaded. Loading the rest may still fail; computing it gives the same logits. For `on_block` see `Loader`. Steps
    call `is_wanted` again and again; they end soon after it returned False.
    """

    def __init__(
        self,
        context: RequestContext,
        nodes: PromptNodes,
        sequence: KVSequence,
        have: int = 0,
        logits: torch.Tensor | None = None,
        on_logits: Callable[[torch.Tensor], None] = lambda _: None,
        on_block: Callable[[int], None] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        assert have < len(nodes.token_ids) or logits is not None or context.goes_on, (
            "there must be something to sample from"
        )
        self.sequence, self.have = sequence, have
        self.held = RestoreResult(num_tokens=have, logits=logits, matched=have, source="memory" if have else "none")
        """The result if nothing is found."""
        self.restored = self.held
        """The result."""
        self.miss_reason: MissReason | None = context.bypass or "error"
        """None once the match has an answer."""
        self.load_s = 0.0
        """Seconds that `load` took, without the wait for `prefetch`."""
        self.needs_load = False
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
        self._read_seen()
        self._match()
        if self.needs_load:
            self._load()

    def run_step(self, step: Step) -> None:
        """Runs one step. `prefetch` fetches the nodes that only the shared tier has, and waits for the network. `seen`
        reads what the store knows of the tenant's earlier prompts, once for a tenant, which may take a second. `match`
        finds what is stored, and sets `needs_load` if some of that is to be loaded. `load` copies it into the
        sequence."""
        {"prefetch": self._prefetch, "seen": self._read_seen, "match": self._match, "load": self._load}[step]()

    def close(self) -> None:
        """Unpins the nodes that were found."""
        self._pins.close()

    def _prefetch(self) -> None:
        if self._context.bypass is None and self._context.cache.remote is not None:
            with self._context.guarded("nothing is fetched from the shared tier"):
                self._prefetched = self._context.prefetch(self._nodes, lambda: not self._is_wanted(), self.have)
                self._restoration.prefetched = self._prefetched.names

    def _read_seen(self) -> None:
        if self._context.bypass is None:
            with self._context.guarded("what was seen before is not known"):
                self._context.cache.namespaces.read(self._context.namespace, self._is_wanted)

    def _match(self) -> None:
        self.needs_load = self._restore(loads=False)

    def _load(self) -> None:
        self._restore(loads=True)

    def _restore(self, *, loads: bool) -> bool:
        """Returns whether something is left to load."""
        restoration, restored, is_cut = self._restoration, None, False
        if self._context.bypass is None:
            with self._context.guarded("nothing is restored"):
                restored = restoration.run(self.sequence, self.have, self._logits, loads=loads)
                is_cut = restored is None
            if restored is not None:
                self.load_s, waited_ms = restored.restore_ms / 1e3, self._prefetched.seconds * 1e3
                self.restored = replace(restored, restore_ms=restored.restore_ms + waited_ms)
                self.miss_reason = None
            elif restoration.kept < self.have:
                self.restored = RestoreResult()
        return is_cut
