"""What was seen, in the store: prompts that share ghosts, their order and their ages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diskprefix.store import evictor
from diskprefix.store.ghosts import forget, newest_first, recent_prompts
from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.store.store import Publication, Store
from diskprefix.store.verify import verify_index
from diskprefix.tokens import TokenIds
from tests.store.building import BLOCK, ROOT, Clock, chain, open_store, prompt, publication

DAY = 86_400.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1e9)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = open_store(tmp_path / "kv", clock=clock)
    yield store
    assert not verify_index(store).problems
    store.close()


def see(store: Store, token_ids: TokenIds, group: bytes = b"", ttl_s: float | None = None) -> None:
    """Sends a prompt of which nothing is kept."""
    whole = publication(store, token_ids)
    store.publish(
        replace(whole, nodes=(), last_node=None, entry=None, prompt_group=group, prompt_ttl_s=ttl_s, ttl_s=None)
    )


def seen(store: Store) -> list[list[int]]:
    """Oldest first."""
    with store.snapshot() as snapshot:
        return [token_ids.tolist() for _, token_ids in recent_prompts(snapshot, ROOT, 1 << 20)]


def num_ghosts(store: Store) -> int:
    with store.snapshot() as snapshot:
        return len(list(snapshot.keys("ghosts")))


def test_prompts_come_back_after_a_restart_with_their_groups_and_names(store: Store, clock: Clock) -> None:
    groups = [b"", b"1" * 8, b"\xff" * 8, b"", b"1" * 8]
    prompts = [prompt(seed, seed * BLOCK // 2) for seed in range(1, 6)]
    for token_ids, group in zip(prompts, groups, strict=True):
        see(store, token_ids, group)
    store.close()
    again = open_store(store.path, clock=clock)
    with again.snapshot() as snapshot:
        recent = recent_prompts(snapshot, ROOT, 99)
        assert [group for group, _ in recent] == groups
        assert [ids.tolist() for _, ids in recent] == [ids.tolist() for ids in prompts]
        assert [ids.tolist() for _, ids in recent_prompts(snapshot, ROOT, 2)] == [ids.tolist() for ids in prompts[-2:]]
        names = [one.names for one in newest_first(snapshot, ROOT)]
    assert names == [tuple(chain(again.secret, ROOT, ids, BLOCK)) for ids in prompts[::-1]]
    again.close()
    store.__init__(store.path, clock=clock)  # type: ignore[misc]


def test_prompts_that_share_a_beginning_share_its_ghosts_until_the_last_one_goes(store: Store) -> None:
    common = prompt(1, 5 * BLOCK)
    see(store, common)
    see(store, np.concatenate([common[: 3 * BLOCK], prompt(2, 2 * BLOCK + 1)]))
    see(store, common)
    assert num_ghosts(store) == 5 + 2
    see(store, common[: 2 * BLOCK + 3])
    assert num_ghosts(store) == 7
    for left in (7, 5, 2, 0):
        with store.snapshot() as snapshot:
            key = min(snapshot.keys("seen"))
        with store.changes() as changes:
            forget(changes, [key])
        assert num_ghosts(store) == left
        assert not verify_index(store).problems
    assert seen(store) == []


def test_a_ghost_stays_when_its_block_is_evicted_and_the_other_way_round(store: Store, clock: Clock) -> None:
    token_ids = prompt(1, 3 * BLOCK)
    evicted = publication(store, token_ids)
    store.publish(evicted)
    with store.changes() as changes:
        for node in evicted.nodes[::-1]:
            changes.delete_node(node.name, node.parent)
    assert seen(store) == [token_ids.tolist()]
    kept = publication(store, prompt(2, 3 * BLOCK))
    store.publish(replace(kept, prompt_ttl_s=10.0, ttl_s=None))
    clock.now += 11
    store.evictor.expire(0.0)
    assert seen(store) == [token_ids.tolist()]
    with store.snapshot() as snapshot:
        assert all(snapshot.node(node.name) is not None for node in kept.nodes)


@pytest.mark.parametrize("jump_s", [DAY, 400 * DAY, -DAY])
def test_one_jump_of_the_clock_makes_no_prompt_outlive_its_time(store: Store, clock: Clock, jump_s: float) -> None:
    """The clock jumps and jumps back. What comes then is as old as it is, and keeps its place."""
    prompts = [prompt(seed, BLOCK + seed) for seed in range(6)]
    start = clock.now
    for number, token_ids in enumerate(prompts):
        clock.now = start + number + (jump_s if number in (2, 3) else 0.0)
        see(store, token_ids, ttl_s=100.0 if number == 5 else None)
    assert seen(store) == [token_ids.tolist() for token_ids in prompts], "in the order in which they came"
    clock.now = start + 106
    store.evictor.expire(0.0)
    assert seen(store) == [token_ids.tolist() for token_ids in prompts[:5]]
    purge(store, PurgeFilter(older_than_s=103.0), clock.now, lambda _bytes: None)
    assert seen(store) == [prompts[4].tolist()]
    store.evictor.expire(101.0)
    assert seen(store) == []
    assert num_ghosts(store) == 0


def test_what_was_seen_keeps_its_share_and_the_oldest_goes(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor, "GHOST_SHARE", 512)
    limit = store.budget_bytes // 512
    system, sizes = prompt(0, 20 * BLOCK), []
    for number in range(1, 400):
        clock.now += 1
        see(store, np.concatenate([system, prompt(number, 4 * BLOCK)]))
        with store.snapshot() as snapshot:
            sizes.append(snapshot.seen_bytes())
    assert limit // 2 < max(sizes) <= limit + (64 << 10)
    left = seen(store)
    assert 0 < len(left) < 300
    assert [ids[20 * BLOCK :] for ids in left] == [prompt(n, 4 * BLOCK).tolist() for n in range(400 - len(left), 400)]


def test_of_a_damaged_root_the_rest_is_forgotten_and_the_publication_is_written(store: Store) -> None:
    token_ids = prompt(1, 3 * BLOCK)
    see(store, token_ids)
    with store.changes() as changes:
        key = ROOT + chain(store.secret, ROOT, token_ids, BLOCK)[2]
        changes.put_seen("ghosts", key, b"damaged")
    assert seen(store) == [], "it is left out"
    longer: Publication = publication(store, np.concatenate([token_ids, prompt(2, BLOCK)]))
    store.publish(longer)
    assert seen(store) == [longer.prompt.tolist() if longer.prompt is not None else []]
