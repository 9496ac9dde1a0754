"""Faults of disks and clocks: the answers stay the same, it is said once, and saving goes on when it can."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from diskprefix.daemon.settings import Settings
from diskprefix.errors import CacheError
from diskprefix.prefixstore.store.folder import FolderUnavailable
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer, WriterLimits
from tests.closing import needs
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import (
    DaemonProcess,
    cache_states,
    clean_environment,
    reply_to,
    running_daemon,
    serve_flags,
    wait_until,
)
from tests.examples import thorough
from tests.faults.power.recording import preloaded
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, open_store, prompt, publication
from tests.runner import Runner, random_prompt, same, tiny_llama, tiny_settings
from tests.small_disk import remount, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    with small_disk(tmp_path / "disk", "24m") as place:
        yield place


def settings_on(disk: Path, **changes: Any) -> Settings:
    """Settings of a store whose budget, that of a new folder, is larger than the disk."""
    return tiny_settings(disk / "kv", **{"kv_cache_budget": None, "kv_cache_new_budget": 1 << 30} | changes)


def answers_alike(runner: Runner, seed: int, num_tokens: int = 4 * BLOCK) -> bool:
    """Tells whether a prompt gets the same answer with the cache, twice, as without it."""
    token_ids = random_prompt(seed, num_tokens)
    cold = runner.run(token_ids, "off", reply=4)
    return all(same(cold, runner.run(token_ids, "full", reply=4)) for _ in range(2))


def lines_about(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records)


class HealthAtLines(logging.Handler):
    """Collects the health of a cache at the moment of each line that contains the text."""

    def __init__(self, runner: Runner, text: str) -> None:
        super().__init__()
        self.states: list[str] = []
        self._runner, self._text = runner, text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.states.append(self._runner.cache.health[0])


def test_a_full_disk_stops_saving_until_there_is_room_again(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    runner = Runner(tiny_llama(torch.float32), settings_on(disk))
    (disk / "of another program").write_bytes(bytes(16 << 20))
    seed = 0
    while runner.cache.writer.error is None:
        seed += 1
        runner.run(random_prompt(seed, 2000), "full")
        runner.flush()
        assert seed < 100, "8 MiB should have been filled"
    assert answers_alike(runner, seed, 2000)
    assert answers_alike(runner, seed + 1, 2000)
    runner.flush()
    stats = runner.cache.stats()
    assert (stats["state"], stats["error"]) == ("degraded", stats["full_disk"])
    assert f"the disk of --kv-cache-dir {disk}/kv is full: " in stats["error"]
    # Names are drawn, so some beginning of a prompt may fit that no other did.
    assert lines_about(caplog, "serving without saving") == 1 + lines_about(caplog, "saving again")
    saved = runner.cache.stats()["entries"]
    remount(disk, "size=200m")
    runner.wait_for_recovery()
    token_ids = random_prompt(seed + 2, 2000)
    cold = runner.run(token_ids, "full", reply=4)
    runner.flush()
    assert runner.cache.stats()["state"] == "ok"
    assert runner.cache.stats()["entries"] > saved
    runner.reopen()
    warm = runner.run(token_ids, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == 2000
    runner.close()


@pytest.mark.parametrize("min_free", [0, 256 << 20], ids=["full", "less than is kept free"])
def test_a_start_without_room_for_any_prompt_is_degraded_before_one_is_lost(
    disk: Path, caplog: pytest.LogCaptureFixture, min_free: int
) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    Store(disk / "kv", budget_bytes=1 << 30, serving=True).close()
    fill_up(disk, 2)
    # The empty file has room for a small block.
    settings = settings_on(disk, kv_cache_min_free=min_free, block_size=512, kv_cache_min_tokens=512)
    runner = Runner(tiny_llama(torch.float32), settings)
    assert runner.cache.health == ("degraded", runner.cache.store.evictor.full_disk())
    assert (runner.cache.writer.dropped, lines_about(caplog, "serving without saving")) == (0, 1)
    at_recovery = HealthAtLines(runner, "saving again")
    logger = logging.getLogger("diskprefix")
    logger.addHandler(at_recovery)
    remount(disk, "size=600m")
    runner.wait_for(lambda: runner.cache.health == ("ok", None))
    logger.removeHandler(at_recovery)
    # The line stands in the log before anybody can see the new state.
    assert (runner.cache.writer.dropped, at_recovery.states) == (0, ["degraded"])
    runner.run(random_prompt(1, 1024), "full")
    runner.reopen()
    assert runner.run(random_prompt(1, 1024), "full").report.restored == 1024
    runner.close()


@pytest.mark.slow
def test_on_a_disk_that_others_have_filled_prompts_take_the_place_of_older_ones_and_one_warning_says_so(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    remount(disk, "size=64m")
    runner = Runner(tiny_llama(torch.float32), settings_on(disk, kv_cache_min_free=16 << 20))
    for seed in range(8):
        runner.run(random_prompt(seed, 2000), "full")
    runner.flush()
    saved = runner.cache.stats()["entries"]
    fill_up(disk, (4 << 20) // 4096)
    runner.wait_for(lambda: runner.cache.health[0] == "degraded")
    reports = [runner.run(random_prompt(seed, 2000), "full").report for seed in range(20, 24)]
    runner.flush()
    assert [report.saved for report in reports] == ["queued"] * 4
    stats = runner.cache.stats()
    assert (stats["state"], stats["dropped"], stats["evicted_blocks"] > 0) == ("degraded", 0, True)
    assert stats["entries"] <= saved
    room_bytes = runner.cache.writer.housekeeping.disk_room_bytes
    too_long = int(room_bytes) // runner.layout.bytes_per_token + 100
    report = runner.run(random_prompt(30, too_long), "full").report
    assert (report.saved, report.selection.reason) == ("none", "disk"), "not even in the place of all others"
    assert runner.run(random_prompt(23, 2000), "full").report.saved == "stored", "nothing of it is new"
    assert lines_about(caplog, "saving only in place of older prompts until this is repaired") == 1
    assert lines_about(caplog, "saving again") == lines_about(caplog, "serving without saving") == 0
    (disk / "filler").unlink()
    runner.wait_for_recovery()
    assert lines_about(caplog, "saving again") == 1
    runner.close()


def test_a_disk_with_less_than_is_kept_free_is_not_called_full_but_says_what_is_left_to_others(disk: Path) -> None:
    """On a small disk, the default keeps more free than there is."""
    store = Store(disk / "kv", budget_bytes=1 << 30, min_free_bytes=256 << 20)
    said = r"has 2\d\.\d MiB free, and the store leaves 256\.0 MiB of a disk to others; make room, or choose a"
    with pytest.raises(FolderUnavailable, match=said):
        store.publish(publication(store, prompt(1, 3 * BLOCK)))
    # What the models, notes and counts of a daemon need.
    with pytest.raises(FolderUnavailable, match=said):
        store.evictor.evict_for(1, frozenset())
    assert re.search(said, store.evictor.full_disk() or "")
    store.close()


def test_a_smaller_budget_says_what_it_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(open_store(tmp_path, budget_bytes=64 << 20)) as store:
        for seed in range(8):
            store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000))
        before = store.counts()["entries"]
    with closing(Store(tmp_path, budget_bytes=16 << 20, serving=True, clock=lambda: time.time() + 60)) as store:
        gone = before - store.counts()["entries"]
    assert gone > 0
    said = rf"{gone} saved prompts? and \d+\.\d MiB were removed, because they do not fit the budget of 16\.0 MiB$"
    assert [record.levelname for record in caplog.records if re.search(said, record.message)] == ["WARNING"]


def test_a_floor_of_free_disk_is_kept_by_evicting(disk: Path) -> None:
    clock = Clock()
    floor = 8 << 20
    store = Store(disk / "kv", budget_bytes=1 << 30, min_free_bytes=floor, clock=clock)
    for seed in range(40):
        clock.now += 11
        pub = publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000)
        store.publish(pub)
        assert is_whole(store, pub)
        assert shutil.disk_usage(disk).free >= floor
    assert store.counts()["used_bytes"] > 8 << 20
    store.close()


def test_a_read_only_file_system_is_read_and_saving_resumes_when_it_is_writable(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    token_ids = random_prompt(1, 4 * BLOCK + 3)
    runner = Runner(tiny_llama(), settings_on(disk))
    cold = runner.run(token_ids, "full", reply=4)
    runner.close()
    remount(disk, "ro")
    runner.open()
    warm = runner.run(token_ids, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == len(token_ids)
    other = runner.run(random_prompt(2, 4 * BLOCK), "full")
    assert (other.report.saved, runner.cache.stats()["state"]) == ("dropped", "degraded")
    assert (other.report.dropped_because or "").startswith("the store has no room, is full or fails: ")
    runner.cache.store.maintain()
    assert lines_about(caplog, "serving without saving") == 1
    remount(disk, "rw")
    runner.wait_for_recovery()
    runner.run(random_prompt(2, 4 * BLOCK), "full")
    runner.reopen()
    assert runner.run(random_prompt(2, 4 * BLOCK), "full").report.restored == 4 * BLOCK
    assert lines_about(caplog, "saving again") == 1
    runner.close()


def test_a_read_only_file_system_without_a_store_is_no_reason_not_to_serve(disk: Path) -> None:
    remount(disk, "ro")
    runner = Runner(tiny_llama(), settings_on(disk))
    assert answers_alike(runner, 1)
    assert runner.cache.stats()["state"] == "degraded"
    remount(disk, "rw")
    runner.wait_for_recovery()
    runner.run(random_prompt(1, 4 * BLOCK), "full")
    runner.reopen()
    assert runner.run(random_prompt(1, 4 * BLOCK), "full").report.restored == 4 * BLOCK
    runner.close()


@pytest.mark.parametrize("place", ["folder", "file"])
def test_what_is_removed_under_a_daemon_is_made_again(tmp_path: Path, place: str) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv"))
    token_ids = random_prompt(1, 4 * BLOCK)
    cold = runner.run(token_ids, "full", reply=4)
    runner.flush()
    before = runner.cache.store.store_id
    if place == "folder":
        shutil.rmtree(tmp_path / "kv")
    else:
        (tmp_path / "kv" / "data.mdb").unlink()
    runner.wait_for(lambda: runner.cache.store.store_id != before)
    runner.wait_for_recovery()
    again = runner.run(token_ids, "full", reply=4)
    assert same(cold, again)
    assert again.report.restored == 0
    runner.reopen()
    warm = runner.run(token_ids, "full", reply=4)
    assert same(cold, warm)
    assert warm.report.restored == len(token_ids)
    runner.close()


def fill_up(disk: Path, pages_left: int) -> None:
    """Take all of the disk but so many pages."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        while (free := shutil.disk_usage(disk).free - pages_left * 4096) > 0:
            filler.write(bytes(min(free, 1 << 20)))


