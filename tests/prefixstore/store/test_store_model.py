"""The real store against a plain model of it: every step is done to both, then all that is in the file is compared.

Two processes have the folder open, as two daemons would. The model says exactly what must be there, save for one thing:
which nodes the store evicts. Of those it demands what eviction promises: no more than needed, and never one that is
pinned, was just written, or that a remaining node continues.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from diskprefix.errors import PrefixGone, StoreFull
from diskprefix.prefixstore.store.changes import NewNode, Use, touches
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.pieces import PayloadLayout, split_payload
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import NodeKind, child_keys
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.tokens import LEAST_TOKENS, PromptDigest, TokenIds
from diskprefix.values import SHARED
from tests.examples import examples
from tests.prefixstore.store.building import (
    BLOCK,
    Clock,
    chain,
    layout_of,
    names_of_every_run,
    open_store,
    part_of,
    publication,
    read_payload,
    recent_prompts,
)

R = TypeVar("R")

BUDGET, SMALLER_BUDGET = 5 << 20, 4 << 20
BLOCK_BYTES = 540_000
"""Of a block's payload: two pieces. Six blocks fill the budget."""
STATE_BYTES = 150_000
"""Of a checkpoint's."""
SALTS = {b"a" * 16: "a", b"b" * 16: "b", b"c" * 16: "c"}
"""Tenants' roots."""
LAYOUTS = {
    b"a" * 16: layout_of(BLOCK_BYTES),
    b"b" * 16: layout_of(BLOCK_BYTES, STATE_BYTES),
    b"c" * 16: layout_of(BLOCK_BYTES),
}
"""The second one's model has states too."""
TO_THE_TOKEN = b"c" * 16
"""The root of a model whose prompts restore to the token."""


class Prompt(NamedTuple):
    """A prompt under one root: a choice for each full block, so that prompts share, branch and extend; and a rest.

    `points`: after how many blocks there is a checkpoint, if its model has states. `ttl_s`: how long the request asks
    to keep it. `group`: in which it is remembered. `has_logits`: whether those at the end of a prompt that restores to
    the token are kept.
    """

    root: bytes
    blocks: tuple[int, ...]
    num_rest: int
    points: frozenset[int] = frozenset()
    ttl_s: float | None = None
    group: bytes = b""
    has_logits: bool = True

    @property
    def token_ids(self) -> TokenIds:
        """The rest is the beginning of one of the blocks."""
        blocks = [np.full(BLOCK, choice, dtype=np.int32) for choice in self.blocks]
        return np.concatenate([*blocks, np.full(self.num_rest, 1, dtype=np.int32)])


prompts = st.builds(
    Prompt,
    st.sampled_from(sorted(SALTS)),
    st.lists(st.integers(-1, 1), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2),
    st.frozensets(st.integers(1, 4), max_size=3),
    st.sampled_from([None, None, 250.0, 600.0]),
    st.sampled_from([b"", b"together"]),
    st.booleans(),
)
processes = st.sampled_from(["here", "there"])
delays_s = st.sampled_from([10.0, 600.0, 0.0])


@lru_cache(maxsize=256)
def payload(root: bytes, prefix: bytes, num_bytes: int) -> bytes:
    """Bytes that no other node has, and that compress a little."""
    return np.random.default_rng([*root, *prefix]).integers(0, 64, num_bytes, dtype=np.uint8).tobytes()


