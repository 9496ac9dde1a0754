"""The arena's memory: who may write to it, how it grows, and pages that are made ahead."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.arena import KVArena
from diskprefix.kv.group import zeros
from diskprefix.kv.layout import Layout
from diskprefix.kv.pool import KVPool
from diskprefix.kv.transfer import fill_device, populate, read_device
from diskprefix.model.exact.self_check import rehearse
from tests.runner import tiny_llama
from tests.server.daemon_process import wait_until
from tests.synthetic_model import dense_layout

CPU = torch.device("cpu")
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def layout() -> Layout:
    return rehearse(tiny_llama())


def payload_of(layout: Layout, seed: int) -> memoryview:
    """Bytes of `NUM_TOKENS` tokens."""
    size = layout.bytes_per_token * NUM_TOKENS
    return memoryview(np.random.default_rng(seed).bytes(size))


def fill(arena: KVArena, layout: Layout, payload: memoryview) -> None:
    """Write a payload behind the first tokens, in pieces of three rows."""
    start = 0
    for number, group in enumerate(layout.groups):
        num_rows = len(group.specs) * group.heads
        for first in range(0, num_rows, 3):

            def write(out: npt.NDArray[np.uint8], start: int = start) -> None:
                out[...] = np.frombuffer(payload, np.uint8, out.size, start).reshape(out.shape)

            rows = slice(first, min(first + 3, num_rows))
            arena.fill(NUM_TOKENS, NUM_TOKENS, number, rows, write)
            start += (rows.stop - rows.start) * NUM_TOKENS * group.head_dim * group.dtype.itemsize


def append(arena: KVArena, num_tokens: int) -> None:
    """What a forward does to every layer, with values of its own."""
    for layer in arena.layers:
        heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        new = torch.arange(heads * num_tokens * head_dim).view(1, heads, num_tokens, head_dim).to(layer.dtype)
        layer.update(new, -new)


@pytest.mark.parametrize("by_torch", [False, True])
def test_memory_taken_in_inference_mode_is_written_and_read_by_other_threads(
    layout: Layout, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's memory is copied by torch, which guards tensors that were made in inference mode."""
    if by_torch:
        monkeypatch.setattr("diskprefix.kv.group.bytes_of", lambda _: None)
        monkeypatch.setattr("diskprefix.kv.group.fill", fill_device)
        monkeypatch.setattr("diskprefix.kv.group.read", read_device)
    arena = KVArena(layout, CPU)
    payload = payload_of(layout, 0)
    with torch.inference_mode(), ThreadPoolExecutor(1) as other:
        arena.reserve(NUM_TOKENS)
        append(arena, NUM_TOKENS)
        arena.reserve(2000)
        assert not any(tensor.is_inference() for tensor in [memory.tensor for memory in arena.memory])
        other.submit(fill, arena, layout, payload).result()
        arena.truncate(2 * NUM_TOKENS)
        append(arena, NUM_TOKENS)
        assert other.submit(arena.read_tokens, NUM_TOKENS, NUM_TOKENS).result() == payload


def test_growing_keeps_what_is_valid(layout: Layout) -> None:
    arena = KVArena(layout, CPU)
    arena.reserve(NUM_TOKENS)
    append(arena, NUM_TOKENS)
    before = arena.read_tokens(0, NUM_TOKENS)
    arena.reserve(5000)
    assert (arena.num_tokens, arena.read_tokens(0, NUM_TOKENS)) == (NUM_TOKENS, before)


