"""Engines on machines that share a bucket: what one computed another one restores, and no fault of the bucket changes a
bit or fails a request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diskprefix.bridges.shared.connector_settings import connector_settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store.writer import Writer
from tests.bridges.vllm.engine import BLOCK, FULL, SLIDING, Engine, Request, prompt
from tests.prefixstore.store.other_process import beside

objects: Any = pytest.importorskip("tests.object_server")

PROMPT = prompt(1, 5 * BLOCK + 3)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with objects.object_server(tmp_path_factory.mktemp("objects")) as started:
        yield started


@pytest.fixture
def make(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes machines with an engine each. Two blocks are a bundle in the bucket. Closes what is still open."""
    monkeypatch.setattr("diskprefix.prefixstore.remote.bundle._TARGET_BYTES", 1500)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    key = tmp_path / "key"
    key.write_text("the key of the tests' engines")
    key.chmod(0o600)
    shared: dict[str, Any] = {"namespace_key_file": str(key), "remote_tier": f"{server.url}/{tmp_path.name}"}
    with ExitStack() as opened:

        def made(**changes: Any) -> Engine:
            folder = tmp_path / f"machine{len(list(tmp_path.iterdir()))}"
            one = Engine(folder, **({"remote_write": "all"} | shared | changes))
            opened.callback(one.close)
            return one

        yield made
        server.reset()


