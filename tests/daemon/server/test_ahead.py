"""What the next question needs is computed while nobody waits, with the same bits, and gives way to requests."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine.idle import ahead_jobs, cpu_waits
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob, AheadJobs, AheadModel
from diskprefix.daemon.engine.idle.cpu_waits import CpuWaits
from diskprefix.daemon.engine.idle.idle_work import IdleWork
from diskprefix.daemon.engine.scheduler import IDLE_ROWS
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, Scope
from tests.daemon.engine.driving import recorded_requests, write_model
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.prefixstore.store.building import stored_texts
from tests.runtime.plan import tiny
from tests.waiting import wait_for

TEMPLATE = """\
{%- set last = namespace(question=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.index > last.question %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that drops the thoughts before the last question."""


def said(role: str, content: str, **fields: str) -> dict[str, str]:
    return {"role": role, "content": content, **fields}


LOOP = [
    said("system", "You are a careful assistant that answers questions about rivers." * 2),
    said("user", "Name three rivers."),
    *(
        message
        for river in ("Rhine", "Po", "Ebro")
        for message in (
            said("assistant", f"I look at the {river}.", reasoning_content=f"Where may the {river} begin?" * 3),
            said("tool", f"The {river} begins in the mountains, and ends in the sea." * 4),
        )
    ),
]


@pytest.fixture(params=["llama", "qwen3_5"], ids=["dense", "hybrid"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "thinking", request.param)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def serving(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppServer]:
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    settings: dict[str, Any] = {"kv_cache_gate": "off", "speculative": "off", "record": tmp_path / "record"}
    with real_app(model, tmp_path / "kv", ahead="auto", **settings) as server:
        yield server


def ask(server: AppServer, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    with server.client() as client:
        return reply_to(client, {"messages": messages, "max_tokens": 24, "temperature": 0}, **options)


def wait_for_ahead(server: AppServer) -> None:
    wait_for(lambda: server.engine.ahead.wait_s is None)


SECRET = "My password is swordfish and I live at number 17."


def with_secret(serving: AppServer) -> list[str]:
    """The texts of all paths of stored nodes that have the secret."""
    assert serving.engine.cache.writer.flush(10)
    with serving.engine.cache.store.snapshot() as snapshot:
        texts = [serving.engine.tokenizer.decode(token_ids) for token_ids in stored_texts(snapshot).values()]
    return [text for text in texts if SECRET in text]


def test_a_copy_made_ahead_is_listed_and_goes_with_its_prompt(serving: AppServer) -> None:
    cache = serving.engine.cache
    ask(serving, [LOOP[0], said("user", SECRET), *LOOP[2:]])
    wait_for_ahead(serving)
    assert len(with_secret(serving)) > 1
    with cache.store.snapshot() as snapshot:
        kinds = {name: entry.kind for name, entry in snapshot.entries()}
    assert sorted(set(kinds.values())) == ["ahead", "saved"]
    for name in [name for name, kind in kinds.items() if kind == "saved"]:
        cache.delete(name.hex())
    assert with_secret(serving) == []
    assert cache.store.counts()["blocks"] == cache.store.counts()["prompts"] == 0


def next_question(reply: dict[str, Any]) -> list[dict[str, str]]:
    return [*LOOP, said("assistant", reply["choices"][0]["message"]["content"]), said("user", "And lakes?")]


@pytest.mark.cases(2)
@pytest.mark.parametrize("forgets", [False, True], ids=["memory", "disk"])
def test_the_next_question_restores_the_rewritten_history(serving: AppServer, tmp_path: Path, forgets: bool) -> None:
    engine = serving.engine
    asked = next_question(ask(serving, LOOP))
    wait_for_ahead(serving)
    if forgets:
        assert engine.cache.writer.flush(10)
        engine.pages.forget_idle()
    answer = ask(serving, asked)
    cache, num_tokens = answer["prefix_cache"], answer["usage"]["prompt_tokens"]
    # The question, and the beginning of the reply.
    assert num_tokens - 40 < cache["restored"] < num_tokens
    assert cache["source"] == ("disk" if forgets else "memory")
    cold = ask(serving, asked, scope="off")
    assert answer["choices"][0]["message"] == cold["choices"][0]["message"]
    assert 0 < engine.cache.stats()["ahead_tokens"] < num_tokens
    wait_for_ahead(serving)
    flags = [line.is_ahead for line in recorded_requests(tmp_path / "record")]
    assert flags[:2] == [False, True]


def test_a_request_waits_for_one_small_step_and_the_work_goes_on_later(
    serving: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, is_computing, may_go_on = IdleWork.compute_step, threading.Event(), threading.Event()
    steps = list[int]()

    def wait(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
        if len(steps) == 3:
            is_computing.set()
            assert may_go_on.wait(60)
        before = sequence.num_tokens
        compute(self, model, sequence, token_ids)
        steps.append(sequence.num_tokens - before)

    monkeypatch.setattr(IdleWork, "compute_step", wait)
    asked = next_question(ask(serving, LOOP))
    assert is_computing.wait(60)
    during = list[dict[str, Any]]()
    client = threading.Thread(target=lambda: during.append(ask(serving, [said("user", "Good day. " * 9)])))
    client.start()
    wait_for(lambda: serving.daemon.inbox.queue_depth == 1)
    num_before = serving.engine.cache.counters["ahead_tokens"]
    may_go_on.set()
    client.join()
    assert max(steps[:4]) <= IDLE_ROWS
    assert during
    wait_for_ahead(serving)
    # What was computed before the request came is not computed again.
    assert serving.engine.cache.counters["ahead_tokens"] > num_before
    answer = ask(serving, asked)
    assert answer["usage"]["prompt_tokens"] - 40 < answer["prefix_cache"]["restored"]


OPTIONS, OWNER = CacheOptions(scope=Scope("full")), Owner(b"root", 0)
MODEL: Any = SimpleNamespace(cache=SimpleNamespace(is_gone=lambda _owner: False))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_spent_and_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    clock = Clock()
    jobs = AheadJobs(24 * 36.0, clock)
    jobs.add_job(AheadJob(MODEL, lambda: None, OPTIONS, OWNER))
    jobs.pause()
    assert jobs.next() is None, "a request may come at once"
    clock.now = 1.0
    assert (job := jobs.next()) is not None
    assert jobs.spend(job, 860.0)
    assert not jobs.spend(job, 10.0)
    assert jobs.next() is None
    assert jobs.figures == {"waiting": 1, "cpu_s": 870.0, "cpu_left_s": 0.0, "paused": "budget", "asked": []}
    clock.now += jobs.wait_s or 0.0
    assert jobs.next() is None, "ten seconds of a processor come back in a thousand"
    clock.now = 2000.0
    assert jobs.next() is job
    assert jobs.figures["paused"] is None


def write_times(tasks: Path, name: str, ran_s: float, waited_s: float) -> None:
    (tasks / name).mkdir(parents=True, exist_ok=True)
    (tasks / name / "schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 9\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts on Linux")
def test_work_ahead_gives_way_to_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    monkeypatch.setattr(cpu_waits, "_LONG", 0.2)
    monkeypatch.setattr(cpu_waits, "_TASKS", tmp_path)
    (tmp_path / "gone").mkdir()
    clock = Clock()
    jobs = AheadJobs(1e6, clock)
    write_times(tmp_path, "1", 5.0, 9.0)
    jobs.add_job(AheadJob(MODEL, lambda: None, OPTIONS, OWNER))
    clock.now = 1.0
    assert (job := jobs.next()) is not None
    write_times(tmp_path, "1", 5.5, 9.4)
    assert jobs.spend(job, 0.5), "too little to tell"
    write_times(tmp_path, "1", 6.0, 9.1)
    write_times(tmp_path, "2", 2.0, 0.1)
    assert jobs.spend(job, 2.0), "the threads have hardly waited"
    write_times(tmp_path, "2", 4.0, 1.1)
    assert not jobs.spend(job, 2.0)
    assert jobs.figures["paused"] == "other programs"
    clock.now = 30.0
    assert jobs.next() is None
    clock.now = 62.0
    assert jobs.next() is job, "it looks again"
    assert jobs.figures["paused"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts on Linux")
@pytest.mark.parametrize("number", ["2", "3"])
def test_other_programs_are_seen_whatever_threads_end(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an ended thread had used counts no more, and its number may be that of a new one."""
    monkeypatch.setattr(cpu_waits, "_LONG", 0.2)
    monkeypatch.setattr(cpu_waits, "_TASKS", tmp_path)
    write_times(tmp_path, "1", 5.0, 9.0)
    write_times(tmp_path, "2", 300.0, 70.0)
    waits = CpuWaits()
    waits.begin()
    shutil.rmtree(tmp_path / "2")
    write_times(tmp_path, number, 0.1, 0.0)
    write_times(tmp_path, "1", 6.0, 10.0)
    assert waits.are_long()
    write_times(tmp_path, "1", 9.0, 10.1)
    assert not waits.are_long()


@pytest.mark.parametrize(("load", "are_long"), [((0.5, 0, 0), False), ((1e6, 0, 0), True)])
def test_the_load_tells_where_the_kernel_does_not(
    load: tuple[float, ...], are_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "getloadavg", lambda: load)
    assert CpuWaits().are_long() == are_long


def test_a_later_turn_replaces_earlier_ones_and_off_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, off, other = AheadJobs(1.0), AheadJobs(0.0), OWNER._replace(root=b"other")
    for messages, owner in (("ab", OWNER), ("x", OWNER), ("ab", other), ("abcd", OWNER)):
        job = AheadJob(MODEL, lambda: None, OPTIONS, owner, tuple(messages))
        jobs.add_job(job)
        off.add_job(job)
    assert ["".join(map(str, job.content)) for job in jobs._jobs[""]] == ["abcd", "ab", "x"]
    assert off.wait_s is None
    assert job.was_dropped, "off keeps nothing"
    monkeypatch.setattr(MODEL.cache, "is_gone", lambda owner: owner == OWNER)
    jobs.drop_gone()
    assert ["".join(map(str, job.content)) for job in jobs._jobs[""]] == ["ab"]


def job_of(share: str, content: str, label: str = "") -> AheadJob:
    return AheadJob(MODEL, lambda: None, replace(OPTIONS, share=share), OWNER, content.encode(), label=label)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> AheadJobs:
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    return AheadJobs(1e6, Clock())


def test_shares_with_prompts_ahead_take_turns_and_have_equal_seconds(jobs: AheadJobs) -> None:
    hers = job_of("alice", "hers", "hers")
    jobs.add_job(hers)
    for number in range(43):
        jobs.add_job(job_of("bob", f"bob {number:02}", f"bob {number}"))
    assert jobs.has(hers)
    assert jobs.figures["waiting"] == 9
    computed = list[str]()
    while (job := jobs.next()) is not None:
        assert jobs.spend(job, 30.0 if job is hers else 10.0)
        jobs.drop_job(job)
        computed.append(job.share)
        if len(computed) == 3:
            jobs.add_job(job_of("alice", "another"))
    # Hers took as long as three of his.
    assert computed == ["alice", *["bob"] * 4, "alice", *["bob"] * 4]


def test_a_long_prompt_ahead_gives_way_to_another_share_after_a_turn(jobs: AheadJobs) -> None:
    long_ones = [job_of(share, "a long prompt") for share in ("alice", "bob")]
    jobs.add_job(long_ones[0])
    jobs.add_job(job_of("alice", "another of hers"))
    assert all(jobs.spend(long_ones[0], 20.0) for _ in range(9)), "nobody else's waits"
    jobs.add_job(long_ones[1])
    turns = list[tuple[str, int]]()
    for _ in range(4):
        job, num_steps = jobs.next(), 1
        assert job is not None
        while jobs.spend(job, 10.0):
            num_steps += 1
        turns.append((job.share, num_steps))
    assert turns == [("alice", 7), ("bob", 14), ("alice", 14), ("bob", 14)]
    assert all(map(jobs.has, long_ones)), "they wait for their next turns"


def test_a_share_that_comes_later_has_saved_up_no_seconds(jobs: AheadJobs) -> None:
    for number in range(8):
        jobs.add_job(job_of("bob", f"bob {number}"))
    computed = list[str]()
    while (job := jobs.next()) is not None:
        assert jobs.spend(job, 10.0)
        jobs.drop_job(job)
        computed.append(job.share)
        if len(computed) == 4:
            for number in range(3):
                jobs.add_job(job_of("alice", f"alice {number}"))
    assert computed == [*["bob"] * 4, *["bob", "alice"] * 3, "bob"]


def test_a_prompt_ahead_that_was_dropped_says_that_it_waits_no_longer(jobs: AheadJobs) -> None:
    asked = [job_of("bob", f"{number}", f"prompt {number}") for number in range(9)]
    for job in asked:
        jobs.add_job(job)
    assert [job.was_dropped for job in asked] == [True] + [False] * 8
    waits = {one["label"]: one["waits"] for one in jobs.figures["asked"]}
    assert waits == {job.label: job is not asked[0] for job in asked}
    jobs.add_job(asked[0])
    waits = {one["label"]: one["waits"] for one in jobs.figures["asked"]}
    assert waits == {job.label: job is not asked[1] for job in asked}


@pytest.mark.parametrize("num_asked", [3, 8])
def test_chats_push_out_no_prompt_that_was_asked_for(jobs: AheadJobs, num_asked: int) -> None:
    asked = [job_of("alice", f"{number}", "asked") for number in range(num_asked)]
    for job in (*asked, *(job_of("alice", f"chat {number:02}") for number in range(40))):
        jobs.add_job(job)
    assert all(jobs.has(job) for job in asked)
    assert jobs.figures["waiting"] == 8


def test_many_shares_with_prompts_ahead_are_bounded(jobs: AheadJobs) -> None:
    all_jobs = [job_of(f"address 192.0.2.{number}", "x", "x") for number in range(100)]
    for job in all_jobs:
        jobs.add_job(job)
    assert jobs.figures["waiting"] == sum(not job.was_dropped for job in all_jobs) == 64
    # Who had most seconds loses its prompts, and what it was told of dropped ones.
    for number in range(10):
        jobs.add_job(job_of(all_jobs[-1].share, f"{number}", f"{number}"))
    assert jobs.spend(all_jobs[-1], 10.0) == jobs.has(all_jobs[-1])
    jobs.add_job(job_of("another", "x", "x"))
    assert all_jobs[-1].share not in {*jobs._jobs, *jobs._dropped}


def test_the_list_of_dropped_prompts_of_a_share_is_bounded(jobs: AheadJobs) -> None:
    for number in range(40):
        jobs.add_job(job_of("alice", f"{number}", f"{number}"))
    assert len(jobs.figures["asked"]) == 8 + 8


def test_a_prompt_that_is_added_ahead_pauses_nothing(jobs: AheadJobs) -> None:
    first = job_of("alice", "first")
    jobs.add_job(first)
    jobs.add_job(job_of("bob", "second"))
    assert jobs.next() is first
    jobs.pause()
    assert jobs.next() is None


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"AC": ("Mains", None, None), "BAT0": ("Battery", "Discharging", "System")}, True),
        ({"AC": ("Mains", None, None), "BAT0": ("Battery", "Charging", None)}, False),
        ({"mouse": ("Battery", "Discharging", "Device")}, False),
    ],
)
def test_a_machine_on_its_battery_computes_nothing_ahead(
    supplies: dict[str, tuple[str | None, ...]], on_battery: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for supply, values in supplies.items():
        (tmp_path / supply).mkdir()
        for name, value in zip(("type", "status", "scope"), values, strict=True):
            if value is not None:
                (tmp_path / supply / name).write_text(f"{value}\n")
    monkeypatch.setattr(ahead_jobs, "_SUPPLIES", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    assert ahead_jobs.runs_on_battery() == on_battery
    jobs = AheadJobs(1.0, lambda: 100.0)
    jobs.add_job(AheadJob(MODEL, lambda: None, OPTIONS, OWNER))
    jobs._not_before = 0.0
    assert (jobs.next() is None) == on_battery
