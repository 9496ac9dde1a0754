"""Pages: who uses them, who may write to them, where their memory comes from, and when their content goes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from diskprefix.errors import ContextTooLong, NotReady
from diskprefix.prefixstore.kv import transfer
from diskprefix.prefixstore.kv.layout import is_out_of_memory
from diskprefix.prefixstore.kv.numbers import Array, converted, dtype_of
from diskprefix.prefixstore.kv.pages import PagePool, zeros
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner, Prefix
from diskprefix.prefixstore.kv.transfer import give_back, populate
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import TokenIds
from tests.prefixstore.kv.hashed_state import (
    BLOCK,
    KINDS,
    WINDOW,
    captured,
    compute,
    compute_for_all,
    hashes,
    holding,
    layout_of,
    page_cache,
    payload_of,
    restore,
    tokens,
    wrong,
)
from tests.waiting import wait_for

IDS = tokens(range(30))


@pytest.fixture
def pool() -> PagePool:
    return PagePool(layout_of(), block_size=BLOCK)


def computed(pool: PagePool, token_ids: TokenIds = IDS) -> KVSequence:
    sequence = KVSequence(pool)
    assert compute(sequence, token_ids)
    return sequence


def checked(pool: PagePool, *sequences: KVSequence) -> list[str]:
    return pool.check(page for sequence in sequences for page in sequence.pages())


# Content.


def test_memory_is_written_and_read_by_other_threads() -> None:
    cache, expected = page_cache(layout_of("token_checkpoints", WINDOW)), hashes(0, IDS, 0, len(IDS))
    with ThreadPoolExecutor(1) as other:
        sequence = KVSequence(cache.pool)
        assert compute(sequence, IDS, 9)
        other.submit(restore, cache, sequence, IDS, 20).result()
        assert wrong(sequence, IDS) == []
        assert compute(sequence, IDS)
        assert wrong(sequence, IDS) == []
        found = captured(sequence, 28, 2, NodeKind.CHECKPOINT)
        assert (
            other.submit(b"".join, found).result() == payload_of(cache.layout, expected[28:]) + bytes(expected[-1]) * 3
        )
        found.release()


def test_a_page_is_the_payload_of_its_block(pool: PagePool) -> None:
    sequence = computed(pool)
    for number in range(len(IDS) // BLOCK):
        start = number * BLOCK
        expected = payload_of(pool.layout, hashes(0, IDS, start, start + BLOCK))
        assert b"".join(page.payload() for page in sequence.block(number) if page is not None) == expected
        assert b"".join(captured(sequence, start, BLOCK)) == expected
    # Of a block that is not complete, the first tokens.
    assert b"".join(captured(sequence, 28, 2)) == payload_of(pool.layout, hashes(0, IDS, 28, 30))


def test_operators_find_each_page_of_a_long_sequence_and_none_where_there_is_none(pool: PagePool) -> None:
    sequence = computed(pool, tokens(range(400)))
    assert wrong(sequence, tokens(range(400))) == []
    table = sequence.tables[1]
    assert [page.tensor.ctypes.data for page in table.pages if page is not None] == table.addresses[:100].tolist()
    sequence._drop_before(table, 7)
    assert not any(table.addresses[:7])
    sequence.truncate(0)
    table.set(60, None)
    assert not any(table.addresses)


# Users.


def test_a_fork_shares_all_pages_but_the_last_one_and_neither_writes_to_those(pool: PagePool) -> None:
    source, fork = computed(pool), KVSequence(pool)
    assert fork.begin_with(source.prefix())
    shared = [page for page in source.pages() if page in fork.pages() and page is not None]
    assert len(shared) == 2 * (len(IDS) // BLOCK)
    assert {page.users for page in shared} == {2}
    others = tokens(IDS, *range(7))
    assert compute(fork, others)
    assert compute(source, tokens(IDS, *range(9, 12)))
    assert wrong(fork, others) == wrong(source, tokens(IDS, *range(9, 12))) == checked(pool, source, fork) == []
    fork.close()
    assert {page.users for page in shared} == {1}


@pytest.mark.parametrize("kind", ["token", "token_checkpoints"])
@pytest.mark.parametrize("end", [6, 8])
def test_who_goes_back_into_a_shared_page_writes_to_a_copy(end: int, kind: str) -> None:
    cache = page_cache(layout_of(kind))
    source, by_step, by_restore = (KVSequence(cache.pool) for _ in range(3))
    assert compute(source, IDS)
    others = tokens(IDS[:end], range(50, 70))
    for one in (by_step, by_restore):
        assert one.begin_with(source.prefix())
        one.truncate(end)
    assert compute(by_step, others)
    restore(cache, by_restore, others, 20)
    assert wrong(source, IDS) == wrong(by_step, others) == wrong(by_restore, others) == []
    assert by_step.tables[0].pages[:1] == by_restore.tables[0].pages[:1] == source.tables[0].pages[:1]
    assert checked(cache.pool, source, by_step, by_restore) == []


def test_a_hold_keeps_what_it_holds_from_changing_until_it_is_released(pool: PagePool) -> None:
    sequence = computed(pool)
    pages = [page for page in sequence.pages() if page is not None]
    hold, contents = holding(pool, pages), [bytes(page.payload()) for page in pages]
    sequence.truncate(0)
    assert compute(sequence, tokens(range(40, 70)))
    assert [bytes(page.payload()) for page in pages] == contents
    sequence.close()
    assert pool.used_bytes == sum(page.num_bytes for page in pages)
    with ThreadPoolExecutor(1) as other:
        other.submit(hold.release).result()
    hold.release()
    assert (pool.used_bytes, checked(pool)) == (0, [])


def test_a_check_finds_wrong_counts_and_lists(pool: PagePool) -> None:
    sequence, idle = computed(pool), computed(pool)
    idle.close()
    page = sequence.tables[0].pages[0]
    assert page is not None
    pool.hold([page])
    assert checked(pool, sequence) == ["a page has 2 users, not 1"]
    pool.release_pages([page])
    assert f"{pool.used_bytes} bytes are used" in checked(pool)[0]
    pool._free[0] += [page, *pool._free[0][:1]]
    assert checked(pool, sequence)[:2] == ["a free page is used", "a page is free twice"]


def test_a_sequence_that_ends_is_gone_at_once() -> None:
    """A garbage collection may be long in coming."""
    cache = page_cache(layout_of("checkpoints"))
    gc.disable()
    try:
        sequence = cache.begin_sequence(None, IDS)
        assert isinstance(sequence, KVSequence)
        table = weakref.ref(sequence)
        cache.end_sequence(sequence, keep=False)
        del sequence
        assert table() is None
        assert cache.pool.used_bytes == 0
    finally:
        gc.enable()


# Bounds.


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_with_figures_and_takes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(kind)
    # Per token 6 rows of 16 bytes.
    pool = PagePool(layout, block_size=BLOCK, limit_bytes=10 * BLOCK * 96 + layout.state_bytes)
    sequence = KVSequence(pool)
    assert compute(sequence, IDS)
    sequence.drop_spares()
    used = pool.used_bytes
    assert not sequence.take_pages_to(41)
    assert not sequence.take_prompt_pages(41)
    expected = f"{1 << 20} tokens need 96.0 MiB of KV memory, 768 B are available; use a shorter prompt"
    for refused in (lambda: sequence.reserve(1 << 20), lambda: sequence.begin_step((1 << 20) - 30)):
        with pytest.raises(ContextTooLong, match=re.escape(expected)):
            refused()
    with pytest.raises(MemoryError):
        sequence.prepare_restore(0, 0, 80)
    assert (pool.used_bytes, wrong(sequence, IDS), checked(pool, sequence)) == (used, [], [])
    assert sequence.take_pages_to(40)
    starved = PagePool(layout, block_size=BLOCK, free_bytes=lambda: 10)
    monkeypatch.setattr(np, "zeros", lambda *_: pytest.fail("memory was taken"))
    assert starved.take_pages([0]) is None
    assert starved.taken_bytes == 0


def test_while_there_is_room_the_free_memory_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, free, reads = [100.0], [0], list[int]()

    def read() -> int:
        reads.append(free[0])
        return free[0]

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pool = PagePool(layout_of(), block_size=BLOCK, free_bytes=read)
    size = pool.page_bytes[0]
    free[0] = 3 * size
    assert pool.take_pages([0]) is not None
    free[0] = 0
    clock[0] += 0.9
    # What was taken since counts.
    assert pool.take_pages([0, 0]) is not None
    assert reads == [3 * size]
    # Nothing is refused by what was read earlier.
    free[0] = size
    assert pool.take_pages([0]) is not None
    assert reads == [3 * size, size]
    free[0] = 0
    assert pool.take_pages([0]) is None
    free[0] = 2 * size
    assert pool.room_bytes == 2 * size
    clock[0] += 1.0
    assert pool.take_pages([0]) is not None
    assert len(reads) == 5


def test_memory_that_runs_out_all_the_same_is_the_requests_error(pool: PagePool) -> None:
    def refuse(*_args: object) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        pool.release_pages(pool.take_pages([0]) or ())
        patch.setattr("diskprefix.prefixstore.kv.pages.zeros", refuse)
        assert pool.take_pages([0, 1]) is None
        sequence = KVSequence(pool)
        for refused in (lambda: sequence.reserve(1000), lambda: sequence.begin_step(1000)):
            with pytest.raises(NotReady, match="the system refuses memory for 1000 tokens"):
                refused()
    assert pool.used_bytes == 0
    assert wrong(computed(pool), IDS) == []


def test_pages_that_are_free_are_used_again_or_give_way_to_those_of_other_groups(pool: PagePool) -> None:
    large, small = pool.page_bytes
    pool.limit_bytes = 4 * large
    first = pool.take_pages([0] * 4)
    assert first is not None
    assert pool.take_pages([1]) is None
    pool.release_pages(first)
    assert pool.take_pages([0]) == [first[-1]]
    assert pool.take_pages([1] * (3 * large // small)) is not None
    assert pool.used_bytes == pool.taken_bytes == pool.limit_bytes
    assert pool.take_pages([1]) is None


def test_errors_of_missing_memory_are_told_by_their_class_or_text() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch has one."""

    torchs = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert all(map(is_out_of_memory, (MemoryError(), OutOfMemoryError("none left"), torchs)))
    assert not any(map(is_out_of_memory, (RuntimeError("it fails"), ValueError("out of memory"))))


