"""What was seen, in the store: prompts that share blocks, their order and their ages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store import evictor
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import remove_damaged, verify_index
from diskprefix.tokens import TokenIds
from tests.prefixstore.store.building import BLOCK, ROOT, Clock, chain, open_store, prompt, publication, recent_prompts

DAY = 86_400.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1e9)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = open_store(tmp_path / "kv", clock=clock)
    yield store
    assert not verify_index(store).problems


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
        return snapshot.counts()["ghosts"]


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
    monkeypatch.setattr(evictor, "_SEEN_SHARE", 512)
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


def test_of_a_damaged_root_all_is_forgotten_until_the_damage_is_removed(store: Store) -> None:
    token_ids = prompt(1, 3 * BLOCK)
    see(store, token_ids)
    with store.changes() as changes:
        changes._put_record("nodes", chain(store.secret, ROOT, token_ids, BLOCK)[2], b"damaged" * 20)
    assert seen(store) == [], "it is left out"
    longer = publication(store, np.concatenate([token_ids, prompt(2, BLOCK)]))
    see(store, np.concatenate([token_ids, prompt(2, BLOCK)]))
    assert seen(store) == []
    with pytest.raises(StoreCorrupt):
        store.publish(longer)
    remove_damaged(store)
    store.publish(longer)
    assert len(seen(store)) == 1


def test_a_block_that_is_found_damaged_twice_is_still_one_of_the_prompts_that_were_seen(store: Store) -> None:
    token_ids = prompt(1, 3 * BLOCK)
    whole = publication(store, token_ids)
    store.publish(whole)
    block = whole.nodes[1]
    assert [store.quarantine(block.name, block.parent) for _ in range(2)] == [3, 0]
    assert seen(store) == [token_ids.tolist()]
