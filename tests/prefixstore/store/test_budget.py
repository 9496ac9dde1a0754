"""The budget of a folder: set by the daemon that asks for it, and followed by all others."""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from diskprefix.daemon import app
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.tiered_store import open_store as open_settings
from diskprefix.prefixstore.store.eviction import usable_bytes
from diskprefix.prefixstore.store.housekeeping import Housekeeping
from diskprefix.prefixstore.store.store import Store
from tests import forked
from tests.prefixstore.store.building import BLOCK, Clock, is_clean, prompt, publication
from tests.prefixstore.store.other_process import beside, fill

SMALL, LARGE, NEW = 16 << 20, 64 << 20, 32 << 20


def serve(folder: Path, clock: Clock | None = None, budget_bytes: int = 0, new_budget_bytes: int = NEW) -> Store:
    """The store of a daemon that was started with a budget, or with 0 without one."""
    return Store(
        folder,
        budget_bytes=budget_bytes,
        new_budget_bytes=new_budget_bytes,
        serving=True,
        on_corruption="quarantine",
        clock=clock or Clock(),
    )


def serve_once(folder: Path, budget_bytes: int, new_budget_bytes: int) -> None:
    """A daemon that starts and ends, in another process."""
    serve(folder, budget_bytes=budget_bytes, new_budget_bytes=new_budget_bytes).close()


def serve_and_fill(ready: Path, folder: Path, num_prompts: int) -> None:
    """A daemon in another process, which saves prompts once it has noticed another budget."""
    clock = Clock(5000.0)
    store = serve(folder, clock)
    housekeeping, before = Housekeeping(store, 0.0), store.budget_bytes
    ready.touch()
    while store.budget_bytes == before:
        time.sleep(0.01)
        housekeeping.notice_purge()
    fill(store, clock, range(100, 100 + num_prompts))
    store.close()


def num_prompts(store: Store) -> int:
    return store.counts()["entries"]


def test_a_new_folder_gets_the_default_and_others_keep_what_they_have(tmp_path: Path) -> None:
    for budget, default, expected in ((0, NEW, NEW), (0, SMALL, NEW), (SMALL, LARGE, SMALL), (0, LARGE, SMALL)):
        with closing(serve(tmp_path, budget_bytes=budget, new_budget_bytes=default)) as store:
            assert store.budget_bytes == expected
    with closing(Store(tmp_path)) as tool:
        assert tool.budget_bytes == SMALL


def test_a_daemon_without_a_budget_evicts_nothing_of_what_one_with_a_larger_budget_kept(tmp_path: Path) -> None:
    clock = Clock()
    store = serve(tmp_path, clock, new_budget_bytes=LARGE)
    fill(store, clock, range(15))
    kept = num_prompts(store)
    assert store.counts()["used_bytes"] > usable_bytes(SMALL)
    # It runs beside, or it comes after.
    assert forked.run(serve_once, tmp_path, 0, SMALL) == 0
    assert num_prompts(store) == kept
    store.close()
    with closing(serve(tmp_path, clock, new_budget_bytes=SMALL)) as store:
        assert num_prompts(store) == kept
        fill(store, clock, range(15, 17))
        assert num_prompts(store) == kept + 2
        assert is_clean(store)