# Numbers.


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits[:8] = 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0xFFFFFFFF
    floats, found = bits.view(np.float32), converted(bits.view(np.float32), "bfloat16")
    theirs = torch.from_numpy(floats).bfloat16()
    is_number = ~np.isnan(floats)
    assert (found == theirs.view(torch.uint16).numpy())[is_number].all()
    back = converted(found, "float32")
    assert np.isnan(back[~is_number]).all()
    assert (back == theirs.float().numpy())[is_number].all()
    assert converted(found, "bfloat16") is found
    assert [dtype_of(one) for one in (floats, found)] == ["float32", "bfloat16"]
    assert converted(np.array([0.1], np.float16), "float32") == np.float32(np.float16(0.1))


# Payloads that wait to be written.


def test_a_payload_frees_a_page_only_if_no_sequence_uses_it() -> None:
    """A complete block is kept by name, and is free without its payload; a partial one has no name."""
    cache = page_cache(layout_of())
    sequence = cache.begin_sequence(Owner(b"r" * 16, 1), IDS)
    assert isinstance(sequence, KVSequence)
    for end in range(BLOCK, len(IDS) + BLOCK, BLOCK):
        assert compute_for_all(cache, sequence, IDS, min(end, len(IDS)))
    last = len(IDS) // BLOCK * BLOCK
    block, partial = captured(sequence, 0, BLOCK), captured(sequence, last, len(IDS) - last, NodeKind.TAIL)
    assert (block.frees(), partial.frees()) == (False, False)
    cache.end_sequence(sequence, keep=False)
    assert (block.frees(), partial.frees()) == (True, True)
    for payload in (block, partial):
        payload.release()
    assert cache.check() == []


