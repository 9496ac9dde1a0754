"""One request's way through the cache: selected, restored, captured, published."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from diskprefix.cache_report import CacheReport, MissReason, Saved
from diskprefix.errors import CacheError
from diskprefix.kv.layers import KVArena
from diskprefix.policy.boundary import Prompt
from diskprefix.policy.scope import DEFAULT_WINDOW, MAX_VALUE, Scope
from diskprefix.policy.select import Selection, select
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.prefix_cache.restore import Restoration, Restored
from diskprefix.store.changes import NewNode
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Publication
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from diskprefix.prefix_cache.cache import PrefixCache, Realm

log = logging.getLogger("diskprefix")


@dataclass(frozen=True)
class _Plan:
    """What is still to be stored, parents first; the node that the entry ends with and the entry's length in tokens."""

    nodes: tuple[Node, ...] = ()
    tip: bytes | None = None
    num_tokens: int = 0


class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends."""

    def __init__(self, cache: PrefixCache, realm: Realm, prompt: Prompt, scope: Scope) -> None:
        self._cache = cache
        self._realm = realm
        self._prompt = prompt
        self._scope = scope
        block_size = cache.settings.block_size
        names = cache.store.names
        self._store_id = names.store_id
        self._nodes = PromptNodes(names.secret, realm.root, prompt.token_ids, block_size, cache.payload_layout)
        self._bypass: MissReason | None = None
        if cache.layout.unsupported or scope.kind == "off":
            self._bypass = "unsupported" if cache.layout.unsupported else "off"
        self.selection = self._select()
        self._restored = Restored()
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._pinned: bytes | None = None

    @property
    def restored(self) -> Restored:
        """What `restore` brought back, and how long it took."""
        return self._restored

    def restore(self, arena: KVArena) -> Restored:
        """Copy the longest stored prefix into the arena, which has room for the prompt. A miss restores 0 tokens."""
        arena.truncate(0)
        if self._bypass is None:
            self._restored = self._try_restore(arena)
            arena.truncate(self._restored.num_tokens)
        return self._restored

    def publish(self, arena: KVArena, logits: torch.Tensor, prefill_s: float) -> None:
        """Have captured and written what the policy wants, with the entry and the history; waits for no disk.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them; `prefill_s` is
        how long computing what was not restored took, in seconds. Until the next `begin` the arena may grow but must
        not be changed before the prompt's end.
        """
        if self._bypass is not None:
            return
        assert arena.num_tokens == len(self._prompt.token_ids), "state length must equal key length"
        if self._cache.store.problem is not None:
            self._saved = "dropped"
            self._cache.counters["refused"] += 1
            return
        wanted = self._plan()
        plan = self._fit(wanted)
        if wanted.tip is not None:
            self._saved = "dropped" if plan.tip is None else "queued" if plan.nodes else "stored"
        publication = Publication(
            store_id=self._store_id,
            root=self._realm.root,
            root_record=self._realm.record,
            nodes=(),
            tip=plan.tip,
            entry=None if plan.tip is None else self._entry(plan.num_tokens),
            prompt=self._remembered(),
            history_limit=MAX_VALUE,
        )
        if publication.tip is not None or publication.prompt is not None:
            computed = len(self._prompt.token_ids) - self._restored.num_tokens
            self._submit(arena, logits, prefill_s / computed if computed else 0.0, plan, publication)

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._unpin(self._take_pin())
        num_tokens = self._restored.num_tokens
        if num_tokens:
            self._cache.counters["hits"] += 1
            self._cache.counters["restored_tokens"] += num_tokens
            self._cache.counters["restored_bytes"] += num_tokens * self._cache.layout.bytes_per_token
        elif self._miss_reason is not None:
            self._cache.misses[self._miss_reason] += 1
        return CacheReport(
            scope=str(self._scope),
            selected=self.selection.selected,
            aligned=self.selection.aligned,
            restored=num_tokens,
            source=self._restored.source,
            restore_ms=self._restored.restore_ms,
            saved=self._saved,
            miss_reason=self._miss_reason,
            diverged_at=self.selection.diverged_at if self._miss_reason == "diverged" else None,
        )

    def _select(self) -> Selection:
        settings = self._cache.settings
        scope = Scope("off") if self._bypass else self._scope
        recent = self._realm.history.recent(scope.value if scope.kind == "auto" else DEFAULT_WINDOW)
        selection = select(
            scope,
            self._prompt,
            recent,
            block_size=settings.block_size,
            min_tokens=settings.kv_cache_min_tokens,
            cold_max=settings.kv_cache_cold_max,
            interval=settings.kv_cache_interval,
        )
        log.info("%s", selection.log_line())
        return selection

    def _try_restore(self, arena: KVArena) -> Restored:
        """The one place that turns an error of the cache into a miss."""
        cache = self._cache
        restoration = Restoration(self._nodes, cache.store, cache.writer, cache.readers)
        try:
            restored = restoration.run(arena)
        except CacheError as error:
            cache.counters["errors"] += 1
            self._miss_reason = "error"
            log.warning("[disk-cache] going on without the cache: %s", error)
            return Restored()
        finally:
            self._pinned = restoration.pinned
        if restored.tip is None:
            self._miss_reason = self._explain_miss()
        else:
            cache.writer.touch(restored.tip, time.time())
        return restored

    def _explain_miss(self) -> MissReason:
        """`diverged` only if the prompt leaves everything seen within its first block: from there on a block could
        have been restored, had it been stored."""
        if len(self._prompt.token_ids) < self._cache.settings.kv_cache_min_tokens:
            return "too_short"
        if not self.selection.recent or self.selection.common >= self._nodes.block_size:
            return "first_request"
        return "diverged"

    def _plan(self) -> _Plan:
        names, planned = list(self._restored.blocks), []
        while len(names) * self._nodes.block_size < self.selection.aligned:
            node = self._nodes.block(names[-1] if names else self._realm.root, len(names))
            planned.append(node)
            names.append(node.name)
        if self.selection.keep_tail:
            tail = self._nodes.tail(names[-1] if names else self._realm.root, len(names))
            is_stored = self._restored.logits is not None
            return _Plan((*planned, *(() if is_stored else (tail,))), tail.name, tail.end)
        blocks = self.selection.aligned // self._nodes.block_size
        return _Plan(tuple(planned), names[blocks - 1], self.selection.aligned) if blocks else _Plan()

    def _fit(self, plan: _Plan) -> _Plan:
        """What of the plan the write buffer has room for: its longest beginning."""
        room, nodes = self._cache.writer.room_bytes, plan.nodes
        while nodes and self._size_of(nodes) > room:
            nodes = nodes[:-1]
        if len(nodes) == len(plan.nodes):
            return plan
        fitting = _Plan(nodes, nodes[-1].name, nodes[-1].end) if nodes else _Plan()
        log.warning(
            "[disk-cache] the write buffer has room for %d of the %d tokens to save; raise --kv-cache-write-buffer",
            fitting.num_tokens,
            plan.num_tokens,
        )
        if not nodes:
            self._cache.counters["refused"] += 1
        return fitting

    def _submit(
        self, arena: KVArena, logits: torch.Tensor, token_s: float, plan: _Plan, publication: Publication
    ) -> None:
        """Reserve the buffer, and let the capturing thread do the rest beside the decoding.

        `token_s`: seconds that computing a token of this prompt took.
        """
        size = self._size_of(plan.nodes)
        self._cache.writer.reserve(size)
        # The capture takes the pin over: what is extended must stay until the writer has it.
        pinned = self._take_pin()

        def copy() -> None:
            try:
                nodes = tuple(self._captured(arena, logits, node, token_s) for node in plan.nodes)
                self._cache.writer.submit(replace(publication, nodes=nodes), reserved_bytes=size)
            except BaseException:
                self._cache.writer.release(size)
                raise
            finally:
                self._unpin(pinned)

        self._cache.start_capture(copy)

    def _captured(self, arena: KVArena, logits: torch.Tensor, node: Node, token_s: float) -> NewNode:
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=self._nodes.tokens(node),
            kind=node.kind,
            payload=arena.read_block(node.position, node.num_tokens, logits if node.kind == Kind.TAIL else None),
            pieces=tuple(cut.piece for cut in self._nodes.cuts(node)),
            prefill_s=token_s * node.num_tokens,
        )

    def _size_of(self, nodes: tuple[Node, ...]) -> int:
        return sum(self._nodes.payload_bytes(node) for node in nodes)

    def _entry(self, num_tokens: int) -> EntryRecord:
        return EntryRecord(
            root=self._realm.root,
            num_tokens=num_tokens,
            scope=str(self._scope),
            preview=self._prompt.text,
            created_at=time.time(),
        )

    def _remembered(self) -> TokenIds | None:
        """The prompt, added to the history; None when it is too short to be worth a place in the window."""
        token_ids = self._prompt.token_ids
        if len(token_ids) < self._cache.settings.kv_cache_min_tokens:
            return None
        self._realm.history.add(token_ids)
        return token_ids

    def _take_pin(self) -> bytes | None:
        pinned, self._pinned = self._pinned, None
        return pinned

    def _unpin(self, name: bytes | None) -> None:
        if name is not None:
            self._cache.store.unpin(name)