def publication_of(store: Store, prompt: Prompt, first: int = 0, end: int | None = None) -> Publication:
    """Returns what a request publishes that found the first `first` nodes of its prompt in the store. With
    `end`, no more than the nodes before it: while the prompt is computed, or because the request was cancelled."""
    token_ids = prompt.token_ids
    layout = LAYOUTS[prompt.root]
    points = {BLOCK * point for point in prompt.points} if has_states(prompt.root) else set()
    whole = publication(
        store,
        token_ids,
        root=prompt.root,
        layout=layout,
        checkpoints=points,
        replaces=prompt.root == TO_THE_TOKEN,
        end_kind=NodeKind.BLOCK if prompt.root == TO_THE_TOKEN and not prompt.has_logits else NodeKind.TAIL,
    )
    nodes = []
    for node in whole.nodes:
        prefix = token_ids[: node.position + len(node.token_ids)].tobytes() + bytes([node.kind])
        own = memoryview(payload(prompt.root, prefix, node.payload_bytes))
        nodes.append(replace(node, payload=split_payload(own, node.pieces), ttl_s=prompt.ttl_s))
    if prompt.num_rest == 0 and nodes[-1].kind == NodeKind.TAIL:
        # As a boundary of the policy ends it: with a full block, which others may continue, or its checkpoint.
        nodes.pop()
    root_record = msgspec.structs.replace(whole.root_record, tenant=str(SHARED.with_salt(SALTS[prompt.root])))
    return replace(
        whole,
        epoch=store.epochs.of(root_record.tenant),
        nodes=tuple(nodes[first:end]),
        last_node=nodes[-1].name if end is None else None,
        entry=whole.entry if end is None else part_of(whole).entry,
        prompt=whole.prompt if end is None else None,
        root_record=root_record,
        prompt_group=prompt.group,
        prompt_ttl_s=prompt.ttl_s,
        ttl_s=prompt.ttl_s,
    )


def has_states(root: bytes) -> bool:
    return bool(PayloadLayout.parse(LAYOUTS[root]).states)


@dataclass(eq=False)
class ModelNode:
    new: NewNode
    root: bytes
    created_at: float
    last_used: float
    restores: int = 0
    asked_s: set[float | None] = field(default_factory=set)
    """For how long its uses asked to keep it; None where one asked for what the daemon says."""

    def is_over(self, ttl_s: float, now: float) -> bool:
        asked_s = (asked or ttl_s or math.inf for asked in self.asked_s)
        return now - self.last_used >= max(asked_s) and self.last_used <= now

    def is_kept_as_long(self, other: ModelNode) -> bool:
        """Tells whether it is kept at least as long as another node after its last use, whatever the daemon says."""
        return all(
            max(asked or ttl_s for asked in self.asked_s) >= max(asked or ttl_s for asked in other.asked_s)
            for ttl_s in (1.0, math.inf)
        )


class Seen(NamedTuple):
    came_at: float
    ttl_s: float | None
    group: bytes
    token_ids: list[int]


class Entry(NamedTuple):
    num_tokens: int
    kind: str


