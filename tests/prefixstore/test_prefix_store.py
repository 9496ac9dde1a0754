"""The store for programs with an engine of their own: what they save is found, and nothing else is."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix import prefixstore
from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore import LayoutGroup, PrefixStore, StateIdentity, States
from tests.prefixstore.store.building import damage

BLOCK, TOKENS = 32, np.arange(200) % 89
GROUPS = (
    LayoutGroup(heads=2, head_dim=8, dtype="float32", tensors=("key", "value")),
    LayoutGroup(heads=1, head_dim=16, dtype="bfloat16", tensors=("latent",)),
)
DTYPES = (np.float32, np.uint16)


def identity(weights: str = "a", groups: tuple[LayoutGroup, ...] = GROUPS) -> StateIdentity:
    return StateIdentity.of_tensors("model", {"weights": weights}, groups, BLOCK)


def empty(num_tokens: int) -> list[Any]:
    return [
        np.zeros((len(group.tensors), group.heads, num_tokens, group.head_dim), dtype)
        for group, dtype in zip(GROUPS, DTYPES, strict=True)
    ]


def computed(num_tokens: int = len(TOKENS), seed: int = 0) -> list[Any]:
    """State of which each token has other bytes."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 16000, buffer.shape).astype(buffer.dtype) for buffer in empty(num_tokens)]


def restored(states: States, tokens: Any) -> tuple[int, list[Any]]:
    buffers = empty(len(tokens))
    with states.match(tokens) as match:
        num_tokens = match.read_into(buffers)
        assert num_tokens <= match.num_tokens
    return num_tokens, [buffer[:, :, :num_tokens] for buffer in buffers]


def assert_same(found: list[Any], expected: list[Any], num_tokens: int) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other[:, :, :num_tokens])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    with PrefixStore.open(tmp_path / "kv", kv_cache_budget=64 << 20) as store:
        yield store


