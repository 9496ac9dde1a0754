"""Copies between main memory and a device: what is there when, and what is kept until then."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.copies import (
    COPY_BYTES,
    BlockingCopies,
    DirectCopies,
    Lane,
    Later,
    PinnedBuffers,
    StreamCopies,
    finish,
)
from diskprefix.kv.layers import TokenLayer, packed
from diskprefix.kv.step import Run, Step, computing
from diskprefix.store.codec.planes import Bytes
from tests.kv.late_streams import LateStreams, install
from tests.synthetic_model import dense_layout

KINDS = ["direct", "blocking", "late"]
if torch.cuda.is_available():
    KINDS.append("cuda")


def made(kind: str) -> Any:
    if kind == "cuda":
        from diskprefix.kv.copies import copies_for

        return copies_for(torch.device("cuda"))
    return {"direct": DirectCopies(), "blocking": BlockingCopies(torch.device("cpu"))}.get(kind) or late()[0]


def late(num_buffers: int = 3, buffer_bytes: int = 1 << 12) -> tuple[StreamCopies, LateStreams]:
    streams = LateStreams()
    lane = Lane(streams)
    lane.buffers = PinnedBuffers(streams.pinned, num_buffers, buffer_bytes)
    return StreamCopies(lane), streams


def numbers(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def filled(copies: Any, memory: torch.Tensor, values: Bytes, layer: int = 0) -> None:
    copies.fill(memory, lambda out: np.copyto(out, values), (layer,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_what_is_filled_is_read_again(kind: str, dtype: torch.dtype) -> None:
    copies, device = made(kind), "cuda" if kind == "cuda" else "cpu"
    memory = torch.zeros((6, 40, 16), dtype=dtype, device=device)
    part, values = memory[1:5, 7:30], numbers(4, 23 * 16 * dtype.itemsize)
    copies.fill(part, lambda out: np.copyto(out, values), (0,)) if kind != "direct" else filled_in_place(part, values)
    found = np.empty(values.size, np.uint8)
    copies.read(found, part)
    assert (found == values.reshape(-1)).all()
    copies.arrive()
    assert memory[0].eq(0).all()
    assert memory[:, 30:].eq(0).all()


def filled_in_place(part: torch.Tensor, values: Bytes) -> None:
    """A part of main memory that is not in one piece is filled by `GroupMemory`."""
    part.view(torch.uint8).numpy()[...] = values.reshape(part.view(torch.uint8).shape)


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_a_buffer_is_read_in_parts(kind: str) -> None:
    copies = made(kind)
    values = torch.from_numpy(numbers(2 * COPY_BYTES + 17))
    found, rows = np.empty(len(values), np.uint8), np.empty(3 * 1000, np.uint8)
    if kind == "cuda":
        values = values.cuda()
    copies.read(found, values)
    copies.read(rows, values[: 3 * 2000].view(3, 2000)[:, 500:1500])
    host = values.cpu().numpy()
    assert (found == host).all()
    assert (rows.reshape(3, 1000) == host[:6000].reshape(3, 2000)[:, 500:1500]).all()


def test_a_layer_waits_for_the_last_copy_of_its_own_state_only() -> None:
    copies, streams = late(num_buffers=4)
    memory = [torch.zeros((2, 8), dtype=torch.uint8) for _ in range(4)]
    for layer, part in ((0, memory[0]), (0, memory[1]), (1, memory[2]), (1, memory[3])):
        filled(copies, part, numbers(2, 8), layer)
    assert streams.counts["waits"] == 0
    copies.arrive(0)
    is_there = [bool((part.numpy() == numbers(2, 8)).all()) for part in memory]
    assert is_there == [True, True, False, False]
    copies.arrive(0)
    copies.arrive(2)
    assert streams.counts["waits"] == 1
    copies.arrive()
    assert (memory[3].numpy() == numbers(2, 8)).all()
    copies.arrive()
    assert streams.counts["waits"] == 2
    assert streams.blocked == []


def test_memory_is_pinned_once_and_a_buffer_waits_for_its_last_copy() -> None:
    copies, streams = late(num_buffers=2, buffer_bytes=1024)
    memory = torch.zeros((20, 1024), dtype=torch.uint8)
    values = numbers(20, 1024)
    with ThreadPoolExecutor(2, thread_name_prefix="reader") as readers:
        list(readers.map(lambda row: filled(copies, memory[row : row + 1], values[row : row + 1]), range(20)))
    assert streams.counts["pinned_bytes"] == 2 * 1024
    assert streams.blocked
    assert all(name.startswith("reader") for name in streams.blocked)
    copies.arrive()
    assert (memory.numpy() == values).all()


def test_a_row_longer_than_a_buffer_gets_one_of_its_own() -> None:
    copies, _ = late(num_buffers=1, buffer_bytes=16)
    memory, values = torch.zeros((1, 1000), dtype=torch.uint8), numbers(1, 1000)
    for _ in range(3):
        filled(copies, memory, values)
    copies.arrive()
    assert (memory.numpy() == values).all()


def test_what_cannot_be_decoded_is_not_copied_and_keeps_no_buffer() -> None:
    copies, streams = late(num_buffers=1)
    memory = torch.full((1, 8), 7, dtype=torch.uint8)

    def damaged(_: Bytes) -> None:
        raise ValueError("damaged")

    for _ in range(3):
        with pytest.raises(ValueError, match="damaged"):
            copies.fill(memory, damaged, (0,))
    copies.arrive()
    assert (streams.counts["loads"], set(memory.flatten().tolist())) == (0, {7})
    filled(copies, memory, numbers(1, 8))
    copies.arrive()
    assert (memory.numpy() == numbers(1, 8)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_later_is_what_was_there_when_it_was_asked_for(kind: str) -> None:
    copies, later = made(kind), Later()
    memory = torch.from_numpy(numbers(100)).to("cuda" if kind == "cuda" else "cpu")
    payload = np.zeros(100, np.uint8)
    copies.read_later(payload, memory, later)
    memory.zero_()
    finish(later)
    assert (payload == numbers(100)).all()
    assert later == deque()


def test_a_load_comes_after_what_was_computed_and_a_save_after_what_was_loaded() -> None:
    copies, streams = late()
    memory = torch.zeros((1, 8), dtype=torch.uint8)
    for _ in range(2):
        filled(copies, memory, numbers(1, 8))
    assert streams.counts["follows"] == 1
    found = np.empty(8, np.uint8)
    copies.read(found, memory)
    assert (found == numbers(1, 8)[0]).all()
    copies.arrive()
    filled(copies, memory, numbers(1, 8, seed=1))
    assert streams.counts["follows"] == 2


def test_the_time_of_a_restore_is_known_when_its_last_copy_is_made() -> None:
    streams = LateStreams(bytes_per_s=1e3)
    copies, memory = StreamCopies(Lane(streams)), torch.zeros((1, 500), dtype=torch.uint8)
    assert copies.seconds() == 0
    for _ in range(4):
        filled(copies, memory, numbers(1, 500))
    assert copies.seconds() is None
    copies.arrive()
    assert copies.seconds() == pytest.approx(2.0)


def test_a_copied_cache_shares_the_streams_and_waits_for_nothing() -> None:
    copies, streams = late()
    memory = torch.zeros((1, 8), dtype=torch.uint8)
    filled(copies, memory, numbers(1, 8))
    other = copy.deepcopy(copies)
    other.arrive()
    assert streams.counts["waits"] == 0
    filled(other, memory, numbers(1, 8))
    assert streams.counts["loads"] == 2


def by_itself(layers: list[TokenLayer], rows: torch.Tensor) -> None:
    layers[0].update(rows, rows)


def in_a_step(layers: list[TokenLayer], rows: torch.Tensor) -> None:
    with computing(Step((Run(0, 1),))):
        layers[0].update(rows, rows)


def for_kernels(layers: list[TokenLayer], rows: torch.Tensor) -> None:
    layers[0].writes_later = True
    in_a_step(layers, rows)


def packed_with_others(layers: list[TokenLayer], rows: torch.Tensor) -> None:
    packed(layers[:1], Step((Run(0, 1),))).update(rows, rows)


def packed_for_kernels(layers: list[TokenLayer], rows: torch.Tensor) -> None:
    layers[0].writes_later = True
    packed_with_others(layers, rows)


@pytest.mark.parametrize(
    "use", [by_itself, in_a_step, for_kernels, packed_with_others, packed_for_kernels], ids=lambda use: use.__name__
)
def test_however_a_layer_is_used_its_state_is_waited_for_and_not_that_of_others(
    use: Callable[[list[TokenLayer], torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = LateStreams()
    install(monkeypatch, streams)
    arena = KVArena(dense_layout(layers=2, heads=2, head_dim=8, dtype=torch.float32, vocab_size=4), torch.device("cpu"))
    arena.reserve(16)
    for row in range(8):
        arena.fill(0, 16, 0, slice(row, row + 1), lambda out: out.fill(7))
    arena.begin_step(1, by_layer=True)
    assert streams.num_loaded == 0
    use(arena.token_layers, torch.zeros(1, 2, 1, 8))
    assert streams.num_loaded == 4
    arena.begin_step(1)
    assert streams.num_loaded == 8
    assert not arena.memory[0].tensor[:, :, :, :16].isnan().any()