class Model:
    """The content that must be in the store, in plain dictionaries."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, ModelNode] = {}
        self.entries: dict[bytes, Entry] = {}
        """By the names of their nodes."""
        self.seen: dict[bytes, list[Seen]] = {root: [] for root in SALTS}
        """The recent prompts of each root, oldest first."""

    def path(self, name: bytes) -> Iterator[bytes]:
        """Names of stored nodes from this one up to the first; nothing if it is not stored."""
        while name in self.nodes:
            yield name
            name = self.nodes[name].new.parent

    def text(self, last_node: bytes) -> list[int]:
        """The token ids of a saved prompt."""
        return [one for name in reversed([*self.path(last_node)]) for one in self.nodes[name].new.token_ids.tolist()]

    def child_keys(self) -> list[bytes]:
        """All keys of the index of children, in order."""
        new = (node.new for node in self.nodes.values())
        return sorted(key for node in new for key in child_keys(node.name, node.parent, node.token_ids.tobytes()))

    def children(self, name: bytes) -> set[bytes]:
        return {child for child, node in self.nodes.items() if node.new.parent == name}

    def entry(self, name: bytes) -> set[bytes]:
        """The nodes of the saved prompt that ends there: its path, and the checkpoints on it."""
        path = set(self.path(name))
        return path | {child for block in path for child in self.children(block) if self.is_checkpoint(child)}

    def is_checkpoint(self, name: bytes) -> bool:
        return self.nodes[name].new.kind == NodeKind.CHECKPOINT

    def is_bare(self, name: bytes) -> bool:
        """Tells whether it would be of no use if nothing continued it."""
        node = self.nodes[name]
        return node.new.kind == NodeKind.BLOCK and has_states(node.root)

    def subtree(self, name: bytes) -> set[bytes]:
        return {node for node in self.nodes if name in self.path(node)}

    def with_ancestors(self, names: Iterable[bytes]) -> set[bytes]:
        return {node for name in names for node in self.path(name)}

    def stored_prefix(self, nodes: tuple[NewNode, ...]) -> int:
        """Returns how many of a prompt's nodes are stored, from the first on."""
        return next((i for i, node in enumerate(nodes) if node.name not in self.nodes), len(nodes))

    def publish(self, publication: Publication, now: float) -> None:
        last_node = publication.last_node
        for new in publication.nodes:
            if (longer := self.longer(new)) is not None:
                last_node = longer if new.name == last_node else last_node
                continue
            node = self.nodes.setdefault(new.name, ModelNode(new, publication.root, now, now))
            node.asked_s.add(new.ttl_s)
            for name in self.shorter(new):
                if node.is_kept_as_long(self.nodes[name]):
                    node.restores += self.nodes[name].restores
                    del self.nodes[name]
                    self.entries.pop(name, None)
        assert publication.entry is not None
        kind, base = publication.entry.kind, publication.base or b""
        if last_node is not None:
            self.touch(last_node, now, 0, publication.ttl_s)
        if last_node is not None and last_node == publication.last_node:
            self.put_entry(last_node, Entry(publication.entry.num_tokens, kind))
        passing = self.entries.pop(base) if self.entries.get(base, Entry(0, "saved")).kind == "partial" else None
        for new in reversed(publication.nodes):
            if new.name in self.nodes and not self.is_covered(new.name):
                self.put_entry(new.name, Entry(new.end, kind))
        if passing is not None and not self.is_covered(base):
            self.put_entry(base, passing)
        if publication.prompt is None:
            return
        own_s, token_ids = publication.prompt_ttl_s, publication.prompt.token_ids.tolist()
        self.seen[publication.root].append(Seen(now, own_s, publication.prompt_group, token_ids))

    def put_entry(self, name: bytes, entry: Entry) -> None:
        if self.entries.get(name, Entry(0, "partial")).kind == "partial":
            self.entries[name] = entry

    def is_covered(self, name: bytes) -> bool:
        """Tells whether a node belongs to an entry. The checkpoints here have no tokens."""
        above = self.nodes[name].new.parent
        is_beside = self.is_checkpoint(name) and (above in self.entries or len(self.children(above)) > 1)
        return name in self.entries or bool(self.children(name)) or is_beside

    def longer(self, new: NewNode) -> bytes | None:
        """Returns the node that holds all of one that is not stored: of several the first in the index of children."""
        if not new.replaces or new.name in self.nodes:
            return None
        found = [self.nodes[name].new for name in self.children(new.parent) if is_part(new, self.nodes[name].new)]
        keys = (child_keys(one.name, one.parent, one.token_ids.tobytes())[0] for one in found)
        return min(keys)[-16:] if found and len(new.token_ids) else None

    def shorter(self, new: NewNode) -> set[bytes]:
        """Returns the parts of a node, each of which goes, unless it is to be kept for longer."""
        if not new.replaces:
            return set()
        return {name for name in self.children(new.parent) if is_part(self.nodes[name].new, new)}

    def touch(self, name: bytes, when: float, hits: int, ttl_s: float | None) -> None:
        for node in map(self.nodes.__getitem__, self.path(name)):
            node.last_used = max(node.last_used, when)
            node.restores += hits
            node.asked_s.add(ttl_s)

    def remove(self, names: Iterable[bytes]) -> None:
        """Removes nodes. What is left of their entries ends where it belongs to no other one."""
        for name in names:
            del self.nodes[name]
            self.entries.pop(name, None)
        for name in sorted(self.nodes, key=lambda name: -self.nodes[name].new.end):
            if not self.is_covered(name):
                self.entries[name] = Entry(self.nodes[name].new.end, "partial")

    def expired(self, ttl_s: float, now: float, pinned: set[bytes]) -> set[bytes]:
        kept = {name for name, node in self.nodes.items() if not node.is_over(ttl_s, now)}
        return self.nodes.keys() - self.with_ancestors(kept | pinned)

    def forget_expired_prompts(self, ttl_s: float, now: float) -> None:
        for root, seen in self.seen.items():
            self.seen[root] = [one for one in seen if abs(now - one.came_at) < (one.ttl_s or ttl_s or math.inf)]

    def seen_children(self, secret: int) -> Counter[bytes]:
        """How many prompts that were seen, and blocks on their paths, continue each block."""
        continued: set[tuple[bytes, bytes]] = set()
        prompts: Counter[bytes] = Counter()
        for root, seen in self.seen.items():
            for one in seen:
                names = [root, *chain(secret, root, np.array(one.token_ids, np.int32), BLOCK)]
                continued |= set(pairwise(names))
                prompts[names[-1]] += 1
        uses = prompts + Counter(parent for parent, _ in continued)
        return Counter({name: number for name, number in uses.items() if name not in self.seen})