def serve_in_another_process(folder: Path, budget_bytes: int) -> str:
    """Tells how a daemon's store starts there: its problem, or that there is none. A crash of it is not ours."""
    code = (
        "import sys; from pathlib import Path; from diskprefix.prefixstore.store.store import Store\n"
        "store = Store(Path(sys.argv[1]), budget_bytes=int(sys.argv[2]), serving=True)\nprint(store.problem)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, str(budget_bytes)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.cases(3)
@pytest.mark.parametrize("pages_left", [0, 1, 2, 3, 4, 5, 9, 20])
@pytest.mark.parametrize("place", ["new", "without lock.mdb", "with a lower budget"])
def test_a_daemon_starts_on_a_full_disk_whatever_it_would_have_to_write(
    disk: Path, pages_left: int, place: str
) -> None:
    clock, folder = Clock(), disk / "kv"
    if place != "new":
        store = open_store(folder, budget_bytes=22 << 20, clock=clock)
        for seed in range(6):
            store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000))
        store.close()
    if place == "without lock.mdb":
        (folder / "lock.mdb").unlink()
    folder.mkdir(mode=0o700, exist_ok=True)
    fill_up(disk, pages_left)
    serve_in_another_process(folder, 16 << 20)
    store = Store(folder, budget_bytes=16 << 20, serving=True)
    (disk / "filler").unlink()
    if store.problem is not None:
        store._retry_at = 0.0
        assert store.maintain()
    pub = publication(store, prompt(100, 3 * BLOCK), payload_bytes=1000)
    store.publish(pub)
    assert is_whole(store, pub)
    store.close()


