"""What a cache says of a request; and whatever goes wrong, the answer stays the same."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.cache import namespaces as namespaces_module
from diskprefix.prefixstore.cache.cached_request import CachedRequest, save_idle
from diskprefix.prefixstore.cache.saving import Saver
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.opening import DAMAGED
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import NodeKind, node_name, piece_key
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import list_entries
from diskprefix.prefixstore.store.writer import WriterLimits
from diskprefix.runtime.prefill import prefill
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from diskprefix.values import LONG_PROMPT, SHARED, CacheOptions, CacheReport, Mark, Prompt, Scope, Tenant
from tests.devices import DEVICES
from tests.prefixstore.cache.opening import AUTO, FULL, Opened, gated
from tests.prefixstore.store.building import chain, damage
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_llama, tiny_settings

PROMPT = random_prompt(1, 4 * BLOCK + 2)


@pytest.fixture
def runner(opened: Opened) -> Runner:
    return opened("grid")


def longer(token_ids: TokenIds, num_more: int) -> TokenIds:
    return np.concatenate([token_ids, random_prompt(9, num_more)])


def unavailable(*_: object, **_named: object) -> Any:
    raise StoreUnavailable("the disk is away")


def test_blocks_of_16_bits_take_three_quarters_of_their_bytes(tmp_path: Path) -> None:
    """As the codec that the daemon uses promises; `raw` would take a little more than all of them."""
    runner = Runner(tiny_llama(torch.bfloat16), tiny_settings(tmp_path))
    runner.run(random_prompt(1, 10 * BLOCK), "full")
    assert runner.cache.writer.flush(10)
    with runner.cache.store.snapshot() as snapshot:
        nodes = [snapshot.node(name) for name, _ in snapshot.records("nodes")]
    blocks = [node for node in nodes if node is not None and node.kind == NodeKind.BLOCK]
    raw_bytes, stored_bytes = (sum(getattr(node, name) for node in blocks) for name in ("raw_bytes", "stored_bytes"))
    assert len(blocks) >= 9
    assert 0.6 * raw_bytes < stored_bytes < 0.85 * raw_bytes, stored_bytes / raw_bytes
    runner.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [10 * BLOCK + 7, 5])
def test_an_exact_repeat_after_a_reopen_runs_no_forward(num_tokens: int, device: str, tmp_path: Path) -> None:
    runner = Runner(tiny_llama(device=device), tiny_settings(tmp_path, kv_cache_min_tokens=4))
    prompt = random_prompt(1, num_tokens)
    cold = runner.run(prompt, "full", reply=8)
    runner.reopen()
    warm = runner.run(prompt, "full", reply=8)
    assert same(cold, warm)
    assert (cold.num_forwards, warm.num_forwards) == (-(-num_tokens // BLOCK), 0)
    assert (cold.report.restored, cold.report.source, cold.report.saved) == (0, "none", "queued")
    assert (warm.report.restored, warm.report.source, warm.report.saved) == (num_tokens, "disk", "stored")
    runner.close()


def test_what_is_still_in_the_buffer_serves_the_next_request(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is written later is the prompt's state, not what came after it in the same memory."""
    with gated(runner, monkeypatch):
        cold = runner.run(PROMPT, "full", reply=40)
        warm = runner.run(PROMPT, "full", reply=40)
    assert same(cold, warm)
    assert (warm.report.source, warm.report.restored) == ("memory", len(PROMPT))
    runner.reopen()
    again = runner.run(PROMPT, "full", reply=40)
    assert same(cold, again)
    assert (again.report.source, again.report.restored) == ("disk", len(PROMPT))


# Damage and failures.


