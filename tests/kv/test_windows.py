"""Memory of layers with a window: it holds the window and a step, and no bit of a run depends on that."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.kv import group as group_module
from diskprefix.kv.arena import KVArena, bytes_for
from diskprefix.kv.capturer import Capture, Capturer
from diskprefix.kv.group import GroupMemory
from diskprefix.kv.layout import Layout
from diskprefix.kv.sizes import TILE
from diskprefix.model.exact import runner
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.exact.state_layout import made_up_tokens
from tests.exactness.architectures import tiny_model

BLOCK = 32
LENGTH = 3000
"""Tokens, of which the memory of a window holds about half."""
AT_TOKENS = {
    "gemma3": torch.bfloat16,
    "gemma2": torch.bfloat16,
    "mistral": torch.float32,
    "gpt_oss": torch.bfloat16,
    "mimo_v2_flash": torch.float32,
    "llama4": torch.bfloat16,
    "lfm3": torch.float32,
    # Layers that share their keys with others.
    "gemma3n": torch.bfloat16,
}


@dataclass
class Model:
    model: PreTrainedModel
    layout: Layout
    ids: torch.Tensor

    def arena(self, *, slides: bool = True) -> KVArena:
        return KVArena(self.layout, self.model.device, block_size=BLOCK if slides else None)

    def run(self, arena: KVArena, steps: Sequence[int]) -> list[torch.Tensor]:
        """Runs the next tokens in such steps. Returns the logits of each."""
        found = []
        for num_tokens in steps:
            start = arena.num_tokens
            found.append(arena.forward(self.model, self.ids[:, start : start + num_tokens]))
        return found


@cache
def made(name: str) -> Model:
    model = tiny_model(name, AT_TOKENS[name])
    layout, _ = make_exact(model, identity=name)
    assert layout.exact_at == "token"
    assert any(group.window for group in layout.groups)
    return Model(model, layout, made_up_tokens(model, 5, LENGTH))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def gemma() -> Model:
    return made("gemma3")


def random_steps(rng: random.Random, num_tokens: int) -> list[int]:
    steps: list[int] = []
    while (left := num_tokens - sum(steps)) > 0:
        steps.append(min(left, rng.choice((1, 1, 2, 5, 33, 100, 200, 256, 256, 256))))
    return steps


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def state(arena: KVArena, start: int) -> memoryview:
    return arena.read_tokens(start, arena.num_tokens - start)


@pytest.mark.parametrize("name", AT_TOKENS)
def test_a_run_in_memory_that_slides_has_the_bits_of_one_that_keeps_all(name: str) -> None:
    model = made(name)
    steps = random_steps(random.Random(name), LENGTH)
    slides, keeps = model.arena(), model.arena(slides=False)
    assert same(model.run(slides, steps), model.run(keeps, steps))
    assert slides.complete_from >= 2 * TILE
    assert state(slides, slides.complete_from) == state(keeps, slides.complete_from)


def test_memory_that_moves_by_less_than_a_tile_is_never_attended_to(
    gemma: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "TILE", 64)
    with pytest.raises(Exception, match="tokens that the cache does not keep"):
        gemma.run(gemma.arena(), [256] * 11)


def test_a_step_that_is_longer_than_usual_enlarges_the_memory(gemma: Model) -> None:
    slides, keeps = gemma.arena(), gemma.arena(slides=False)
    steps = [700, 1, 2000, 1]
    assert same(gemma.run(slides, steps), gemma.run(keeps, steps))
    assert slides.memory[0].first > 0


def test_memory_stays_the_same_however_long_a_sequence_is() -> None:
    model = made("mistral")
    arena = model.arena()
    sizes = set()
    for _ in range(11):
        model.run(arena, [255, 1])
        sizes.add(arena.num_bytes)
    assert len(sizes) <= 2
    assert max(sizes) == bytes_for(model.layout, 1 << 20, BLOCK) < bytes_for(model.layout, LENGTH)


def test_the_bound_of_a_reservation_is_what_it_takes(gemma: Model) -> None:
    for num_tokens in (100, 1500, 2900):
        arena = gemma.arena()
        arena.reserve(num_tokens)
        assert arena.num_bytes == bytes_for(gemma.layout, num_tokens, BLOCK)


@pytest.mark.parametrize("marked", [300, 1500, 1537])
def test_a_marked_point_is_returned_to_after_its_window_slid_out(gemma: Model, marked: int) -> None:
    arena, fork = gemma.arena(), gemma.arena()
    gemma.run(arena, random_steps(random.Random(1), marked))
    arena.mark()
    expected = gemma.run(arena, [1] * 20 + [256] * 5)
    assert arena.held(marked) == marked
    fork.reserve(LENGTH)
    fork.copy_from(arena, marked)
    assert same(gemma.run(fork, [1] * 20 + [256] * 5), expected)
    for _ in range(2):
        arena.rewind()
        assert same(gemma.run(arena, [1] * 20 + [256] * 5), expected)


def test_a_sequence_is_gone_on_from_only_where_the_window_is_there(gemma: Model) -> None:
    """Up to the marked point where that is not behind."""
    arena = gemma.arena()
    whole = random_steps(random.Random(2), 2800)
    gemma.run(arena, whole)
    (window,) = {group.window for group in gemma.layout.groups if group.window}
    assert 0 < arena.complete_from < 2800 - window
    first = arena.complete_from + window - 1
    assert [arena.held(num_tokens) for num_tokens in (2800, first, first - 1, 700, 0)] == [2800, first, 0, 0, 0]
    keeps = gemma.arena(slides=False)
    gemma.run(keeps, whole)
    for num_tokens in (2799, 2500, first):
        copy = gemma.arena()
        copy.reserve(num_tokens)
        copy.copy_from(arena, num_tokens)
        keeps.truncate(num_tokens)
        arena.truncate(num_tokens)
        expected = gemma.run(keeps, [3, 60])
        assert same(gemma.run(copy, [3, 60]), expected)
        assert same(gemma.run(arena, [3, 60]), expected)


def test_what_slid_out_is_gone_on_from_at_the_marked_point(gemma: Model) -> None:
    arena, keeps = gemma.arena(), gemma.arena(slides=False)
    gemma.run(arena, [256, 44])
    arena.mark()
    gemma.run(arena, [256] * 9)
    gemma.run(keeps, [256, 44])
    assert [arena.held(num_tokens) for num_tokens in (300, 310, 290)] == [300, 300, 290]
    arena.truncate(290)
    keeps.truncate(290)
    assert same(gemma.run(arena, [256] * 6), gemma.run(keeps, [256] * 6))


def test_several_sequences_slide_in_one_packed_step(gemma: Model) -> None:
    arenas = [gemma.arena() for _ in range(3)]
    steps = [random.Random(seed).choices((1, 7, 100, 200), k=28) for seed in range(3)]
    expected = [gemma.run(gemma.arena(slides=False), part) for part in steps]
    for number in range(28):
        rows = []
        for arena, part in zip(arenas, steps, strict=True):
            start = arena.num_tokens
            rows.append(runner.Rows(arena, gemma.ids[:, start : start + part[number]]))
        logits = [of_last for (of_last,) in runner.run(gemma.model, rows)]
        assert same(logits, [found[number] for found in expected])
    assert all(arena.complete_from for arena in arenas)


def test_a_window_that_another_sequence_left_in_memory_never_shows(gemma: Model) -> None:
    arena = gemma.arena()
    gemma.run(arena, [256] * 10)
    expected = [gemma.run(arena, [1])]
    for memory in arena.memory:
        memory.tensor.fill_(float("nan"))
    arena.truncate(0)
    gemma.run(arena, [256] * 10)
    assert same(gemma.run(arena, [1]), expected[0])


class Saved:
    """A capturing thread whose buffer has room when `room` says so, and what it captured."""

    def __init__(self, arena: KVArena) -> None:
        self.room = True
        self.found: list[tuple[int, memoryview]] = []
        self.dropped: list[int] = []
        self._arena = arena
        self._capturer = arena.capturer = Capturer(lambda _: self.room, lambda: None)

    def capture(self, position: int) -> None:
        def copy() -> None:
            self.found.append((position, self._arena.read_tokens(position, BLOCK)))

        self._capturer.submit(Capture(self._arena, 1, copy, lambda: self.dropped.append(position)))

    def close(self) -> None:
        self.room = True
        self._capturer.close(30)


def captured(model: Model, has_room: Callable[[int], bool]) -> tuple[Saved, memoryview]:
    """What is captured of a prompt whose blocks are captured when they are complete, and all of its state."""
    arena, keeps = model.arena(), model.arena(slides=False)
    saved = Saved(arena)
    for end in range(BLOCK, LENGTH - BLOCK, BLOCK):
        saved.room = has_room(end)
        model.run(arena, [BLOCK])
        saved.capture(end - BLOCK)
    saved.close()
    model.run(keeps, [BLOCK] * (arena.num_tokens // BLOCK))
    return saved, state(keeps, 0)


def block_of(model: Model, whole: memoryview, position: int) -> bytes:
    """A block's payload, cut out of that of all tokens."""
    num_tokens, start, parts = len(whole) // model.layout.bytes_per_token, 0, []
    for group in model.layout.groups:
        row = group.head_dim * group.dtype.itemsize
        for _ in range(len(group.specs) * group.heads):
            parts.append(whole[start + position * row : start + (position + BLOCK) * row])
            start += num_tokens * row
    return b"".join(parts)


