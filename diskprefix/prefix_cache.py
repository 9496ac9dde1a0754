"""match → restore → capture → publish: the heart.

A `PrefixCache` serves one model from one store. Each request takes a `CachedRequest` through these steps, all called
on the engine thread:

    cached = cache.begin(prompt, scope)        what to save is selected
    restored = cached.restore(arena)           the longest stored prefix is found, verified and copied into the arena
    cached.publish(arena, logits)              after the first token: what the policy wants is captured and published
    report = cached.close()                    however the request ended

Capturing copies the prompt's blocks out of the arena on a thread of its own while the reply is decoded: decoding only
writes behind the prompt, and `begin` waits for the capture before the arena is used again. So saving costs nothing
until the first token, and nothing afterwards but memory bandwidth.

State enters and leaves only at grid points, so a restored run makes the same kernel calls on the same bytes as a cold
one. The exception is the end of a prompt: its partial block and next-token logits are kept, so that an exact repeat
runs no forward at all. If anything goes wrong in here the request goes on without the cache: `_attempt` is the one
place that turns cache errors into misses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from diskprefix.cache_report import CacheReport, MissReason, Saved, Source
from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.kv.layers import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.policy.boundary import Prompt
from diskprefix.policy.history import History
from diskprefix.policy.scope import DEFAULT_WINDOW, MAX_VALUE, Scope
from diskprefix.policy.select import Selection, select
from diskprefix.settings import Settings
from diskprefix.store.codec import read_payload
from diskprefix.store.schema import EntryRecord, Kind, NodeRecord, RootRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import NewNode, Publication, Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds, block_hash

log = logging.getLogger("diskprefix")

T = TypeVar("T")

_HISTORY_TOKENS = 1 << 22
"""The window is bounded in memory and on disk whatever N a request asks for: 16 MiB of token ids for each root."""
_READER_THREADS = 2


@dataclass(frozen=True)
class Restored:
    """`num_tokens` are in the arena; `logits` (shape [vocab], the model's dtype) only for an exact repeat."""

    num_tokens: int = 0
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class _Node:
    """A place in the prompt and the name that it has in the tree."""

    name: bytes
    parent: bytes
    position: int
    num_tokens: int
    kind: Kind

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


@dataclass(frozen=True, eq=False)
class _Piece:
    """A matched node. `load` answers its raw payload, verified. Raises `StoreCorrupt`."""

    node: _Node
    source: Source
    load: Callable[[], memoryview]


class PrefixCache:
    """The prefix cache of one model. `begin` is for the engine thread; `stats` may be called from any thread."""

    def __init__(
        self, settings: Settings, store: Store, layout: Layout, root: bytes, model_name: str, default_scope: Scope
    ) -> None:
        self.settings = settings
        self.store = store
        self.layout = layout
        self.root = root
        self.default_scope = default_scope
        self.root_record = RootRecord(
            model=model_name, block_size=settings.block_size, layout=layout.describe(), created_at=time.time()
        )
        self.writer = Writer(store, buffer_bytes=settings.kv_cache_write_buffer)
        self.readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="kv-reader")
        self._capturer = ThreadPoolExecutor(1, thread_name_prefix="kv-capture")
        self._capturing: Future[None] | None = None
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        with store.snapshot() as snapshot:
            prompts = snapshot.recent_prompts(root, MAX_VALUE)
        self.history = History.from_prompts(prompts, max_prompts=MAX_VALUE, max_tokens=_HISTORY_TOKENS)

    def begin(self, prompt: Prompt, scope: Scope) -> CachedRequest:
        """Select what to save of `prompt`, and start a request. Waits until the arena is free to be overwritten."""
        self.settle()
        return CachedRequest(self, prompt, scope)

    def start_capture(self, copy: Callable[[], None]) -> None:
        """Run `copy`, which reads the arena, beside the engine thread; at most one at a time."""
        self.settle()
        self._capturing = self._capturer.submit(copy)

    def settle(self) -> None:
        """Wait for the capture that is under way. Once it is over, what it captured is visible to `restore`."""
        capturing, self._capturing = self._capturing, None
        if capturing is not None and (error := capturing.exception()) is not None:
            self.counters["errors"] += 1
            log.warning("[disk-cache] a prompt was not saved: %r", error, exc_info=error)

    def stats(self) -> dict[str, Any]:
        """What `/props` and `/metrics` show. Counts of this process, sizes of the store. Never raises."""
        try:
            counts, error = self.store.counts(), self.writer.error
        except CacheError as failure:
            counts, error = {"entries": 0, "blocks": 0, "prompts": 0, "used_bytes": 0}, str(failure)
        return {
            "scope": str(self.default_scope),
            "dir": str(self.store.path),
            "store_id": self.store.store_id.hex(),
            "state": "degraded" if error else "unsupported" if self.layout.unsupported else "ok",
            "error": error,
            "entries": counts["entries"],
            "blocks": counts["blocks"],
            "history": counts["prompts"],
            "used_bytes": counts["used_bytes"],
            "budget_bytes": self.store.budget_bytes,
            "pending_bytes": self.writer.pending_bytes,
            "bytes_per_token": self.layout.bytes_per_token,
            "hits": self.counters["hits"],
            "misses": dict(self.misses),
            "restored_tokens": self.counters["restored_tokens"],
            "restored_bytes": self.counters["restored_bytes"],
            "saved_tokens": self.writer.written_tokens,
            "saved_bytes": self.writer.written_bytes,
            "dropped": self.writer.dropped,
            "evicted_blocks": self.writer.evicted,
            "quarantined": self.writer.quarantined,
            "errors": self.counters["errors"],
        }

    def close(self, timeout_s: float) -> bool:
        """Flush the writer and close the store; False when time ran out before everything was saved."""
        self.settle()
        self._capturer.shutdown()
        flushed = self.writer.close(timeout_s)
        self.readers.shutdown()
        self.store.close()
        return flushed


