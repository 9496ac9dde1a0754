from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diskprefix.cache.policy.select import Rules
from diskprefix.cache.policy.write_budget import Spending, SpentByKey, within_budget
from diskprefix.nouns import Mark, Prompt, Reason, Scope, Selection
from diskprefix.tokens import as_token_ids

RULES = Rules(block_size=16, min_tokens=100, cold_max=100, interval=100, state="token")
PROMPT = Prompt(as_token_ids(range(1000)), boundaries=(200, 500, 1000), system_end=200)
ALL = Selection(scope=Scope("auto", 30), prompt_tokens=1000, reason="learning", selected=1000, aligned=1000)


def kept(used: float, selection: Selection = ALL, prompt: Prompt = PROMPT, **changes: Any) -> tuple[int, Reason]:
    """What is kept if this share of the budget is used; the prompt itself takes a thousandth of it."""
    spending = Spending(used_bytes=int(used * 1e6), limit_bytes=1_000_000, bytes_per_token=1)
    arguments: dict[str, Any] = {"stored": 0, "had": 0, "is_asked": False, "rules": RULES} | changes
    found = within_budget(selection, prompt, spending, **arguments)
    return found.kept, found.reason


USED = (0.0, 0.22, 0.6, 0.8, 0.96)


def test_what_may_never_be_missed_is_left_out_first_and_what_was_missed_last() -> None:
    assert [kept(used)[0] for used in USED] == [1000, 200, 200, 0, 0], "a new prompt, and its system message"
    seen = replace(ALL, common=500)
    assert [kept(used, seen)[0] for used in USED] == [1000, 500, 500, 500, 0]
    assert [kept(used, replace(ALL, seen=500))[0] for used in USED] == [1000, 500, 500, 500, 0]
    goes_on = replace(seen, reason="continues")
    assert [kept(used, goes_on)[0] for used in USED] == [1000, 1000, 500, 500, 0]
    assert [kept(used, replace(ALL, common=1000))[0] for used in USED] == [1000, 1000, 1000, 1000, 0]
    assert kept(0.0) == (1000, "learning")
    assert {kept(used)[1] for used in USED[1:]} == {"write_budget"}


def test_what_is_in_memory_can_wait_until_it_was_missed() -> None:
    goes_on = replace(ALL, common=500, reason="continues")
    assert [kept(used, goes_on, had=500)[0] for used in USED] == [1000, 1000, 200, 0, 0]
    assert [kept(used, goes_on, had=401)[0] for used in USED] == [1000, 1000, 200, 0, 0], "too few tokens were missed"
    assert [kept(used, goes_on, had=400)[0] for used in USED] == [1000, 1000, 500, 500, 0]


def test_what_the_request_asks_for_has_room_as_long_as_there_is_any() -> None:
    assert [kept(used, is_asked=True)[0] for used in (0.6, 0.9, 0.96)] == [1000, 1000, 0]
    marked = replace(PROMPT, marks=(Mark(200), Mark(500)))
    assert [kept(used, prompt=marked)[0] for used in (0.1, 0.6, 0.9, 0.96)] == [1000, 500, 500, 0]


def test_what_is_stored_costs_nothing() -> None:
    assert kept(2.0, stored=1000) == (1000, "learning")
    assert kept(0.96, replace(ALL, common=500), stored=500) == (500, "write_budget")


def test_a_prompt_must_fit_in_what_is_left() -> None:
    big = Spending(used_bytes=0, limit_bytes=1_000_000, bytes_per_token=600)
    assert within_budget(ALL, PROMPT, big, RULES, stored=0, had=0, is_asked=False).kept == 200


@pytest.mark.parametrize(("is_asked", "used"), [(False, 250_000), (True, 950_000)])
def test_a_reply_must_fit_too_with_its_prompt(used: int, *, is_asked: bool) -> None:
    spending = Spending(used_bytes=used - 1010, limit_bytes=1_000_000, bytes_per_token=1, state_bytes=10)
    assert spending.allows_reply(1500, 500, is_asked=is_asked)
    assert not spending.allows_reply(1501, 500, is_asked=is_asked)


def test_states_count_and_what_is_left_ends_at_a_checkpoint() -> None:
    rules = replace(RULES, state="token_checkpoints", state_bytes=150_000, min_tokens=50)
    selection = replace(ALL, checkpoints=(200, 1000), votes=(3, 1))

    def part(used_bytes: int, stored: int = 0, selection: Selection = selection) -> Selection:
        spending = Spending(used_bytes=used_bytes, limit_bytes=1_000_000, bytes_per_token=1, state_bytes=150_000)
        return within_budget(selection, PROMPT, spending, rules, stored=stored, had=stored, is_asked=False)

    assert part(0, stored=200) == selection
    shorter = part(0)
    assert (shorter.kept, shorter.checkpoints, shorter.votes, shorter.reason) == (200, (200,), (3,), "write_budget")
    assert part(700_000).kept == 0
    assert part(100_000, selection=replace(selection, checkpoints=(1000,))).kept == 0, "none in what may be kept"


@pytest.mark.parametrize("state", ["token", "sliceable"])
def test_a_part_has_no_end_no_reply_and_at_least_the_fewest_tokens(state: Any) -> None:
    rules = replace(RULES, state=state)
    whole = replace(ALL, aligned=992, keep_tail=True, keeps_reply=True)
    spending = Spending(used_bytes=600_000, limit_bytes=1_000_000, bytes_per_token=1)

    def part(rules: Rules) -> Selection:
        return within_budget(whole, PROMPT, spending, rules, stored=0, had=0, is_asked=False)

    found = part(rules)
    assert (found.kept, found.keep_tail, found.keeps_reply) == (200 if state == "token" else 192, False, False)
    assert part(replace(rules, min_tokens=201)).kept == 0


def test_a_key_has_its_part_of_the_budget_while_others_ask_and_all_of_it_alone() -> None:
    spending = Spending(used_bytes=400_000, limit_bytes=1_000_000, bytes_per_token=1, own_bytes=400_000)
    shares = [
        replace(spending, num_keys=number, own_bytes=own)
        for number, own in ((1, 400_000), (2, 400_000), (3, 400_000), (3, 0))
    ]
    arguments: dict[str, Any] = {"stored": 0, "had": 0, "is_asked": True, "rules": RULES}
    assert [within_budget(ALL, PROMPT, one, **arguments).kept for one in shares] == [1000, 1000, 0, 1000]
    assert [one.allows_reply(1000, 0, is_asked=True) for one in shares] == [True, True, False, True]


def test_what_was_spent_counts_for_a_day_and_so_does_a_key_that_asked() -> None:
    spent = SpentByKey()
    spent.add("greedy", 700, 0.0)
    spent.add("greedy", 200, 7200.0)
    assert spent.of("greedy", 10_000.0) == (900, 1)
    assert spent.of("other", 86_000.0) == (0, 2)
    assert spent.of("greedy", 90_000.0) == (200, 2)
    assert spent.of("other", 200_000.0) == (0, 1)
