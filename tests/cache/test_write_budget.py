"""The write budget as a request sees it. Nothing fails a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.nouns import CacheOptions, Prompt, Scope, Tenant
from diskprefix.store.written import WrittenBytes
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

MIB = 1 << 20
FULL = CacheOptions(scope=Scope("full"))


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    settings = tiny_settings(tmp_path, kv_cache_write_budget="1MiB/day")
    return Runner(tiny_llama(), settings, exact_at="token")


def test_a_prompt_that_is_left_out_says_so_and_one_that_comes_again_is_saved(runner: Runner) -> None:
    prompt = Prompt(random_prompt(1, 4 * BLOCK))
    runner.cache.store.meter.count(6 * MIB // 10)
    first = runner.run_prompt(prompt, FULL).report
    assert (first.selection.reason, first.selection.kept, first.saved) == ("write_budget", 0, "none")
    runner.flush()
    stats = runner.cache.stats()
    assert (stats["unaffordable"], stats["blocks"], stats["dropped"]) == (1, 0, 0)
    assert 0.6 * MIB <= stats["disk_written_last_day_bytes"] == stats["disk_written_bytes"]
    assert stats["write_budget_bytes"] == MIB
    again = runner.run_prompt(prompt, FULL).report
    assert (again.selection.reason, again.restored, again.saved) == ("full", 0, "queued")
    runner.flush()
    assert runner.run_prompt(prompt, FULL).report.restored == 4 * BLOCK
    runner.close()


def test_what_a_request_asks_for_itself_is_saved_until_nothing_is_left_over_a_restart(runner: Runner) -> None:
    asked = CacheOptions(scope=Scope("full"), is_asked=True)
    runner.cache.store.meter.count(8 * MIB // 10)
    assert runner.run_prompt(Prompt(random_prompt(1, 4 * BLOCK)), asked).report.saved == "queued"
    runner.cache.store.meter.count(2 * MIB // 10)
    runner.flush()
    runner.reopen()
    spent = runner.run_prompt(Prompt(random_prompt(2, 4 * BLOCK)), asked).report
    assert (spent.selection.reason, spent.saved) == ("write_budget", "none")
    assert runner.run_prompt(Prompt(random_prompt(1, 4 * BLOCK)), asked).report.restored == 4 * BLOCK
    runner.close()


def test_a_reply_that_has_no_room_is_left_out(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompt and its reply count here, not what the file takes beside."""
    monkeypatch.setattr(WrittenBytes, "last_day", lambda _written, _now: 0)
    reply, token_bytes = 20 * BLOCK, runner.layout.bytes_per_token
    runner.cache.store.meter.budget_bytes = 4 * 8 * BLOCK * token_bytes
    answer = runner.run_prompt(Prompt(random_prompt(1, 4 * BLOCK)), FULL, reply=reply)
    runner.flush()
    assert answer.report.selection.kept == 4 * BLOCK
    assert runner.cache.stats()["saved_tokens"] == 4 * BLOCK
    runner.close()


def test_a_prompt_that_is_faster_to_compute_is_not_said_to_lack_room(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.cache.cost_model, "allows", lambda *_, **_kw: False)
    runner.cache.store.meter.count(3 * MIB // 10)
    prompt = Prompt(random_prompt(1, 8 * BLOCK), boundaries=(4 * BLOCK,), system_end=4 * BLOCK)
    assert runner.run_prompt(prompt, FULL).report.selection.reason == "faster_to_compute"
    assert runner.cache.stats()["unaffordable"] == 0
    runner.close()


def test_a_cancelled_prompt_is_not_left_on_the_disk_when_the_budget_is_half_used(runner: Runner) -> None:
    prompt = Prompt(random_prompt(1, 8 * BLOCK))
    runner.cache.store.meter.count(6 * MIB // 10)
    assert runner.cancelled(prompt, FULL, steps=2).saved == "none"
    runner.close()


def test_one_key_cannot_spend_the_part_of_another_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `full`, which each request asks for itself. Only the prompts count here, not what the file takes beside."""
    monkeypatch.setattr(WrittenBytes, "last_day", lambda _written, _now: 0)
    settings = tiny_settings(tmp_path, kv_cache_write_budget="1GiB/day", api_keys=Path("keys"))
    runner = Runner(tiny_llama(), settings, exact_at="token")
    runner.cache.store.meter.budget_bytes = 24 * BLOCK * runner.layout.bytes_per_token
    greedy, other = (
        CacheOptions(scope=Scope("full"), is_asked=True, tenant=Tenant.of_key(name)) for name in ("greedy", "other")
    )
    saved = [runner.run_prompt(Prompt(random_prompt(0, 4 * BLOCK)), other).report.saved]
    saved += [runner.run_prompt(Prompt(random_prompt(seed, 4 * BLOCK)), greedy).report.saved for seed in range(1, 5)]
    saved.append(runner.run_prompt(Prompt(random_prompt(9, 4 * BLOCK)), other).report.saved)
    assert saved == ["queued", "queued", "queued", "none", "none", "queued"]
    runner.close()
