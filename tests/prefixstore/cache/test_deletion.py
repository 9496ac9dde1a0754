"""After a conversation is deleted, the store holds nothing of it, however its state came there."""

from __future__ import annotations

from typing import Literal

import pytest

from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from tests.examples import examples
from tests.prefixstore.cache.lives import Lives, is_sound, left_of, payloads_without_node, tenant_of, word_of
from tests.prefixstore.cache.opening import open_runner
from tests.runner import Runner

KINDS = {
    "token": "token",
    "sliceable": "grid",
    "token_checkpoints": "lfm2",
    "checkpoints": "qwen3_next",
}
"""A model of each kind of state."""


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    kind, folder = request.param, tmp_path_factory.mktemp("lives") / "kv"
    exact_at: Literal["token", "grid"] = "token" if kind.startswith("token") else "grid"
    runner = open_runner(KINDS[kind], folder, exact_at=exact_at)
    assert runner.layout.state_kind == kind
    return runner


def nothing_left(lives: Lives, number: int) -> None:
    with lives.runner.cache.store.reads.snapshot() as snapshot:
        assert left_of(snapshot, lives.conversations[number]) == [], lives.steps
        assert payloads_without_node(snapshot) == []
    assert is_sound(lives.runner), lives.steps


@pytest.mark.parametrize("first", range(0, examples(12), 12))
def test_nothing_is_left_of_a_conversation_that_was_deleted(runner: Runner, first: int) -> None:
    """By its ids, as they are listed; by its key; by its age. The others stay as they are listed."""
    for seed in range(first, first + 12):
        lives = Lives(runner, seed)
        lives.forget_all()
        lives.live(10)
        assert is_sound(runner), lives.steps
        gone = lives.rng.randrange(len(lives.conversations))
        how = ("id", "key", "age")[seed % 3]
        others = listed(lives, but=gone)
        lives.steps.append(f"delete {gone} by {how}")
        if how == "id":
            if not lives.delete_by_id(gone):
                # It never was, or all of its state was evicted.
                continue
            assert others <= listed(lives, but=gone), lives.steps
        elif how == "key":
            lives.delete_by_key(gone)
        else:
            store = runner.cache.store
            purge(store, PurgeFilter(older_than_s=0.0), store.clock() + 10)
        for number in range(len(lives.conversations)):
            if number == gone or how == "age" or (how == "key" and tenant_of(number) == tenant_of(gone)):
                nothing_left(lives, number)


def listed(lives: Lives, *, but: int) -> set[bytes]:
    """The saved prompts of all conversations but one."""
    with lives.runner.cache.store.reads.snapshot() as snapshot:
        return {
            name
            for name, entry in snapshot.entries()
            if entry.kind in ("saved", "imported") and word_of(but) not in entry.preview
        }
