"""A damaged node ends a restore after one round, whatever its kind and wherever the model's state may end."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.kv.layout import ExactAt
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Prompt, Scope
from tests.prefixstore.cache.opening import Opened
from tests.prefixstore.store.building import damage
from tests.runner import BLOCK, Runner, random_prompt, same

MODELS: dict[str, tuple[str, ExactAt]] = {
    "token": ("token", "token"),
    "sliceable": ("grid", "grid"),
    "token_checkpoints": ("lfm2", "token"),
    "checkpoints": ("qwen3_next", "grid"),
}
"""A model of each state kind."""
VICTIMS = ("block", "partial block", "own tail", "another's tail", "checkpoint")
UNUSED = {
    ("sliceable", "partial block"), ("sliceable", "another's tail"), ("token_checkpoints", "partial block"),
    ("checkpoints", "partial block"), ("token", "checkpoint"), ("sliceable", "checkpoint"),
}  # fmt: skip
"""Nodes that a restore does not use, or that are not stored: it has one round without damage."""
CHECKPOINT, PARTIAL = 2 * BLOCK, 3 * BLOCK + 8
"""Where a checkpoint is kept, and where a block is cut that is not full."""
Found: TypeAlias = list[Node | None]


def turns(state: str, victim: str) -> tuple[TokenIds, TokenIds]:
    """Returns a prompt to store, and one whose restore ends with the node to damage."""
    stored = random_prompt(1, 4 * BLOCK + (0 if state == "checkpoints" else 5))
    if victim == "own tail":
        return stored, stored
    end = {"partial block": PARTIAL - 2, "checkpoint": CHECKPOINT + 5}.get(victim, len(stored))
    return stored, np.append(stored[:end], random_prompt(2, 2 * BLOCK))


def is_victim(victim: str, kind: NodeKind, position: int, num_tokens: int) -> bool:
    if victim == "block":
        return (kind, position) == (NodeKind.BLOCK, BLOCK)
    if victim == "partial block":
        return kind == NodeKind.BLOCK and num_tokens < BLOCK
    return kind == (NodeKind.CHECKPOINT if victim == "checkpoint" else NodeKind.TAIL)


def damage_nodes(runner: Runner, victim: str) -> int:
    """Flips a bit in each node that a victim stands for. Returns the number of nodes."""
    with runner.cache.store.snapshot() as snapshot:
        nodes = [(name, node) for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
    names = [name for name, node in nodes if is_victim(victim, node.kind, node.position, node.num_tokens)]
    for name in names:
        damage(runner.cache.store, name)
    return len(names)


def note_rounds(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Notes the damaged node that each round of a restore finds, None for a round without one."""
    found, run = Found(), Loader.run

    def noted(loader: Loader, *args: Any) -> Any:
        bad = run(loader, *args)
        found.append(bad and bad[0])
        assert len(found) < 20, "the restore does not end"
        return bad

    monkeypatch.setattr(Loader, "run", noted)
    return found


@pytest.mark.cases(5)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", MODELS)
def test_a_damaged_node_ends_a_restore_after_one_round(
    state: str, victim: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, exact_at = MODELS[state]
    runner = opened(name, exact_at=exact_at)
    assert runner.layout.state_kind == state
    stored, wanted = turns(state, victim)
    cold = runner.run(wanted, "off", reply=4)
    scope = Scope("tokens", PARTIAL) if victim == "partial block" else Scope("full")
    runner.run_prompt(Prompt(stored, (CHECKPOINT,)), CacheOptions(scope=scope))
    runner.reopen()
    num_damaged, is_used = damage_nodes(runner, victim), (state, victim) not in UNUSED
    assert num_damaged or not is_used
    rounds = note_rounds(monkeypatch)
    warm = runner.run(wanted, "full", reply=4)
    assert same(cold, warm)
    assert [node for node in rounds if node is not None] == rounds[: int(is_used)]
    assert len(rounds) <= 2
    assert (warm.report.refused == "damaged") == is_used
    runner.flush()
    # Its pins are released, and the next prompt finds nothing damaged.
    assert not runner.cache.store.evictor.pinned()
    assert same(cold, runner.run(wanted, "full", reply=4))


def test_a_restore_ends_where_more_nodes_are_damaged_than_the_prompt_has_blocks(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty prompts share the first block and leave each other in the second one."""
    runner, first = opened("token"), random_prompt(1, BLOCK)
    for seed in range(40):
        end = np.append(random_prompt(2, 4), random_prompt(100 + seed, 6))
        runner.run(np.append(first, end), "full")
    wanted = np.concatenate([first, random_prompt(2, 4), random_prompt(3, BLOCK)])
    cold = runner.run(wanted, "off")
    runner.reopen()
    assert damage_nodes(runner, "own tail") == 40
    rounds = note_rounds(monkeypatch)
    warm = runner.run(wanted, "full")
    assert same(cold, warm)
    assert len({node.name for node in rounds if node is not None}) == len(rounds) == 2 + len(wanted) // BLOCK
    assert (warm.report.restored, warm.report.refused) == (0, "damaged")


@pytest.mark.parametrize(("name", "exact_at"), [("token", "token"), ("gemma3", "token"), ("qwen3_next", "grid")])
@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_restore_without_memory_keeps_what_the_sequence_has(
    fails_at: int, name: str, exact_at: ExactAt, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a window has passed it: `fails_at` is the group for which there are no pages."""
    runner, in_memory_tokens = opened(name, exact_at=exact_at), 2 * BLOCK
    prompt = random_prompt(1, 6 * BLOCK + 5)
    cold = runner.run(prompt, "full")
    runner.reopen()
    # The sequence has the beginning.
    runner.run(prompt[:in_memory_tokens], "off")
    prepare, slid = KVSequence.prepare_restore, False

    def fail(sequence: KVSequence, group: int, start: int, stop: int) -> None:
        nonlocal slid
        if group == fails_at:
            raise MemoryError("there is no KV memory for a restore")
        prepare(sequence, group, start, stop)
        slid = not sequence.continues_at(in_memory_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(KVSequence, "prepare_restore", fail)
        cached = CachedRequest(runner.cache, Prompt(prompt), CacheOptions(scope=Scope("full"), save=False))
        cached.fetch(runner.sequence, in_memory_tokens)
        cached.close()
    fails = fails_at < len(runner.layout.groups)
    assert cached.restored.num_tokens == ((0 if slid else in_memory_tokens) if fails else len(prompt))
    if fails:
        again = runner.run_prompt(
            Prompt(prompt), CacheOptions(scope=Scope("off")), in_memory_tokens=cached.restored.num_tokens
        )
        assert same(again, cold)