def test_blocks_are_captured_before_they_slide_out(gemma: Model) -> None:
    saved, whole = captured(gemma, lambda _end: True)
    assert [position for position, _ in saved.found] == list(range(0, LENGTH - 2 * BLOCK, BLOCK))
    assert all(payload == block_of(gemma, whole, position) for position, payload in saved.found)


def test_a_block_that_is_not_complete_stays_however_long_it_is(gemma: Model) -> None:
    """Longer than the window: it is captured as a whole."""
    arena = KVArena(gemma.layout, gemma.model.device, block_size=500)
    gemma.run(arena, [250] * 7 + [240, 250])
    assert 0 < arena.complete_from <= 1500


def test_what_the_buffer_has_no_room_for_is_dropped_when_memory_moves(gemma: Model) -> None:
    """And what is captured later has the bytes of its own place."""
    saved, whole = captured(gemma, lambda end: end < 600 or end > 2000)
    assert saved.dropped
    assert saved.found[-1][0] > 2000
    assert all(payload == block_of(gemma, whole, position) for position, payload in saved.found)


@pytest.mark.parametrize(
    ("have", "end"), [(0, 420), (400, 420), (0, 1500), (1400, 1500), (0, 2700), (400, 2700), (1400, 2700), (2650, 2700)]
)
def test_a_restore_makes_room_for_what_it_loads(gemma: Model, have: int, end: int) -> None:
    cold, arena = gemma.arena(slides=False), gemma.arena()
    gemma.run(cold, random_steps(random.Random(3), end))
    arena.reserve(end)
    for memory in arena.memory:
        # What an earlier sequence left.
        memory.tensor.fill_(float("nan"))
    gemma.run(arena, random_steps(random.Random(4), have))
    for number, (memory, computed) in enumerate(zip(arena.memory, cold.memory, strict=True)):
        start = memory.needed_from(end) // BLOCK * BLOCK
        arena.prepare_restore(number, start, end)
        for position in range(max(start, have), end):
            fill(memory, computed, position)
    arena.truncate(end)
    assert same(gemma.run(arena, [3, 256, 1]), gemma.run(cold, [3, 256, 1]))


def fill(memory: GroupMemory, computed: GroupMemory, position: int) -> None:
    def write(out: Any) -> None:
        rows = computed.tensor[:, :, :, position].flatten(0, 2)
        out[...] = rows.view(torch.uint8).numpy().reshape(out.shape)

    memory.fill(position, 1, slice(None), write)