def test_counting_in_a_folder_that_was_removed_is_an_error_of_the_cache(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(CacheError):
        store.counts()
    store.close()


@pytest.mark.parametrize("said", [b"", b"x", bytes(8), (1 << 62).to_bytes(8, "little")])
def test_a_damaged_budget_is_not_believed(tmp_path: Path, said: bytes) -> None:
    store = open_store(tmp_path)
    with store.changes() as changes:
        changes.put_meta("budget", said)
    store.close()
    store = Store(tmp_path)
    assert store.budget_bytes == store.file_bytes()
    store.close()


def test_stopping_does_not_wait_for_another_process_that_holds_the_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    held = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(last_write_s=0.1))
    pub = publication(store, prompt(1, 2 * BLOCK))
    with store.changes():
        held.queue_publication(Save(pub.epoch), pub, is_last=True)
        assert not held.close(0.1)
        assert held.is_alive
    assert held.close(30)
    assert is_whole(store, pub)
    store.close()


def question(number: int) -> dict[str, Any]:
    text = f"{number}: " + "rivers cities weather " * 60
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, "logprobs": True}


def require_alike(client: httpx.Client, number: int, reply: dict[str, Any]) -> None:
    again = reply_to(client, question(number))
    assert again["choices"] == reply["choices"]
    assert again["prefix_cache"]["restored"] > 0


