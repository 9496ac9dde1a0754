"""Records that lead around in a circle, though each is whole by itself, keep no walk through the store going."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.errors import CacheError, PrefixGone
from diskprefix.prefixstore.store.changes import Use
from diskprefix.prefixstore.store.ghosts import forget_prompts, newest_first
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import NodeKind, encode_node
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.tree import PrefixTree, list_entries
from diskprefix.prefixstore.store.verify import remove_damaged, verify_index
from tests.prefixstore.store.building import BLOCK, ROOT, open_store, prompt, publication

PROMPT = prompt(1, 6 * BLOCK + 5)
DEADLINE_S = 20


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A walk that does not end fails the test instead of all tests."""

    def end(*_: object) -> None:
        pytest.fail("the walk does not end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, budget_bytes=64 << 20)
    yield opened
    opened.close()


def saved(store: Store) -> Publication:
    pub = publication(store, PROMPT, checkpoints=(2 * BLOCK, 4 * BLOCK), payload_bytes=2000)
    store.publish(pub)
    return pub


def blocks_of(pub: Publication) -> list[bytes]:
    return [node.name for node in pub.nodes if node.kind == NodeKind.BLOCK]


def close_circle(store: Store, pub: Publication, *, bare: bool) -> None:
    """Has the second block continue the fifth one, with checksums that are right. The index of children says so too.
    `bare`: without tokens, as nothing of a position falls then."""
    second, fifth = blocks_of(pub)[1], blocks_of(pub)[4]
    with store.changes() as changes:
        node = changes.node(second)
        assert node is not None
        position = 5 * BLOCK if not bare else node.position
        changed = replace(node, parent=fifth, position=position, token_ids=node.token_ids[: 0 if bare else None])
        changes._put_record("nodes", second, encode_node(second, changed))
        for key in [key for key in changes.keys("children") if key.endswith(second)]:
            changes._put_record("children", fifth + key[16:], b"")


def walk_newest_first(store: Store, _: Publication) -> None:
    with store.snapshot() as snapshot:
        assert not list(newest_first(snapshot, ROOT))


def walk_forget(store: Store, _: Publication) -> None:
    with store.changes() as changes:
        forget_prompts(changes, list(changes.keys_under("seen", ROOT)))
        assert not changes.has_under("seen", ROOT)


def walk_ancestry(store: Store, pub: Publication) -> None:
    with store.snapshot() as snapshot:
        names = list(snapshot.ancestry(pub.nodes[-1].name))
        assert len(names) == len(set(names))


def walk_touch(store: Store, pub: Publication) -> None:
    with store.changes() as changes:
        changes.touch(pub.nodes[-1].name, Use(1e9, 1, 0))


def walk_superseded(store: Store, _: Publication) -> None:
    """Saving the next turn looks for the checkpoints that it supersedes."""
    last = publication(store, PROMPT, checkpoints=(6 * BLOCK + 2,), payload_bytes=2000).nodes[-2]
    assert last.kind == NodeKind.CHECKPOINT
    with store.changes() as changes:
        changes.remove_superseded(last, (), ttl_s=0, pinned=(), has_entry=True)


def walk_path(store: Store, pub: Publication) -> None:
    with store.snapshot() as snapshot, pytest.raises(CacheError):
        PrefixTree(snapshot).entry(pub.nodes[-1].name)


def walk_lists(store: Store, _: Publication) -> None:
    with store.snapshot() as snapshot:
        names = list(PrefixTree(snapshot).depth_first())
        assert len(names) == len(set(names))
        list_entries(snapshot)


def walk_subtrees(store: Store, pub: Publication) -> None:
    second, fifth = blocks_of(pub)[1], blocks_of(pub)[4]
    assert second in store.remove_subtrees({second: fifth}).nodes


def walk_verify(store: Store, _: Publication) -> None:
    assert verify_index(store).problems
    remove_damaged(store)


def walk_purge(store: Store, _: Publication) -> None:
    purge(store, PurgeFilter(), 2e9)


def walk_eviction(store: Store, _: Publication) -> None:
    """The nodes of a circle are no leaves, so they are never chosen; a check removes them."""
    store.evictor.expire(1e-3)


def walk_publish(store: Store, _: Publication) -> None:
    with suppress(PrefixGone):
        store.publish(publication(store, np.append(PROMPT, prompt(2, BLOCK)), payload_bytes=2000))


WALKS: dict[str, Callable[[Store, Publication], None]] = {
    name.removeprefix("walk_"): walk for name, walk in list(globals().items()) if name.startswith("walk_")
}


@pytest.mark.parametrize("bare", [False, True], ids=["with tokens", "without tokens"])
@pytest.mark.parametrize("walk", WALKS)
def test_records_that_lead_around_in_a_circle_end_every_walk(store: Store, walk: str, bare: bool) -> None:
    pub = saved(store)
    close_circle(store, pub, bare=bare)
    WALKS[walk](store, pub)
