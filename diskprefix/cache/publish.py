"""The way of one request's nodes from KV memory to the store: in batches, parents first, beside the engine thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.planning import ttl_at
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture
from diskprefix.kv.transfer import is_finite
from diskprefix.nouns import MAX_VALUE, CacheOptions, Prompt
from diskprefix.store.changes import NewNode
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Chain, Publication
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_BATCH_BYTES = 16 << 20


class Wanted(NamedTuple):
    """A node to be stored. `parts` are what of its payload is copied already: it comes behind the tokens' own.
    `prefill_s` is how long computing it took, in seconds, `ttl_s` its time to live; `is_expected` as
    in `store.changes.NewNode`."""

    node: Node
    parts: tuple[memoryview, ...]
    prefill_s: float
    ttl_s: float | None
    is_expected: bool


class Ending(NamedTuple):
    """What the last batch brings with it: a boundary after `num_tokens` tokens, which the node `tip` holds (None: there
    is none), and the prompt, if that is to be remembered. `has_entry`: the prompt is listed as saved up to there."""

    tip: bytes | None
    num_tokens: int
    prompt: TokenIds | None = None
    has_entry: bool = True


@dataclass(kw_only=True, eq=False)
class Publisher:
    """Has the nodes of one request copied and written. Its methods are for the engine thread, and wait for nothing.

    Where a batch is lost, for want of room or because the store fails, all that comes after it is dropped: no node is
    stored without the one that it continues, and no entry without its nodes. `pins` gets what is to be unpinned when
    the last batch is with the writer.
    """

    cache: CacheResources
    namespace: TenantNamespace
    prompt: Prompt
    options: CacheOptions
    chain: Chain = field(default_factory=Chain)
    pins: ExitStack = field(default_factory=ExitStack)
    has_published: bool = False
    at_end: Callable[[], None] | None = None
    """Called when the last batch is with the writer."""
    reason: str = ""
    """Why the policy keeps what it keeps."""

    def __post_init__(self) -> None:
        self._names = self.cache.store.names
        """Those of the store that the request began with."""
        self._arena: KVArena | None = None
        self._end = ExitStack()
        """Unpins the last node that is with the writer: what continues it is not there yet."""

    @property
    def store_id(self) -> bytes:
        """The id of the store that the request began with."""
        return self._names.store_id

    def nodes_of(self, token_ids: TokenIds) -> PromptNodes:
        block_size, layout = self.cache.settings.block_size, self.cache.payload_layout
        return PromptNodes(self._names.secret, self.namespace.root, token_ids, block_size, layout)

    def ttl_at(self, position: int) -> float | None:
        return ttl_at(position, self.prompt.marks, self.options.ttl_s)

    def give_up(self, why: str | None) -> None:
        """Have nothing more written, count that and log why (None: nothing). The second time it does nothing. For any
        thread."""
        self._count(why, is_first=self.chain.break_off())

    def note_loss(self, why: str) -> None:
        """The same of something that nothing continues: the rest is written."""
        self._count(why, is_first=self.chain.record_loss())

    def publish(
        self, arena: KVArena, nodes: PromptNodes, wanted: Sequence[Wanted], ending: Ending | None = None
    ) -> None:
        """Have nodes of `nodes` captured and written, parents first. `arena` may grow meanwhile, and nothing that it
        has may change; see `KVArena.settle`. Room for the parts is reserved."""
        self.has_published |= bool(wanted)
        for want in wanted:
            self._check(arena, want.node)
        self._arena = arena
        arena.capturer = self.cache.capturer
        batches = list(self._batches(nodes, wanted)) or [()]
        for number, batch in enumerate(batches, start=1):
            self._capture(arena, nodes, batch, ending if number == len(batches) else None)

    def close(self) -> None:
        """Unpin what was pinned, once all batches are with the writer."""
        if self._arena is None:
            self._unpin()
        else:
            self.cache.capturer.submit(Capture(self._arena, 0, self._unpin, self._unpin))

    @property
    def batch_bytes(self) -> int:
        """What a batch may wait for room for: one block at least."""
        block_bytes = self.cache.payload_layout.payload_bytes(self.cache.settings.block_size, Kind.BLOCK)
        return max(block_bytes, min(_BATCH_BYTES, self.cache.settings.kv_cache_write_buffer // 4))

    def _count(self, why: str | None, *, is_first: bool) -> None:
        if is_first:
            self.cache.count("refused")
        if is_first and why is not None:
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    def _check(self, arena: KVArena, node: Node) -> None:
        if node.num_tokens and node.position < arena.complete_from:
            self.give_up("what it continues is no longer stored, and of layers with windows not in memory either")
        if self.batch_bytes > self.cache.settings.kv_cache_write_buffer:
            self.give_up("the write buffer is smaller than a block; raise --kv-cache-write-buffer")

    def _batches(self, nodes: PromptNodes, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, ...]]:
        """Parts of `wanted` that wait for room for no more than `batch_bytes` each."""
        batch: list[Wanted] = []
        size = 0
        for want in wanted:
            copied = _copied_bytes(nodes, want)
            if batch and size + copied > self.batch_bytes:
                yield tuple(batch)
                batch, size = [], 0
            batch.append(want)
            size += copied
        if batch:
            yield tuple(batch)

    def _capture(self, arena: KVArena, nodes: PromptNodes, batch: tuple[Wanted, ...], ending: Ending | None) -> None:
        capture = Capture(
            arena,
            sum(_copied_bytes(nodes, want) for want in batch),
            copy=partial(self._copy, arena, nodes, batch, ending),
            drop=partial(self._drop, batch, ending),
            is_void=self.chain.is_broken,
        )
        self.cache.capturer.submit(capture)

    def _copy(self, arena: KVArena, nodes: PromptNodes, batch: tuple[Wanted, ...], ending: Ending | None) -> None:
        """On the capturing thread. Room for the whole batch is reserved."""
        size = sum(nodes.payload_bytes(want.node) for want in batch)
        try:
            captured = tuple(self._captured(arena, nodes, want) for want in batch)
        except BaseException:
            self.cache.writer.release(size)
            self.give_up("it could not be copied")
            raise
        if not all(is_finite(node.payload, arena.layout, len(node.token_ids)) for node in captured):
            self.cache.writer.release(size)
            self.give_up("its state is not finite")
            captured = ()
        if captured or ending is not None:
            self._submit(captured, ending)

    def _drop(self, batch: tuple[Wanted, ...], ending: Ending | None) -> None:
        """On the capturing thread."""
        self.cache.writer.release(sum(len(part) for want in batch for part in want.parts))
        if batch:
            self.give_up("its memory was needed before the disk had room for it; raise --kv-cache-write-buffer")
        if ending is not None:
            self._submit((), ending)

    def _submit(self, captured: tuple[NewNode, ...], ending: Ending | None) -> None:
        publication = self._publication(captured, ending)
        last = captured[-1].name if captured else None
        with self._end.pop_all():
            if last is not None:
                self.cache.store.evictor.pin(last)
                self._end.callback(self.cache.store.evictor.unpin, last)
            self.cache.writer.submit(publication, reserved_bytes=publication.payload_bytes)

    def _publication(self, captured: tuple[NewNode, ...], ending: Ending | None) -> Publication:
        tip, num_tokens, prompt, has_entry = ending or Ending(None, 0)
        if self.chain.is_broken():
            tip = None
        entry = EntryRecord(
            root=self.namespace.root,
            num_tokens=num_tokens,
            scope=str(self.options.scope),
            preview=self.prompt.text,
            created_at=time.time(),
            reason=self.reason,
        )
        return Publication(
            store_id=self._names.store_id,
            root=self.namespace.root,
            root_record=self.namespace.record,
            nodes=captured,
            tip=tip,
            entry=entry if tip is not None and has_entry else None,
            prompt=prompt,
            history_limit=MAX_VALUE,
            prompt_group=self.options.group,
            prompt_ttl_s=self.ttl_at(len(self.prompt.token_ids)),
            ttl_s=self.ttl_at(num_tokens),
            chain=self.chain,
        )

    def _captured(self, arena: KVArena, nodes: PromptNodes, want: Wanted) -> NewNode:
        node = want.node
        has_tokens = node.kind != Kind.CHECKPOINT and node.num_tokens > 0
        parts = [arena.read_tokens(node.position, node.num_tokens)] if has_tokens else []
        parts += want.parts
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=nodes.tokens(node),
            kind=node.kind,
            payload=parts[0] if len(parts) == 1 else memoryview(b"".join(parts)),
            pieces=tuple(cut.piece for cut in nodes.cuts(node)),
            prefill_s=want.prefill_s,
            generated=node.generated,
            ttl_s=want.ttl_s,
            is_expected=want.is_expected,
            replaces=self.cache.layout.state_kind == "token",
        )

    def _unpin(self) -> None:
        self._end.close()
        self.pins.close()
        if self.at_end is not None:
            self.at_end()


def _copied_bytes(nodes: PromptNodes, want: Wanted) -> int:
    """Bytes of the payload that are still to be copied."""
    return nodes.payload_bytes(want.node) - sum(map(len, want.parts))