def test_what_does_not_fit_is_refused_before_memory_is_taken(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = KVArena(layout, CPU, lambda: 1 << 20)
    monkeypatch.setattr(torch, "zeros", lambda *_args, **_kwargs: pytest.fail("memory was taken"))
    expected = "100000 tokens need 24.5 MiB of KV memory, 1.0 MiB are available; use a shorter prompt"
    with pytest.raises(ContextTooLong, match=re.escape(expected)):
        arena.reserve(100_000)


def test_a_refusal_leaves_the_arena_as_it_was(layout: Layout) -> None:
    free = [1 << 30]
    arena = KVArena(layout, CPU, lambda: free[0])
    arena.reserve(NUM_TOKENS)
    append(arena, NUM_TOKENS)
    before = arena.read_tokens(0, NUM_TOKENS)
    free[0] = 0
    with pytest.raises(ContextTooLong):
        arena.reserve(100_000)
    append(arena, 1)
    assert arena.read_tokens(0, NUM_TOKENS) == before


def capacity_of(arena: KVArena) -> int:
    return int(arena.layers[0].keys.shape[2])


def test_growth_is_generous_only_where_memory_allows(layout: Layout) -> None:
    free = [1 << 30]
    arena = KVArena(layout, CPU, lambda: free[0])
    arena.reserve(10_000)
    append(arena, 1)
    step = capacity_of(arena) + 1
    free[0] = layout.bytes_per_token * (step + 1200)
    arena.reserve(step)
    assert step <= capacity_of(arena) < step + 1200
    free[0] = 1 << 30
    arena.reserve(capacity_of(arena) + 1)
    assert capacity_of(arena) > 1.4 * step


def test_an_empty_arena_gives_its_memory_back_before_it_takes_more(layout: Layout) -> None:
    """Old and new would not fit together."""
    free = [1 << 30]
    arena = KVArena(layout, CPU, lambda: free[0])
    arena.reserve(10_000)
    append(arena, 1)
    free[0] = layout.bytes_per_token * 6_000
    with pytest.raises(ContextTooLong):
        arena.reserve(14_000)
    arena.truncate(0)
    arena.reserve(14_000)
    append(arena, 14_000)
    assert arena.num_tokens == 14_000


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_runs_out_all_the_same_is_the_requests_error(
    layout: Layout, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = KVArena(layout, CPU)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", refuse)
        with pytest.raises(ContextTooLong, match="more than there is"):
            arena.reserve(2000)
    arena.reserve(2000)
    append(arena, 2000)
    assert arena.num_tokens == 2000


LAYOUT: Layout = dense_layout(layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, vocab_size=16)


def share_of_pages(tensor: torch.Tensor) -> float:
    """Returns how many of a tensor's whole pages are in memory, as a share of 1."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize - first) // mmap.PAGESIZE
    found = np.zeros(num_pages, np.uint8)
    length, out = ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(found.ctypes.data)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), length, out) == 0
    return float((found & 1).mean())


def test_pages_are_made_ahead_and_what_they_hold_stays() -> None:
    tensor = zeros((40, 1 << 20), torch.uint8, torch.device("cpu"))
    tensor[7, 5] = 3
    populate([tensor])
    assert share_of_pages(tensor) == 1
    assert tensor[7, 5] == 3
    assert int(tensor.sum()) == 3


def test_pages_are_made_as_long_as_they_are_wanted() -> None:
    # Fresh memory: what the C library gives may have been used before.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    tensor = torch.frombuffer(mmap.mmap(-1, 40 << 20, flags=flags), dtype=torch.uint8)
    answers = iter([True, True, False])
    populate([tensor], lambda: next(answers))
    # Two large pages, of which the first may have begun before.
    assert 2 / 40 < share_of_pages(tensor) < 8 / 40


def test_a_request_ends_the_making_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], bool]] = []
    monkeypatch.setattr("diskprefix.kv.pool.populate", lambda _tensors, is_wanted: asked.append(is_wanted))
    pool = KVPool(
        LAYOUT, torch.device("cpu"), limit_bytes=1 << 30, free_bytes=lambda: 1 << 30, max_idle=1, block_size=16
    )
    pool.touch(1 << 20, 1 << 20)
    wait_until(lambda: bool(asked), "the thread begins")
    assert asked[0]()
    pool.give_way()
    assert not asked[0]()


def test_memory_that_is_taken_ahead_is_all_there_soon_and_the_first_sequence_gets_it() -> None:
    pool = KVPool(
        LAYOUT, torch.device("cpu"), limit_bytes=1 << 30, free_bytes=lambda: 1 << 30, max_idle=1, block_size=16
    )
    pool.touch(32 << 20, 1 << 20)
    (arena,) = pool._spare
    (memory,) = arena.memory
    assert memory.num_bytes >= 32 << 20
    wait_until(lambda: share_of_pages(memory.tensor) == 1, "the pages are made")
    allocation = pool.allocate(1000)
    assert allocation is not None
    assert allocation.arena is arena
    assert not memory.tensor.any()
