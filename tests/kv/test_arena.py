"""The arena's memory: who may write to it, how it grows, pages that are made ahead, and captures that wait for room."""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

from diskprefix.errors import ContextTooLong
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture, Capturer
from diskprefix.kv.group import zeros
from diskprefix.kv.layout import Layout
from diskprefix.kv.pool import KVPool
from diskprefix.kv.transfer import fill_device, populate, read_device
from diskprefix.model.exact.self_check import rehearse
from tests.runner import tiny_llama
from tests.server.daemon_process import wait_until
from tests.synthetic_model import dense_layout

CPU = torch.device("cpu")
GIB = 1 << 30
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


def test_growing_keeps_what_is_valid_and_so_does_a_refusal(layout: Layout) -> None:
    free = [GIB]
    arena = KVArena(layout, CPU, lambda: free[0])
    arena.reserve(NUM_TOKENS)
    append(arena, NUM_TOKENS)
    before = arena.read_tokens(0, NUM_TOKENS)
    arena.reserve(5000)
    assert (arena.num_tokens, arena.read_tokens(0, NUM_TOKENS)) == (NUM_TOKENS, before)
    free[0] = 0
    with pytest.raises(ContextTooLong):
        arena.reserve(100_000)
    append(arena, 1)
    assert arena.read_tokens(0, NUM_TOKENS) == before


def test_what_does_not_fit_is_refused_before_memory_is_taken(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = KVArena(layout, CPU, lambda: 1 << 20)
    monkeypatch.setattr(torch, "zeros", lambda *_args, **_kwargs: pytest.fail("memory was taken"))
    expected = "100000 tokens need 24.5 MiB of KV memory, 1.0 MiB are available; use a shorter prompt"
    with pytest.raises(ContextTooLong, match=re.escape(expected)):
        arena.reserve(100_000)


def capacity_of(arena: KVArena) -> int:
    return int(arena.layers[0].keys.shape[2])


def test_growth_is_generous_only_where_memory_allows(layout: Layout) -> None:
    free = [GIB]
    arena = KVArena(layout, CPU, lambda: free[0])
    arena.reserve(10_000)
    append(arena, 1)
    step = capacity_of(arena) + 1
    free[0] = layout.bytes_per_token * (step + 1200)
    arena.reserve(step)
    assert step <= capacity_of(arena) < step + 1200
    free[0] = GIB
    arena.reserve(capacity_of(arena) + 1)
    assert capacity_of(arena) > 1.4 * step


def test_an_empty_arena_gives_its_memory_back_before_it_takes_more(layout: Layout) -> None:
    """Old and new would not fit together."""
    free = [GIB]
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
    tensor = zeros((40, 1 << 20), torch.uint8, CPU)
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


@pytest.fixture
def pool() -> KVPool:
    return KVPool(LAYOUT, CPU, limit_bytes=GIB, free_bytes=lambda: GIB, max_idle=1, block_size=16)


def test_a_request_ends_the_making_of_pages(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], bool]] = []
    monkeypatch.setattr("diskprefix.kv.pool.populate", lambda _tensors, is_wanted: asked.append(is_wanted))
    pool.touch(1 << 20, 1 << 20)
    wait_until(lambda: bool(asked), "the thread begins")
    assert asked[0]()
    pool.give_way()
    assert not asked[0]()


def test_memory_that_is_taken_ahead_is_all_there_soon_and_the_first_sequence_gets_it(pool: KVPool) -> None:
    pool.touch(32 << 20, 1 << 20)
    (arena,) = pool._spare
    (memory,) = arena.memory
    assert memory.num_bytes >= 32 << 20
    wait_until(lambda: share_of_pages(memory.tensor) == 1, "the pages are made")
    allocation = pool.allocate(1000)
    assert allocation is not None
    assert allocation.arena is arena
    assert not memory.tensor.any()


# Captures.


class Buffer:
    """Room for `room` bytes, and what was done with each capture."""

    def __init__(self) -> None:
        self.room = self.errors = 0
        self.done: list[str] = []
        self.asked = threading.Semaphore(0)
        self.capturer = Capturer(self.reserve, self.fail)

    def reserve(self, size: int) -> bool:
        self.asked.release()
        if size > self.room:
            return False
        self.room -= size
        return True

    def fail(self) -> None:
        self.errors += 1

    def make_room(self, size: int) -> None:
        self.room += size
        self.capturer.wake()

    def submit(self, memory: object, name: str, size: int = 1, is_void: bool = False) -> None:
        copied, dropped = (lambda: self.done.append(f"{name} copied")), (lambda: self.done.append(f"{name} dropped"))
        self.capturer.submit(Capture(memory, size, copied, dropped, lambda: is_void))

    def wait_until_asked(self) -> None:
        """Until the thread has found no room."""
        assert self.asked.acquire(timeout=30)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    buffer = Buffer()
    yield buffer
    buffer.capturer.close(0)


A, B = object(), object()


def test_captures_wait_for_room_and_keep_their_order(buffer: Buffer) -> None:
    buffer.submit(A, "a", 2)
    buffer.submit(B, "b", 1)
    buffer.wait_until_asked()
    buffer.make_room(1)
    assert not buffer.capturer.settle(timeout_s=0.01)
    assert buffer.done == [], "a small one does not overtake a large one"
    buffer.make_room(2)
    assert buffer.capturer.settle(timeout_s=30)
    assert buffer.done == ["a copied", "b copied"]


@pytest.mark.parametrize(
    ("room", "done"), [(0, ["a1 dropped", "a2 dropped"]), (2, ["a1 copied", "a2 dropped"])], ids=["no room", "some"]
)
def test_a_memory_that_is_wanted_is_not_waited_for_and_others_keep_their_captures(
    room: int, done: list[str], buffer: Buffer
) -> None:
    buffer.submit(B, "b", 3)
    buffer.submit(A, "a1", 1)
    buffer.submit(A, "a2", 2)
    buffer.wait_until_asked()
    buffer.make_room(room)
    assert buffer.capturer.settle(A, drop=True)
    assert buffer.done == done
    buffer.make_room(3)
    assert buffer.capturer.settle(B, timeout_s=30)
    assert buffer.done == [*done, "b copied"]


def test_what_is_void_needs_no_room(buffer: Buffer) -> None:
    buffer.submit(A, "a", 5, is_void=True)
    assert buffer.capturer.settle(A, timeout_s=30)
    assert buffer.done == ["a dropped"]


def test_settling_one_memory_does_not_wait_for_another(buffer: Buffer) -> None:
    buffer.submit(B, "b", 1)
    assert buffer.capturer.settle(A, timeout_s=0)
    assert not buffer.capturer.settle(B, timeout_s=0.01)


def test_a_capture_that_fails_is_counted_and_the_next_one_is_made(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise MemoryError("none left")

    buffer.capturer.submit(Capture(A, 0, fail, fail))
    buffer.submit(A, "a", 0)
    assert buffer.capturer.settle(A, timeout_s=30)
    assert (buffer.errors, buffer.done) == (1, ["a copied"])
    assert "none left" in caplog.text


def test_closing_drops_what_has_no_room_in_time(buffer: Buffer) -> None:
    buffer.submit(A, "a", 1)
    buffer.capturer.close(0)
    assert buffer.done == ["a dropped"]