# What was purged.


def test_what_was_purged_is_wiped_when_its_last_user_goes(pool: PagePool) -> None:
    sequence, other = computed(pool), KVSequence(pool)
    assert other.begin_with(Prefix(8, [table.pages[:2] for table in sequence.tables]))
    pages = [page for page in sequence.pages() if page is not None]
    for page in pages:
        page.is_secret = True
    slabs = [page.tensor for page in pages]
    kept = [page.tensor for page in other.pages() if page is not None and page in pages]
    sequence.close()
    assert [bool(slab.any()) for slab in slabs] == [any(slab is one for one in kept) for slab in slabs]
    assert wrong(other, IDS[:8]) == []
    other.close()
    assert not any(bool(slab.any()) for slab in slabs)


@pytest.mark.parametrize("offset", [0, 16, 4000])
@pytest.mark.parametrize("num_bytes", [100, 4096, 3 * 4096, 5 * 4096 + 8])
def test_memory_that_is_given_back_reads_as_zeros_and_its_neighbours_stay(
    offset: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refuses in (False, True):
        memory = zeros((10 * mmap.PAGESIZE,), np.dtype(np.uint8))
        memory[:] = 1
        if refuses:
            monkeypatch.setattr(transfer._libc, "madvise", lambda *_: -1)
        give_back(memory.ctypes.data + offset, num_bytes)
        monkeypatch.undo()
        assert memory.sum() == memory.nbytes - num_bytes
        assert not memory[offset : offset + num_bytes].any()


def test_wiping_writes_no_zeros_where_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling all memory with zeros takes several times as long as giving it back."""
    given: list[int] = []

    def take(_start: ctypes.c_void_p, num_bytes: ctypes.c_size_t, _advice: int) -> int:
        given.append(num_bytes.value)
        return 0

    monkeypatch.setattr(transfer._libc, "madvise", take)
    pool = PagePool(layout_of(), block_size=2000)
    pages = pool.take_pages([0] * 3)
    assert pages is not None
    for page in pages:
        page.rows.fill(1)
    pool.release_pages(pages)
    pool.wipe()
    whole = sum(page.num_bytes for page in pages)
    assert sum(given) > whole - 3 * 2 * mmap.PAGESIZE
    assert sum(int(page.rows.sum()) for page in pages) == sum(given), "this memory was left to the kernel"


# Memory that is made ahead.


def share_of_pages(memory: Array) -> float:
    """Returns how many of the kernel's whole pages are in memory, as a share of 1."""
    start = memory.ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (start + memory.nbytes - first) // mmap.PAGESIZE
    found = np.zeros(num_pages, np.uint8)
    length, out = ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(found.ctypes.data)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), length, out) == 0
    return float((found & 1).mean())


