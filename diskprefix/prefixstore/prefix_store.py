"""The store for programs with an engine of their own. README.md has the verbs in one table, and an example."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.prefixstore.cache.tiered_store import TieredStore, open_store
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import View, Write, open_views
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.pieces import DTYPES, LayoutGroup, LayoutText, PayloadLayout
from diskprefix.prefixstore.store.purge import Purged, PurgeFilter, purge
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import EntryRecord
from diskprefix.prefixstore.store.store import Publication
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.tokens import PromptDigest, TokenIds, TokenPath, as_token_ids

log = logging.getLogger("diskprefix")

Buffers: TypeAlias = Sequence[npt.NDArray[Any]]
"""An array for each group of a `StateIdentity`, C-contiguous, of shape [tensors, heads, tokens, head_dim]. Its items
have as many bytes as the group's dtype: uint16 for bfloat16. It may have room for more tokens than a call reads or
writes."""
PromptTokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
SaveState: TypeAlias = Literal["queued", "stored", "dropped"]

_LABEL = "a prompt"


class PrefixStore:
    """An open folder of the store. A folder is open once in a process; any number of processes may have it open."""

    def __init__(self, options: StoreOptions, on_wait: Callable[[str], None] = lambda _why: None) -> None:
        """Opens the folder of `options`, and makes it if it is missing. `on_wait` gets the reason if that takes long.

        Raises `CacheError` if the folder cannot be used, but not if it is full or read-only: then nothing is saved.
        Raises `SettingsError` for a key file that cannot be read, or a budget above the disk.
        """
        store = open_store(options, on_wait)
        try:
            self._tiered = TieredStore(options, store)
        except BaseException:
            store.close()
            raise

    @classmethod
    def open(cls, folder: str | Path, **options: Any) -> PrefixStore:
        """Returns the open store of a folder. `options` are fields of `StoreOptions`; raises as `__init__` does."""
        return cls(StoreOptions(kv_cache_dir=Path(folder), **options))

    def states(
        self, identity: StateIdentity, *, tenant: str = "", exact_at: Literal["token", "block"] = "token"
    ) -> States:
        """Returns the states of one identity. Those of one `tenant` (the text of a `values.Tenant`) are never found for
        another. `exact_at`: where a computation may go on with the same bits as one from the start."""
        return States(self._tiered, identity, tenant, "token" if exact_at == "token" else "sliceable")

    def purge(self, model: str | None = None, *, older_than_s: float | None = None) -> Purged:
        """Removes the states of a model (None for all) that were not used for `older_than_s` seconds (None for all), of
        all tenants, and returns what was removed. Saves that are still queued are dropped. Raises `CacheError`."""
        store = self._tiered.store
        purged = purge(store, PurgeFilter(model=model, older_than_s=older_than_s), store.clock())
        self._tiered.writer.drop_outdated()
        return purged

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until what was queued is stored or dropped. Returns False if the time runs out first."""
        return self._tiered.writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Writes what is queued, ends the threads and closes the file. Returns False if not all of it was written."""
        return self._tiered.close(timeout_s)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class States:
    """The states of one identity and one tenant. For any thread."""

    def __init__(
        self, tiered: TieredStore, identity: StateIdentity, tenant: str, kind: Literal["token", "sliceable"]
    ) -> None:
        self._tiered, self._kind = tiered, kind
        self._record = identity.record(tenant)
        self._root = identity.root(tenant)
        self._layout = PayloadLayout.parse(identity.layout)
        self._groups = _groups_of(identity)

    def match(self, token_ids: PromptTokens) -> Match:
        """Returns the longest stored beginning of a prompt. It reads the disk, for some seconds at most; none is found
        if the disk does not answer or the store cannot be read."""
        nodes = self._nodes(as_token_ids(token_ids))
        try:
            path, num_tokens = self._tiered.store.reads.ask(partial(self._find, nodes), Patience())
        except CacheError as error:
            log.debug("[disk-cache] %s was not looked up: %s", _LABEL, error)
            path, num_tokens = [], 0
        return Match(self, nodes, path, num_tokens)

    def save(self, token_ids: PromptTokens, buffers: Buffers, *, ttl_s: float | None = None) -> SaveTicket:
        """Queues the state of all tokens of a prompt that is not stored yet, and returns at once. The state is copied,
        so the buffers may change afterwards. It is stored in one transaction, and found by `match` from now on. It is
        removed `ttl_s` seconds after its last use; None for those of the options.

        Nothing is saved, and the ticket says `dropped`, if the write buffer has no room or the store cannot be written.
        Raises `ValueError` for buffers of another form.
        """
        nodes = self._nodes(as_token_ids(token_ids))
        rows = self._rows(buffers, len(nodes.token_ids))
        tiered, ticket = self._tiered, SaveTicket(Save(self._tiered.store.epochs.of(self._record.tenant), _LABEL))
        try:
            new = self._tiered.store.reads.ask(partial(self._missing, nodes), Patience())
        except CacheError as error:
            log.debug("[disk-cache] %s was not looked up: %s", _LABEL, error)
            return ticket.ended("dropped")
        if not new:
            return ticket.ended("stored")
        if tiered.store.problem is not None or (room := tiered.writer.reserve(self._num_bytes(new))) is None:
            return ticket.ended("dropped")
        try:
            publication = self._publication(ticket.of, nodes, new, rows, ttl_s)
        except BaseException:
            room.release()
            raise
        tiered.writer.queue_publication(ticket.of, publication, [room, ticket], is_last=True)
        return ticket

    def _nodes(self, token_ids: TokenIds) -> PromptNodes:
        path = TokenPath(self._tiered.store.secret, self._root, token_ids, self._record.block_size)
        return PromptNodes(path, self._layout)

    def _matcher(self, nodes: PromptNodes, views: Sequence[View]) -> Matcher[View]:
        matcher = Matcher(nodes, views, self._kind, needs_logits=False)
        matcher.match()
        return matcher

    def _find(self, nodes: PromptNodes) -> tuple[list[Node], int]:
        with open_views(self._tiered.tiers) as views:
            return self._matcher(nodes, views).restorable()

    def _missing(self, nodes: PromptNodes) -> list[Node]:
        """Returns the nodes of a prompt that are not stored: full blocks, and with an engine that is exact at any token
        the partial block at the end."""
        stop = len(nodes.token_ids)
        with open_views(self._tiered.tiers) as views:
            matcher = self._matcher(nodes, views)
            _, stored = matcher.restorable()
        new = nodes.blocks[len(matcher.blocks) :]
        if self._kind == "token" and stop % nodes.block_size and (new or stored < stop):
            new = [*new, nodes.partial_block(stop)]
        return new

    def _read(self, nodes: PromptNodes, num_tokens: int, rows: list[Bytes]) -> int:
        """Reads the state of the first tokens. Returns for how many of them it was whole, and removes what is damaged:
        the next save writes it again."""
        damaged: dict[bytes, bytes] = {}
        with open_views(self._tiered.tiers) as views:
            matcher = self._matcher(nodes, views)
            # Bound: each round but the last one drops a damaged node.
            while bad := self._load(matcher, num_tokens, rows):
                node, view, error = bad
                view.drop_damaged(node, error)
                matcher.drop_node(node)
                damaged[node.name] = node.parent
            path, matched = matcher.restorable()
        store = self._tiered.store
        if path:
            self._tiered.writer.touch(path[-1].name, store.clock())
        if damaged and store.problem is None:
            with suppress(CacheError):
                store.reads.ask(partial(store.remove_subtrees, damaged), Patience())
        return min(matched, num_tokens)

    def _load(
        self, matcher: Matcher[View], num_tokens: int, rows: list[Bytes]
    ) -> tuple[Node, View, StoreCorrupt] | None:
        """Reads what was matched, up to `num_tokens`. Returns the first damaged node."""

        def fill(position: int, count: int, group: int, of_group: slice, write: Write) -> None:
            row_bytes = self._layout.groups[group].row_bytes
            write(rows[group][of_group, position * row_bytes : (position + count) * row_bytes])

        path, matched = matcher.restorable()
        stop = min(matched, num_tokens)
        read = [(node, matcher.index_of[node.name]) for node in path if node.position < stop]
        return Loader(matcher.nodes, read, 0, stop, {}, fill).run(self._tiered.readers) if read else None

    def _rows(self, buffers: Buffers, num_tokens: int) -> list[Bytes]:
        """Returns the buffers as bytes, shape [rows, bytes of all tokens]. Raises `ValueError` for another form."""
        if len(buffers) != len(self._groups):
            raise ValueError(f"{len(buffers)} buffers for {len(self._groups)} groups of tensors")
        rows: list[Bytes] = []
        for number, (buffer, group, of_token) in enumerate(
            zip(buffers, self._groups, self._layout.groups, strict=True)
        ):
            item_bytes, room = DTYPES[group.dtype][0], buffer.nbytes // (of_token.num_rows * of_token.row_bytes or 1)
            if (
                not buffer.flags.c_contiguous
                or buffer.dtype.itemsize != item_bytes
                or buffer.shape[:1] != (len(group.tensors),)
            ):
                tensors, dtype = len(group.tensors), group.dtype
                raise ValueError(f"buffer {number}: must be C-contiguous, with {tensors} tensors of {dtype} items")
            if room < num_tokens:
                raise ValueError(f"buffer {number}: has room for {room} tokens, not {num_tokens}")
            rows.append(buffer.view(np.uint8).reshape(of_token.num_rows, -1))
        return rows

    def _num_bytes(self, new: Sequence[Node]) -> int:
        return sum(self._layout.payload_bytes(node.num_tokens, node.kind) for node in new)

    def _publication(
        self, save: Save, nodes: PromptNodes, new: Sequence[Node], rows: list[Bytes], ttl_s: float | None
    ) -> Publication:
        last = new[-1]
        entry = EntryRecord(
            root=self._root,
            num_tokens=last.end,
            scope="full",
            preview="",
            created_at=self._tiered.store.clock(),
            came_from=PromptDigest.of(self._tiered.store.secret, nodes.token_ids),
            ttl_s=recorded_ttl(ttl_s),
        )
        return Publication(
            epoch=save.epoch,
            root=self._root,
            root_record=self._record,
            nodes=tuple(self._copied(nodes, node, rows, ttl_s) for node in new),
            last_node=last.name,
            entry=entry,
            ttl_s=ttl_s,
        )

    def _copied(self, nodes: PromptNodes, node: Node, rows: list[Bytes], ttl_s: float | None) -> NewNode:
        payload: list[memoryview] = []
        for piece in nodes.pieces(node):
            row_bytes = self._layout.groups[piece.group].row_bytes
            part = rows[piece.group][piece.rows, node.position * row_bytes : node.end * row_bytes]
            payload.append(np.array(part, order="C").reshape(-1).data)
        return nodes.new_node(node, payload, prefill_s=0.0, ttl_s=ttl_s, replaces=self._kind == "token")


class Match:
    """The stored beginning of a prompt: its first `num_tokens` tokens. It holds no memory and no place in the store; in
    a `with` block, its state is not evicted by this process. For one thread."""

    def __init__(self, states: States, nodes: PromptNodes, path: Sequence[Node], num_tokens: int) -> None:
        self._states, self._nodes, self._path = states, nodes, path
        self.num_tokens = num_tokens

    def read_into(self, buffers: Buffers) -> int:
        """Reads the state of the first `num_tokens` tokens into `buffers`, and returns for how many tokens it did:
        fewer if some of it was evicted meanwhile or is damaged, which is removed. What the buffers hold for later
        tokens is undefined. Waits for the disk. Raises `ValueError` for buffers of another form, and `CacheError` if
        the store cannot be read."""
        if not self.num_tokens:
            return 0
        states = self._states
        return states._read(self._nodes, self.num_tokens, states._rows(buffers, self.num_tokens))

    def pin(self) -> None:
        """Keeps the state from eviction by this process until `unpin`. Does not wait."""
        if self._path:
            self._states._tiered.store.evictor.pin(self._path[-1].name)

    def unpin(self) -> None:
        """Ends one `pin`."""
        if self._path:
            self._states._tiered.store.evictor.unpin(self._path[-1].name)

    def __enter__(self) -> Match:
        self.pin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unpin()


class SaveTicket:
    """Tells what becomes of a save. For any thread. A `Hold`."""

    def __init__(self, of: Save) -> None:
        self.of = of
        self._has_ended, self._result = threading.Event(), "queued"

    @property
    def state(self) -> SaveState:
        """`queued` until it is known whether it is `stored` or `dropped`."""
        if not self._has_ended.is_set():
            return "queued"
        return "dropped" if self.of.lost is not None or self._result == "dropped" else "stored"

    def wait(self, timeout_s: float = 30.0) -> SaveState:
        """Waits until the save is stored or dropped, or the time is over, and returns its state."""
        self._has_ended.wait(timeout_s)
        return self.state

    def ended(self, result: SaveState) -> SaveTicket:
        self._result = result
        self._has_ended.set()
        return self

    def release(self) -> None:
        self._has_ended.set()

    def frees(self) -> bool:
        return False


def _groups_of(identity: StateIdentity) -> tuple[LayoutGroup, ...]:
    import msgspec

    return msgspec.json.decode(identity.layout, type=LayoutText).groups
