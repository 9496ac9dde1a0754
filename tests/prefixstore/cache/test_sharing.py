"""Machines that share a bucket, each with a model: what one computed, another one restores, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.tiers.tier import Prefetched
from diskprefix.values import Prompt
from tests.object_server import Fault, ObjectServer, object_server
from tests.prefixstore.cache.opening import FULL
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_llama, tiny_settings

PROMPT = random_prompt(1, 6 * BLOCK + 5)
LONGER = np.concatenate([PROMPT, random_prompt(2, 2 * BLOCK)])
OTHER_END = np.concatenate([PROMPT[: 4 * BLOCK + 3], random_prompt(3, 2 * BLOCK)])
MakeRunner = Callable[..., Runner]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture
def make(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRunner]:
    """Makes a machine that shares a bucket. Two blocks of the model make a bundle."""
    block_bytes = 2 * 2 * 2 * 16 * 2 * BLOCK
    monkeypatch.setattr("diskprefix.prefixstore.remote.bundle._TARGET_BYTES", 2 * block_bytes - 1)
    key = tmp_path / "key"
    key.write_text("the key of the tests' fleet")
    key.chmod(0o600)
    number = 0
    with ExitStack() as opened:

        def made(exact_at: Any = None, bucket: str = "bucket", **changes: Any) -> Runner:
            nonlocal number
            number += 1
            values: dict[str, Any] = {
                "namespace_key_file": key,
                "remote_tier": (tmp_path / bucket).as_uri(),
                "remote_write": "all",
            }
            settings = tiny_settings(tmp_path / f"kv{number}", **(values | changes))
            runner = Runner(model, settings, exact_at=exact_at)
            opened.callback(runner.close)
            return runner

        yield made


def shared(runner: Runner) -> None:
    """Waits until what the runner has is in the bucket."""
    runner.flush()
    assert runner.cache.remote is not None
    assert runner.cache.remote.flush(30)


@pytest.mark.parametrize("exact_at", ["grid", None], ids=["grid", "token"])
def test_what_one_machine_computed_another_one_restores_with_the_bits_of_the_cold_run(
    exact_at: Any, make: MakeRunner
) -> None:
    one, other, alone = make(exact_at), make(exact_at), make(exact_at, bucket="none")
    first = one.run(PROMPT, "full", reply=3)
    shared(one)
    # Five tokens are not worth a request.
    for ids, restored in ((PROMPT, 0 if exact_at else 6 * BLOCK), (LONGER, 6 * BLOCK), (OTHER_END, 4 * BLOCK)):
        cold = alone.run(ids, "full", reply=3)
        machine = make(exact_at)
        prefetched = machine.run(ids, "full", reply=3)
        assert prefetched.report.source == "remote"
        assert prefetched.report.restored == (restored or len(PROMPT))
        assert same(prefetched, cold)
        machine.flush()
    again = other.run(PROMPT, "full", reply=3)
    assert same(again, first)
    other.flush()
    memory = other.run(PROMPT, "full", reply=3)
    assert memory.report.source == "disk", "read through to the disk"
    assert memory.report.restored >= again.report.restored
    assert same(memory, first)
    counted = {"memory": 0, "disk": memory.report.restored, "remote": again.report.restored}
    assert other.cache.stats()["restored_tokens"] == counted


@pytest.mark.parametrize(
    ("policy", "save", "after_one", "after_two"),
    [
        ("all", True, True, True),
        ("seen-twice", True, False, True),
        ("off", True, False, False),
        ("all", False, False, False),
    ],
    ids=["all", "seen-twice", "off", "a request that only reads"],
)
def test_the_write_policy_says_what_is_left(
    policy: str, save: bool, after_one: bool, after_two: bool, make: MakeRunner
) -> None:
    runner = make(remote_write=policy)
    for is_written in (after_one, after_two):
        runner.run_prompt(Prompt(PROMPT), replace(FULL, save=save))
        shared(runner)
        assert runner.cache.remote is not None
        assert (int(runner.cache.remote.stats()["written"]) > 0) == is_written


def test_waiting_for_the_bucket_is_not_taken_for_a_slow_disk(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make()
    runner.run(PROMPT, "full")
    runner.flush()

    def wait_in_vain(*_: object) -> Prefetched:
        return Prefetched(seconds=1000.0, is_whole=False)

    monkeypatch.setattr("diskprefix.prefixstore.cache.restore.Restore._prefetch", wait_in_vain)
    report = runner.run(LONGER, "full").report
    assert report.source == "disk"
    assert report.restore_ms > 1e6
    assert max(seconds for _, seconds in runner.cache.cost_model._samples["restore"]) < 1000.0


def test_a_bucket_that_answers_too_late_is_learned_as_slow(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(remote_deadline=0.01)
    assert runner.cache.remote is not None
    late = Prefetched(wanted_bytes=1000, seconds=10.0, is_whole=False, is_late=True)
    monkeypatch.setattr(runner.cache.remote, "prefetch", lambda _: late)
    runner.run(PROMPT, "full")
    assert list(runner.cache.cost_model._samples["fetch"]) == [(1000, 10.0)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as started:
        yield started


def test_a_real_server_serves_what_was_shared_and_none_of_its_faults_changes_a_bit(
    make: MakeRunner, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    one, other = (make(remote_tier=server.url, remote_deadline=0.4) for _ in range(2))
    faults: tuple[Fault, ...] = ("none", "flaky", "partial", "hang")
    for number, fault in enumerate(faults):
        ids = random_prompt(20 + number, 6 * BLOCK + 5)
        first = one.run(ids, "full", reply=2)
        shared(one)
        server.fault = fault
        answer = other.run(ids, "full", reply=2)
        assert same(answer, first)
        if fault == "none":
            assert (answer.report.source, answer.report.restored) == ("remote", 6 * BLOCK)
        server.reset()
    assert other.cache.stats()["remote"]["failed"] + other.cache.stats()["remote"]["late"] >= 2


@pytest.mark.parametrize("lacks", ["buffer", "budget"])
def test_nothing_is_brought_that_there_is_no_room_to_write(lacks: str, make: MakeRunner) -> None:
    one = make()
    first = one.run(PROMPT, "full")
    shared(one)
    other = make(kv_cache_write_buffer=1000) if lacks == "buffer" else make(kv_cache_write_budget="1MiB/day")
    other.cache.store.meter.count(96 * (1 << 20) // 100)
    answer = other.run(PROMPT, "full")
    assert answer.report.restored == 0
    assert torch.equal(answer.logits, first.logits)
    if lacks == "budget":
        other.cache.store.meter.budget_bytes = 0
        assert other.run(PROMPT, "full").report.source == "remote"


def test_a_bucket_needs_a_key() -> None:
    with pytest.raises(SettingsError, match="--remote-tier needs --namespace-key-file"):
        Settings(remote_tier="s3://bucket")


@pytest.mark.parametrize("url", ["bucket", "nonsense://x", "s3://", "file://folder"])
def test_an_address_that_cannot_be_used_is_one_line(url: str, make: MakeRunner) -> None:
    with pytest.raises(SettingsError, match=r"--remote-tier: '.*' cannot be used: ") as caught:
        make(remote_tier=url)
    assert "\n" not in caught.value.message