def test_pages_are_made_ahead_and_what_they_hold_stays() -> None:
    memory = zeros((40, 1 << 20), np.dtype(np.uint8))
    memory[7, 5] = 3
    populate([(memory.ctypes.data, memory.nbytes)])
    assert share_of_pages(memory) == 1
    assert memory.sum() == memory[7, 5] == 3


def test_pages_are_made_as_long_as_they_are_wanted() -> None:
    # Fresh memory: what the C library gives may have been used before.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, 40 << 20, flags=flags), np.uint8)
    answers = iter([True, True, False])
    populate([(memory.ctypes.data, memory.nbytes)], lambda: next(answers))
    # Two large pages, of which the first may have begun before.
    assert 2 / 40 < share_of_pages(memory) < 8 / 40


def test_the_first_sequence_gets_the_pages_that_are_made_ahead_until_a_request_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[tuple[int, int]], Callable[[], bool]]] = []
    monkeypatch.setattr("diskprefix.prefixstore.kv.pages.populate", lambda *made: asked.append(made))
    cache = page_cache(layout_of(window=WINDOW))
    cache._is_idle = True
    cache.make_ahead(1 << 20, 400)
    wait_for(lambda: asked)
    ((made, is_wanted),) = asked
    # Of layers with a window, only as many as are under it.
    assert len(made) == 100 + (WINDOW + 64 + 256 - 2) // BLOCK + 2
    assert cache.pool.used_bytes == 0
    assert is_wanted()
    cache.stop_populating()
    assert not is_wanted()
    sequence = cache.begin_sequence(None, IDS)
    assert isinstance(sequence, KVSequence)
    assert {(page.address, page.num_bytes) for page in sequence.pages() if page is not None} <= {*made}