class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends."""

    def __init__(self, cache: PrefixCache, prompt: Prompt, scope: Scope) -> None:
        self._cache = cache
        self._prompt = prompt
        self._scope = scope
        self._bypass: MissReason | None = (
            "unsupported" if cache.layout.unsupported else "off" if scope.kind == "off" else None
        )
        self.selection = self._select()
        self.lookup_ms = 0.0
        self.restore_ms = 0.0
        self._restored = 0
        self._source: Source = "none"
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._diverged_at: int | None = None
        self._path: list[bytes] = []
        """Names of the restored full blocks, from position 0 on."""
        self._tail_stored = False
        self._pinned: bytes | None = None

    @property
    def bypassed(self) -> bool:
        """Whether this request neither restores nor saves."""
        return self._bypass is not None

    def restore(self, arena: KVArena) -> Restored:
        """Copy the longest stored prefix into the arena (which is truncated first). A miss restores 0 tokens."""
        arena.truncate(0)
        if self.bypassed:
            return Restored()
        restored = self._attempt(lambda: self._restore(arena))
        if restored is None:
            arena.truncate(0)
            self._path, self._miss_reason, restored = [], "error", Restored()
        elif not restored.num_tokens and self._miss_reason is None:
            self._explain_miss()
        self._restored = restored.num_tokens
        return restored

    def publish(self, arena: KVArena, logits: torch.Tensor) -> None:
        """Capture what the policy wants and hand it to the writer, with the entry and the history; never blocks.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them. Until the next
        `begin` the arena may grow but must not be changed before the prompt's end.
        """
        if self.bypassed:
            return
        assert arena.num_tokens == len(self._prompt.token_ids), "state length must equal key length"
        planned, tip, num_tokens = self._fit(*self._plan())
        prompt = self._remembered()
        if tip is None and prompt is None:
            return
        size = sum(self._payload_bytes(node) for node in planned)
        if self._saved == "dropped" or not self._cache.writer.reserve(size):
            self._saved = "dropped"
            return
        if tip is not None:
            self._saved = "queued" if planned else "stored"
        publication = Publication(
            root=self._cache.root,
            root_record=self._cache.root_record,
            nodes=(),
            tip=tip,
            entry=None if tip is None else self._entry(num_tokens),
            prompt=prompt,
            history_limit=len(self._cache.history),
        )
        # The capture takes the pin over: what is extended must stay until the writer has it.
        pinned, self._pinned = self._pinned, None
        self._cache.start_capture(lambda: self._copy_and_submit(arena, logits, planned, publication, size, pinned))

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._unpin(self._pinned)
        self._pinned = None
        if self._restored:
            self._cache.counters["hits"] += 1
            self._cache.counters["restored_tokens"] += self._restored
            self._cache.counters["restored_bytes"] += self._restored * self._cache.layout.bytes_per_token
        else:
            self._cache.misses[self._miss_reason or "error"] += 1
        return self.report()

    def report(self) -> CacheReport:
        return CacheReport(
            scope=str(self._scope),
            selected=self.selection.selected,
            aligned=self.selection.aligned,
            restored=self._restored,
            source=self._source,
            restore_ms=self.restore_ms,
            saved=self._saved,
            miss_reason=None if self._restored else self._miss_reason,
            diverged_at=None if self._restored else self._diverged_at,
        )

    @property
    def _block_size(self) -> int:
        return self._cache.settings.block_size

    def _select(self) -> Selection:
        settings = self._cache.settings
        scope = Scope("off") if self._bypass else self._scope
        recent = self._cache.history.recent(scope.value if scope.kind == "auto" else DEFAULT_WINDOW)
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

    def _attempt(self, step: Callable[[], T]) -> T | None:
        """Run a step that may fail in the store; a failure is logged and counted, and answers None."""
        try:
            return step()
        except CacheError as error:
            self._cache.counters["errors"] += 1
            log.warning("[disk-cache] going on without the cache: %s", error)
            return None

    def _restore(self, arena: KVArena) -> Restored:
        started = time.perf_counter()
        # Before the snapshot: a node that is written in between is then seen twice, never not at all.
        pending = self._cache.writer.pending
        with self._cache.store.snapshot() as snapshot:
            pieces = self._match(pending, snapshot)
            self.lookup_ms = (time.perf_counter() - started) * 1e3
            started = time.perf_counter()
            restored = self._load(pieces, arena)
            self.restore_ms = (time.perf_counter() - started) * 1e3
        return restored

    def _match(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot) -> list[_Piece]:
        """The longest chain of stored nodes that the prompt starts with.

        At least one token must be left to compute unless the tail, with the next-token logits, is stored too.
        """
        num_tokens, size = len(self._prompt.token_ids), self._block_size
        pieces: list[_Piece] = []
        parent = self._cache.root
        for start in range(0, num_tokens - size + 1, size):
            piece = self._find_sound(pending, snapshot, self._node(parent, start, start + size, Kind.BLOCK))
            if piece is None:
                return pieces
            pieces.append(piece)
            parent = piece.node.name
        tail = self._find_sound(pending, snapshot, self._node(parent, len(pieces) * size, num_tokens, Kind.TAIL))
        if tail is not None:
            return [*pieces, tail]
        if pieces and len(pieces) * size == num_tokens:
            pieces.pop()
        return pieces

    def _find_sound(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: _Node) -> _Piece | None:
        """The node if it is stored, or queued to be; one whose record is damaged is removed."""
        try:
            return self._find(pending, snapshot, node)
        except StoreCorrupt as error:
            self._quarantine(node, error)
            return None

    def _find(self, pending: Mapping[bytes, NewNode], snapshot: Snapshot, node: _Node) -> _Piece | None:
        queued = pending.get(node.name)
        if queued is not None and self._is_same(node, queued):
            return _Piece(node, "memory", lambda: queued.payload)
        record, stored = snapshot.node(node.name), snapshot.payload(node.name)
        if record is None:
            return None
        if not self._is_same(node, record):
            raise StoreCorrupt("its record is that of another prefix")
        if stored is None:
            raise StoreCorrupt("its payload is missing")
        expected = self._payload_bytes(node)
        return _Piece(node, "disk", lambda: read_payload(record, stored, expected_bytes=expected))

    def _is_same(self, node: _Node, stored: NewNode | NodeRecord) -> bool:
        """A name is not a proof: the tokens, the parent and the place must be the same too."""
        same_place = (stored.parent, stored.position, stored.kind) == (node.parent, node.position, node.kind)
        wanted = self._prompt.token_ids[node.position : node.end]
        return same_place and stored.token_ids.tobytes() == wanted.tobytes()

    def _load(self, pieces: list[_Piece], arena: KVArena) -> Restored:
        """Verify and copy the pieces in several threads; what follows a bad one is not accepted."""
        arena.reserve(len(self._prompt.token_ids))
        loads = [self._cache.readers.submit(self._load_piece, piece, arena) for piece in pieces]
        good: list[_Piece] = []
        logits: torch.Tensor | None = None
        try:
            for piece, load in zip(pieces, loads, strict=True):
                logits = load.result()
                good.append(piece)
        except StoreCorrupt as error:
            self._quarantine(pieces[len(good)].node, error)
            good, logits = self._leave_one_token(good), None
        finally:
            # The views belong to the snapshot: no thread may still read them when it is closed.
            for load in loads:
                load.cancel() or load.exception()
        return self._accept(good, logits, arena)

    @staticmethod
    def _load_piece(piece: _Piece, arena: KVArena) -> torch.Tensor | None:
        """On a reading thread: a tail answers its next-token logits."""
        node = piece.node
        return arena.write_block(node.position, node.num_tokens, piece.load(), with_logits=node.kind == Kind.TAIL)

    def _accept(self, pieces: list[_Piece], logits: torch.Tensor | None, arena: KVArena) -> Restored:
        num_tokens = pieces[-1].node.end if pieces else 0
        arena.truncate(num_tokens)
        self._path = [piece.node.name for piece in pieces if piece.node.kind == Kind.BLOCK]
        self._tail_stored = logits is not None
        if pieces:
            self._pinned = pieces[-1].node.name
            self._cache.store.pin(self._pinned)
            self._source = "disk" if any(piece.source == "disk" for piece in pieces) else "memory"
            self._cache.writer.touch(self._pinned, time.time())
        return Restored(num_tokens, logits)

    def _leave_one_token(self, pieces: list[_Piece]) -> list[_Piece]:
        """Without its tail, a prompt that ends on the grid must compute its last block again."""
        complete = len(pieces) * self._block_size == len(self._prompt.token_ids)
        return pieces[:-1] if complete else pieces

    def _quarantine(self, node: _Node, error: StoreCorrupt) -> None:
        log.warning("[disk-cache] block %s is damaged and will be removed: %s", node.name.hex(), error)
        self._cache.writer.quarantine(node.name, node.parent)

    def _explain_miss(self) -> None:
        """`diverged` only if the prompt leaves everything seen within its first block: from there on a block could
        have been restored, had it been stored."""
        if len(self._prompt.token_ids) < self._cache.settings.kv_cache_min_tokens:
            self._miss_reason = "too_short"
        elif not self.selection.recent or self.selection.common >= self._block_size:
            self._miss_reason = "first_request"
        else:
            self._miss_reason = "diverged"
            self._diverged_at = self.selection.diverged_at

    def _plan(self) -> tuple[list[_Node], bytes | None, int]:
        """What is still to be stored, parents first; the node that the entry ends with, None if nothing is saved; and
        the entry's length in tokens."""
        size, num_tokens = self._block_size, len(self._prompt.token_ids)
        names, planned = list(self._path), []
        while len(names) * size < self.selection.aligned:
            start = len(names) * size
            node = self._node(names[-1] if names else self._cache.root, start, start + size, Kind.BLOCK)
            planned.append(node)
            names.append(node.name)
        if self.selection.keep_tail:
            start = len(names) * size
            tail = self._node(names[-1] if names else self._cache.root, start, num_tokens, Kind.TAIL)
            return (planned if self._tail_stored else [*planned, tail]), tail.name, num_tokens
        blocks = self.selection.aligned // size
        return planned, names[blocks - 1] if blocks else None, blocks * size

    def _fit(self, planned: list[_Node], tip: bytes | None, num_tokens: int) -> tuple[list[_Node], bytes | None, int]:
        """A plan that the write buffer has room for: the longest beginning that fits, if not all of it does."""
        room, fitting = self._cache.writer.room_bytes, list(planned)
        while fitting and sum(self._payload_bytes(node) for node in fitting) > room:
            fitting.pop()
        if len(fitting) == len(planned):
            return planned, tip, num_tokens
        wanted, kept = num_tokens, fitting[-1].end if fitting else 0
        log.warning(
            "[disk-cache] the write buffer has room for %d of the %d tokens to save; raise --kv-cache-write-buffer",
            kept,
            wanted,
        )
        if not fitting:
            self._cache.writer.dropped += 1
            self._saved = "dropped"
            return [], None, 0
        return fitting, fitting[-1].name, kept

    def _node(self, parent: bytes, start: int, end: int, kind: Kind) -> _Node:
        name = block_hash(self._cache.store.secret, parent, self._prompt.token_ids[start:end])
        return _Node(name, parent, start, end - start, kind)

    def _payload_bytes(self, node: _Node) -> int:
        return self._cache.layout.payload_bytes(node.num_tokens, with_logits=node.kind == Kind.TAIL)

    def _copy_and_submit(
        self,
        arena: KVArena,
        logits: torch.Tensor,
        planned: list[_Node],
        publication: Publication,
        size: int,
        pinned: bytes | None,
    ) -> None:
        """On the capturing thread: copy the planned nodes out of the arena and submit them in one publication."""
        try:
            nodes = tuple(self._captured(arena, logits, node) for node in planned)
            self._cache.writer.submit(replace(publication, nodes=nodes), reserved_bytes=size)
        except BaseException:
            self._cache.writer.release(size)
            raise
        finally:
            self._unpin(pinned)

    def _captured(self, arena: KVArena, logits: torch.Tensor, node: _Node) -> NewNode:
        payload = arena.read_block(node.position, node.num_tokens, logits if node.kind == Kind.TAIL else None)
        token_ids = self._prompt.token_ids[node.position : node.end]
        return NewNode(node.name, node.parent, node.position, token_ids, node.kind, payload)

    def _unpin(self, name: bytes | None) -> None:
        if name is not None:
            self._cache.store.unpin(name)

    def _entry(self, num_tokens: int) -> EntryRecord:
        return EntryRecord(
            root=self._cache.root,
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
        self._cache.history.add(token_ids)
        return token_ids