def is_part(node: NewNode, other: NewNode) -> bool:
    """Tells whether a node that continues the same node has all that `node` has, and more."""
    mine, others = node.token_ids.tolist(), other.token_ids.tolist()
    is_longer = len(others) > len(mine) or (node.kind, other.kind) == (NodeKind.BLOCK, NodeKind.TAIL)
    return others[: len(mine)] == mine and is_longer


def goes_with(seen: list[int], text: list[int], kept: list[list[int]]) -> bool:
    """Tells whether a recent prompt goes with a deleted text: one begins with the other, or it has tokens of that text
    that nothing has which stays; unless something that stays has all of it."""
    alike, least = num_alike(seen, text), max((num_alike(seen, other) for other in kept), default=0)
    return least < len(seen) and (alike == min(len(seen), len(text)) or alike > max(LEAST_TOKENS - 1, least))


def num_alike(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Written(NamedTuple):
    """The outcome of a publication. `scattered`: LMDB found no free pages for it at first, though there was room."""

    fitted: bool
    evicted: int
    scattered: bool


def write(store: Store, prompt: Prompt, first: int, codec: Codec, end: int | None = None) -> Written:
    store.codec = codec
    # The other process may have purged something.
    store.read_epochs()
    # What a publication does when LMDB is full begins with this.
    real = Environment.wait_for_readers
    with mock.patch.object(Environment, "wait_for_readers", autospec=True, side_effect=real) as waited:
        try:
            evicted = store.publish(publication_of(store, prompt, first, end))
        except StoreFull:
            return Written(fitted=False, evicted=0, scattered=waited.called)
    return Written(fitted=True, evicted=evicted, scattered=waited.called)


def is_there(snapshot: Snapshot, node: NewNode) -> bool:
    token_ids = node.token_ids.tobytes()
    return snapshot.has(node.name, node.parent, node.position, node.kind, token_ids)


def touch(store: Store, name: bytes, use: Use) -> None:
    store.write([touches({name: use})])


def forget(store: Store, selection: PurgeFilter, now: float) -> int:
    return purge(store, selection, now, lambda _: None).blocks


_opened: dict[Path, tuple[Store, Clock]] = {}
"""In the other process: its store of each folder, open until `close_there`."""


def do_there(path: Path, now: float, action: Callable[..., R], *args: Any) -> R:
    if path not in _opened:
        clock = Clock()
        _opened[path] = open_store(path, budget_bytes=BUDGET, clock=clock), clock
    store, clock = _opened[path]
    clock.now = now
    return action(store, *args)


def usable_bytes(store: Store) -> int:
    return store.evictor.usable_bytes()


def expire(store: Store, ttl_s: float) -> int:
    return store.evictor.expire(ttl_s)


def close_there(path: Path) -> None:
    if path in _opened:
        _opened.pop(path)[0].close()


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, path: Path, other: ProcessPoolExecutor) -> None:
        super().__init__()
        self.path, self.other = path, other
        self.clock = Clock()
        self.clock.now = 1e9
        with names_of_every_run():
            self.store = open_store(path, budget_bytes=BUDGET, clock=self.clock)
        self.identity = self.store.store_id, self.store.secret
        self.model = Model()
        self.prompts: list[Prompt] = []
        self.sent: dict[PromptDigest, list[int]] = {}
        self.pins: list[bytes] = []
        self.most_file_bytes = BUDGET

    def teardown(self) -> None:
        self.store.close()
        self.other.submit(close_there, self.path).result()

    def do(self, process: str, action: Callable[..., R], *args: Any) -> R:
        if process == "here":
            return action(self.store, *args)
        return self.other.submit(do_there, self.path, self.clock.now, action, *args).result()

    def pinned(self, process: str) -> set[bytes]:
        """A pin holds against the process that set it alone."""
        return set(self.pins) if process == "here" else set()

    def stored(self) -> set[bytes]:
        with self.store.snapshot() as snapshot:
            return set(snapshot.keys("usage"))

    def sizes(self) -> dict[bytes, int]:
        with self.store.snapshot() as snapshot:
            table = snapshot.usages()
        return dict(zip(table.names, table.records["stored_bytes"].tolist(), strict=True))

    def usable(self, process: str) -> int:
        """The bytes that pages with data may take, as the store of that process reckons: some less than its budget."""
        usable = self.do(process, usable_bytes)
        assert 0 < usable < (self.store.budget_bytes if process == "here" else BUDGET)
        return usable

    @initialize(some=st.lists(prompts, min_size=1, max_size=3), process=processes)
    def begin_with_some_prompts(self, some: list[Prompt], process: str) -> None:
        for prompt in some:
            self.publish(process, prompt, Codec.PLANES, matched=True)

    @rule(process=processes, prompt=prompts, codec=st.sampled_from(Codec), matched=st.booleans(), after_s=delays_s)
    def save(self, process: str, prompt: Prompt, codec: Codec, matched: bool, after_s: float) -> None:
        self.clock.now += after_s
        self.publish(process, prompt, codec, matched)

    @precondition(lambda self: self.prompts)
    @rule(process=processes, data=st.data(), more=st.lists(st.integers(-1, 1), max_size=2), after_s=delays_s)
    def save_the_next_turn(self, process: str, data: st.DataObject, more: list[int], after_s: float) -> None:
        last = data.draw(st.sampled_from(self.prompts[-3:]))
        self.clock.now += after_s
        prompt = last._replace(blocks=(*last.blocks, *more)[:5], num_rest=1)
        self.publish(process, prompt, Codec.PLANES, matched=True)

    @rule(process=processes, prompt=prompts, end=st.integers(1, 5), matched=st.booleans(), after_s=delays_s)
    def save_a_beginning(self, process: str, prompt: Prompt, end: int, matched: bool, after_s: float) -> None:
        """The first of several publications, or what a cancelled request leaves: no entry, and no place in the
        history."""
        self.clock.now += after_s
        first = self.model.stored_prefix(publication_of(self.store, prompt, 0, end).nodes) if matched else 0
        if publication_of(self.store, prompt, first, end).nodes:
            self.publish(process, prompt, Codec.RAW, matched, end)

    def publish(self, process: str, prompt: Prompt, codec: Codec, matched: bool, end: int | None = None) -> None:
        self.prompts.append(prompt)
        self.sent[PromptDigest.of(self.store.secret, prompt.token_ids)] = prompt.token_ids.tolist()
        whole = publication_of(self.store, prompt, 0, end)
        new = publication_of(self.store, prompt, self.model.stored_prefix(whole.nodes) if matched else 0, end)
        sizes, used = self.sizes(), self.store.counts()["used_bytes"]
        need = sum(node.max_bytes for node in new.nodes)
        continued = {node.parent for node in whole.nodes} | {node.name for node in (*new.nodes, whole.nodes[-1])}
        protected = self.pinned(process) | continued
        protected = self.model.with_ancestors(protected)
        free = self.model.nodes.keys() - protected
        excess = used + need - self.usable(process)
        written = self.do(process, write, prompt, len(whole.nodes) - len(new.nodes), codec, end)
        gone = self.model.nodes.keys() - self.stored()
        replaced = {name for node in new.nodes for name in self.model.shorter(node)} if written.fitted else set()
        evicted = gone - replaced
        assert evicted <= free
        if not written.scattered:
            self.check_eviction(evicted, free, sizes, excess, written)
        self.model.remove(evicted)
        if not written.fitted:
            return
        # What was to be replaced may have been evicted before.
        assert len(evicted) <= written.evicted <= len(gone)
        # The estimate of what a node takes leaves out a page or two of the B-trees.
        assert not need or self.store.counts()["used_bytes"] <= self.usable(process) + (64 << 10)
        self.model.publish(new, self.clock.now)
        if written.evicted > len(evicted):
            self.take_over(new)

    def take_over(self, publication: Publication) -> None:
        """From the store: what was evicted before it was replaced has left its uses to nobody, and its entry to the
        node before it."""
        with self.store.snapshot() as snapshot:
            for name, entry in snapshot.entries():
                if entry.kind == "partial" and self.model.children(name):
                    self.model.entries.setdefault(name, Entry(entry.num_tokens, entry.kind))
            for node in publication.nodes:
                if (usage := snapshot.usage(node.name)) is not None:
                    self.model.nodes[node.name].restores = usage.restores

    def check_eviction(
        self, gone: set[bytes], free: set[bytes], sizes: Mapping[bytes, int], excess: int, written: Written
    ) -> None:
        """No more than needed went, and all or nothing: `excess` bytes, or a little ahead."""
        if not written.fitted:
            assert not gone
            assert sum(sizes[name] for name in free) < excess
        elif gone:
            assert excess > 0
            assert sum(sizes[name] for name in gone) < max(excess, BUDGET // 64) + max(sizes[name] for name in gone)
            bare = {name for name in free if self.model.is_bare(name) and not self.model.children(name)}
            assert bare <= gone or all(map(self.model.is_bare, gone))

    @rule(process=processes, prompt=prompts)
    def save_what_continues_a_prefix_that_is_gone(self, process: str, prompt: Prompt) -> None:
        nodes = publication_of(self.store, prompt).nodes
        first = self.model.stored_prefix(nodes) + 1
        if first < len(nodes) and nodes[first - 1].kind != NodeKind.CHECKPOINT:
            # The refusal may come after room was made: what had to go for it is gone.
            protected = self.pinned(process)
            with suppress(PrefixGone):
                assert not self.do(process, write, prompt, first, Codec.RAW).fitted
            gone = self.model.nodes.keys() - self.stored()
            assert not gone & self.model.with_ancestors(protected)
            self.model.remove(gone)

    @rule(prompt=prompts)
    def match(self, prompt: Prompt) -> None:
        nodes = publication_of(self.store, prompt).nodes
        with self.store.snapshot() as snapshot:
            found = [is_there(snapshot, node) for node in nodes]
        assert (*found, False).index(False) == self.model.stored_prefix(nodes)

    @rule(
        process=processes,
        prompt=prompts,
        hits=st.integers(0, 3),
        late_s=st.sampled_from([0.0, 0.5, 100.0]),
        ttl_s=st.sampled_from([None, 250.0, 3600.0]),
        is_gone=st.booleans(),
    )
    def touch(self, process: str, prompt: Prompt, hits: int, late_s: float, ttl_s: float | None, is_gone: bool) -> None:
        nodes = publication_of(self.store, prompt).nodes
        # The deepest that is stored; or, as after an eviction by the other process, one that is not: perhaps a ghost.
        name = nodes[min(max(0, self.model.stored_prefix(nodes) - 1 + is_gone), len(nodes) - 1)].name
        use = Use(self.clock.now - late_s, hits, recorded_ttl(ttl_s))
        self.do(process, touch, name, use)
        self.model.touch(name, self.clock.now - late_s, hits, ttl_s)

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.nodes)))
        self.store.evictor.pin(name)
        self.pins.append(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.pins))
        self.store.evictor.unpin(name)
        self.pins.remove(name)

    @rule(prompt=prompts, num_free=st.integers(0, 1))
    def save_while_most_is_in_use(self, prompt: Prompt, num_free: int) -> None:
        with self.in_use(self.leaves()[num_free:]):
            self.publish("here", prompt, Codec.ZSTD, matched=True)

    def leaves(self) -> list[bytes]:
        return sorted(name for name in self.model.nodes if not self.model.children(name))

    @contextmanager
    def in_use(self, names: list[bytes]) -> Iterator[None]:
        for name in names:
            self.store.evictor.pin(name)
        self.pins += names
        yield
        for name in names:
            self.store.evictor.unpin(name)
            self.pins.remove(name)

    @rule(seconds=st.sampled_from([1.0, 600.0, 86_400.0]))
    def set_the_clock_back(self, seconds: float) -> None:
        self.clock.now -= seconds

    @rule(
        process=processes,
        ttl_s=st.sampled_from([3600.0, 300.0, 0.0]),
        after_s=st.sampled_from([0.0, 200.0, 300.0, 3500.0, 86_400.0]),
        num_in_use=st.integers(0, 1),
    )
    def expire(self, process: str, ttl_s: float, after_s: float, num_in_use: int) -> None:
        self.clock.now += after_s
        with self.in_use(self.leaves()[:num_in_use]):
            names = self.model.expired(ttl_s, self.clock.now, self.pinned(process))
            assert self.do(process, expire, ttl_s) == len(names)
        self.model.remove(names)
        self.model.forget_expired_prompts(ttl_s, self.clock.now)

    @precondition(lambda self: self.model.entries)
    @rule(process=processes, data=st.data(), what=st.sampled_from(["damage", "prompt", "tenant"]))
    def remove(self, process: str, data: st.DataObject, what: str) -> None:
        last_node = data.draw(st.sampled_from(sorted(self.model.entries)))
        if what == "damage":
            self.quarantine(process, data.draw(st.sampled_from(sorted(self.model.entry(last_node)))))
        elif what == "prompt":
            # The one that continues most of the others: saved ones must stay.
            self.forget_prompt(process, max(sorted(self.model.entries), key=self.num_entries_within))
        else:
            self.forget_tenant(process, self.model.nodes[last_node].root)

    def num_entries_within(self, last_node: bytes) -> int:
        return len(self.model.entries.keys() & set(self.model.path(last_node)))

    def quarantine(self, process: str, name: bytes) -> None:
        doomed = self.model.subtree(name)
        assert self.do(process, Store.quarantine, name, self.model.nodes[name].new.parent) == len(doomed)
        self.model.remove(doomed)

    def forget_tenant(self, process: str, root: bytes) -> None:
        doomed = {name for name, node in self.model.nodes.items() if node.root == root}
        assert self.do(process, forget, PurgeFilter(salt=SALTS[root]), self.clock.now) == len(doomed)
        self.model.remove(doomed)
        self.model.seen[root] = []

    def forget_prompt(self, process: str, last_node: bytes) -> None:
        root, model = self.model.nodes[last_node].root, self.model
        gone = self.going_with(last_node)
        needed = {node for name in model.entries.keys() - gone for node in model.entry(name)}
        # A checkpoint here has no tokens, and stays with its block.
        doomed = {name for name, node in model.nodes.items() if node.root == root} - needed
        texts, sources = [model.text(name) for name in gone], [self.source(name) for name in gone]
        assert self.do(process, forget, PurgeFilter(entries=frozenset([last_node])), self.clock.now) == len(doomed)
        for name in gone:
            model.entries.pop(name)
        for name in doomed:
            del model.nodes[name]
        kept = [model.text(name) for name, node in model.nodes.items() if node.root == root]
        living = {tuple(self.source(name)) for name, entry in model.entries.items() if entry.kind == "saved"}
        model.seen[root] = [
            one
            for one in model.seen[root]
            if not any(goes_with(one.token_ids, text, kept) for text in texts)
            and not (
                one.token_ids in sources
                and tuple(one.token_ids) not in living
                and max((num_alike(one.token_ids, other) for other in kept), default=0) < len(one.token_ids)
            )
        ]

    def source(self, name: bytes) -> list[int]:
        """The prompt that an entry came from, as the store has it: which of several is left to a node is its choice."""
        with self.store.snapshot() as snapshot:
            entry = snapshot.entry(name)
        assert entry is not None
        return self.sent[entry.came_from]

    def going_with(self, chosen: bytes) -> set[bytes]:
        """The entries that go with a chosen one: the partial ones whose prompt begins with a deleted text or continues
        it, unless a saved one stays that has their prompt."""
        model, root = self.model, self.model.nodes[chosen].root
        own = {name: entry for name, entry in model.entries.items() if model.nodes[name].root == root}
        living = [self.source(name) for name, entry in own.items() if entry.kind == "saved" and name != chosen]
        seen = [one.token_ids for one in model.seen[root]]
        gone, texts, sources = {chosen}, [model.text(chosen)], [self.source(chosen)]
        if own[chosen].kind == "partial" and sources[0] in seen:
            texts.append(sources[0])
        sources = [source for source in sources if source not in living]

        def follows(name: bytes, text: list[int]) -> bool:
            source, stored = self.source(name), model.text(name)
            if source in sources or num_alike(source, text) == len(source):
                return True
            # How a longer prompt goes on is known if it was seen, or from what is stored of it.
            known = source if source in seen else stored
            alike = num_alike(known, text)
            return len(source) > len(text) and (alike == len(text) or (known is stored and alike == len(stored)))

        # Bound: each text is taken once, and there are as many as entries.
        while texts:
            text = texts.pop()
            others = [name for name, entry in own.items() if entry.kind == "partial" and name not in gone]
            for name in others:
                if self.source(name) not in living and follows(name, text):
                    gone.add(name)
                    texts += [] if model.children(name) else [model.text(name)]
            sources += [self.source(name) for name in gone if self.source(name) not in (*living, *sources)]
        return gone

    @rule(budget_bytes=st.sampled_from([BUDGET, SMALLER_BUDGET]), alone=st.booleans())
    def reopen(self, budget_bytes: int, alone: bool) -> None:
        with self.store.snapshot() as snapshot:
            before = {name: snapshot.usage(name) for name in self.model.nodes}
        self.store.close()
        if alone:
            self.other.submit(close_there, self.path).result()
        self.store = open_store(self.path, budget_bytes=budget_bytes, clock=self.clock)
        assert (self.store.store_id, self.store.secret) == self.identity
        with self.store.snapshot() as snapshot:
            assert {name: snapshot.usage(name) for name in self.model.nodes} == before
        # Pins are those of a running process.
        self.pins.clear()
        if budget_bytes < BUDGET:
            # A file that is larger than the budget keeps its size, and may need pages to delete with.
            self.most_file_bytes = BUDGET + (16 << 20)

    @rule(alone=st.booleans())
    def fit_budget(self, alone: bool) -> None:
        if alone:
            self.other.submit(close_there, self.path).result()
        protected = self.model.with_ancestors(set(self.pins))
        free = self.model.nodes.keys() - protected
        evicted = self.store.fit_budget()
        gone = self.model.nodes.keys() - self.stored()
        assert len(gone) == evicted
        assert gone <= free
        self.model.remove(gone)
        if gone != free:
            assert self.store.counts()["used_bytes"] <= self.usable("here")
            assert not alone or self.store.file_bytes() <= self.store.budget_bytes

    @invariant()
    def what_must_be_there_is_there_bit_for_bit_and_nothing_else(self) -> None:
        with self.store.snapshot() as snapshot:
            seen = self.model.seen_children(self.store.secret)
            assert set(snapshot.keys("usage")) == self.model.nodes.keys()
            assert set(snapshot.keys("nodes")) == self.model.nodes.keys() | seen.keys(), "and ghosts"
            records = {name: snapshot.node_or_ghost(name) for name in seen}
            counts = {name: record.seen_children for name, record in records.items() if record is not None}
            assert counts == seen
            assert list(snapshot.keys("children")) == self.model.child_keys()
            for node in self.model.nodes.values():
                assert is_there(snapshot, node.new)
                assert read_payload(snapshot, node.new) == b"".join(node.new.payload)
            entries = {name: Entry(entry.num_tokens, entry.kind) for name, entry in snapshot.entries()}
            assert entries == self.model.entries
            assert all(self.model.is_covered(name) for name in self.model.nodes)
            for root, prompts_of_root in self.model.seen.items():
                found = [(group, prompt.tolist()) for group, prompt in recent_prompts(snapshot, root, 999)]
                assert found == [(one.group, one.token_ids) for one in prompts_of_root]

    @invariant()
    def uses_and_continuations_are_counted(self) -> None:
        with self.store.snapshot() as snapshot:
            for name, node in self.model.nodes.items():
                usage = snapshot.usage(name)
                assert usage is not None
                assert usage.children == len(self.model.children(name))
                assert (usage.created_at, usage.last_used) == (node.created_at, node.last_used)
                assert usage.restores == node.restores

    @invariant()
    def the_budget_holds_and_the_store_verifies(self) -> None:
        assert self.store.counts()["used_bytes"] <= BUDGET
        assert self.store.file_bytes() <= self.most_file_bytes
        assert verify_index(self.store).problems == ()


def test_the_store_does_what_a_plain_model_of_it_does(tmp_path: Path) -> None:
    folders = (tmp_path / str(i) for i in range(10**6))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        run_state_machine_as_test(
            lambda: StoreMachine(next(folders), other),  # type: ignore[arg-type]
            # Drawing is timed too, and a busy machine is no failure.
            settings=settings(
                max_examples=examples(4), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
            ),
        )
