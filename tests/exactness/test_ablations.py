"""Each protection of the grid, states, windows and checkpoints is taken away, and the check that rests on it must fail.

`test_exactness.py` does so with the protections of every model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capturer
from diskprefix.kv.layers import SlidingWindowLayer
from diskprefix.model.exact.self_check import rehearse
from diskprefix.tokens import TokenIds
from tests import runner
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_settings

PROMPT = random_prompt(1, 9 * BLOCK + 5)
OTHER = np.concatenate([PROMPT[: 6 * BLOCK], random_prompt(2, 2 * BLOCK + 3)])
"""Leaves PROMPT at a block that a checkpoint was taken after."""
BOUNDARIES = (6 * BLOCK,)


@pytest.fixture(params=["llama", "gemma3", "qwen3_next", "mamba2"])
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runner_of(architecture: str, folder: Path) -> Runner:
    """In float32, where the last bits show more than in a tiny model's bfloat16."""
    return Runner(tiny_model(architecture, torch.float32), tiny_settings(folder))


def is_exact(runner: Runner) -> bool:
    """Tells whether a prompt that branches off another after a restart is answered as a cold run answers it."""
    runner.run(PROMPT, "full", boundaries=BOUNDARIES, reply=4)
    runner.reopen()
    warm = runner.run(OTHER, "full", boundaries=BOUNDARIES, reply=8)
    assert warm.report.restored == 6 * BLOCK
    cold = runner.run(OTHER, "off", reply=8)
    runner.close()
    return same(cold, warm)


def capture_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disk is slow: nothing is captured before the prompt's end."""
    has_ended = threading.Event()
    publish, find = CachedRequest.publish, Capturer._next

    def ending(self: CachedRequest, *args: Any) -> None:
        publish(self, *args)
        has_ended.set()
        self.cache.capturer.wake()

    monkeypatch.setattr(CachedRequest, "publish", ending)
    monkeypatch.setattr(Capturer, "_next", lambda self: find(self) if has_ended.is_set() else None)


def test_with_every_protection_it_is_exact(architecture: str, tmp_path: Path) -> None:
    assert is_exact(runner_of(architecture, tmp_path))


HYBRIDS = pytest.mark.parametrize("architecture", ["qwen3_next", "mamba2"], indirect=True)


@pytest.mark.parametrize("architecture", ["lfm2"], indirect=True)
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "shared"])
def test_without_the_copy_of_states_it_is_not(
    architecture: str, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model updates its states in place: what was not copied shows what they have become when it is written."""

    def shared(arena: KVArena, room_bytes: int = 0, **_later: object) -> memoryview:
        # These models have states of one form, so that all of them lie in one piece of memory.
        (states,) = arena.states
        found = states.view(-1).view(torch.uint8).numpy()
        return np.pad(found, (0, room_bytes)).data if room_bytes else found.data

    runner = runner_of(architecture, tmp_path)
    capture_late(monkeypatch)
    if not copied:
        monkeypatch.setattr(KVArena, "read_states", shared)
    assert is_exact(runner) == copied


@HYBRIDS
def test_without_the_copy_for_several_choices_they_are_not_all_the_same(architecture: str) -> None:
    """`mark` and `rewind` let each of n replies start from the prompt's states."""
    model = tiny_model(architecture, torch.float32)
    arena = KVArena(rehearse(model), model.device)
    token_ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        arena.reserve(30)
        arena.forward(model, token_ids)
        arena.mark()
        first = arena.forward(model, token_ids[:, :1])
        arena.rewind()
        assert torch.equal(arena.forward(model, token_ids[:, :1]), first)
        arena.truncate(20)
        assert not torch.equal(arena.forward(model, token_ids[:, :1]), first)


def test_without_the_grid_it_is_not(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on in other steps rounds otherwise. Of a recurrent state, other steps are other chunks."""

    def off_the_grid(
        model: Any, arena: KVArena, token_ids: TokenIds, *, start: int, after_step: Callable[[KVArena], None], **_: Any
    ) -> torch.Tensor:
        ids = torch.from_numpy(token_ids).to(torch.long).unsqueeze(0)
        ends = [start + 5, len(token_ids)] if start else [*range(BLOCK, len(token_ids), BLOCK), len(token_ids)]
        for end in ends:
            logits = arena.forward(model, ids[:, arena.num_tokens : end])
            after_step(arena)
        return logits

    monkeypatch.setattr(runner, "prefill", off_the_grid)
    assert not is_exact(runner_of(architecture, tmp_path))


@pytest.mark.parametrize("architecture", ["gemma3"], indirect=True)
def test_without_what_slid_out_of_the_window_it_is_not(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own layer keeps the last window only: at an earlier grid point its state is gone."""
    update = SlidingWindowLayer.update

    def forgetful(self: SlidingWindowLayer, *args: Any, **kwargs: Any) -> Any:
        shown = tuple(part.clone() for part in update(self, *args, **kwargs))
        for part in (self.keys, self.values):
            part[:, :, : self._first_visible()] = 0
        return shown

    capture_late(monkeypatch)
    monkeypatch.setattr(SlidingWindowLayer, "update", forgetful)
    assert not is_exact(runner_of(architecture, tmp_path))


@HYBRIDS
def test_without_a_checkpoint_at_its_place_it_is_not(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the wrong grid point, one step before, are another chunk's."""
    runner = runner_of(architecture, tmp_path)
    read_states, compute = KVArena.read_states, KVArena.forward
    before: list[memoryview] = []

    def forward(self: KVArena, *args: Any) -> torch.Tensor:
        before[:] = [read_states(self)]
        return compute(self, *args)

    monkeypatch.setattr(KVArena, "forward", forward)
    monkeypatch.setattr(KVArena, "read_states", lambda _, room_bytes=0, **_k: np.pad(before[0], (0, room_bytes)).data)
    assert not is_exact(runner)
