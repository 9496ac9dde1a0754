"""Engines that share a bucket: what one of them computed is restored by the other, and nobody waits for the bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.cache.tiers.tier import Prefetched
from diskprefix.errors import SettingsError
from diskprefix.extras.vllm.plans import StepPlan
from tests.extras.vllm.engine import BLOCK, Engine, Request, prompt

PROMPT = prompt(1, 3 * BLOCK + 5)
Make = Callable[..., Engine]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Make]:
    """Makes engines with a store each, by a number, that share a folder in the place of a bucket."""
    key = tmp_path / "namespace.key"
    key.write_bytes(b"the key of the tests' fleet")
    key.chmod(0o600)
    made: dict[int, Engine] = {}

    def make(number: int, **changes: Any) -> Engine:
        if number in made:
            made.pop(number).close()
        shared = {"remote_tier": (tmp_path / "bucket").as_uri(), "namespace_key_file": str(key)}
        made[number] = Engine(tmp_path / str(number), **shared | {"remote_write": "all"} | changes)
        return made[number]

    yield make
    for engine in made.values():
        engine.close()


def num_objects(tmp_path: Path) -> int:
    return sum(file.is_file() and file.name != "about" for file in (tmp_path / "bucket").rglob("*"))


def asks(engine: Engine, name: str, token_ids: list[int] = PROMPT, **more: Any) -> tuple[int, str]:
    """Serves a request. Returns how many tokens were loaded, and from where."""
    request = Request(name, token_ids, kv_transfer_params={}, **more)
    loaded = engine.begin(request)
    assert all(found[1:] == (False, set()) for found in engine.results(request))
    assert engine.is_right(request, loaded)
    engine.step(request, len(token_ids) - request.num_computed_tokens)
    told = engine.end(request)
    assert told is not None
    return loaded, told["prefix_cache"]["source"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_machine_computed_is_restored_by_another_and_stays_on_its_disk(
    machine: Make, tmp_path: Path, num_ranks: int
) -> None:
    one, other = machine(1, num_ranks=num_ranks), machine(2, num_ranks=num_ranks)
    assert asks(one, "a") == (0, "none")
    assert num_objects(tmp_path) == num_ranks
    assert asks(other, "b") == (3 * BLOCK, "remote")
    again = machine(2, num_ranks=num_ranks)
    assert asks(again, "c") == (3 * BLOCK, "disk")
    assert again.scheduler.take_counts()["remote_fetched"] == 0


def test_workers_in_other_processes_find_on_the_disk_what_was_fetched(machine: Make) -> None:
    asks(machine(1), "a")
    other, request = machine(2), Request("b", PROMPT)
    other.scheduler.add(request, not_cached=None)
    assert other.scheduler.match("b", 0) is None
    other.await_fetch(request)
    assert other.shared.store.counts()["blocks"] == 3


def test_of_another_engine_nothing_is_fetched(machine: Make) -> None:
    asks(machine(1), "a")
    other = machine(2, numbers={"dtype": "float16"})
    assert asks(other, "b") == (0, "none")
    counts = other.scheduler.take_counts()
    assert (counts["remote_fetched"], counts["miss_not_stored"]) == (0, 1)
    assert counts["remote_missing"] > 0


@pytest.mark.parametrize(
    ("write", "cached", "objects"),
    [("off", 2 * BLOCK, 0), ("seen-twice", 0, 0), ("seen-twice", 2 * BLOCK, 1), ("all", 0, 1)],
)
def test_what_is_left_for_others_is_what_the_settings_say(
    machine: Make, tmp_path: Path, write: str, cached: int, objects: int
) -> None:
    """`cached`: tokens of an earlier prompt that the engine has itself."""
    one = machine(1, remote_write=write)
    request = Request("a", PROMPT, num_computed_tokens=cached)
    one.allocate(request, cached)
    one._compute(0, request, one.tables["a"], 0, cached)
    one.run(request)
    assert num_objects(tmp_path) == objects
    if objects:
        restored = cached if write == "seen-twice" else 3 * BLOCK
        assert asks(machine(2), "b") == (restored, "remote")


def test_a_request_that_saves_nothing_shares_nothing_of_what_it_restored(machine: Make, tmp_path: Path) -> None:
    machine(1, remote_write="off").run(Request("a", PROMPT))
    request = Request("b", PROMPT, kv_transfer_params={"save": False})
    assert machine(1).run(request) == 3 * BLOCK
    assert num_objects(tmp_path) == 0


def test_nobody_waits_for_one_who_fetches_and_who_leaves_ends_it(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cancelled = machine(1), threading.Event()
    assert engine.shared.remote is not None

    def hang(wish: Any) -> Prefetched:
        while not wish.is_cancelled():
            threading.Event().wait(0.01)
        cancelled.set()
        return Prefetched(is_whole=False)

    monkeypatch.setattr(engine.shared.remote, "prefetch", hang)
    engine.scheduler.add(Request("a", PROMPT), not_cached=None)
    assert [engine.scheduler.match("a", 0) for _ in range(3)] == [None] * 3
    assert engine.scheduler.plan([]).is_fetching
    assert engine.run(Request("b", PROMPT[: BLOCK - 1])) == 0
    engine.scheduler.finish("a")
    assert cancelled.wait(20)
    assert not engine.scheduler.plan([]).is_fetching


def test_a_step_that_computes_nothing_waits_a_little_for_what_is_fetched(machine: Make) -> None:
    (worker,) = machine(1).workers
    waited: list[float] = []
    worker._has_loaded.wait = lambda timeout=None: bool(waited.append(timeout))  # type: ignore[method-assign,arg-type,func-returns-value]
    for is_fetching in (False, True):
        worker.load(StepPlan(is_fetching=is_fetching))
        worker.take_results(0.02)
    assert waited == [0.02]


def test_a_bucket_that_fails_fails_no_request(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = machine(1)
    assert engine.shared.remote is not None

    def fail(_: Any) -> Prefetched:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.shared.remote, "prefetch", fail)
    assert asks(engine, "a") == (0, "none")
    assert asks(engine, "b") == (3 * BLOCK, "disk")


def test_what_is_slower_than_computing_is_not_fetched(machine: Make) -> None:
    asks(machine(1), "a")
    other = machine(2)
    assert other.scheduler._sharing is not None
    model = other.scheduler._sharing.cost_model
    for _ in range(4):
        model.record_prefill(BLOCK, 1e-6)
        model.record_prefetch(Prefetched(num_bytes=1000, seconds=1.0))
    assert asks(other, "b") == (0, "none")
    assert other.scheduler.take_counts()["remote_slower"] == 1


def test_the_time_that_a_prompt_takes_to_compute_is_noted_once_its_first_token_is_there(machine: Make) -> None:
    engine = machine(1)
    assert engine.scheduler._sharing is not None
    model = engine.scheduler._sharing.cost_model
    request = Request("a", PROMPT)
    engine.begin(request)
    engine.step(request, 20)
    engine.step(request, len(PROMPT) - 20)
    assert model.as_dict()["prefill_samples"] == 0
    request.reply.append(7)
    engine.step(request, 1)
    engine.end(request)
    assert model.as_dict()["prefill_samples"] == 1


def test_what_the_bucket_did_is_counted_once_by_whoever_asks_first(machine: Make) -> None:
    one = machine(1)
    asks(one, "a")
    counts = one.workers[0].take_counts() + one.scheduler.take_counts()
    assert counts["remote_written"] == 1
    assert counts["remote_written_bytes"] > 0


def test_a_url_that_cannot_be_used_is_named_by_its_key(machine: Make) -> None:
    with pytest.raises(SettingsError, match=r"^remote_tier: 'ftp://bucket' cannot be used"):
        machine(1, remote_tier="ftp://bucket")