def test_a_daemon_on_a_disk_with_less_than_is_kept_free_says_so_once_and_saves_again_when_there_is_room(
    disk: Path, chat_model: Path
) -> None:
    with (
        running_daemon(chat_model, disk / "kv", kv_cache_budget="24MiB") as daemon,
        daemon.wait_ready().client() as client,
    ):
        reply = reply_to(client, question(0))
        wait_until(lambda: client.get("/health").json()["status"] == "degraded", "/health says that nothing is saved")
        reply_to(client, question(1))
        assert "the store leaves 256.0 MiB" in json.dumps(client.get("/health").json())
        assert "diskprefix_store_degraded 1" in client.get("/metrics").text
        remount(disk, "size=1g")
        wait_until(lambda: client.get("/health").json()["status"] == "ok", "it has room again")
        require_alike(client, 0, reply)
        said = [line for line in daemon.lines if " WARNING " in line and " MiB free, and the store leaves" in line]
        assert len(said) == 1, daemon.lines


NOT_SAVED = ("none", "disk")


def outcome(reply: dict[str, Any]) -> tuple[str, str]:
    return reply["prefix_cache"]["saved"], reply["prefix_cache"]["boundary_reason"]


@pytest.mark.parametrize("scope", ["auto", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["before the folder is made", "before the start", "during the run"])
def test_a_daemon_on_a_full_disk_says_in_each_reply_why_nothing_is_saved_warns_once_and_recovers(
    disk: Path, chat_model: Path, when: str, scope: str
) -> None:
    folder, flags = disk / "kv", {"disk_prefix_cache": scope}
    remount(disk, "size=300m")
    if when != "before the folder is made":
        with running_daemon(chat_model, folder, **flags) as daemon, daemon.client() as client:
            reply_to(client, question(0))
            daemon.wait_saved()
            assert daemon.stop() == 0
    if when != "during the run":
        fill_up(disk, 0)
    with running_daemon(chat_model, folder, **flags) as daemon, daemon.client() as client:
        if when == "during the run":
            assert client.get("/health").json()["status"] == "ok"
            fill_up(disk, 0)
        wait_until(lambda: client.get("/health").json()["status"] == "degraded", "/health says that the disk is full")
        wait_until(lambda: outcome(reply_to(client, question(2))) == NOT_SAVED, "it is not tried any more")
        assert [outcome(reply_to(client, question(number))) for number in range(3, 9)] == [NOT_SAVED] * 6
        is_full = f"the disk of --kv-cache-dir {folder} is full: "
        assert client.get("/health").json()["cache"]["error"].startswith(is_full)
        shown = subprocess.run(
            [sys.executable, "-m", "diskprefix", "ps", "--url", daemon.url, "--api-key", daemon.token],
            capture_output=True, text=True, check=True, env=clean_environment(),
        ).stdout  # fmt: skip
        assert is_full in shown
        assert len([line for line in daemon.lines if "until this is repaired" in line]) == 1, daemon.log
        (disk / "filler").unlink()
        wait_until(lambda: client.get("/health").json()["status"] == "ok", "it has room again")
        reply = reply_to(client, question(10))
        assert outcome(reply)[0] == "queued"
        daemon.wait_saved()
        assert "saving again" in daemon.log
    with running_daemon(chat_model, folder, **flags) as daemon, daemon.client() as client:
        require_alike(client, 10, reply)


@thorough
@pytest.mark.slow
@needs("cc")
@pytest.mark.parametrize("seconds", [3, 10**6])
def test_a_daemon_whose_disk_answers_late_or_never_answers_requests_and_ends(seconds: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    flags = serve_flags(write_chat_model(tmp_path / "model"), tmp_path / "disk/kv")
    recorded = preloaded(tmp_path / "disk", tmp_path / "log")
    trouble = {"POWER_TROUBLE": str(tmp_path / "trouble"), "POWER_SECONDS": str(seconds)}
    environment = clean_environment(**recorded, **trouble)
    with DaemonProcess(*flags, environment=environment, fresh=True) as daemon, daemon.wait_ready().client() as client:
        replies = [reply_to(client, question(number)) for number in range(3)]
        daemon.wait_saved()
        (tmp_path / "trouble").touch()
        for number in range(3, 6):
            reply_to(client, question(number))
        for number, reply in enumerate(replies):
            require_alike(client, number, reply)
        assert client.get("/health").json()["status"] == "ok"
        assert client.get("/metrics").status_code == 200
        (state,) = cache_states(client)
        assert state["pending_bytes"] > 0 or seconds < 10**6
        # As systemd allows.
        assert daemon.stop(timeout_s=90) == 0
    with DaemonProcess(*flags) as daemon, daemon.wait_ready().client() as client:
        for number, reply in enumerate(replies):
            require_alike(client, number, reply)
