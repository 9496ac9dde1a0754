"""What the write budget leaves of a prompt: first of one by numbers alone, then as a request sees it, which never fails
for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy.select import Rules
from diskprefix.prefixstore.cache.policy.write_budget import Spending, SpentByShare, within_budget
from diskprefix.prefixstore.store.write_counter import WrittenBytes
from diskprefix.tokens import as_token_ids
from diskprefix.values import SHARED, CacheOptions, CacheReport, Mark, Prompt, Scope, Selection
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

RULES = Rules(block_size=16, min_tokens=100, cold_max=100, interval=100, state="token")
PROMPT = Prompt(as_token_ids(range(1000)), boundaries=(200, 500, 1000), system_end=200)
MARKED = replace(PROMPT, marks=(Mark(200), Mark(500)))
ALL = Selection(scope=Scope("auto", 30), prompt_tokens=1000, reason="learning", selected=1000, aligned=1000)
GOES_ON = replace(ALL, common=500, reason="continues")
SPENDING = Spending(used_bytes=0, limit_bytes=1_000_000, bytes_per_token=1)
"""A prompt takes a thousandth of the budget."""


def within(used: float, selection: Selection = ALL, prompt: Prompt = PROMPT, **changes: Any) -> Selection:
    """What may be written if this share of the budget is used."""
    spending = replace(SPENDING, used_bytes=int(used * 1e6), state_bytes=changes.pop("state_bytes", 0))
    arguments: dict[str, Any] = {"stored": 0, "had": 0, "is_asked": False, "rules": RULES} | changes
    return within_budget(selection, prompt, spending, **arguments)


@pytest.mark.parametrize(
    ("selection", "changes", "kept"),
    [
        (ALL, {}, [1000, 200, 200, 0, 0]),
        (replace(ALL, common=500), {}, [1000, 500, 500, 500, 0]),
        (replace(ALL, seen=500), {}, [1000, 500, 500, 500, 0]),
        (GOES_ON, {}, [1000, 1000, 500, 500, 0]),
        (replace(ALL, common=1000), {}, [1000, 1000, 1000, 1000, 0]),
        (GOES_ON, {"had": 500}, [1000, 1000, 200, 0, 0]),
        # Too few tokens were missed.
        (GOES_ON, {"had": 401}, [1000, 1000, 200, 0, 0]),
        (GOES_ON, {"had": 400}, [1000, 1000, 500, 500, 0]),
        (ALL, {"is_asked": True}, [1000, 1000, 1000, 1000, 0]),
        (ALL, {"prompt": MARKED}, [1000, 500, 500, 500, 0]),
        # What is stored costs nothing.
        (ALL, {"stored": 1000}, [1000] * 5),
        (replace(ALL, common=500), {"stored": 500}, [1000, 500, 500, 500, 500]),
    ],
    ids=[
        *("a new prompt and its system message", "missed", "seen before the window", "a part missed, and it grew"),
        *("all missed", "in memory", "nearly all in memory", "a part in memory"),
        *("the request asks for it", "marks", "all is stored", "a part is stored"),
    ],
)
def test_what_may_never_be_missed_is_left_out_first_and_what_was_missed_last(
    selection: Selection, changes: dict[str, Any], kept: list[int]
) -> None:
    found = [within(used, selection, **changes) for used in (0.0, 0.22, 0.6, 0.8, 0.96)]
    assert [one.kept for one in found] == kept
    assert {one.reason for one in found if one.kept < 1000} <= {"write_budget"}
    assert {one.reason for one in found if one.kept == 1000} == {selection.reason}


def test_a_prompt_must_fit_in_what_is_left() -> None:
    big = replace(SPENDING, bytes_per_token=600)
    assert within_budget(ALL, PROMPT, big, RULES, stored=0, had=0, is_asked=False).kept == 200


@pytest.mark.parametrize(("is_asked", "used"), [(False, 250_000), (True, 950_000)])
def test_a_reply_must_fit_too_with_its_prompt(used: int, *, is_asked: bool) -> None:
    spending = replace(SPENDING, used_bytes=used - 1010, state_bytes=10)
    assert spending.allows_reply(1500, 500, is_asked=is_asked)
    assert not spending.allows_reply(1501, 500, is_asked=is_asked)


def test_states_count_and_what_is_left_ends_at_a_checkpoint() -> None:
    rules = replace(RULES, state="token_checkpoints", state_bytes=150_000, min_tokens=50)
    selection = replace(ALL, checkpoints=(200, 1000), votes=(3, 1))
    changes: dict[str, Any] = {"rules": rules, "state_bytes": 150_000}
    assert within(0.0, selection, stored=200, had=200, **changes) == selection
    shorter = within(0.0, selection, **changes)
    assert (shorter.kept, shorter.checkpoints, shorter.votes, shorter.reason) == (200, (200,), (3,), "write_budget")
    assert within(0.7, selection, **changes).kept == 0
    assert within(0.1, replace(ALL, checkpoints=(1000,)), **changes).kept == 0, "none in what may be kept"


@pytest.mark.parametrize(("state", "kept"), [("token", 200), ("sliceable", 192)])
def test_a_part_has_no_end_no_reply_and_at_least_the_fewest_tokens(state: Any, kept: int) -> None:
    rules, whole = replace(RULES, state=state), replace(ALL, aligned=992, keep_tail=True, saves_reply=True)
    found = within(0.6, whole, rules=rules)
    assert (found.kept, found.keep_tail, found.saves_reply) == (kept, False, False)
    assert within(0.6, whole, rules=replace(rules, min_tokens=201)).kept == 0


def test_a_share_has_its_part_of_the_budget_while_others_ask_and_all_of_it_alone() -> None:
    for number, own, kept in ((1, 400_000, 1000), (2, 400_000, 1000), (3, 400_000, 0), (3, 0, 1000)):
        spending = replace(SPENDING, used_bytes=400_000, num_shares=number, own_bytes=own)
        assert within_budget(ALL, PROMPT, spending, RULES, stored=0, had=0, is_asked=True).kept == kept
        assert spending.allows_reply(1000, 0, is_asked=True) == (kept > 0)


def test_what_was_spent_counts_for_a_day_and_a_share_that_wrote_nothing_has_no_part() -> None:
    spent = SpentByShare()
    spent.add("greedy", 700, 0.0)
    spent.add("greedy", 200, 7200.0)
    assert spent.spent_by("greedy", 10_000.0) == (900, 1)
    assert spent.spent_by("other", 86_000.0) == (0, 2)
    assert spent.spent_by("greedy", 90_000.0) == (200, 1)
    spent.add("other", 1, 90_000.0)
    assert spent.spent_by("greedy", 90_000.0) == (200, 2)
    assert spent.spent_by("greedy", 200_000.0) == (0, 1)


def test_more_shares_than_any_machine_has_do_not_make_all_parts_small() -> None:
    spent = SpentByShare()
    for number in range(2000):
        spent.add(f"address {number}", 1, 0.0)
    num_bytes, num_shares = spent.spent_by("address 1999", 0.0)
    assert num_shares <= 257
    assert num_bytes == 2000 - num_shares + 1, "the last ones have one part together"
    assert spent.spent_by("address 0", 0.0) == (1, num_shares)


# As a request sees it.

MIB = 1 << 20
FULL = CacheOptions(scope=Scope("full"))
ASKED = replace(FULL, is_asked=True)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    settings = tiny_settings(tmp_path, kv_cache_write_budget="1MiB/day")
    runner = Runner(tiny_llama(), settings, exact_at="token")
    yield runner
    runner.close()


def ask(runner: Runner, seed: int, options: CacheOptions = FULL, num_blocks: int = 4, reply: int = 0) -> CacheReport:
    report = runner.run_prompt(Prompt(random_prompt(seed, num_blocks * BLOCK)), options, reply=reply).report
    runner.flush()
    return report


def spend(runner: Runner, tenths: int) -> None:
    runner.cache.store.meter.count(tenths * MIB // 10)


def test_a_prompt_that_is_left_out_says_so_and_one_that_comes_again_is_saved(runner: Runner) -> None:
    spend(runner, 6)
    first = ask(runner, 1)
    assert (first.selection.reason, first.selection.kept, first.saved) == ("write_budget", 0, "none")
    stats = runner.cache.stats()
    assert (stats["unaffordable"], stats["blocks"], stats["dropped"]) == (1, 0, 0)
    assert 0.6 * MIB <= stats["disk_written_last_day_bytes"] == stats["disk_written_bytes"]
    assert stats["write_budget_bytes"] == MIB
    again = ask(runner, 1)
    assert (again.selection.reason, again.restored, again.saved) == ("full", 0, "queued")
    assert ask(runner, 1).restored == 4 * BLOCK


def test_what_a_request_asks_for_itself_is_saved_until_nothing_is_left_over_a_restart(runner: Runner) -> None:
    spend(runner, 8)
    assert ask(runner, 1, ASKED).saved == "queued"
    spend(runner, 2)
    runner.reopen()
    spent = ask(runner, 2, ASKED)
    assert (spent.selection.reason, spent.saved) == ("write_budget", "none")
    assert ask(runner, 1, ASKED).restored == 4 * BLOCK


def test_a_reply_that_has_no_room_is_left_out(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompt and its reply count here, not what the file takes beside."""
    monkeypatch.setattr(WrittenBytes, "last_day", lambda _written, _now: 0)
    runner.cache.store.meter.budget_bytes = 4 * 8 * BLOCK * runner.layout.bytes_per_token
    assert ask(runner, 1, reply=20 * BLOCK).selection.kept == 4 * BLOCK
    assert runner.cache.stats()["saved_tokens"] == 4 * BLOCK