def share(engine: Engine, ids: list[int], name: str = "a") -> Request:
    """Computes a prompt, and waits until it is in the bucket."""
    request = Request(name, ids, kv_transfer_params={})
    engine.run(request)
    assert engine.shared.remote is not None
    assert engine.shared.remote.flush(30)
    return request


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)], ids=["one group", "several groups"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_machine_computed_another_one_restores_and_keeps(make: Make, num_ranks: int, groups: Any) -> None:
    layout: dict[str, Any] = {"num_ranks": num_ranks, "groups": groups}
    one = make(**layout)
    share(one, PROMPT)
    other = make(**layout)
    # Other workers than this process's see only the disk.
    other.shared.num_users = 2
    request = Request("b", [*PROMPT, 7, 8, 9], kv_transfer_params={})
    assert other.begin(request) == 5 * BLOCK
    assert other.results(request) == [(True, False, set())] * num_ranks
    assert other.is_right(request, 5 * BLOCK, range(len(groups)))
    other.step(request, request.num_tokens - request.num_computed_tokens)
    told = other.end(request)
    assert told == {"prefix_cache": {"restored": 5 * BLOCK, "source": "remote", "saved": 0, "reason": "full"}}
    assert other.scheduler.take_counts()["fetched_bytes"] == 5 * sum(worker.block_bytes for worker in other.workers)
    again = Request("c", PROMPT, kv_transfer_params={})
    assert other.run(again) == 5 * BLOCK
    other.shared.num_users = 1


def test_a_request_waits_until_workers_in_other_processes_can_read_what_was_fetched(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(make(), PROMPT)
    other, flushed = make(), list[float]()
    flush = Writer.flush

    def noted(writer: Writer, timeout_s: float) -> bool:
        flushed.append(timeout_s)
        return flush(writer, timeout_s)

    monkeypatch.setattr(Writer, "flush", noted)
    assert other.shared.num_users == 1
    assert other.begin(Request("b", PROMPT)) == 5 * BLOCK
    assert len(flushed) == 1
    assert other.shared.store.counts()["blocks"] == 5


def share_and_stay(ready: Path, folder: Path, environment: dict[str, str], settings: dict[str, Any]) -> None:
    """A machine that puts a prompt into the bucket and goes on."""
    os.environ.update(environment)
    share(Engine(folder, remote_write="all", **settings), PROMPT)
    ready.touch()
    time.sleep(3600)


def test_a_machine_that_was_killed_leaves_what_it_had_written_to_the_bucket(
    make: Make, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process has bundles of the usual size.
    monkeypatch.undo()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    other, request = make(), Request("b", PROMPT)
    settings = {"namespace_key_file": str(tmp_path / "key"), "remote_tier": other.settings.remote_tier}
    with beside(share_and_stay, tmp_path / "killed", server.environment, settings) as process:
        process.kill()
        process.join()
    assert other.begin(request) == 5 * BLOCK
    other.results(request)
    assert other.is_right(request, 5 * BLOCK)


@pytest.mark.parametrize(("rule", "counts"), [("all", (6, 6)), ("seen-twice", (0, 6)), ("off", (0, 0))])
def test_the_rule_for_uploads_is_the_daemons(make: Make, rule: str, counts: tuple[int, int]) -> None:
    one = make(remote_write=rule)
    assert one.shared.remote is not None
    for number, count in enumerate(counts):
        share(one, PROMPT, f"r{number}")
        # Three bundles of each rank, and what the root is: that one is no bundle.
        assert (one.shared.remote.stats()["written"] > 0) == (count > 0)


def test_a_request_that_saves_nothing_uploads_nothing(make: Make) -> None:
    one = make()
    one.run(Request("a", PROMPT, kv_transfer_params={"save": False}))
    one.run(Request("b", PROMPT, kv_transfer_params={"scope": "off"}))
    assert one.shared.remote is not None
    assert one.shared.remote.flush(30)
    assert one.shared.remote.stats()["written"] == 0
    assert make().begin(Request("c", PROMPT)) == 0


def test_tenants_and_other_numbers_find_nothing(make: Make) -> None:
    share(make(), PROMPT)
    other = make()
    assert other.begin(Request("b", PROMPT, cache_salt="mine")) == 0
    assert make(numbers={"weights_digest": "other"}).begin(Request("c", PROMPT)) == 0


@pytest.mark.parametrize("fault", objects.FAULTS)
def test_a_bucket_that_fails_costs_a_miss_at_most(make: Make, server: Any, fault: str) -> None:
    one = make()
    share(one, PROMPT)
    other = make()
    shorten(other, 0.5)
    server.fault = fault
    request = Request("b", [*PROMPT, 7])
    num_loaded = other.begin(request)
    assert all(loaded and not failed for loaded, failed, _ in other.results(request)) == (num_loaded > 0)
    assert num_loaded in (0, 2 * BLOCK, 4 * BLOCK, 5 * BLOCK)
    assert other.is_right(request, num_loaded)
    other.step(request, request.num_tokens - num_loaded)
    other.end(request)
    server.reset()
    # It was computed and saved, so the machine does without the bucket.
    again = Request("c", [*PROMPT, 7])
    assert other.begin(again) == 5 * BLOCK
    other.results(again)
    assert other.is_right(again, 5 * BLOCK)


def shorten(engine: Engine, seconds: float) -> None:
    fetcher = engine.scheduler._fetcher
    assert fetcher is not None
    fetcher._max_s = seconds


def test_a_hanging_bucket_is_waited_for_once_and_only_so_long(make: Make, server: Any) -> None:
    share(make(), PROMPT)
    other = make()
    shorten(other, 0.3)
    server.fault = "hang"
    began = time.monotonic()
    for number in range(12):
        # More than there are threads: those that wait for a thread wait no longer.
        other.scheduler.add(Request(f"r{number}", prompt(number, 3 * BLOCK)), not_cached=None)
    for number in range(12):
        assert other.match(Request(f"r{number}", None)) == 0
    assert time.monotonic() - began < 5
    assert other.scheduler.take_counts()["fetches_cut"] == 12


def test_a_request_that_leaves_while_it_waits_is_forgotten(make: Make, server: Any) -> None:
    other = make()
    server.fault = "hang"
    other.scheduler.add(Request("a", PROMPT), not_cached=None)
    assert other.scheduler.match("a", 0) is None
    assert other.scheduler.finish("a") is None
    assert other.scheduler.match("a", 0) == 0
    fetcher = other.scheduler._fetcher
    assert fetcher is not None
    assert fetcher._fetches == set()


@pytest.mark.parametrize("fault", ["500", "reset", "refusing", "full"])
def test_a_bucket_that_takes_nothing_loses_only_uploads(make: Make, server: Any, fault: str) -> None:
    one = make()
    server.fault = fault
    one.run(Request("a", PROMPT))
    assert one.shared.remote is not None
    assert one.shared.remote.flush(30)
    assert one.shared.remote.stats()["written"] == 0
    server.reset()
    assert one.begin(Request("b", PROMPT)) == 5 * BLOCK


def test_a_full_write_buffer_takes_no_fetched_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    share(make(), PROMPT)
    monkeypatch.setattr("diskprefix.bridges.shared.connector_settings._WRITE_BUFFER", 100)
    other = make()
    assert other.begin(Request("b", PROMPT)) == 0
    assert other.scheduler.take_counts()["fetches_cut"] == 1


def test_a_bucket_needs_a_key_and_its_rule_a_known_word(tmp_path: Path) -> None:
    folder = {"kv_cache_dir": str(tmp_path / "kv")}
    with pytest.raises(SettingsError, match="remote_tier: needs namespace_key_file"):
        connector_settings(folder | {"remote_tier": "s3://bucket"}, 16)
    with pytest.raises(SettingsError, match="remote_write: 'some' is not one of"):
        connector_settings(folder | {"remote_write": "some"}, 16)
