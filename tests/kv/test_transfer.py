"""Pages of memory that are made ahead."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch

from diskprefix.kv.group import zeros
from diskprefix.kv.layout import Layout
from diskprefix.kv.pool import KVPool
from diskprefix.kv.transfer import populate
from tests.server.daemon_process import wait_until
from tests.synthetic_model import dense_layout

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
