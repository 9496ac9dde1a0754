"""The way of one request's nodes from KV memory to the writer: in batches, parents first, beside the engine thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from diskprefix.cache.context import RequestContext
from diskprefix.cache.planning import Plan
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture
from diskprefix.kv.layout import Layout
from diskprefix.kv.transfer import is_finite
from diskprefix.nouns import Selection
from diskprefix.store.changes import NewNode
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Chain, Publication
from diskprefix.store.writer import Writer

log = logging.getLogger("diskprefix")

_BATCH_BYTES = 16 << 20


class Publisher:
    """Has the nodes of one request copied and written. Methods are for the engine thread and do not wait.

    If a batch is lost, because there is no room or the store fails, all later batches are dropped: no node is stored
    without its parent, and no entry without its nodes. `pins` collects what is unpinned when the last batch is with the
    writer.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context, self._cache = context, context.cache
        self.chain = Chain()
        self.pins = ExitStack()
        self.has_published = False
        self.at_end: Callable[[], None] = lambda: None
        """Called when the last batch is with the writer."""
        self.selection: Selection | None = None
        """The policy's decision, once it is made."""
        self._arena: KVArena | None = None
        self._end = ExitStack()
        """Unpins the last node that is with the writer. Its child is not there yet."""

    def give_up(self, why: str | None) -> None:
        """Stops all further writing, counts that once, and logs `why` unless it is None. For any thread."""
        self._count(why, is_first=self.chain.break_off(why or ""))

    def record_loss(self, why: str) -> None:
        """Counts and logs the loss of something that no other node continues. The rest is written."""
        self._count(why, is_first=self.chain.record_loss(why))

    def publish(self, arena: KVArena, nodes: Sequence[NewNode], plan: Plan | None = None) -> None:
        """Queues nodes to be captured and written, parents first. With the last of them goes what `plan` adds. `arena`
        may grow meanwhile, and nothing that it has may change; see `KVArena.settle`.

        The payload of a node holds what is copied already, for which room is reserved. The state of the node's own
        tokens comes before that.
        """
        self.has_published |= bool(nodes)
        for node in nodes:
            self._check(arena, node)
        self._arena = arena
        arena.capturer = self._cache.capturer
        batches = list(self._batches(nodes))
        for batch in batches:
            added = plan if batch is batches[-1] else None
            copy, drop = partial(self._copy, arena, batch, added), partial(self._drop, batch, added)
            num_bytes = sum(map(_missing_bytes, batch))
            self._cache.capturer.submit(Capture(arena, num_bytes, copy, drop, self.chain.is_broken))

    def close(self) -> None:
        """Unpins everything once all batches are with the writer."""
        if self._arena is None:
            self._unpin()
        else:
            self._cache.capturer.submit(Capture(self._arena, 0, self._unpin, self._unpin))

    @property
    def batch_bytes(self) -> int:
        """The most bytes of a batch: one block at least."""
        block_bytes = self._cache.payload_layout.payload_bytes(self._cache.settings.block_size, Kind.BLOCK)
        return max(block_bytes, min(_BATCH_BYTES, self._cache.settings.kv_cache_write_buffer // 4))

    def _count(self, why: str | None, *, is_first: bool) -> None:
        if is_first:
            self._cache.count("refused")
        if is_first and why is not None:
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    def _check(self, arena: KVArena, node: NewNode) -> None:
        if len(node.token_ids) and node.position < arena.complete_from:
            self.give_up("what it continues is no longer stored, and of layers with windows not in memory either")
        if self.batch_bytes > self._cache.settings.kv_cache_write_buffer:
            self.give_up("the write buffer is smaller than a block")

    def _batches(self, nodes: Sequence[NewNode]) -> Iterator[tuple[NewNode, ...]]:
        """Yields parts of `nodes` that wait for room for no more than `batch_bytes` each; an empty one of none."""
        batch: list[NewNode] = []
        size = 0
        for node in nodes:
            missing = _missing_bytes(node)
            if batch and size + missing > self.batch_bytes:
                yield tuple(batch)
                batch, size = [], 0
            batch.append(node)
            size += missing
        yield tuple(batch)

    def _copy(self, arena: KVArena, batch: tuple[NewNode, ...], plan: Plan | None) -> None:
        """Copies and submits a batch, on the capturing thread. Room for the whole batch is reserved."""
        size = sum(map(_payload_bytes, batch))
        try:
            captured = tuple(_captured(arena, node) for node in batch)
        except BaseException:
            self._cache.writer.release(size)
            self.give_up("it could not be copied")
            raise
        if not all(is_finite(node.payload, arena.layout, len(node.token_ids)) for node in captured):
            self._cache.writer.release(size)
            self.give_up("its state is not finite")
            captured = ()
        if captured or plan is not None:
            self._submit(captured, plan)

    def _drop(self, batch: tuple[NewNode, ...], plan: Plan | None) -> None:
        """Drops a batch, on the capturing thread."""
        self._cache.writer.release(sum(len(node.payload) for node in batch))
        if batch:
            self.give_up("its memory was needed before the disk had room for it")
        if plan is not None:
            self._submit((), plan)

    def _submit(self, captured: tuple[NewNode, ...], plan: Plan | None) -> None:
        publication = self._publication(captured, plan or Plan())
        last = captured[-1].name if captured else None
        with self._end.pop_all():
            if last is not None:
                self._cache.store.evictor.pin(last)
                self._end.callback(self._cache.store.evictor.unpin, last)
            self._cache.writer.submit(publication, reserved_bytes=publication.payload_bytes)

    def _publication(self, captured: tuple[NewNode, ...], plan: Plan) -> Publication:
        last_node = None if self.chain.is_broken() else plan.last_node
        context, namespace = self._context, self._context.namespace
        entry = EntryRecord(
            root=namespace.root,
            num_tokens=plan.num_tokens,
            scope=str(context.options.scope),
            preview=context.prompt.text,
            created_at=time.time(),
            reason=self.selection.reason if self.selection else "",
        )
        return Publication(
            store_id=context.names.store_id,
            root=namespace.root,
            root_record=namespace.record,
            nodes=captured,
            last_node=last_node,
            entry=entry if last_node is not None and plan.has_entry else None,
            prompt=plan.prompt,
            prompt_group=context.options.group,
            prompt_ttl_s=context.ttl_at(len(context.prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=self.selection.anchors if self.selection and self._cache.layout.states else None,
            daemon_ttl_s=self._cache.settings.kv_cache_ttl,
            chain=self.chain,
        )

    def _unpin(self) -> None:
        self._end.close()
        self.pins.close()
        self.at_end()


class HeldStates:
    """Copies of states and logits that the next step overwrites, and that are not published yet. Room for them in the
    write buffer is reserved.

    They cannot wait for room, so room for the last ones, which the others need, is reserved ahead. `leaving` bytes are
    left for copies that can wait.
    """

    def __init__(self, writer: Writer, layout: Layout, *, leaving: int) -> None:
        self._writer = writer
        self._layout = layout
        self._leaving = leaving
        self._copies: dict[int, memoryview] = {}
        self._ahead_bytes = 0
        self.positions: set[int] = set()
        """The positions of all copied states, published or not."""

    @property
    def num_held(self) -> int:
        return len(self._copies)

    def reserve(self, num_bytes: int) -> None:
        """Reserves `num_bytes` ahead in all, if there is room now."""
        missing = num_bytes - self._ahead_bytes
        if missing > 0 and self._writer.reserve(missing, leaving=self._leaving):
            self._ahead_bytes += missing

    def take(self, arena: KVArena, *, is_last: bool) -> bool:
        """Copies the states as they are now. Returns False if there is no room. `is_last`: the room that was reserved
        ahead may be used."""
        position = arena.num_tokens
        if position in self.positions:
            return True
        copied = self._in_room(self._layout.state_bytes, arena.read_states, is_last=is_last)
        if copied is None:
            return False
        self._copies[position] = copied
        self.positions.add(position)
        return True

    def tail(self, arena: KVArena, logits: torch.Tensor) -> memoryview | None:
        """Returns copies of the states and of `logits`, shape [vocab], one behind the other; None if there is no room
        for them."""
        state_bytes, logits_bytes = self._layout.state_bytes, self._layout.logits_bytes

        def copy() -> memoryview:
            payload = arena.read_states(room_bytes=logits_bytes)
            arena.logits_bytes(logits, payload[state_bytes:])
            return payload

        return self._in_room(state_bytes + logits_bytes, copy, is_last=True)

    def pop(self, position: int) -> memoryview:
        """Returns the copy that was taken there. The room for it is the caller's now."""
        return self._copies.pop(position)

    def close(self) -> None:
        """Releases the copies that were not published."""
        for states in self._copies.values():
            self._writer.release(len(states))
        self._copies.clear()
        self._writer.release(self._ahead_bytes)
        self._ahead_bytes = 0

    def _in_room(self, num_bytes: int, copy: Callable[[], memoryview], *, is_last: bool) -> memoryview | None:
        if is_last and num_bytes <= self._ahead_bytes:
            self._ahead_bytes -= num_bytes
        elif not self._writer.reserve(num_bytes, leaving=self._leaving):
            return None
        try:
            return copy()
        except BaseException:
            self._writer.release(num_bytes)
            raise


def _captured(arena: KVArena, node: NewNode) -> NewNode:
    """Returns the node with its whole payload: the state of its tokens, then what was copied already."""
    if not len(node.token_ids):
        return node
    state = arena.read_tokens(node.position, len(node.token_ids))
    return replace(node, payload=memoryview(b"".join((state, node.payload))) if node.payload else state)


def _payload_bytes(node: NewNode) -> int:
    return sum(piece.num_bytes for piece in node.pieces)


def _missing_bytes(node: NewNode) -> int:
    """Returns the bytes of the payload that are still to be copied."""
    return _payload_bytes(node) - len(node.payload)