def test_a_prompt_that_is_faster_to_compute_is_not_said_to_lack_room(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.cache.cost_model, "allows", lambda *_, **_kw: False)
    spend(runner, 3)
    prompt = Prompt(random_prompt(1, 8 * BLOCK), boundaries=(4 * BLOCK,), system_end=4 * BLOCK)
    assert runner.run_prompt(prompt, FULL).report.selection.reason == "faster_to_compute"
    assert runner.cache.stats()["unaffordable"] == 0


def test_a_cancelled_prompt_is_not_left_on_the_disk_when_the_budget_is_half_used(runner: Runner) -> None:
    spend(runner, 6)
    assert runner.cancelled(Prompt(random_prompt(1, 8 * BLOCK)), FULL, steps=2).saved == "none"


@pytest.mark.parametrize("has_salts", [False, True])
def test_one_share_cannot_spend_the_part_of_another_that_asks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, has_salts: bool
) -> None:
    """With `full`, which each request asks for itself. Only the prompts count here, not what the file takes beside."""
    monkeypatch.setattr(WrittenBytes, "last_day", lambda _written, _now: 0)
    runner.cache.store.meter.budget_bytes = 24 * BLOCK * runner.layout.bytes_per_token
    greedy, other = (replace(ASKED, share=name) for name in ("user 1000", "user 1001"))
    salted = [replace(greedy, tenant=SHARED.with_salt(str(number))) if has_salts else greedy for number in range(4)]
    asking = [(0, other), *enumerate(salted, 1), (9, other)]
    saved = [ask(runner, seed, options).saved for seed, options in asking]
    assert saved == ["queued", "queued", "queued", "none", "none", "queued"]


def test_a_reply_that_is_not_saved_costs_its_share_nothing(runner: Runner) -> None:
    options = CacheOptions(scope=Scope("tokens", 4 * BLOCK), share="user 1000")
    ask(runner, 1, options, reply=BLOCK)
    num_bytes, _ = runner.cache.tiered.spent.spent_by(options.share, runner.cache.store.clock())
    assert num_bytes == 4 * BLOCK * runner.layout.bytes_per_token
