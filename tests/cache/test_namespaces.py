"""The memory of tenants: bounded, and read from the store on no thread that others wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from diskprefix.cache import namespaces as module
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import StoreUnavailable
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from diskprefix.store.purge import PurgeFilter, purge
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


def held(runner: Runner) -> dict[Tenant, int]:
    """The bytes of each tenant in memory, the one that was used longest ago first."""
    return {tenant: one.seen.num_bytes for tenant, one in runner.cache.namespaces._used.items()}


def test_all_that_is_remembered_of_tenants_is_bounded(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, namespaces = 20_000, runner.cache.namespaces
    monkeypatch.setattr(module, "_MAX_BYTES", limit)
    total = 0
    for number in range(60):
        tenant = SHARED.with_salt(str(number))
        one = namespaces.get(tenant)
        for prompt in range(8):
            names = [bytes([number, prompt, block] + [0] * 13) for block in range(3)]
            one.seen.remember(random_prompt(100 * number + prompt, 3 * BLOCK), names)
        total += one.seen.num_bytes
        *others, (latest, _) = held(runner).items()
        assert latest == tenant
        assert sum(size for _, size in others) <= limit
    assert total > 3 * limit
    assert len(held(runner)) < 60
    monkeypatch.setattr(module, "_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_MAX_TENANTS", 3)
    for name in "abcd":
        namespaces.get(SHARED.with_salt(name))
    assert list(held(runner)) == [SHARED.with_salt(name) for name in "bcd"]


def test_the_store_is_read_with_the_fetch_and_not_by_the_engine(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(1, 4 * BLOCK)
    longer = np.concatenate([prompt, random_prompt(2, 2 * BLOCK)])
    assert (ask(runner, ALICE, prompt), ask(runner, ALICE, prompt)) == ("no_history", "shared_prefix")
    here, snapshot = threading.current_thread(), runner.cache.store.snapshot

    def reading() -> AbstractContextManager[Snapshot]:
        assert threading.current_thread() is not here
        return snapshot()

    for is_known in (True, False):
        if not is_known:
            runner.cache.namespaces._used.pop(ALICE)
        with monkeypatch.context() as patched:
            patched.setattr(runner.cache.store, "snapshot", reading)
            cached = runner.cache.begin(Prompt(longer), CacheOptions(scope=AUTO, tenant=ALICE))
            runner.arena.reserve(len(longer))
            fetching = threading.Thread(target=cached.fetch, args=(runner.arena,))
            fetching.start()
            fetching.join()
            cached.choose(runner.arena)
        assert (cached.selection.reason, cached.selection.recent) == ("continues", 2)
        cached.close()


def test_a_tenant_that_could_not_be_read_is_read_by_its_next_request(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(1, 4 * BLOCK)
    ask(runner, ALICE, prompt)
    runner.cache.namespaces._used.pop(ALICE)

    def unreadable(*_: object, **_more: object) -> None:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(module, "newest_first", unreadable)
        assert ask(runner, ALICE, prompt) == "no_history", "and the prompt is restored all the same"
    assert runner.cache.counters["errors"] == 1
    assert ask(runner, ALICE, prompt) == "shared_prefix"
    assert len(runner.cache.namespaces.get(ALICE).seen) == 3


def test_a_restart_reads_what_was_seen_before(runner: Runner) -> None:
    ask(runner, ALICE, random_prompt(1, 4 * BLOCK + 3))
    before = held(runner)[ALICE]
    runner.reopen()
    runner.cache.namespaces.read(runner.cache.namespaces.get(ALICE))
    assert held(runner)[ALICE] == before > 0


def test_a_purge_by_another_process_is_noticed(runner: Runner) -> None:
    ask(runner, ALICE, random_prompt(1, 4 * BLOCK))
    cache, store = runner.cache, runner.cache.store
    owner = cache.owner(ALICE)
    assert not cache.is_gone(owner)
    purge(store, PurgeFilter(model="tiny"), 1.0, lambda _bytes: None)
    runner.wait_for(lambda: cache.is_gone(owner))
    assert ask(runner, ALICE, random_prompt(1, 4 * BLOCK)) == "no_history"