def test_a_budget_above_the_disk_is_refused_and_the_folder_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_once(tmp_path, 0, NEW)
    disk = SimpleNamespace(f_blocks=SMALL // 4096, f_bavail=1 << 20, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    settings = Settings(kv_cache_dir=tmp_path, kv_cache_budget=SMALL + 1)
    for start in (open_settings, app.serve):
        with pytest.raises(SettingsError, match=r"^--kv-cache-budget: .* are more than the disk of .* has: .*; give"):
            start(settings)
    for size, budget in ((SMALL, None), (SMALL, SMALL), (0, LARGE)):
        disk.f_blocks = size // 4096
        with closing(open_settings(replace(settings, kv_cache_budget=budget))) as store:
            assert store.budget_bytes == (budget or NEW)


def test_a_lower_budget_is_followed_by_a_daemon_that_runs(tmp_path: Path) -> None:
    clock = Clock()
    with closing(serve(tmp_path, clock, new_budget_bytes=LARGE)) as store:
        fill(store, clock, range(15))
        assert forked.run(serve_once, tmp_path, SMALL, LARGE) == 0
        assert store.counts()["used_bytes"] <= usable_bytes(SMALL)
        Housekeeping(store, 0.0).notice_purge()
        assert store.budget_bytes == SMALL
        fill(store, clock, range(15, 40))
        assert store.counts()["used_bytes"] <= usable_bytes(SMALL)
        assert is_clean(store)


def test_a_higher_budget_is_followed_by_a_daemon_that_runs(tmp_path: Path) -> None:
    clock = Clock()
    with closing(serve(tmp_path, clock, new_budget_bytes=SMALL)) as store:
        fill(store, clock, range(15))
        assert num_prompts(store) < 15
        assert forked.run(serve_once, tmp_path, LARGE, SMALL) == 0
        Housekeeping(store, 0.0).notice_purge()
        assert store.budget_bytes == LARGE
        before = num_prompts(store)
        fill(store, clock, range(15, 25))
        assert num_prompts(store) == before + 10
        assert is_clean(store)


def test_two_daemons_that_run_keep_to_the_budget_of_the_third(tmp_path: Path) -> None:
    clock = Clock()
    with closing(serve(tmp_path, clock, new_budget_bytes=SMALL)) as store:
        with beside(serve_and_fill, tmp_path, 12) as other:
            assert forked.run(serve_once, tmp_path, LARGE, SMALL) == 0
            other.join(60)
            assert other.exitcode == 0
        Housekeeping(store, 0.0).notice_purge()
        assert num_prompts(store) == 12
        fill(store, clock, range(3))
        assert num_prompts(store) == 15
        assert is_clean(store)


def test_a_daemon_that_opens_the_folder_again_follows_the_others_and_a_new_file_gets_its_budget(tmp_path: Path) -> None:
    with closing(serve(tmp_path, budget_bytes=LARGE)) as store:
        assert forked.run(serve_once, tmp_path, SMALL, SMALL) == 0
        for changes_file, expected in ((False, SMALL), (True, SMALL)):
            if changes_file:
                (tmp_path / "data.mdb").unlink()
            store.environment.broken = "it is to be opened again"
            assert store.maintain()
            assert store.budget_bytes == expected


def test_a_budget_that_is_damaged_is_that_of_a_new_folder(tmp_path: Path) -> None:
    for damaged in (b"", b"short", bytes(8), b"\xff" * 8):
        with closing(serve(tmp_path)) as store, store.changes() as changes:
            changes.put_meta("budget", damaged)
        with closing(serve(tmp_path, new_budget_bytes=SMALL)) as store:
            assert store.budget_bytes == SMALL


def test_the_settings_of_presets_and_of_serve_evict_nothing_of_each_other(tmp_path: Path) -> None:
    """`launch` and `run` start a daemon with the preset agent."""
    for new in (LARGE, SMALL):
        with closing(open_settings(Settings(kv_cache_dir=tmp_path, kv_cache_new_budget=new))) as store:
            assert store.budget_bytes == LARGE
    with closing(open_settings(Settings(kv_cache_dir=tmp_path, kv_cache_budget=SMALL))) as store:
        assert store.budget_bytes == SMALL


def test_a_full_store_says_how_long_state_stays_that_is_not_used(tmp_path: Path) -> None:
    clock, seeds = Clock(), count()

    def fill_up(num_prompts: int) -> None:
        for seed in islice(seeds, num_prompts):
            clock.now += 10.0
            store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=50_000))

    with closing(serve(tmp_path, clock, new_budget_bytes=SMALL)) as store:
        evictor = store.evictor
        fill_up(3)
        assert evictor.stays_s == math.inf
        fill_up(150)
        stays_s = evictor.stays_s
        assert 300 < stays_s < 1500
        clock.now += 10_000.0
        evictor.refuse(SMALL // 64 - 1)
        evictor.measure_again()
        assert evictor.stays_s == stays_s, "too little was refused to look again"
        evictor.refuse(1)
        evictor.measure_again()
        assert stays_s + 9000 < evictor.stays_s < stays_s + 10_100, "what would be evicted next is used no longer"
        evictor.expire(1.0)
        evictor.refuse(SMALL // 64)
        evictor.measure_again()
        assert evictor.stays_s == math.inf, "there is room again"
