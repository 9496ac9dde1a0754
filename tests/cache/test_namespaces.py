"""The memory of tenants: bounded in bytes, and read from the store on no thread that others wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from diskprefix.cache import namespaces as module
from diskprefix.cache.namespaces import TenantNamespaces
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import StoreUnavailable
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from diskprefix.store.maintenance.purge import PurgeFilter, purge
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import TokenIds
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

AUTO = parse_scope("auto", param="scope")
ALICE, BOB = SHARED.with_salt("alice"), SHARED.with_salt("bob")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv"))
    yield runner
    runner.close()


def ask(runner: Runner, tenant: Tenant, token_ids: TokenIds) -> str:
    """Sends a prompt; why so much of it is kept."""
    answer = runner.run_prompt(Prompt(token_ids), CacheOptions(scope=AUTO, tenant=tenant))
    runner.flush()
    return answer.report.selection.reason


def held(namespaces: TenantNamespaces) -> list[tuple[Tenant, int]]:
    """The tenants in memory, and the bytes of each."""
    loaded = namespaces._loaded.items()
    return [(tenant, one.result().seen.num_bytes) for tenant, one in loaded]


@pytest.mark.parametrize("num_tokens", [BLOCK + 1, 3 * BLOCK])
def test_all_that_is_remembered_of_tenants_is_bounded_in_bytes(
    num_tokens: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, names of blocks and ends of prompts alike: each of the three alone would pass this bound."""
    limit, namespaces = 20_000, runner.cache.namespaces
    monkeypatch.setattr(module, "_MAX_BYTES", limit)
    total = 0
    for number in range(60):
        tenant = SHARED.with_salt(str(number))
        namespaces.load(tenant).result()
        one = namespaces.get(tenant)
        for prompt in range(8):
            token_ids = random_prompt(100 * number + prompt, num_tokens)
            names = [bytes([number, prompt, block] + [0] * 13) for block in range(num_tokens // BLOCK)]
            one.seen.history.add(token_ids[:1])
            one.seen.admission.add(token_ids, names, BLOCK)
        total += one.seen.num_bytes
        *others, (latest, _) = held(namespaces)
        assert latest == tenant
        assert sum(size for _, size in others) <= limit
    assert total > 3 * limit
    assert len(held(namespaces)) < 60


def test_no_more_tenants_are_remembered_than_there_may_be(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TENANTS", 3)
    for name in "abcd":
        runner.cache.load(SHARED.with_salt(name)).result()
    assert [tenant for tenant, _ in held(runner.cache.namespaces)] == [SHARED.with_salt(name) for name in "bcd"]


def test_the_engine_reads_no_history_and_a_tenant_that_was_dropped_delays_nobody(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice was dropped, and the disk does not answer while she is read: Bob is served, and so is she, as if new. Carol
    comes for the first time, and is read meanwhile."""
    prompt = random_prompt(1, 4 * BLOCK)
    longer = np.concatenate([prompt, random_prompt(2, 2 * BLOCK)])
    assert (ask(runner, ALICE, prompt), ask(runner, ALICE, prompt)) == ("no_history", "shared_prefix")
    runner.cache.load(BOB).result()
    runner.cache.namespaces._loaded.pop(ALICE)
    disk, is_reading, readers = threading.Event(), threading.Event(), []
    alice = runner.cache.namespaces.get(ALICE).root
    read = Snapshot.recent_prompts

    def slow(self: Snapshot, root: bytes, limit: int) -> list[tuple[bytes, TokenIds]]:
        readers.append(threading.current_thread().name)
        if root == alice:
            is_reading.set()
            assert disk.wait(30)
        return read(self, root, limit)

    monkeypatch.setattr(Snapshot, "recent_prompts", slow)
    loading = runner.cache.load(ALICE)
    assert is_reading.wait(30)
    assert runner.cache.load(ALICE) is loading, "she is read once"
    runner.cache.load(SHARED.with_salt("carol")).result(30)
    assert not loading.done()
    # What the engine's thread does of requests that were prepared.
    for tenant, num_recent in ((BOB, 0), (ALICE, 0)):
        cached = runner.cache.begin(Prompt(longer), CacheOptions(scope=AUTO, tenant=tenant))
        runner.arena.reserve(len(longer))
        cached.restore(runner.arena)
        assert cached.selection.recent == num_recent
        cached.close()
    disk.set()
    loading.result(30)
    assert [name.startswith("tenant") for name in readers] == [True, True]
    assert ask(runner, ALICE, longer) == "continues", "her history is back"


def test_what_was_purged_while_it_was_read_is_not_remembered(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(runner, ALICE, random_prompt(1, 4 * BLOCK))
    namespaces, read = runner.cache.namespaces, Snapshot.recent_prompts
    namespaces._loaded.pop(ALICE)

    def purged_meanwhile(self: Snapshot, root: bytes, limit: int) -> list[tuple[bytes, TokenIds]]:
        prompts = read(self, root, limit)
        with runner.cache.store.changes() as changes:
            changes.put_meta("purged_at", b"now")
        namespaces.forget_deleted()
        return prompts

    monkeypatch.setattr(Snapshot, "recent_prompts", purged_meanwhile)
    namespaces.load(ALICE).result()
    assert len(namespaces.get(ALICE).seen.history) == 0


def test_a_tenant_that_could_not_be_read_is_read_by_its_next_request(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(1, 4 * BLOCK)
    ask(runner, ALICE, prompt)
    runner.cache.namespaces._loaded.pop(ALICE)

    def unreadable(*_: object) -> None:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "recent_prompts", unreadable)
        runner.cache.load(ALICE).result()
        assert len(runner.cache.namespaces.get(ALICE).seen.history) == 0
    runner.cache.load(ALICE).result()
    assert len(runner.cache.namespaces.get(ALICE).seen.history) == 1


def test_a_restart_reads_what_was_seen_before(runner: Runner) -> None:
    prompt = random_prompt(1, 4 * BLOCK + 3)
    ask(runner, ALICE, prompt)
    before = runner.cache.namespaces.get(ALICE).seen.num_bytes
    runner.reopen()
    runner.cache.load(ALICE).result()
    assert runner.cache.namespaces.get(ALICE).seen.num_bytes == before > 0


def test_a_request_reads_nothing_of_the_store_for_its_tenant_and_a_purge_is_noticed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(runner, ALICE, random_prompt(1, 4 * BLOCK))
    cache, store, read = runner.cache, runner.cache.store, threading.Event()
    here = threading.current_thread()
    snapshot = store.snapshot

    def reading() -> AbstractContextManager[Snapshot]:
        if threading.current_thread() is here:
            read.set()
        return snapshot()

    monkeypatch.setattr(store, "snapshot", reading)
    owner = cache.owner(ALICE)
    cache.load(ALICE).result()
    assert not cache.is_gone(owner)
    assert not read.is_set()
    purge(store, PurgeFilter(model="tiny"), 1.0, lambda _bytes: None)
    runner.wait_for(lambda: cache.is_gone(owner))
    cache.load(ALICE).result()
    assert len(cache.namespaces.get(ALICE).seen.history) == 0
