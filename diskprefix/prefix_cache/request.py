"""One request's way through the cache: selected, restored, captured, published."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from diskprefix.cache_report import CacheReport, MissReason, Saved
from diskprefix.errors import CacheError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import is_out_of_memory
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
    """What is still to be stored, parents first; the node that the entry ends with, None if there is to be none; and
    the entry's length in tokens."""

    nodes: tuple[Node, ...] = ()
    tip: bytes | None = None
    num_tokens: int = 0


class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends."""

    def __init__(
        self,
        cache: PrefixCache,
        realm: Realm,
        prompt: Prompt,
        scope: Scope,
        *,
        reuse_generated: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._cache = cache
        self._realm = realm
        self._prompt = prompt
        self._scope = scope
        self._reuse_generated = reuse_generated
        self._goes_on = goes_on
        names = cache.store.names
        self._store_id = names.store_id
        self._secret = names.secret
        self._nodes = self._nodes_of(prompt.token_ids)
        self._bypass: MissReason | None = None
        if prompt.media:
            self._bypass = "media"
        elif cache.layout.unsupported or scope.kind == "off":
            self._bypass = "unsupported" if cache.layout.unsupported else "off"
        self.selection = self._select()
        self._restored = Restored()
        self._states: dict[int, memoryview] = {}
        """Copies of the states by the position that they were taken at, for checkpoints."""
        self._token_s = 0.0
        self._submitted: set[bytes] = set()
        """Names of the nodes that were handed to the writer."""
        self._restorable = 0
        """The last position that a later request could go on from, of those that are stored or handed to the writer."""
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._pinned: list[bytes] = []

    @property
    def restored(self) -> Restored:
        """What `restore` brought back, and how long it took."""
        return self._restored

    def restore(self, arena: KVArena) -> Restored:
        """Copy the longest restorable prefix into the arena, which has room for the prompt; of a miss, nothing."""
        arena.truncate(0)
        if self._bypass is None:
            with self._guarded("nothing is restored"):
                self._restored = self._try_restore(arena)
            self._restorable = self._restored.num_tokens
            arena.truncate(self._restored.num_tokens)
        return self._restored

    def after_step(self, arena: KVArena) -> None:
        """Take a checkpoint if one is wanted where the prefill has come to: its next step overwrites the states."""
        if self._bypass is None and arena.num_tokens in self.selection.checkpoints and self._has_room_for_states():
            with self._guarded("no checkpoint is taken"):
                self._states[arena.num_tokens] = arena.read_states()

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Have captured and written what the policy wants, with the entry and the history; waits for no disk.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them (None if it goes
        on, and was restored); `prefill_s` is how long computing what was not restored took, in seconds. Until the next
        `begin` the arena may grow but must not be changed before the prompt's end.
        """
        if self._bypass is not None:
            return
        assert arena.num_tokens == len(self._prompt.token_ids), "state length must equal key length"
        if self._is_refused():
            return
        self._saved = "dropped"
        with self._guarded("the prompt is not saved"):
            self._saved = self._publish(arena, logits, prefill_s)

    def _publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> Saved:
        computed = len(self._prompt.token_ids) - self._restored.num_tokens
        self._token_s = prefill_s / computed if computed else 0.0
        wanted = self._plan()
        plan = self._fit(wanted)
        publication = self._publication(plan, prompt=self._remembered())
        if publication.tip is not None or publication.prompt is not None or plan.nodes:
            self._submit(arena, logits, plan, publication)
        if plan.nodes:
            return "queued"
        return "dropped" if wanted.nodes else "stored" if wanted.tip is not None else "none"

    def after_decode(self, arena: KVArena) -> None:
        """Remember the states if the reply has just completed a block, in case that its blocks are kept."""
        at_end_of_block = arena.num_tokens % self._nodes.block_size == 0
        if not self._keeps_reply or not at_end_of_block or self._cache.layout.is_cuttable:
            return
        with self._guarded("no checkpoint of the reply is taken"):
            end = len(self._prompt.token_ids)
            of_prompt = {position: states for position, states in self._states.items() if position <= end}
            self._states = of_prompt | {arena.num_tokens: arena.read_states()}

    def publish_reply(self, arena: KVArena, token_ids: TokenIds) -> None:
        """Have captured and written the blocks that decoding completed, if the request reuses replies.

        `token_ids` are the prompt and what of the reply is in the arena. These blocks are marked as generated: computed
        token by token, they are not what a prefill computes bit for bit. What they continue is stored with them, also
        where the scope keeps less of the prompt.
        """
        if not self._keeps_reply or self._cache.store.problem is not None:
            return
        assert arena.num_tokens == len(token_ids), "state length must equal key length"
        nodes = self._nodes_of(token_ids)
        is_too_short = nodes.num_blocks * nodes.block_size < self._cache.settings.kv_cache_min_tokens
        if is_too_short or nodes.num_blocks == self._nodes.num_blocks:
            return
        self._nodes = nodes
        with self._guarded("the reply is not saved"):
            missing, _ = self._missing(nodes.num_blocks)
            plan = self._fit(_Plan(missing, missing[-1].name, missing[-1].end))
            if plan.nodes:
                self._submit(arena, None, plan, self._publication(plan, prompt=None))
                self._saved = "queued"

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._unpin(self._take_pins())
        restored, layout = self._restored, self._cache.layout
        if restored.num_tokens:
            self._cache.counters["hits"] += 1
            self._cache.counters["restored_tokens"] += restored.num_tokens
            self._cache.counters["restored_bytes"] += restored.num_bytes
        elif self._miss_reason is not None:
            self._cache.misses[self._miss_reason] += 1
        return CacheReport(
            scope=str(self._scope),
            selected=self.selection.selected,
            aligned=self.selection.aligned,
            checkpoints=self.selection.checkpoints,
            restored=restored.num_tokens,
            matched=restored.matched,
            refused=restored.refused,
            retained=layout.retained(restored.num_tokens) if restored.num_tokens else {},
            exact=restored.exact,
            source=restored.source,
            restore_ms=restored.restore_ms,
            saved=self._saved,
            miss_reason=self._miss_reason,
            diverged_at=self.selection.diverged_at if self._miss_reason == "diverged" else None,
        )

    @property
    def _keeps_reply(self) -> bool:
        return self._reuse_generated and self._bypass is None and not self._cache.layout.is_one_pass

    def _nodes_of(self, token_ids: TokenIds) -> PromptNodes:
        cache = self._cache
        return PromptNodes(self._secret, self._realm.root, token_ids, cache.settings.block_size, cache.payload_layout)

    @contextmanager
    def _guarded(self, consequence: str) -> Iterator[None]:
        """The one place that turns what goes wrong with the cache into a request without it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CacheError) and not is_out_of_memory(error):
                raise
            self._cache.counters["errors"] += 1
            log.warning("[disk-cache] going on without the cache, %s: %s", consequence, error or type(error).__name__)

    def _has_room_for_states(self) -> bool:
        """Whether one more copy of the states fits what may wait to be written."""
        writer, num_bytes = self._cache.writer, self._cache.layout.state_bytes
        return self._cache.store.problem is None and (len(self._states) + 1) * num_bytes <= writer.room_bytes

    def _is_refused(self) -> bool:
        """Whether the store takes nothing now; then that is noted."""
        refused = self._cache.store.problem is not None
        if refused:
            self._saved = "dropped"
            self._cache.counters["refused"] += 1
        return refused

    def _select(self) -> Selection:
        settings, layout = self._cache.settings, self._cache.layout
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
            state="one_pass" if layout.is_one_pass else "cuttable" if layout.is_cuttable else "checkpoints",
        )
        if self._goes_on:
            selection = replace(selection, keep_tail=False)
        if self._bypass in (None, "off"):
            log.info("%s", selection.log_line())
        return selection

    def _try_restore(self, arena: KVArena) -> Restored:
        cache = self._cache
        restoration = Restoration(
            self._nodes,
            cache.layout,
            cache.store,
            cache.writer,
            cache.readers,
            reuse_generated=self._reuse_generated,
            needs_logits=not self._goes_on,
        )
        self._miss_reason = "error"
        try:
            restored = restoration.run(arena)
        finally:
            self._pinned = restoration.pinned
        self._miss_reason = None
        if restored.tip is None:
            self._miss_reason = self._explain_miss(restored)
        else:
            cache.writer.touch(restored.tip, time.time())
        return restored

    def _explain_miss(self, restored: Restored) -> MissReason:
        """`diverged` only if the prompt leaves everything seen within its first block: from there on a block could
        have been restored, had it been stored."""
        if restored.refused in ("no_checkpoint", "one_pass"):
            return restored.refused
        if len(self._prompt.token_ids) < self._cache.settings.kv_cache_min_tokens:
            return "too_short"
        if not self.selection.recent or self.selection.common >= self._nodes.block_size:
            return "first_request"
        return "diverged"

    def _plan(self) -> _Plan:
        """What of the prompt the policy wants and is not stored yet."""
        selection, restored = self.selection, self._restored
        missing, block = self._missing(selection.aligned // self._nodes.block_size)
        if selection.keep_tail:
            parent = block.name if block else self._realm.root
            tail = self._nodes.tail(parent, self._nodes.num_blocks, generated=not restored.exact)
            return _Plan(missing if restored.logits is not None else (*missing, tail), tail.name, tail.end)
        if block is None:
            return _Plan()
        return _Plan(missing, self._boundary_tip(block), block.end)

    def _missing(self, num_blocks: int) -> tuple[tuple[Node, ...], Node | None]:
        """Of the first `num_blocks` blocks, those that are still to be stored, each with the checkpoint at its end if
        there is one; and the last block of all, None without any."""
        missing: list[Node] = []
        block: Node | None = None
        for index in range(num_blocks):
            block, is_stored = self._block(index, block)
            if not is_stored:
                missing.append(block)
            if block.end in self._states:
                missing.append(self._nodes.checkpoint(block))
        return tuple(missing), block

    def _block(self, index: int, before: Node | None) -> tuple[Node, bool]:
        """Block number `index` after the block `before`, and whether it is stored already, or will be."""
        stored = self._restored.blocks
        is_of_reply = (index + 1) * self._nodes.block_size > len(self._prompt.token_ids)
        generated = is_of_reply or not self._restored.exact
        # What was decoded and reaches further than was restored is not what this run computed.
        if index < len(stored) and stored[index].generated <= generated:
            return stored[index], True
        parent = before.name if before else self._realm.root
        block = self._nodes.block(parent, index, generated=generated)
        return block, block.name in self._submitted

    def _boundary_tip(self, block: Node) -> bytes | None:
        """The node that a saved boundary ends with; None where the states at it were not computed by this run."""
        if self._cache.layout.is_cuttable:
            return block.name
        checkpoint = self._nodes.checkpoint(block).name
        return checkpoint if block.end in self._states or checkpoint == self._restored.tip else None

    def _fit(self, plan: _Plan) -> _Plan:
        """What of the plan the write buffer has room for: its longest beginning."""
        sizes = list(accumulate(self._nodes.payload_bytes(node) for node in plan.nodes))
        nodes = plan.nodes[: bisect_right(sizes, self._cache.writer.room_bytes)]
        if len(nodes) == len(plan.nodes):
            return plan
        while nodes and nodes[-1].kind == Kind.BLOCK and not self._cache.layout.is_cuttable:
            # Nothing can go on from a block without the states at its end.
            nodes = nodes[:-1]
        fitting = _Plan(nodes, nodes[-1].name, nodes[-1].end) if nodes else _Plan()
        log.warning(
            "[disk-cache] the write buffer has room for %d of the %d tokens to save; raise --kv-cache-write-buffer",
            fitting.num_tokens,
            plan.num_tokens,
        )
        if not nodes:
            self._cache.counters["refused"] += 1
        return fitting

    def _publication(self, plan: _Plan, *, prompt: TokenIds | None) -> Publication:
        return Publication(
            store_id=self._store_id,
            root=self._realm.root,
            root_record=self._realm.record,
            nodes=(),
            tip=plan.tip,
            entry=None if plan.tip is None else self._entry(plan.num_tokens),
            prompt=prompt,
            history_limit=MAX_VALUE,
        )

    def _submit(
        self,
        arena: KVArena,
        logits: torch.Tensor | None,
        plan: _Plan,
        publication: Publication,
    ) -> None:
        """Reserve the buffer, and let the capturing thread do the rest beside the decoding.

        `logits` are those at the prompt's end, which a tail holds.
        """
        new_nodes = self._captures(arena, logits, plan.nodes)
        size = sum(self._nodes.payload_bytes(node) for node in plan.nodes)
        self._cache.writer.reserve(size)
        self._submitted.update(node.name for node in plan.nodes)
        # The capture takes the pins over: what is extended must stay until the writer has it.
        pinned = self._take_pins()

        def copy() -> None:
            try:
                nodes = tuple(capture() for capture in new_nodes)
                self._cache.writer.submit(replace(publication, nodes=nodes), reserved_bytes=size)
            except BaseException:
                self._cache.writer.release(size)
                raise
            finally:
                self._unpin(pinned)

        self._cache.start_capture(copy)

    def _captures(
        self, arena: KVArena, logits: torch.Tensor | None, nodes: tuple[Node, ...]
    ) -> list[Callable[[], NewNode]]:
        """For each node, what copies it out of the arena. States are copied now: decoding changes them."""
        captures: list[Callable[[], NewNode]] = []
        for node in nodes:
            parts: list[memoryview] = []
            if node.kind == Kind.CHECKPOINT:
                parts = [self._states.pop(node.position)]
            elif node.kind == Kind.TAIL:
                assert logits is not None
                parts = [arena.read_states(), arena.logits_bytes(logits)]
            seconds = self._token_s * node.num_tokens
            if node.kind != Kind.BLOCK and not self._cache.layout.is_cuttable:
                # It saves all that lies between it and the one before; blocks alone save nothing.
                seconds = self._token_s * (node.end - self._restorable)
                self._restorable = node.end
            captures.append(partial(self._captured, arena, node, parts, seconds, self._nodes))
        return captures

    @staticmethod
    def _captured(arena: KVArena, node: Node, parts: list[memoryview], seconds: float, nodes: PromptNodes) -> NewNode:
        """`parts` of the payload come after the tokens' own."""
        payload = arena.read_tokens(node.position, node.num_tokens)
        if node.kind == Kind.CHECKPOINT:
            (payload,) = parts
        elif parts:
            payload = memoryview(b"".join([payload, *parts]))
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=nodes.tokens(node),
            kind=node.kind,
            payload=payload,
            pieces=tuple(cut.piece for cut in nodes.cuts(node)),
            prefill_s=seconds,
            generated=node.generated,
        )

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

    def _take_pins(self) -> list[bytes]:
        pinned, self._pinned = self._pinned, []
        return pinned

    def _unpin(self, names: list[bytes]) -> None:
        for name in names:
            self._cache.store.unpin(name)