def test_the_program_of_the_page_finds_what_it_saved_before_it_was_killed(tmp_path: Path) -> None:
    page = (Path(prefixstore.__file__).parent / "PROGRAMS.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(program.splitlines()) <= 30

    def run() -> list[str]:
        command = [sys.executable, "-P", "-c", program, str(tmp_path / "kv")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(2)]
            process.kill()
        assert process.returncode == -signal.SIGKILL
        return lines

    first, second = run(), run()
    assert first[0] == "0 of 1000 tokens were stored"
    assert second[0] == "1000 of 1000 tokens were stored"
    assert first[1] == second[1]
    assert first[1].startswith("stored ")


@pytest.mark.parametrize("num_common", [200, 199, 150, 128, 40])
def test_a_prompt_is_restored_up_to_the_token_that_differs(num_common: int, store: PrefixStore) -> None:
    states, state = store.states(identity()), computed()
    assert states.save(TOKENS, state).wait() == "stored"
    other = np.concatenate([TOKENS[:num_common], [1000], TOKENS[num_common:]])
    num_tokens, found = restored(states, other)
    assert num_tokens == num_common
    assert_same(found, state, num_common)


def test_an_engine_that_is_exact_at_blocks_gets_whole_blocks(store: PrefixStore) -> None:
    states, state = store.states(identity(), exact_at="block"), computed()
    assert states.save(TOKENS, state).wait() == "stored"
    num_tokens, found = restored(states, TOKENS)
    assert num_tokens == len(TOKENS) // BLOCK * BLOCK
    assert_same(found, state, num_tokens)


def test_a_conversation_grows_and_only_what_is_new_is_written(store: PrefixStore) -> None:
    states, state = store.states(identity()), computed()
    for stop in (50, 50, 64, 130, 200):
        assert states.save(TOKENS[:stop], [buffer[:, :, :stop].copy() for buffer in state]).wait() == "stored"
        num_tokens, found = restored(states, TOKENS)
        assert num_tokens == stop
        assert_same(found, state, stop)
    # A longer block takes the place of the shorter one that it begins with.
    with store._tiered.store.snapshot() as snapshot:
        assert len(list(snapshot.keys("usage"))) == 200 // BLOCK + 1


def test_the_state_is_found_before_it_is_written_and_the_buffers_may_change_at_once(store: PrefixStore) -> None:
    states, state = store.states(identity()), computed()
    expected = [buffer.copy() for buffer in state]
    with store._tiered.store.changes():
        ticket = states.save(TOKENS, state)
        for buffer in state:
            buffer[...] = 0
        num_tokens, found = restored(states, TOKENS)
        assert (ticket.state, num_tokens) == ("queued", len(TOKENS))
        assert_same(found, expected, num_tokens)
    assert ticket.wait() == "stored"


def test_other_weights_layouts_and_tenants_find_nothing(store: PrefixStore) -> None:
    states = store.states(identity())
    assert states.save(TOKENS, computed()).wait() == "stored"
    wider = (LayoutGroup(heads=2, head_dim=16, dtype="float32", tensors=("key", "value")),)
    others = (
        store.states(identity("b")),
        store.states(identity(groups=wider)),
        store.states(identity(), tenant="salt:x"),
    )
    assert [other.match(TOKENS).num_tokens for other in others] == [0, 0, 0]
    assert states.match(TOKENS).num_tokens == len(TOKENS)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_a_damaged_block_ends_what_is_read_and_is_saved_again(number: int, store: PrefixStore) -> None:
    states, state = store.states(identity()), computed()
    assert states.save(TOKENS, state).wait() == "stored"
    inner = store._tiered.store
    with inner.snapshot() as snapshot:
        nodes = [(node.position, name) for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
    damage(inner, sorted(nodes)[number][1])
    num_tokens, found = restored(states, TOKENS)
    assert num_tokens == number * BLOCK
    assert_same(found, state, num_tokens)
    assert store.flush()
    assert states.match(TOKENS).num_tokens == num_tokens, "the damaged block is removed"
    assert states.save(TOKENS, state).wait() == "stored"
    num_tokens, found = restored(states, TOKENS)
    assert num_tokens == len(TOKENS)
    assert_same(found, state, num_tokens)


def test_what_is_pinned_stays_when_room_is_needed(tmp_path: Path) -> None:
    with PrefixStore.open(tmp_path / "kv", kv_cache_budget=16 << 20) as store:
        states = store.states(identity())
        pinned, others = TOKENS + 1000, [TOKENS + 2000 * number for number in range(2, 400)]
        assert states.save(pinned, computed(seed=1)).wait() == "stored"
        with states.match(pinned) as match:
            for number, tokens in enumerate(others):
                states.save(tokens, computed(seed=number)).wait()
            assert match.read_into(empty(len(pinned))) == len(pinned)
        assert states.match(others[0]).num_tokens == 0, "the store had to evict"


def test_a_purge_removes_what_is_stored_and_what_is_queued(store: PrefixStore) -> None:
    states = store.states(identity())
    assert states.save(TOKENS, computed()).wait() == "stored"
    assert store.purge("another model").blocks == 0
    assert store.purge("model").blocks > 0
    assert states.match(TOKENS).num_tokens == 0
    assert states.save(TOKENS, computed()).wait() == "stored"


def test_without_room_in_the_write_buffer_nothing_is_saved(tmp_path: Path) -> None:
    with PrefixStore.open(tmp_path / "kv", kv_cache_budget=64 << 20, kv_cache_write_buffer=1000) as store:
        states = store.states(identity())
        assert states.save(TOKENS, computed()).wait() == "dropped"
        assert states.match(TOKENS).num_tokens == 0


def test_without_room_on_the_disk_nothing_is_saved(tmp_path: Path) -> None:
    store = PrefixStore.open(tmp_path / "kv", kv_cache_min_free=1 << 60)
    ticket = store.states(identity()).save(TOKENS, computed())
    # The disk may get room within seconds: until then the save waits.
    assert not store.close(0)
    assert ticket.wait(0) == "dropped"
    with PrefixStore.open(tmp_path / "kv") as store:
        assert store.states(identity()).match(TOKENS).num_tokens == 0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (lambda buffers: buffers[:1], "1 buffers for 2 groups"),
        (lambda buffers: [buffers[0].astype(np.float16), buffers[1]], "buffer 0: must be C-contiguous, with 2 tensors"),
        (lambda buffers: [buffers[0].swapaxes(2, 3), buffers[1]], "buffer 0: must be C-contiguous"),
        (lambda buffers: [buffers[0], buffers[1][:, :, :50].copy()], "buffer 1: has room for 50 tokens, not 200"),
        (lambda buffers: [buffers[0][:1].copy(), buffers[1]], "buffer 0: must be C-contiguous, with 2 tensors"),
    ],
    ids=["number", "dtype", "order", "room", "tensors"],
)
def test_buffers_of_another_form_are_refused(changed: Any, problem: str, store: PrefixStore) -> None:
    states = store.states(identity())
    with pytest.raises(ValueError, match=problem):
        states.save(TOKENS, changed(computed()))
    assert states.save(TOKENS, computed()).wait() == "stored"
    with pytest.raises(ValueError, match=problem):
        states.match(TOKENS).read_into(changed(empty(len(TOKENS))))


@pytest.mark.usefixtures("store")
def test_a_folder_is_open_once_in_a_process(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="in use by another session of this process"):
        PrefixStore.open(tmp_path / "kv")


def test_each_name_of_the_library_is_there_and_no_other() -> None:
    names = dir(prefixstore)
    assert [getattr(prefixstore, name).__name__ for name in names] == names
    with pytest.raises(AttributeError, match="no attribute 'Store'"):
        prefixstore.Store  # noqa: B018