@pytest.mark.parametrize("how", ["block 0", "block 2", "tail", "record", "piece"])
def test_what_is_damaged_is_removed_with_all_behind_it_and_saved_again(how: str, runner: Runner) -> None:
    cold = runner.run(PROMPT, "full", reply=4)
    runner.reopen()
    store = runner.cache.store
    names = chain(store.secret, runner.cache.root, PROMPT, BLOCK)
    names.append(node_name(store.secret, names[-1], PROMPT[4 * BLOCK :], NodeKind.TAIL))
    victim = {"block 0": 0, "tail": 4}.get(how, 2)
    with store.changes() as changes:
        if how == "record":
            changes._put_record("nodes", names[victim], b"garbage")
        elif how == "piece":
            changes.delete_record("payloads", piece_key(names[victim], 0))
    if how not in ("record", "piece"):
        damage(store, names[victim])
    warm = runner.run(PROMPT, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == victim * BLOCK
    runner.flush()
    assert runner.cache.stats()["quarantined"] == 5 - victim
    with store.snapshot() as snapshot:
        # The leaf-first eviction rests on that.
        table = snapshot.usages()
        parents = Counter(snapshot.parent(name) for name in table.names)
        assert table.records["children"].tolist() == [parents[name] for name in table.names]
    runner.reopen()
    again = runner.run(PROMPT, "full", reply=4)
    assert same(cold, again)
    assert again.report.restored == len(PROMPT)


def test_records_that_make_saving_fail_go_and_the_next_request_is_saved(runner: Runner) -> None:
    more = longer(PROMPT[: 4 * BLOCK], 2 * BLOCK)
    runner.run(PROMPT[: 4 * BLOCK], "full")
    runner.flush()
    store = runner.cache.store
    with store.changes() as changes:
        for name in list(changes.keys("usage")):
            changes._put_record("usage", name, b"x")
    for _ in range(2):
        runner.run(more, "full")
        runner.flush()
    with store.snapshot() as snapshot:
        assert len(snapshot.usages().names) == store.counts()["blocks"] > 0
    runner.reopen()
    assert runner.run(more, "full").report.restored == len(more)


def test_a_failing_store_makes_misses_not_errors(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = runner.run(PROMPT, "full", reply=4)
    with monkeypatch.context() as patched:
        patched.setattr(runner.cache.store.reads, "snapshot", unavailable)
        warm = runner.run(PROMPT, "full", reply=4)
        stats = runner.cache.stats()
    assert same(cold, warm)
    assert (warm.report.restored, warm.report.miss_reason) == (0, "error")
    assert (stats["state"], stats["error"]) == ("degraded", "the disk is away")


def test_pages_that_lmdb_cannot_read_make_a_miss_and_the_file_is_moved_aside(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = runner.run(PROMPT, "full", reply=4)
    runner.reopen()

    def damaged(*_: object) -> None:
        raise lmdb.CorruptedError("MDB_CORRUPTED")

    monkeypatch.setattr(Snapshot, "pieces_at", damaged)
    warm = runner.run(PROMPT, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.miss_reason == "error"
    runner.wait_for(lambda: (runner.cache.store.path / DAMAGED).exists())
    runner.wait_for(lambda: runner.cache.stats()["state"] != "degraded")


@pytest.mark.cases(2)
@pytest.mark.parametrize("step", ["restore", "copy", "pages", "logits", "submit"])
@pytest.mark.parametrize("error", [MemoryError("none left"), torch.OutOfMemoryError("none left")], ids=repr)
def test_a_cache_without_memory_fails_no_request_and_leaks_nothing(
    step: str, error: Exception, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever a copy of the state is made: the answer is the cold run's, and what was reserved and pinned is free."""
    runner = opened("qwen3_next")
    prompt = random_prompt(1, 6 * BLOCK + 3)
    more = longer(prompt[: 6 * BLOCK], 2 * BLOCK)
    runner.run(prompt, "full")
    runner.reopen()
    cold = runner.run(more, "off", reply=4)

    def fail(*_: Any, **_named: Any) -> Any:
        raise error

    targets: dict[str, tuple[Any, str]] = {
        "restore": (KVSequence, "fill"),
        "copy": (KVSequence, "capture"),
        "pages": (PagePool, "hold"),
        "logits": (KVSequence, "logits_bytes"),
        "submit": (Saver, "_publication"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[step], fail)
        answer = runner.run(more, "full", boundaries=(6 * BLOCK, 7 * BLOCK), reply=4)
        runner.flush()
    assert same(cold, answer)
    assert answer.report.miss_reason == ("error" if step == "restore" else None)
    assert "none left" in caplog.text
    stats = runner.cache.stats()
    assert (stats["errors"] > 0, stats["dropped"], stats["pending_bytes"]) == (True, step != "restore", 0)
    assert not runner.cache.store.evictor.pinned()
    assert not runner.pool.holds
    assert same(runner.run(more, "full", reply=4), cold)


def test_without_memory_for_a_copy_of_states_the_end_is_lost_and_the_blocks_are_saved(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, take = opened("qwen3_next"), PagePool.take_pages
    first = len(runner.layout.groups)
    with monkeypatch.context() as patch:
        after_step = CachedRequest.after_step

        def full(self: CachedRequest, sequence: KVSequence) -> None:
            patch.setattr(PagePool, "take_pages", lambda pool, of: None if first in of else take(pool, of))
            after_step(self, sequence)

        patch.setattr(CachedRequest, "after_step", full)
        report = runner.run(PROMPT, "full").report
    assert (report.saved, report.dropped_because) == ("dropped", "there is no KV memory for a copy of its states")
    runner.flush()
    stats = runner.cache.stats()
    assert (stats["blocks"], stats["entries"], stats["dropped"]) == (4, 1, 1)
    assert len([record for record in caplog.records if "not saved" in record.message]) == 1
    assert not runner.pool.holds


# Why nothing was restored.


def test_the_miss_reason_says_what_would_help(runner: Runner) -> None:
    assert runner.run(PROMPT[: BLOCK - 1].copy(), "full").report.miss_reason == "too_short"
    off = runner.run(PROMPT, "off").report
    assert (off.miss_reason, off.saved) == ("off", "none")
    runner.flush()
    stats = runner.cache.stats()
    assert (stats["blocks"], stats["prompts"]) == (0, 0)
    runner.cache.store.evictor.stays_s = 60.0
    for reason in ("new", "not_stored"):
        report = runner.run(PROMPT, "auto:1", boundaries=(3,)).report
        assert (report.miss_reason, report.diverged_at, report.saved) == (reason, None, "none")
        assert report.recomputed == (() if reason == "new" else (("not_stored", len(PROMPT)),))
    runner.run(PROMPT, "full")
    report = runner.run(PROMPT[:BLOCK].copy(), "full").report
    assert (report.restored, report.matched, report.miss_reason) == (0, BLOCK, "no_logits")
    assert report.recomputed == (("no_logits", BLOCK),)
    assert runner.run(PROMPT, "full").report.recomputed == ()
    misses = runner.cache.stats()["misses"]
    CachedRequest(runner.cache, Prompt(PROMPT), FULL).close()
    assert runner.cache.stats()["misses"] == misses, "it ended before it was looked up"


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_miss_that_another_key_of_the_user_would_have_hit_says_so(runner: Runner, salt: str | None) -> None:
    """What other users have, and what the user's other salts have, changes no answer."""
    old, new, stranger = (Tenant.of_key(name) for name in ("old", "new", "stranger"))
    new = dataclasses.replace(new, others=(old,))

    def asked(prompt: TokenIds, tenant: Tenant, salt: str | None = salt, **changes: Any) -> CacheReport:
        options = replace(FULL, tenant=tenant if salt is None else tenant.with_salt(salt), **changes)
        return runner.run_prompt(Prompt(prompt), options).report

    asked(PROMPT, old)
    runner.flush()
    others = ((new, "b"), (new, None if salt else "b"), (stranger, salt), (stranger, None), (old, "b"))
    for tenant, of_tenant in others:
        report = asked(PROMPT, tenant, of_tenant, save=False)
        assert (report.restored, report.miss_reason, report.recomputed) == (0, "new", ()), (tenant, of_tenant)
    report = asked(PROMPT, new, save=False)
    assert (report.restored, report.miss_reason) == (0, "other_key")
    assert report.recomputed == (("other_key", len(PROMPT)),)
    wrong = random_prompt(77, len(PROMPT))
    assert asked(wrong, new, save=False).miss_reason == "new"
    asked(PROMPT, new)
    assert asked(PROMPT, new).miss_reason is None
    assert runner.cache.stats()["misses"]["other_key"] == 2


def test_another_key_that_would_have_missed_too_is_no_reason(runner: Runner) -> None:
    old = Tenant.of_key("old")
    new = dataclasses.replace(Tenant.of_key("new"), others=(old,))
    long = random_prompt(78, 40 * BLOCK)
    for stored, reason in ((8 * BLOCK, "new"), (24 * BLOCK, "other_key")):
        runner.run_prompt(Prompt(long[:stored].copy()), replace(FULL, tenant=old))
        runner.flush()
        report = runner.run_prompt(Prompt(long), replace(FULL, tenant=new, save=False)).report
        assert (report.restored, report.miss_reason) == (0, reason)


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
    common: int, system_end: int, reason: str, opened: Opened
) -> None:
    """One that leaves it later, but in the first block, is another conversation."""
    runner = opened(block_size=3 * BLOCK)
    prompt = random_prompt(21, 6 * BLOCK)
    runner.cache.store.evictor.stays_s = 60.0
    assert runner.run(prompt, "auto:1", boundaries=(3,)).report.selection.kept == 0
    prompt[common] = (prompt[common] + 1) % 100
    report = runner.run_prompt(Prompt(prompt, system_end=system_end), FULL).report
    assert (report.miss_reason, report.diverged_at) == (reason, common if reason == "diverged" else None)


def test_a_long_prompt_of_which_only_the_beginning_is_restored_has_a_miss_reason(runner: Runner) -> None:
    first, long = random_prompt(41, 2 * BLOCK), random_prompt(42, LONG_PROMPT)
    runner.run(first, "full")
    long[: len(first)] = first
    few = runner.run(long, "full").report
    assert (few.restored, few.miss_reason) == (2 * BLOCK, "new")
    assert runner.run(long, "full").report.miss_reason is None
    assert runner.cache.stats()["misses"] == {"new": 2}


# What was saved by it.


def test_what_requests_saved_outlives_the_process(runner: Runner) -> None:
    for _ in range(2):
        runner.run(PROMPT, "full", reply=2)
    saved = runner.cache.stats()["savings"]
    total = saved["total"]
    assert (total["requests"], total["prompt_tokens"]) == (2, 2 * len(PROMPT))
    assert saved["today"] == total
    runner.reopen()
    assert runner.cache.stats()["savings"] == saved
    with runner.cache.store.snapshot() as snapshot:
        (entry,) = list_entries(snapshot)
        assert snapshot.entry(bytes.fromhex(entry.id)).reason == "full"  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_hit_saves_what_computing_its_tokens_took_though_nothing_else_was_measured(
    runner: Runner, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, publish = 3600.0, CachedRequest.publish
    with monkeypatch.context() as patched:
        patched.setattr(CachedRequest, "publish", lambda self, state, logits, _: publish(self, state, logits, took))
        # All is published at the end, when it is known what it took.
        patched.setattr(CachedRequest, "after_step", lambda *_: None)
        if where == "memory":
            patched.setattr(runner.cache.writer, "_next", lambda: None)
        runner.run(PROMPT, "full")
        if where == "disk":
            runner.reopen()
        # As in a process that computed nothing.
        runner.cache.cost_model.prefill_s_per_token = None
        report = runner.run(PROMPT, "full").report
    assert (report.restored, report.source) == (len(PROMPT), where)
    assert runner.cache.stats()["savings"]["total"]["saved_s"] == pytest.approx(took, rel=0.01)


# For how long it is kept.

SHORT_S, LONG_S = 300.0, 3600.0
KEPT_SHORTLY = CacheOptions(scope=Scope("full"), ttl_s=SHORT_S)


@pytest.mark.parametrize("end", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("is_stored_before", [False, True])
def test_a_mark_keeps_every_block_that_ends_at_it_or_before(end: int, is_stored_before: bool, runner: Runner) -> None:
    """A mark on a block's end is about that block too, whether this request stores it or an earlier one did."""
    if is_stored_before:
        runner.run_prompt(Prompt(PROMPT), KEPT_SHORTLY)
        runner.flush()
    runner.run_prompt(Prompt(PROMPT, marks=(Mark(end, LONG_S), Mark(3 * BLOCK, SHORT_S))), KEPT_SHORTLY)
    runner.flush()
    names = chain(runner.cache.store.secret, runner.cache.root, PROMPT, BLOCK)[:3]

    def ttls_s() -> list[int]:
        with runner.cache.store.snapshot() as snapshot:
            table = snapshot.usages()
        return [int(table.records["ttl_s"][table.row_of[name]]) for name in names]

    num_marked = end // BLOCK
    runner.wait_for(lambda: ttls_s() == [LONG_S] * num_marked + [SHORT_S] * (3 - num_marked))


@pytest.mark.parametrize(
    ("state", "scope", "end", "num_tokens"),
    [
        ("grid", Scope("full"), 2 * BLOCK + 5, 2 * BLOCK + 5),
        ("qwen3_next", Scope("tokens", BLOCK), 2 * BLOCK, 4 * BLOCK),
    ],
    ids=["tail", "checkpoint"],
)
def test_a_mark_keeps_the_state_that_is_stored_exactly_at_it(
    state: str, scope: Scope, end: int, num_tokens: int, opened: Opened
) -> None:
    """No block ends with the prompt's tail or with a checkpoint, so their own records must say it."""
    runner = opened(state)
    prompt = Prompt(random_prompt(1, num_tokens), marks=(Mark(end, LONG_S),))
    runner.run_prompt(prompt, CacheOptions(scope=scope, ttl_s=SHORT_S))
    runner.flush()
    with runner.cache.store.snapshot() as snapshot:
        assert snapshot.usages().records["ttl_s"].tolist() == [LONG_S] * 3, "two blocks, and what ends at the mark"


def test_what_a_queued_publication_continues_is_not_removed_before_it_is_written(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is restored and its pins are given back; then it would expire, while what continues it still waits."""
    more, store = longer(PROMPT, 3 * BLOCK), runner.cache.store
    runner.run(PROMPT, "full")
    runner.flush()
    with gated(runner, monkeypatch):
        answer = runner.run(more, "full")
        runner.cache.finish_aside()
        assert (answer.report.restored, answer.report.saved) == (4 * BLOCK, "queued")
        later = time.time() + 1e6
        monkeypatch.setattr(store, "clock", lambda: later)
        assert store.evictor.expire(60.0) == 1, "the end of the short prompt, which nothing continues"
    assert runner.cache.writer.dropped == 0
    runner.reopen()
    assert runner.run(more, "full").report.restored == len(more)


def test_what_a_restore_goes_on_from_stays_while_it_is_extended(opened: Opened) -> None:
    """The checkpoint is a leaf, and may lie before the last block that matched."""
    runner = opened("qwen3_next")
    prompt = random_prompt(1, 8 * BLOCK + 3)
    runner.run(prompt, "full", boundaries=(4 * BLOCK,))
    runner.flush()
    branch = longer(prompt[: 6 * BLOCK], BLOCK)
    cached = CachedRequest(runner.cache, Prompt(branch), FULL)
    restored = cached.restore(runner.new_sequence(len(branch)))
    assert (restored.num_tokens, restored.matched) == (4 * BLOCK, 6 * BLOCK)
    assert set(runner.cache.store.evictor.pinned()) == {restored.last_node, restored.blocks[-1].name}
    cached.close()
    assert not runner.cache.store.evictor.pinned()


# Models and tenants.

ALICE = SHARED.with_salt("alice")


def why_kept(runner: Runner, token_ids: TokenIds) -> str:
    """Sends a prompt of Alice."""
    answer = runner.run_prompt(Prompt(token_ids), CacheOptions(scope=AUTO.scope, tenant=ALICE))
    runner.flush()
    return answer.report.selection.reason


def held(runner: Runner) -> dict[Tenant, int]:
    """The bytes of each tenant in memory."""
    used = runner.cache.namespaces._used
    return {tenant: namespace.seen.num_bytes for tenant in used if (namespace := used.get(tenant)) is not None}


def test_another_model_never_hits(tmp_path: Path) -> None:
    for name in ("one", "another"):
        runner = Runner(tiny_llama(), tiny_settings(tmp_path), name)
        assert runner.run(PROMPT, "full").report.miss_reason == "new"
        runner.close()


@pytest.mark.parametrize("share", ["", "key alice"])
def test_all_that_is_remembered_of_tenants_is_bounded_and_many_salts_drop_nothing_of_another_share(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    limit, namespaces = 20_000, runner.cache.namespaces
    monkeypatch.setattr(namespaces_module, "_LEAST_BYTES", limit // 20)
    namespaces._used.most = limit
    total, mine = 0, namespaces.get(ALICE, "key mine")
    for number in range(60):
        tenant = SHARED.with_salt(str(number))
        one = namespaces.get(tenant, share)
        for prompt in range(8):
            names = [bytes([number, prompt, block] + [0] * 13) for block in range(3)]
            one.seen.remember(random_prompt(100 * number + prompt, 3 * BLOCK), names)
        total += one.seen.num_bytes
        assert tenant in held(runner)
        assert sum(size for other, size in held(runner).items() if other != tenant) <= limit
    assert total > 3 * limit
    assert namespaces.get(ALICE, "key mine") is mine
    for number in range(60):
        namespaces.get(SHARED.with_salt(f"empty {number}"), share)
    assert len(held(runner)) <= 20, "one that is empty counts too"


def test_first_prompts_are_tried_of_each_key_but_of_no_salt(runner: Runner) -> None:
    """There may be any number of salts, and each would be tried anew."""
    for tenant, is_trusting in (
        *((SHARED, True), (Tenant.of_key("k"), True)),
        *((ALICE, False), (Tenant.of_key("k").with_salt("alice"), False)),
    ):
        namespace = runner.cache.namespaces.get(tenant)
        assert namespace.seen.is_trusting is is_trusting
        runner.cache.namespaces.read_seen(namespace)
        assert namespace.seen.is_trusting is is_trusting


def test_the_store_is_read_with_the_fetch_and_not_by_the_engine(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [why_kept(runner, PROMPT) for _ in range(2)] == ["room", "continues"]
    here, snapshot, more = threading.current_thread(), runner.cache.store.reads.snapshot, longer(PROMPT, 2 * BLOCK)

    def reading() -> AbstractContextManager[Snapshot]:
        assert threading.current_thread() is not here
        return snapshot()

    for is_known in (True, False):
        if not is_known:
            runner.cache.namespaces._used.remove(ALICE)
        with monkeypatch.context() as patched:
            patched.setattr(runner.cache.store.reads, "snapshot", reading)
            cached = CachedRequest(runner.cache, Prompt(more), CacheOptions(scope=AUTO.scope, tenant=ALICE))
            fetching = threading.Thread(target=cached.fetch, args=(runner.new_sequence(len(more)),))
            fetching.start()
            fetching.join()
            cached.choose(runner.sequence)
        assert (cached.selection.reason, cached.selection.recent) == ("continues", 2)
        cached.close()


def test_a_tenant_that_could_not_be_read_is_read_by_its_next_request(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_kept(runner, PROMPT)
    before = held(runner)[ALICE]
    runner.reopen()
    with monkeypatch.context() as patched:
        patched.setattr(namespaces_module, "newest_first", unavailable)
        assert why_kept(runner, PROMPT) == "room", "and the prompt is restored all the same"
    assert runner.cache.counters["errors"] == 1
    assert why_kept(runner, PROMPT) == "continues"
    assert len(runner.cache.namespaces.get(ALICE).seen) == 3
    assert held(runner)[ALICE] > before > 0


def test_a_purge_beside_the_daemon_empties_the_window_too(runner: Runner) -> None:
    runner.run(PROMPT, "full")
    assert runner.run(PROMPT, "auto").report.selection.aligned > 0
    runner.flush()
    owner = runner.cache.owner(SHARED)
    assert not runner.cache.is_gone(owner)
    purge(runner.cache.store, PurgeFilter(model="tiny"), time.time(), lambda _: None)
    # A purge is several rounds, and the writing thread may look between two of them: the last one counts.
    runner.wait_for(lambda: runner.cache.namespaces.epochs == runner.cache.store.epochs)
    assert runner.cache.is_gone(owner)
    again = runner.run(PROMPT, "auto")
    assert (again.report.restored, len(runner.cache.namespaces.get(SHARED).seen)) == (0, 1)


def test_a_purge_that_cannot_wait_for_the_writer_leaves_nothing_of_what_waits(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = runner.cache
    cache.writer.limits = WriterLimits(max_held_s=600.0, pause_s=600.0)
    monkeypatch.setattr(cache.writer, "flush", lambda _timeout_s: False)
    monkeypatch.setattr(cache.writer, "resume_writing", cache.writer.pause_writing)
    runner.run(PROMPT, "full")
    assert cache.writer.num_pending
    cache.purge(PurgeFilter(model="nobody"))
    assert runner.run(PROMPT, "off").report.restored == 0
    assert not cache.writer.pending
    monkeypatch.undo()
    cache.writer.resume_writing()
    runner.flush()
    counts = cache.store.counts()
    assert (counts["entries"], counts["blocks"], counts["prompts"], counts["notes"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("is_purged", [False, True])
def test_state_that_only_memory_has_is_left_behind_at_the_end_unless_it_is_of_before_a_purge(
    runner: Runner, is_purged: bool
) -> None:
    cache = runner.cache
    runner.run(PROMPT[: 4 * BLOCK], "off")
    owner = cache.owner(SHARED)
    if is_purged:
        cache.purge(PurgeFilter())
    save_idle(cache, runner.sequence, PROMPT[: 4 * BLOCK], AUTO, owner)
    runner.flush()
    assert (cache.store.counts()["blocks"] > 0) == (not is_purged)


def test_what_was_seen_goes_with_a_store_that_is_replaced(runner: Runner) -> None:
    """The names of its blocks are those of another secret."""
    runner.run(PROMPT, "auto:30")
    runner.flush()
    cache = runner.cache
    seen, store_id = cache.namespaces.get(SHARED).seen, cache.store.store_id
    assert seen.num_bytes
    (cache.store.path / "data.mdb").unlink()
    runner.wait_for(lambda: cache.store.store_id != store_id)
    runner.wait_for(lambda: cache.namespaces.get(SHARED).seen is not seen)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")])
def test_a_search_for_a_break_that_fails_has_found_none_and_the_save_is_ended(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> Any:
        raise error

    source = SimpleNamespace(line_at=unavailable, tool_at=unavailable)
    monkeypatch.setattr("diskprefix.prefixstore.cache.misses.find_break", failing)
    answer = runner.run_prompt(Prompt(PROMPT, source=source), FULL)  # type: ignore[arg-type]
    runner.flush()
    assert (answer.report.broken, answer.report.saved) == (None, "queued")
    assert runner.cache.counters["errors"] == 1
    assert not runner.cache.writer._saves
    assert not runner.cache.store.evictor.pinned()
    assert runner.run(PROMPT, "full").num_forwards == 0


def test_an_idle_save_that_fails_is_ended(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **_named: object) -> Any:
        raise RuntimeError("a bug")

    runner.run(PROMPT, "off")
    monkeypatch.setattr(CachedRequest, "fetch", failing)
    ended: list[object] = []
    monkeypatch.setattr(type(runner.cache.writer), "finish", lambda _, save: ended.append(save))
    with pytest.raises(RuntimeError, match="a bug"):
        save_idle(runner.cache, runner.sequence, PROMPT, FULL, runner.cache.owner(SHARED))
    assert len(ended) == 1


def test_while_the_store_fails_prompts_are_remembered_and_prefills_measured(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.cache.store, "_problem", "the file system is read-only")
    before = len(runner.cache.namespaces.get(SHARED).seen)
    measured: list[tuple[int, float]] = []
    monkeypatch.setattr(runner.cache.cost_model, "record_prefill", lambda *prefill: measured.append(prefill))
    cached = CachedRequest(runner.cache, Prompt(PROMPT), FULL)
    sequence = runner.new_sequence(len(PROMPT))
    cached.restore(sequence)
    logits = prefill(runner.runtime, sequence, PROMPT, start=0, block_size=BLOCK, after_step=cached.after_step)
    cached.publish(sequence, logits, 0.5)
    report = cached.close()
    assert (report.saved, report.restored) == ("dropped", 0)
    assert len(runner.cache.namespaces.get(SHARED).seen) == before + 1
    assert measured == [(len(PROMPT), 0.5)]
