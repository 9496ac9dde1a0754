"""What a prompt finds of itself in memory: by the kind of its model, of whom, for how long, and what goes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.prefixstore.kv import pages
from diskprefix.prefixstore.kv.kept_blocks import KeptBlock, KeptBlocks
from diskprefix.prefixstore.kv.page_cache import MemoryWait, PageCache, PrefixWait
from diskprefix.prefixstore.kv.pages import Page
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.store.epochs import Purges, of_tenants
from diskprefix.scope import parse_scope
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from diskprefix.values import CacheOptions
from tests.prefixstore.kv.hashed_state import (
    BLOCK,
    KINDS,
    WINDOW,
    A,
    B,
    compute_for_all,
    holding,
    ids_of,
    layout_of,
    page_cache,
    restore,
    tokens,
    wrong,
)

IDS = tokens(range(30))
TRUNK = tokens(range(24))
OPTIONS = CacheOptions(scope=parse_scope("full", param="scope"))


@pytest.fixture
def cache() -> PageCache:
    return page_cache(layout_of())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("diskprefix.prefixstore.kv.page_cache.time", clock)
    monkeypatch.setattr("diskprefix.prefixstore.kv.kept_blocks.time", clock)
    return now


def begun(cache: PageCache, token_ids: TokenIds, *, owner: Owner | None = A, **options: Any) -> KVSequence:
    sequence = cache.begin_sequence(owner, token_ids, **options)
    assert isinstance(sequence, KVSequence)
    assert wrong(sequence, token_ids) == []
    return sequence


def run(cache: PageCache, token_ids: TokenIds, end: int | None = None, **options: Any) -> KVSequence:
    """A sequence that has computed its prompt, in steps."""
    sequence, end = begun(cache, token_ids, **options), len(token_ids) if end is None else end
    for part in range(sequence.num_tokens + BLOCK, end + BLOCK, BLOCK):
        assert compute_for_all(cache, sequence, token_ids, min(part, end))
    return sequence


def ended(cache: PageCache, token_ids: TokenIds, **options: Any) -> None:
    cache.end_sequence(run(cache, token_ids, **options), keep=True, options=OPTIONS)


def found(cache: PageCache, token_ids: TokenIds, owner: Owner = A) -> int:
    return cache.match_prefix(owner, owner.path(token_ids, BLOCK)).prefix.num_tokens


def more(token_ids: TokenIds, count: int = 20) -> TokenIds:
    return tokens(token_ids, range(900, 900 + count))


def test_pages_for_guesses_go_to_a_prompt_that_needs_them() -> None:
    cache = page_cache(layout_of("token_checkpoints"), blocks=2)
    first = run(cache, IDS[:4])
    assert first.take_spares()
    assert isinstance(cache.begin_sequence(B, IDS[:4]), MemoryWait), "a step with guesses is about to begin"
    first.take_back(4)
    assert isinstance(cache.begin_sequence(B, IDS[:4]), KVSequence)
    assert not first.take_spares()
    assert wrong(first, IDS[:4]) == cache.check() == []


@pytest.mark.parametrize("blocks", [16, 64])
def test_a_page_is_taken_without_a_look_at_all_blocks(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looks, idle = page_cache(layout_of(), blocks=blocks), list[KeptBlock](), KeptBlocks._idle

    def noted(self: KeptBlocks, node: KeptBlock) -> list[Page]:
        looks.append(node)
        return idle(self, node)

    monkeypatch.setattr(KeptBlocks, "_idle", noted)
    for seed in range(blocks // 4):
        ended(cache, tokens(range(1000 * seed, 1000 * seed + 4 * BLOCK)))
    assert cache.stats()["kept_tokens"] == blocks * BLOCK
    looks.clear()
    sequence = run(cache, tokens(range(900_000, 900_000 + 4 * BLOCK)))
    # Memory was full. A few blocks were freed at a time, and each was looked at twice.
    assert 0 < len(looks) <= 32
    cache.end_sequence(sequence, keep=True)
    assert cache.check() == []
    cache.kept._sums = cache.kept._sums._replace(idle_bytes=0)
    assert len(cache.check()) == 1, "a wrong sum is found"


# How much is found.


@pytest.mark.parametrize(
    ("kind", "held", "prompt", "expected"),
    [
        ("token", 30, 50, 30),
        ("token", 30, 30, 29),
        ("token", 30, 17, 16),
        ("sliceable", 30, 50, 28),
        ("sliceable", 28, 28, 24),
        ("sliceable", 30, 17, 16),
        ("token_checkpoints", 30, 50, 30),
        ("token_checkpoints", 30, 30, 0),
        ("token_checkpoints", 30, 17, 0),
        ("checkpoints", 28, 50, 28),
        ("checkpoints", 30, 50, 0),
        ("checkpoints", 30, 31, 0),
        ("checkpoints", 30, 30, 0),
        ("checkpoints", 28, 28, 0),
    ],
)
@pytest.mark.parametrize("has_logits", [False, True], ids=["", "with logits"])
def test_as_much_is_found_as_the_model_can_go_on_from(
    kind: str, held: int, prompt: int, expected: int, has_logits: bool
) -> None:
    cache = page_cache(layout_of(kind))
    sequence = run(cache, IDS[:held])
    if has_logits:
        cache.keep_logits(sequence, np.full(16, 7.0, np.float32))
        expected = prompt if prompt == held else expected
    cache.end_sequence(sequence, keep=True)
    token_ids = IDS[:prompt] if prompt <= held else more(IDS[:held], prompt - held)
    again = begun(cache, token_ids)
    logits = cache.running[again].logits
    assert (again.num_tokens, logits is not None) == (expected, has_logits and prompt == held)
    assert (found(cache, token_ids, B), cache.check()) == (0, [])
    assert begun(cache, token_ids, owner=None).num_tokens == 0


def test_the_last_token_is_left_to_compute_if_that_is_asked_for(cache: PageCache) -> None:
    sequence = run(cache, IDS)
    cache.keep_logits(sequence, np.zeros(16, np.float32))
    cache.end_sequence(sequence, keep=True)
    again = begun(cache, IDS, computes_last=True)
    assert (again.num_tokens, cache.running[again].logits) == (29, None)
    assert begun(cache, IDS[:1], computes_last=True).num_tokens == 0


def test_logits_are_kept_for_the_latest_prompts(cache: PageCache) -> None:
    for first in range(65):
        sequence = run(cache, tokens(range(first, first + 20)))
        cache.keep_logits(sequence, np.full(16, first, np.float32))
        cache.end_sequence(sequence, keep=True)
    again = [begun(cache, tokens(range(first, first + 20))) for first in (0, 1, 64)]
    logits = [cache.running[sequence].logits for sequence in again]
    assert [one if one is None else float(one[0]) for one in logits] == [None, 1.0, 64.0]


@pytest.mark.parametrize(("kind", "count"), [("token", 50), ("sliceable", 28)])
def test_a_reply_is_found_if_its_state_is_exact(kind: str, count: int) -> None:
    cache = page_cache(layout_of(kind))
    sequence, whole = run(cache, IDS), more(IDS)
    assert compute_for_all(cache, sequence, whole)
    assert found(cache, more(whole)) == count
    cache.end_sequence(sequence, keep=True, token_ids=whole)
    assert (found(cache, more(whole)), cache.check()) == (count, [])


def test_prompts_part_anywhere_in_a_block(cache: PageCache) -> None:
    """In a complete one, in that at the end of a sequence, and in that of one that runs."""
    ended(cache, IDS)
    running = run(cache, tokens(TRUNK, range(70, 80)), 27)
    prompts = [more(part) for part in (IDS[:9], IDS[:29], tokens(TRUNK, range(70, 72)), tokens(TRUNK, range(70, 79)))]
    assert [found(cache, one) for one in prompts] == [9, 29, 26, 27]
    for one in prompts:
        ended(cache, one)
    assert (wrong(running, tokens(TRUNK, range(70, 80))), cache.check()) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_what_ended_twice_is_kept_once(kind: str) -> None:
    cache = page_cache(layout_of(kind))
    ended(cache, IDS)
    ended(cache, IDS[:28])
    used = cache.pool.used_bytes
    for _ in range(2):
        ended(cache, IDS)
        ended(cache, IDS[:28])
        assert (cache.pool.used_bytes, cache.check()) == (used, [])
    # The latest first.
    assert [one["tokens"] for one in cache.sequences()] == [28, 30]


def test_a_state_that_moved_on_behind_what_is_exact_is_not_kept() -> None:
    cache = page_cache(layout_of("checkpoints"))
    sequence = run(cache, IDS[:28])
    assert compute_for_all(cache, sequence, IDS)
    cache.end_sequence(sequence, keep=True, token_ids=IDS)
    assert found(cache, more(IDS[:28])) == 0
    assert cache.stats()["kept_tokens"] == 28


# Those that run.


def test_a_sequence_that_runs_is_waited_for_if_it_will_have_more(cache: PageCache) -> None:
    whole, least = tokens(range(60)), 39 - LEAST_TOKENS
    running = begun(cache, whole)
    wait = cache.begin_sequence(A, whole[:40])
    assert isinstance(wait, PrefixWait)
    assert isinstance(cache.begin_sequence(A, whole), PrefixWait)
    assert begun(cache, whole[:LEAST_TOKENS]).num_tokens == begun(cache, whole, owner=B).num_tokens == 0
    for end, must_wait in ((least, True), (least + 1, False)):
        compute_for_all(cache, running, whole, end)
        # Who waits asks this again and again, and not for a match.
        assert isinstance(cache.begin_sequence(A, whole[:40]), PrefixWait) == cache.must_wait(wait) == must_wait
    assert begun(cache, whole[:40]).num_tokens == least + 1


def test_nobody_waits_for_states_which_move_on_with_the_one_that_computes_them() -> None:
    cache = page_cache(layout_of("token_checkpoints"))
    begun(cache, more(IDS))
    assert begun(cache, more(IDS)).num_tokens == 0


def test_nobody_waits_for_one_that_has_passed() -> None:
    """And whose window there is gone."""
    cache = page_cache(layout_of(window=WINDOW))
    whole = more(IDS, 400)
    running = run(cache, whole)
    assert found(cache, more(IDS[:25])) == 25
    assert running.tables[1].first > 25
    while cache.pool.reclaim(1):
        pass
    assert begun(cache, tokens(IDS, 7)).num_tokens == 0


def test_what_is_restored_is_found_at_once_and_not_what_a_fetch_may_take_back(cache: PageCache) -> None:
    ended(cache, TRUNK)
    fetching = begun(cache, IDS)
    restore(cache, fetching, IDS, 28)
    cache.set_ready(fetching, 0)
    assert found(cache, more(IDS)) == 28
    assert (wrong(fetching, IDS), cache.check()) == ([], [])


# Windows.


def test_pages_behind_a_window_stay_under_their_names_and_are_found_again() -> None:
    cache, whole = page_cache(layout_of(window=WINDOW)), more(IDS, 200)
    ended(cache, whole)
    for end in (30, 101, 230):
        other = tokens(whole[:end], range(50, 60))
        again = begun(cache, other)
        assert again.num_tokens == end
        assert again.complete_from == (end - WINDOW + 1) // BLOCK * BLOCK
        assert again.tables[0].first == 0
        assert compute_for_all(cache, again, other)
        assert wrong(again, other) == []
        cache.end_sequence(again, keep=True)
    assert cache.check() == []


def test_without_the_pages_of_its_window_a_shorter_prefix_is_found() -> None:
    cache, whole = page_cache(layout_of(window=WINDOW)), more(IDS, 60)
    ended(cache, whole)
    blocks = {node.position: node for node in cache.kept.blocks.values()}
    for position in (80, 84, 40):
        cache.pool.release_pages([blocks[position].pages[1]])
        blocks[position].pages[1] = None
    assert found(cache, more(whole)) == 80
    assert found(cache, more(whole[:46])) == 40
    ended(cache, whole)
    assert (found(cache, more(whole)), cache.check()) == (90, [])


def test_pages_behind_windows_go_while_the_rest_of_their_blocks_is_used() -> None:
    cache, whole = page_cache(layout_of(window=WINDOW)), more(IDS, 400)
    running, used = run(cache, whole), cache.pool.used_bytes
    while cache.pool.reclaim(1):
        pass
    assert cache.pool.used_bytes == sum(page.num_bytes for page in running.pages() if page is not None) < used
    assert (wrong(running, whole), cache.check()) == ([], [])
    assert found(cache, more(whole)) == 430


# What goes first.


def test_the_least_recently_used_goes_first_what_continues_a_block_before_it() -> None:
    cache = page_cache(layout_of(), blocks=20)
    first, second = (tokens(TRUNK, range(start, start + 22)) for start in (100, 200))
    ended(cache, first)
    ended(cache, second)
    ended(cache, tokens(TRUNK, range(300, 310)))
    counts = []
    for _ in range(4):
        counts.append([found(cache, more(one)) for one in (first, second, tokens(TRUNK, range(300, 310)))])
        cache.pool.reclaim(1)
    assert counts == [[32, 46, 34], [24, 40, 34], [24, 24, 34], [20, 20, 20]]
    assert cache.check() == []


@pytest.mark.parametrize("how", ["kept", "not kept", "abandoned"])
def test_however_a_sequence_ends_its_last_blocks_go_before_those_that_they_continue(how: str) -> None:
    """A child whose parent has gone would take memory, and nobody would find it."""
    cache = page_cache(layout_of(), blocks=20)
    token_ids = tokens(range(5 * BLOCK))
    sequence = run(cache, token_ids)
    if how == "abandoned":
        cache.abandon(sequence)
    cache.end_sequence(sequence, keep=how == "kept")
    while cache.kept.blocks:
        positions = sorted(block.position for block in cache.kept.blocks.values())
        assert positions == list(range(0, len(positions) * BLOCK, BLOCK))
        cache.kept.remove(next(iter(cache.kept.blocks.values())))
    assert cache.check() == []


@pytest.mark.parametrize("kind", ["token_checkpoints", "checkpoints"])
def test_a_state_that_prompts_begin_with_stays(kind: str) -> None:
    cache = page_cache(layout_of(kind), blocks=40)
    ended(cache, TRUNK)
    for start in range(100, 400, 16):
        ended(cache, tokens(range(start, start + 16)))
        sequence = begun(cache, more(TRUNK, 1))
        assert sequence.num_tokens == 24
        cache.end_sequence(sequence, keep=False)
    assert cache.check() == []


def test_nothing_is_kept_where_that_is_not_wanted() -> None:
    cache = page_cache(layout_of(), keeps=False)
    running = run(cache, TRUNK)
    ended(cache, IDS)
    assert found(cache, more(IDS)) == 24
    cache.end_sequence(running, keep=True)
    assert (cache.pool.used_bytes, found(cache, more(IDS)), cache.check()) == (0, 0, [])


def test_idle_state_is_forgotten_and_that_in_use_is_not(cache: PageCache) -> None:
    ended(cache, IDS)
    ended(cache, tokens(range(50, 80)))
    running = begun(cache, TRUNK)
    assert cache.stats()["kept_tokens"] == 30 + 30 - 20
    cache.forget_idle()
    assert [found(cache, more(one)) for one in (IDS, tokens(range(50, 80)))] == [23, 0]
    assert cache.pool.used_bytes == sum(page.num_bytes for page in running.pages() if page is not None)


def test_a_sequence_that_failed_is_found_by_nobody_and_those_that_began_with_it_go_on(cache: PageCache) -> None:
    ended(cache, TRUNK)
    failing = run(cache, IDS)
    other = begun(cache, IDS)
    assert other.num_tokens == 29
    cache.forget_names(failing)
    cache.end_sequence(failing, keep=True)
    cache.end_sequence(other, keep=False)
    assert (found(cache, more(IDS)), cache.check()) == (0, [])


# Full memory.


@pytest.mark.parametrize("kind", ["token", "token_checkpoints"])
def test_a_prompt_that_fills_memory_does_without_the_copy_of_its_last_page(kind: str) -> None:
    cache, whole = page_cache(layout_of(kind), blocks=8), more(TRUNK, 8)
    cache.pool.limit_bytes = cache.pool.sequence_bytes(32)
    ended(cache, IDS[:22])
    again = begun(cache, whole)
    assert again.num_tokens == (20 if kind == "token" else 0)
    assert compute_for_all(cache, again, whole)
    assert (wrong(again, whole), cache.check()) == ([], [])


def test_others_are_waited_for_and_what_never_fits_is_refused() -> None:
    cache = page_cache(layout_of(), blocks=8)
    run(cache, IDS)
    assert isinstance(cache.begin_sequence(B, IDS), MemoryWait)
    with pytest.raises(ContextTooLong, match=r"33 tokens need .*, and --kv-memory allows 3"):
        cache.begin_sequence(A, tokens(range(33)))
    assert (cache.longest(1000), cache.longest(7)) == (32, 7)
    for one in list(cache.running):
        cache.end_sequence(one, keep=True)
    assert begun(cache, IDS, owner=B).num_tokens == 0
    assert cache.check() == []


def test_a_prompt_that_a_hanging_restore_leaves_no_memory_for_is_not_called_too_long() -> None:
    cache = page_cache(layout_of(), blocks=8)
    hanging = run(cache, IDS)
    cache.abandon(hanging)
    assert isinstance(cache.begin_sequence(B, IDS), MemoryWait), "its thread comes back soon"
    cache.disk_hangs = True
    with pytest.raises(NotReady, match="the disk does not answer"):
        cache.begin_sequence(B, IDS)
    cache.end_sequence(hanging, keep=False)
    assert begun(cache, IDS, owner=B).num_tokens == 0


def test_a_prompt_waits_for_what_is_being_written_though_nothing_runs() -> None:
    cache = page_cache(layout_of(), blocks=8)
    sequence = run(cache, IDS)
    hold = holding(cache.pool, sequence.pages())
    cache.end_sequence(sequence, keep=True)
    assert isinstance(cache.begin_sequence(B, IDS), MemoryWait)
    hold.release()
    assert begun(cache, IDS, owner=B).num_tokens == 0


def test_the_devices_own_limit_counts_too() -> None:
    cache = page_cache(layout_of(), free_bytes=lambda: 100)
    with pytest.raises(ContextTooLong, match=r"30 tokens need .*, 100 B are available"):
        cache.begin_sequence(A, IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_the_system_refuses_memory_for_is_not_called_too_long(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = page_cache(layout_of(kind))
    with monkeypatch.context() as refusing:
        refusing.setattr(pages, "zeros", Mock(side_effect=MemoryError))
        with pytest.raises(NotReady, match=r"the system refuses memory for 30 tokens, .* try again"):
            cache.begin_sequence(A, IDS)
    assert compute_for_all(cache, begun(cache, IDS), IDS)
    assert cache.check() == []


def test_a_prompt_that_the_system_refuses_memory_for_waits_for_those_who_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_SLAB_BYTES", 1)
    cache = page_cache(layout_of())
    sequence = run(cache, IDS)
    with monkeypatch.context() as refusing:
        refusing.setattr(pages, "zeros", Mock(side_effect=MemoryError))
        wait = cache.begin_sequence(B, IDS)
        assert isinstance(wait, MemoryWait)
        cache.end_sequence(sequence, keep=True)
        assert not cache.must_wait(wait)
        assert begun(cache, IDS, owner=B).num_tokens == 0


# Whose, and for how long.


@pytest.mark.parametrize("kind", KINDS)
def test_replies_of_a_request_that_shares_nothing_begin_with_the_first_one_and_with_what_others_share(
    kind: str,
) -> None:
    cache, own = page_cache(layout_of(kind)), A._replace(private=b"own")
    ended(cache, TRUNK)
    used, prompt = cache.pool.used_bytes, tokens(TRUNK, range(70, 80))
    first = run(cache, prompt, owner=own)
    assert first.num_tokens == len(prompt)
    cache.keep_logits(first, np.full(16, 7.0, np.float32))
    cache.keep_prompt(first)
    assert compute_for_all(cache, first, more(prompt))
    second = begun(cache, prompt, owner=own)
    assert (second.num_tokens, cache.running[second].logits is not None) == (len(prompt), True)
    assert (found(cache, more(prompt)), found(cache, more(prompt), own._replace(private=b"other"))) == (24, 24)
    for one in (first, second):
        cache.end_sequence(one, keep=True)
    cache.forget_private(b"own")
    assert (cache.pool.used_bytes, found(cache, prompt, own), cache.check()) == (used, 24, [])


def test_a_sequence_that_runs_over_a_purge_goes_on_and_nobody_finds_it(cache: PageCache) -> None:
    ended(cache, IDS)
    running, nobodys, gone = run(cache, more(IDS)), run(cache, IDS, owner=None), run(cache, more(IDS, 5), owner=None)
    unused = [page.tensor for page in gone.pages() if page is not None]
    cache.end_sequence(gone, keep=False)
    slabs = [page.tensor for one in cache.running for page in one.pages() if page is not None]
    purges = Purges().and_of(of_tenants([A.tenant]))
    after = A._replace(last_purge=purges.last(A.tenant))
    cache.forget_expired(purges)
    assert not any(bool(slab.any()) for slab in unused)
    again = run(cache, IDS, owner=after)
    assert compute_for_all(cache, running, more(IDS, 50))
    assert wrong(running, more(IDS, 50)) == []
    slabs += [page.tensor for page in running.pages() if page is not None]
    for one in [*cache.running.keys() - {again}]:
        cache.end_sequence(one, keep=True)
    assert (found(cache, more(IDS, 50)), found(cache, more(IDS, 50), after)) == (0, 30)
    assert nobodys not in cache.running
    assert not any(bool(slab.any()) for slab in slabs)
    assert (wrong(again, IDS), cache.check()) == ([], [])


def test_a_purge_of_one_tenant_leaves_the_memory_of_others_alone(cache: PageCache) -> None:
    """What is kept, and what runs."""
    cache.forget_expired(Purges())
    for owner in (A, B):
        ended(cache, IDS, owner=owner)
    runs = {owner: run(cache, more(IDS), owner=owner) for owner in (A, B)}
    gone, left = ([page.tensor for page in runs[owner].pages() if page is not None] for owner in (A, B))
    purges = Purges().and_of(of_tenants([A.tenant]))
    cache.forget_expired(purges)
    after = A._replace(last_purge=purges.last(A.tenant))
    assert [found(cache, more(IDS, 50), owner) for owner in (A, after, B)] == [0, 0, 50]
    assert all(compute_for_all(cache, sequence, more(IDS, 50)) for sequence in runs.values())
    for sequence in runs.values():
        cache.end_sequence(sequence, keep=True)
    assert (found(cache, more(IDS, 50)), found(cache, more(IDS, 50), after)) == (0, 0)
    assert found(cache, more(IDS, 50), B) > 30
    assert not any(map(np.count_nonzero, gone))
    assert all(map(np.count_nonzero, left))
    assert cache.check() == []


def test_what_expires_is_found_until_then_and_wiped(cache: PageCache, now: list[float]) -> None:
    sequence = run(cache, IDS, expires_at=10.0)
    cache.keep_logits(sequence, np.zeros(16, np.float32))
    slabs = [page.tensor for page in sequence.pages() if page is not None]
    cache.end_sequence(sequence, keep=True)
    ended(cache, tokens(range(50, 80)), expires_at=30.0)
    assert cache.kept.expires_at == 10.0
    now[0] = 9.0
    cache.forget_expired(Purges())
    assert found(cache, IDS) == 30
    now[0] = 10.0
    cache.forget_expired(Purges())
    assert (found(cache, more(IDS)), found(cache, tokens(range(50, 90)))) == (0, 30)
    assert not any(bool(slab.any()) for slab in slabs)
    assert (cache.kept.expires_at, cache.check()) == (30.0, [])


def test_a_use_extends_the_life_of_what_it_begins_with_to_its_own(cache: PageCache, now: list[float]) -> None:
    ended(cache, TRUNK, expires_at=10.0)
    cache.end_sequence(begun(cache, more(TRUNK[:16]), expires_at=20.0), keep=False)
    cache.end_sequence(begun(cache, more(TRUNK[:12]), expires_at=15.0), keep=False)
    for now[0], expected in ((10.0, 16), (15.0, 16), (20.0, 0)):
        cache.forget_expired(Purges())
        assert found(cache, more(TRUNK)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_ended_is_resumed_while_it_is_there(kind: str) -> None:
    cache = page_cache(layout_of(kind))
    ended(cache, IDS)
    ended(cache, tokens(range(50, 78)))
    counts = {"token": [28, 30], "sliceable": [28, 28], "token_checkpoints": [28, 30], "checkpoints": [28]}[kind]
    nodes, resumed = cache.kept.sequence_ends(), []
    assert [node.options for node in nodes] == [OPTIONS] * 2
    for node in nodes:
        if (sequence := cache.resume(node)) is not None:
            assert wrong(sequence, ids_of(cache, node)) == []
            resumed.append(sequence.num_tokens)
            cache.end_sequence(sequence, keep=False)
    assert resumed == counts
    cache.forget_idle()
    assert [cache.resume(node) for node in nodes] == [None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_what_ended_is_resumed_at_its_end_beside_a_prompt_that_repeats_its_last_token(kind: str) -> None:
    cache, token_ids = page_cache(layout_of(kind)), IDS[: 7 * BLOCK]
    ended(cache, token_ids)
    (node,) = cache.kept.sequence_ends()
    longer = run(cache, tokens(token_ids, token_ids[-1:]))
    cache.keep_logits(longer, np.full(16, 7.0, np.float32))
    cache.end_sequence(longer, keep=True)
    sequence = cache.resume(node)
    assert sequence is not None
    assert sequence.num_tokens == len(token_ids)
    assert wrong(sequence, token_ids) == []


def test_a_check_finds_blocks_of_other_tokens_and_lists_that_differ(cache: PageCache) -> None:
    ended(cache, IDS)
    node = next(node for node in cache.kept.blocks.values() if node.position == 4)
    node.token_ids = node.token_ids + 1
    assert cache.check() == ["a block has the name of other tokens"]
    node.token_ids = node.token_ids - 1
    cache.kept._children[A, node.parent].append(node)
    assert cache.check() == ["9 blocks continue others, of 8"]
