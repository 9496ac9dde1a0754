"""A hit is the cold run, bit for bit; and whatever goes wrong, the answer stays the same."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import StoreUnavailable
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import LONG_PROMPT, SHARED, CacheOptions, Prompt
from diskprefix.store.opening import DAMAGED
from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.store.savings import read_savings
from diskprefix.store.schema import Kind, node_name, piece_key
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import PrefixTree, list_entries
from diskprefix.tokens import LEAST_TOKENS
from tests.cache.opening import gated
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.naming import name_nodes
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_llama, tiny_settings
from tests.store.building import chain, damage

FULL = CacheOptions(scope=parse_scope("full", param="scope"))


@pytest.fixture(params=DEVICES)
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(tiny_llama(device=request.param), tiny_settings(tmp_path / "kv"))
    yield runner
    runner.close()


def test_an_exact_repeat_after_a_reopen_runs_no_forward(runner: Runner) -> None:
    prompt = random_prompt(1, 10 * BLOCK + 7)
    cold = runner.run(prompt, "full", reply=8)
    runner.reopen()
    warm = runner.run(prompt, "full", reply=8)
    assert same(cold, warm)
    assert (cold.num_forwards, warm.num_forwards) == (11, 0)
    assert (warm.report.restored, warm.report.source, warm.report.miss_reason) == (len(prompt), "disk", None)
    assert (cold.report.restored, cold.report.source, cold.report.miss_reason) == (0, "none", "new")
    assert (cold.report.saved, warm.report.saved) == ("queued", "stored")


def test_a_prompt_shorter_than_a_block_repeats_exactly(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path, kv_cache_min_tokens=4))
    prompt = random_prompt(2, 5)
    cold = runner.run(prompt, "full", reply=4)
    runner.reopen()
    warm = runner.run(prompt, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == 5
    runner.close()


def test_a_prefix_that_ends_on_the_grid_leaves_a_block_to_compute(runner: Runner) -> None:
    """The blocks of a longer prompt hold no logits at this point: at least one token must be computed."""
    prompt = random_prompt(3, 6 * BLOCK)
    runner.run(prompt, "full")
    shorter = prompt[: 4 * BLOCK].copy()
    warm = runner.run(shorter, "full", reply=4)
    cold = runner.run(shorter, "off", reply=4)
    assert same(cold, warm)
    assert (warm.report.restored, warm.num_forwards) == (3 * BLOCK, 1)


def test_the_longest_stored_prefix_is_found_whatever_the_scope_selects_now(runner: Runner) -> None:
    prompt = random_prompt(4, 8 * BLOCK + 3)
    runner.run(prompt, "full")
    runner.reopen()
    longer = np.concatenate([prompt, random_prompt(5, 2 * BLOCK)])
    for scope in (2 * BLOCK, "auto:1", "full"):
        warm, cold = runner.run(longer, scope, reply=4), runner.run(longer, "off", reply=4)
        assert same(cold, warm)
        assert warm.report.restored >= 8 * BLOCK


def test_a_saved_boundary_serves_another_tail(runner: Runner) -> None:
    anchor = random_prompt(8, 5 * BLOCK + 4)
    first = np.concatenate([anchor, random_prompt(9, 40)])
    second = np.concatenate([anchor, random_prompt(10, 40)])
    assert runner.run(first, len(anchor)).report.selection.aligned == 5 * BLOCK
    runner.reopen()
    warm, cold = runner.run(second, len(anchor), reply=4), runner.run(second, "off", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == 5 * BLOCK


def test_auto_knows_its_history_in_the_first_request_after_a_restart(runner: Runner) -> None:
    anchor = random_prompt(11, 6 * BLOCK)
    prompts = [np.concatenate([anchor, random_prompt(seed, 30)]) for seed in (12, 13, 14)]
    runner.run(prompts[0], "auto:8", boundaries=(len(anchor),))
    runner.reopen()
    second = runner.run(prompts[1], "auto:8", boundaries=(len(anchor),))
    assert (second.report.selection.selected, second.report.selection.aligned) == (len(anchor), len(anchor))
    runner.reopen()
    third = runner.run(prompts[2], "auto:8", boundaries=(len(anchor),), reply=4)
    assert third.report.restored == len(anchor)
    assert same(third, runner.run(prompts[2], "off", reply=4))


def test_what_is_still_in_the_buffer_serves_the_next_request(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(15, 4 * BLOCK + 2)
    with gated(runner, monkeypatch):
        cold = runner.run(prompt, "full", reply=4)
        warm = runner.run(prompt, "full", reply=4)
    assert same(cold, warm)
    assert (warm.report.source, warm.report.restored) == ("memory", len(prompt))
    runner.reopen()
    assert runner.run(prompt, "full").report.source == "disk"


def children_are_counted_right(runner: Runner) -> bool:
    """Tells whether each node says how many continue it: the leaf-first eviction rests on that."""
    with runner.cache.store.snapshot() as snapshot:
        table = snapshot.usages()
        parents = Counter(snapshot.parent(name) for name in table.names)
        children = table.records["children"].tolist()
        return bool(children == [parents[name] for name in table.names])


@pytest.mark.parametrize("victim", [0, 2, 4])
def test_a_damaged_block_is_removed_and_the_answer_stays_the_same(runner: Runner, victim: int) -> None:
    prompt = random_prompt(16, 4 * BLOCK + 2)
    cold = runner.run(prompt, "full", reply=4)
    runner.reopen()
    store = runner.cache.store
    names = chain(store.secret, runner.cache.root, prompt, BLOCK)
    names.append(node_name(store.secret, names[-1], prompt[4 * BLOCK :], Kind.TAIL))
    damage(store, names[victim])
    warm = runner.run(prompt, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == victim * BLOCK
    runner.flush()
    assert runner.cache.stats()["quarantined"] == 5 - victim
    assert children_are_counted_right(runner)
    runner.reopen()
    again = runner.run(prompt, "full", reply=4)
    assert same(cold, again)
    assert again.report.restored == len(prompt)


@pytest.mark.parametrize(("database", "value"), [("nodes", b"garbage"), ("payloads", None)])
def test_a_damaged_index_is_mended_by_the_next_request(runner: Runner, database: str, value: bytes | None) -> None:
    prompt = random_prompt(27, 4 * BLOCK + 2)
    cold = runner.run(prompt, "full", reply=4)
    runner.flush()
    store = runner.cache.store
    name = chain(store.secret, runner.cache.root, prompt, BLOCK)[2]
    with store.changes() as changes:
        if value is None:
            changes.delete_record(database, piece_key(name, 0))
        else:
            changes._put(database, name, value)
    warm = runner.run(prompt, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == 2 * BLOCK
    runner.flush()
    assert runner.cache.stats()["quarantined"] == 3
    assert children_are_counted_right(runner)
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)


def test_records_that_make_saving_fail_go_and_the_next_request_is_saved(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path))
    prompt = random_prompt(28, 4 * BLOCK)
    longer = np.concatenate([prompt, random_prompt(29, 2 * BLOCK)])
    runner.run(prompt, "full")
    runner.flush()
    store = runner.cache.store
    with store.changes() as changes:
        for name in list(changes.keys("usage")):
            changes._put("usage", name, b"x")
    for _ in range(2):
        runner.run(longer, "full")
        runner.flush()
    with store.snapshot() as snapshot:
        assert len(snapshot.usages().names) == store.counts()["blocks"] > 0
    runner.run(longer, "full")
    runner.reopen()
    assert runner.run(longer, "full").report.restored == len(longer)
    runner.close()


def test_tokens_are_compared_so_equal_names_never_mix_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every block gets the same name: a store that trusted names would restore another prompt's state."""
    name_nodes(monkeypatch, lambda *_, **__: b"n" * 16)
    runner = Runner(tiny_llama(), tiny_settings(tmp_path))
    runner.run(random_prompt(17, BLOCK + 5), BLOCK)
    runner.flush()
    other = random_prompt(18, BLOCK + 5)
    warm, cold = runner.run(other, BLOCK, reply=4), runner.run(other, "off", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == 0
    assert "that of another prefix" in caplog.text
    runner.close()


def test_a_failing_store_makes_misses_not_errors(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(19, 4 * BLOCK)
    cold = runner.run(prompt, "full", reply=4)

    def fail() -> None:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(runner.cache.store, "snapshot", fail)
        warm = runner.run(prompt, "full", reply=4)
        stats = runner.cache.stats()
    assert same(cold, warm)
    assert (warm.report.restored, warm.report.miss_reason) == (0, "error")
    assert (stats["state"], stats["error"]) == ("degraded", "the disk is away")


def test_pages_that_lmdb_cannot_read_make_a_miss_and_the_file_is_moved_aside(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(31, 4 * BLOCK)
    cold = runner.run(prompt, "full", reply=4)
    runner.reopen()

    def damaged(*_: object) -> None:
        raise lmdb.CorruptedError("MDB_CORRUPTED")

    monkeypatch.setattr(Snapshot, "pieces_at", damaged)
    warm = runner.run(prompt, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.miss_reason == "error"
    runner.wait_for(lambda: (runner.cache.store.path / DAMAGED).exists())
    runner.wait_for(lambda: runner.cache.stats()["state"] != "degraded")


def test_another_root_never_hits(tmp_path: Path) -> None:
    prompt = random_prompt(20, 4 * BLOCK)
    model = tiny_llama()
    for name in ("one", "another"):
        runner = Runner(model, tiny_settings(tmp_path), name)
        assert runner.run(prompt, "full").report.miss_reason == "new"
        runner.close()


def test_the_miss_reason_says_what_would_help(runner: Runner) -> None:
    prompt = random_prompt(21, 4 * BLOCK)
    assert runner.run(prompt[: BLOCK - 1].copy(), "full").report.miss_reason == "too_short"
    assert runner.run(prompt, "off").report.miss_reason == "off"
    assert runner.run(prompt, "full").report.miss_reason == "new"


@pytest.mark.parametrize(
    ("common", "system_end", "reason"),
    [
        (0, 0, "diverged"),
        (LEAST_TOKENS - 1, 0, "diverged"),
        (LEAST_TOKENS, 0, "diverged"),
        (3 * BLOCK - 1, 0, "diverged"),
        (3 * BLOCK, 0, "not_stored"),
        (LEAST_TOKENS + 4, LEAST_TOKENS + 5, "diverged"),
        (LEAST_TOKENS + 5, LEAST_TOKENS + 5, "new"),
    ],
)
def test_a_prompt_that_leaves_another_in_its_system_message_has_diverged(
    common: int, system_end: int, reason: str, tmp_path: Path
) -> None:
    """One that leaves it later, but in the first block, is another conversation."""
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", block_size=3 * BLOCK))
    prompt = random_prompt(21, 6 * BLOCK)
    assert runner.run(prompt, "auto:1", boundaries=(3,)).report.selection.kept == 0
    other = prompt.copy()
    other[common] = (other[common] + 1) % 100
    report = runner.run_prompt(Prompt(other, system_end=system_end), FULL).report
    assert (report.miss_reason, report.diverged_at) == (reason, common if reason == "diverged" else None)
    runner.close()


def test_a_long_prompt_of_which_only_the_beginning_is_restored_has_a_miss_reason(runner: Runner) -> None:
    first, long = random_prompt(41, 2 * BLOCK), random_prompt(42, LONG_PROMPT)
    runner.run(first, "full")
    long[: len(first)] = first
    few = runner.run(long, "full").report
    assert (few.restored, few.miss_reason) == (2 * BLOCK, "new")
    assert runner.run(long, "full").report.miss_reason is None
    assert runner.cache.stats()["misses"] == {"new": 2}


def test_a_prompt_that_was_seen_but_not_kept_has_not_diverged(runner: Runner) -> None:
    prompt = random_prompt(29, 4 * BLOCK)
    for reason in ("new", "not_stored"):
        report = runner.run(prompt, "auto:1", boundaries=(3,)).report
        assert (report.miss_reason, report.diverged_at, report.saved) == (reason, None, "none")


def test_a_prompt_of_one_stored_block_misses_for_its_logits(runner: Runner) -> None:
    prompt = random_prompt(33, 2 * BLOCK)
    runner.run(prompt, "full")
    report = runner.run(prompt[:BLOCK].copy(), "full").report
    assert (report.restored, report.matched, report.miss_reason) == (0, BLOCK, "no_logits")


def test_a_request_that_ends_before_it_was_looked_up_is_no_miss(runner: Runner) -> None:
    runner.cache.begin(Prompt(random_prompt(32, 4 * BLOCK)), FULL).close()
    assert runner.cache.stats()["misses"] == {}


def test_off_neither_restores_nor_saves_nor_remembers(runner: Runner) -> None:
    prompt = random_prompt(22, 4 * BLOCK)
    report = runner.run(prompt, "off").report
    runner.flush()
    stats = runner.cache.stats()
    assert (report.saved, stats["blocks"], stats["prompts"]) == ("none", 0, 0)


def test_without_room_in_the_write_buffer_nothing_is_saved_and_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path, kv_cache_write_buffer=1000))
    report = runner.run(random_prompt(23, 4 * BLOCK), "full").report
    assert (report.saved, report.dropped_because) == ("dropped", "the write buffer is smaller than a block")
    assert runner.cache.stats()["dropped"] == 1
    assert "the write buffer is smaller than a block" in caplog.text
    runner.close()


def test_a_capture_that_fails_costs_the_saving_alone(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_prompt(25, 4 * BLOCK)

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the copy")

    with monkeypatch.context() as patched:
        patched.setattr(runner.arena, "read_tokens", fail)
        first = runner.run(prompt, "full", reply=4)
        second = runner.run(prompt, "full", reply=4)
        runner.flush()
    assert same(first, second)
    assert "no memory for the copy" in caplog.text
    stats = runner.cache.stats()
    assert (stats["errors"], stats["dropped"], stats["pending_bytes"], stats["blocks"]) == (2, 2, 0, 0)
    runner.run(prompt, "full")
    runner.flush()
    assert runner.cache.stats()["blocks"] == 5


def test_saving_reads_the_prompt_while_the_reply_is_decoded(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture is held until the reply is complete: it must save the prompt's state, not what came after."""
    decoded = threading.Event()
    read = runner.arena.read_tokens

    def late(position: int, num_tokens: int) -> memoryview:
        assert decoded.wait(30)
        return read(position, num_tokens)

    monkeypatch.setattr(runner.arena, "read_tokens", late)
    prompt = random_prompt(26, 4 * BLOCK + 3)
    cold = runner.run(prompt, "full", reply=40)
    decoded.set()
    runner.reopen()
    warm = runner.run(prompt, "full", reply=40)
    assert same(cold, warm)
    assert warm.report.restored == len(prompt)


def test_state_and_key_must_have_the_same_length(runner: Runner) -> None:
    cached = runner.cache.begin(Prompt(random_prompt(24, 3 * BLOCK)), FULL)
    runner.arena.reserve(3 * BLOCK)
    cached.restore(runner.arena)
    with pytest.raises(AssertionError, match="state length must equal key length"):
        cached.publish(runner.arena, torch.zeros(400), 0.0)
    cached.close()


def test_a_purge_beside_the_daemon_empties_the_window_too(runner: Runner) -> None:
    prompt = random_prompt(40, 4 * BLOCK)
    runner.run(prompt, "full")
    assert runner.run(prompt, "auto").report.selection.aligned > 0
    runner.flush()
    owner = runner.cache.owner(SHARED)
    purge(runner.cache.store, PurgeFilter(), time.time(), lambda _: None)
    runner.wait_for(lambda: runner.cache.is_gone(owner))
    again = runner.run(prompt, "auto")
    assert (again.report.restored, len(runner.cache.namespaces.get(SHARED).seen)) == (0, 1)


def test_a_purge_that_finds_nothing_in_the_store_has_the_daemon_forget_its_memory(runner: Runner) -> None:
    owner = runner.cache.owner(SHARED)
    assert purge(runner.cache.store, PurgeFilter(), time.time(), lambda _: None).blocks == 0
    runner.wait_for(lambda: runner.cache.is_gone(owner))


STEPS_OF_A_REQUEST = ["restore", "after_step", "publish", "submit"]


@pytest.mark.parametrize("step", STEPS_OF_A_REQUEST)
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_a_cache_without_memory_fails_no_request_and_leaks_nothing(
    step: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a copy of the state is made: the answer is the cold run's, and what was reserved and pinned is free."""
    runner = Runner(tiny_model("qwen3_next", torch.float32), tiny_settings(tmp_path))
    prompt = random_prompt(1, 6 * BLOCK + 3)
    longer = np.concatenate([prompt[: 6 * BLOCK], random_prompt(2, 2 * BLOCK)])
    runner.run(prompt, "full")
    runner.reopen()
    cold = runner.run(longer, "off", reply=4)

    def fail(*_: Any, **_named: Any) -> Any:
        raise error

    target = {"restore": "fill", "after_step": "read_states", "publish": "read_states", "submit": "logits_bytes"}[step]
    with monkeypatch.context() as patch:
        if step == "publish":
            # Only the copy at the prompt's end: no checkpoint before it.
            patch.setattr(CachedRequest, "after_step", lambda *_: None)
        patch.setattr(runner.arena, target, fail)
        answer = runner.run(longer, "full", boundaries=(6 * BLOCK, 7 * BLOCK), reply=4)
    assert same(cold, answer)
    assert answer.report.miss_reason == ("error" if step == "restore" else None)
    runner.flush()
    assert (runner.cache.stats()["errors"] > 0, runner.cache.writer.pending_bytes) == (True, 0)
    assert not runner.cache.store.evictor.pinned()
    assert same(runner.run(longer, "full", reply=4), cold)
    runner.close()


def test_checkpoints_take_no_more_memory_than_may_wait_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3_next", torch.float32)
    states = Runner(model, tiny_settings(tmp_path / "probe")).layout.state_bytes
    settings = tiny_settings(tmp_path / "kv", kv_cache_interval=BLOCK, kv_cache_write_buffer=3 * states)
    runner = Runner(model, settings)
    held: list[int] = []
    after_step = CachedRequest.after_step

    def watched(self: CachedRequest, arena: KVArena) -> None:
        after_step(self, arena)
        held.append(runner.cache.writer.pending_bytes)

    monkeypatch.setattr(CachedRequest, "after_step", watched)
    with gated(runner, monkeypatch):
        answer = runner.run(random_prompt(1, 20 * BLOCK), "full")
    # The tail has the states at the end.
    assert len(answer.report.selection.checkpoints) == 19
    assert max(held) <= settings.kv_cache_write_buffer
    assert (answer.report.saved, runner.cache.stats()["dropped"]) == ("dropped", 1)
    runner.close()


def test_what_a_restore_goes_on_from_stays_while_it_is_extended(tmp_path: Path) -> None:
    """The checkpoint is a leaf, and may lie before the last block that matched."""
    runner = Runner(tiny_model("qwen3_next", torch.float32), tiny_settings(tmp_path))
    prompt = random_prompt(1, 8 * BLOCK + 3)
    runner.run(prompt, "full", boundaries=(4 * BLOCK,))
    runner.flush()
    branch = np.concatenate([prompt[: 6 * BLOCK], random_prompt(2, BLOCK)])
    cached = runner.cache.begin(Prompt(branch), FULL)
    runner.arena.truncate(0)
    runner.arena.reserve(len(branch))
    restored = cached.restore(runner.arena)
    assert (restored.num_tokens, restored.matched) == (4 * BLOCK, 6 * BLOCK)
    assert set(runner.cache.store.evictor.pinned()) == {restored.last_node, restored.blocks[-1].name}
    cached.close()
    assert not runner.cache.store.evictor.pinned()
    runner.close()


def test_what_requests_saved_outlives_the_process(runner: Runner) -> None:
    prompt = random_prompt(41, 10 * BLOCK)
    runner.run(prompt, "full", reply=2)
    assert runner.run(prompt, "full", reply=2).report.restored > 0
    saved = runner.cache.stats()["savings"]
    total = saved["total"]
    assert (total["requests"], total["prompt_tokens"]) == (2, 2 * len(prompt))
    assert saved["today"] == total
    runner.reopen()
    assert runner.cache.stats()["savings"] == saved
    with runner.cache.store.snapshot() as snapshot:
        (entry,) = list_entries(snapshot)
        (hit,) = read_savings(snapshot)[runner.cache.root].hits
        assert snapshot.entry(bytes.fromhex(entry.id)).reason == "full"  # type: ignore[union-attr]
        assert hit.block in PrefixTree(snapshot).entry(bytes.fromhex(entry.id))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_hit_saves_what_computing_its_tokens_took_though_nothing_else_was_measured(
    runner: Runner, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, prompt, publish = 3600.0, random_prompt(43, 10 * BLOCK), CachedRequest.publish
    with monkeypatch.context() as patched:
        patched.setattr(CachedRequest, "publish", lambda self, arena, logits, _: publish(self, arena, logits, took))
        # All is published at the end, when it is known what it took.
        patched.setattr(CachedRequest, "after_step", lambda *_: None)
        if where == "memory":
            patched.setattr(runner.cache.writer, "_next", lambda: None)
        runner.run(prompt, "full")
        if where == "disk":
            runner.reopen()
        # As in a process that computed nothing.
        runner.cache.cost_model.prefill_s_per_token = None
        report = runner.run(prompt, "full").report
    assert (report.restored, report.source) == (10 * BLOCK, where)
    assert runner.cache.stats()["savings"]["total"]["saved_s"] == pytest.approx(took, rel=0.01)
