"""How often those who watch read the daemon's state and the tree of stored prompts, and which problems they see."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.daemon.server.recent import EndedRequest
from diskprefix.daemon.server.tenant_names import TenantNames
from diskprefix.daemon.server.threads import Threads
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.desk.watch.dashboard import entries
from diskprefix.desk.watch.dashboard.entries import SavedPrompts
from diskprefix.desk.watch.dashboard.problems import Problem, problems
from diskprefix.desk.watch.dashboard.watch import Watch
from diskprefix.desk.watch.lost_advice import InEffect, advised
from diskprefix.errors import EntryNotFound
from diskprefix.prefixstore.remote.counts import Counts
from diskprefix.prefixstore.store.purge import Purged, delete_entry, purge
from diskprefix.prefixstore.store.statistics.lost_tokens import hour_of
from diskprefix.prefixstore.store.store import Store
from diskprefix.setting import flag_of
from diskprefix.values import MISS_REASONS, words_of
from tests.daemon.server.scripted import STATS
from tests.prefixstore.store.building import BLOCK, open_store, prompt, publication


def daemon(status: str = "ok", **others: Any) -> Any:
    recent = SimpleNamespace(failures=[], since=lambda number: list(range(number, 2)))
    broken_lines = SimpleNamespace(texts={})
    fields = {"settings": Settings(), "serving": None, "status": status, "doing": "reading the weights"}
    return SimpleNamespace(**fields | {"num_arriving": 0, "recent": recent, "broken_lines": broken_lines} | others)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_what_it_does_is_told_while_it_loads() -> None:
    assert run(Watch(daemon("loading")).state())["message"] == "reading the weights"
    assert run(Watch(daemon("ok")).state())["message"] is None


WELL = dict(STATS) | {"quarantined": 0, "errors": 0, "dropped": 0, "unaffordable": 0, "evicted_blocks": 0}

REMOTE = Counts().as_dict() | {"url": "s3://b", "state": "ok"}


def failed(number: int, status: int = 400, error: str | None = "top_p: too large", **changes: Any) -> EndedRequest:
    figures: dict[str, Any] = {
        "ended_at": float(number),
        "elapsed_s": 0.1,
        "id": "r",
        "route": "/v1/messages",
    } | changes
    return EndedRequest(number=number, caller=None, status=status, error=error, **figures)


def test_a_daemon_that_is_well_has_no_problems() -> None:
    assert problems(WELL, [], []) == []
    assert problems(WELL | {"remote": REMOTE}, [], []) == []
    assert problems(None, [], []) == []


@pytest.mark.parametrize(
    ("change", "level", "what", "todo"),
    [
        ({"state": "degraded", "error": "the disk is full"}, "error", "the disk is full", "tries again"),
        ({"state": "unsupported"}, "warning", "without the cache", "list --architectures"),
        ({"quarantined": 3}, "error", "damaged records", "diskprefix verify"),
        ({"errors": 3}, "warning", "became misses", "log"),
        ({"dropped": 3}, "warning", "not saved whole", "--kv-cache-budget"),
        ({"dropped": 3, "full_disk": "the disk is full"}, "warning", "not saved whole", "the disk is full"),
        ({"unaffordable": 3}, "hint", "left out", "--kv-cache-write-budget"),
        ({"gate": {"state": "closed"}}, "hint", "computing is faster", "--kv-cache-gate off"),
        ({"remote": REMOTE | {"problem": "403"}}, "error", "nothing is shared: 403", "credentials"),
        ({"remote": REMOTE | {"state": "failing"}}, "warning", "s3://b does not answer", "access keys"),
        ({"remote": REMOTE | {"refused": {"mac": 2, "foreign": 0}}}, "warning", "refused: mac", "plants state"),
        ({"remote": REMOTE | {"dropped": 3}}, "hint", "could not be uploaded to s3://b", "--remote-write off"),
        ({"evicted_blocks": 3, "used_bytes": 95, "budget_bytes": 100}, "hint", "full", "--kv-cache-budget"),
    ],
)
def test_each_trouble_of_the_cache_is_told_with_what_to_do(
    change: dict[str, Any], level: str, what: str, todo: str
) -> None:
    [problem] = problems(WELL | change, [], [])
    assert problem.level == level
    assert what in problem.what
    assert todo in problem.todo


def test_evictions_are_no_problem_while_there_is_room() -> None:
    assert problems(WELL | {"evicted_blocks": 3, "used_bytes": 50, "budget_bytes": 100}, [], []) == []


LOST = {
    "cause": "diverged", "client": "", "tool": "", "line": "", "canonicalisers": (), "options": "", "requests": 2,
    "tokens": 5000, "hour": 2 * 10**9 // 3600,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what", "todo"),
    [
        (
            {"line": "cch=x#x", "canonicalisers": ["billing-header"]},
            "diverged: cch=b7e",
            "--canonicalise billing-header=on",
        ),
        ({"line": "Today is #"}, "diverged: Today is # (letters are masked as x, digits as #)", "end of the prompt"),
        ({"client": "opencode"}, "diverged, from opencode", "`diskprefix clients`"),
        ({"tool": "bash"}, "diverged, tool bash", "what the tool bash writes"),
        *(({"cause": cause}, words_of(cause), "") for cause in MISS_REASONS if cause != "diverged"),
        ({"cause": "not_stored"}, "not stored", "--kv-cache-budget"),
        (
            {"cause": "other_settings", "options": "--kv-type auto"},
            "other settings, stored with --kv-type auto",
            "start with --kv-type auto to find it",
        ),
    ],
)
def test_tokens_that_were_computed_again_are_told_with_what_helps(change: dict[str, Any], what: str, todo: str) -> None:
    [problem] = problems(WELL, advised([LOST | change, LOST | {"tokens": 10}], {"cch=x#x": "cch=b7e"}, []), [])
    assert problem.what == f"5,000 tokens of the last day were computed again: {what}"
    assert todo in problem.todo
    assert problem.todo


TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "--canonicalise": (
        {"line": "cch=x#x", "canonicalisers": ["billing-header"]},
        {"canonicalise": "billing-header=on"},
    ),
    "--kv-cache-gate": ({"cause": "faster_to_compute"}, {"kv_cache_gate": "off"}),
    "--kv-type": ({"cause": "other_settings", "options": "--kv-type q8"}, {"kv_type": "q8"}),
    "--speculative": (
        {"cause": "other_settings", "options": "--kv-type auto --speculative off"},
        {"speculative": "off"},
    ),
}
"""For options that rows of lost tokens advise: such a row, and settings with which its tokens are not lost again."""
# How much was too little, and how many tokens the prompts had, is not known.
UNDECIDED = {"--kv-cache-budget", "--kv-cache-min-tokens"}


@pytest.mark.parametrize("flag", TAKEN)
def test_tokens_whose_advice_was_taken_are_solved_and_no_problem(flag: str) -> None:
    change, taken = TAKEN[flag]
    before = InEffect(asdict(Settings()), 1e9)
    after = InEffect({**before.settings, **taken}, 2e9)
    row, other = LOST | change, LOST | {"cause": "image", "tokens": 3}
    of_several = InEffect({name: value for name, value in after.settings.items() if name not in taken}, 1e9)
    goes_on = row | {"hour": hour_of(2e9) + 1}
    for lost, daemons in (
        *((row, daemons) for daemons in ([], [before], [before, after], [of_several, after])),
        (goes_on, [after]),
    ):
        found = advised([lost, other], {}, daemons)
        assert [each["solved_since"] for each in found] == [None, None]
        assert "solved" not in found[0]["advice"]
    for daemons, since in (([after], 2e9), ([after, InEffect(after.settings, 1e9)], 2e9)):
        found = advised([row, other], {}, daemons)
        assert [each["cause"] for each in found] == ["image", row["cause"]]
        assert found[1]["solved_since"] == since
        assert f"solved: {flag if flag != '--speculative' else '--kv-type'} " in found[1]["advice"]
        assert problems(WELL, found, []) == []


def test_each_option_that_is_advised_for_lost_tokens_is_known_when_it_is_taken() -> None:
    causes = [*MISS_REASONS, "diverged"]
    rows = [LOST | {"cause": cause, "options": "--kv-type q8"} for cause in causes]
    rows[-1] |= {"canonicalisers": ["billing-header"]}
    told = "\n".join(row["advice"] for row in advised(rows, {}, []))
    named = set(re.findall(r"--[a-z-]+", told)) & {flag_of(name) for name in SETTINGS}
    assert named == {*TAKEN} - {"--speculative"} | UNDECIDED


def test_requests_that_failed_alike_are_one_problem_and_the_worst_come_first() -> None:
    ended = [failed(1), failed(2), failed(3, 500, None), failed(4, 503, "full"), failed(5, 499, None)]
    found = problems(WELL, [], ended)
    assert [(problem.level, problem.count, problem.last_at) for problem in found] == [
        ("error", 1, 3.0),
        ("warning", 1, 4.0),
        ("warning", 2, 2.0),
    ]
    assert isinstance(found[0], Problem)
    assert "log" in found[0].todo
    assert found[2].what == "/v1/messages answered 400: top_p: too large"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    yield store
    store.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    read, found = entries._read, []

    def noted(store: Store) -> Any:
        found.append(store)
        return read(store)

    monkeypatch.setattr(entries, "_read", noted)
    return found


async def looked(browser: SavedPrompts, store: Store, *, with_texts: bool = True) -> list[Any]:
    found = await browser.entries(store, TenantNames(), with_texts=with_texts)
    return list(found["entries"])


@pytest.mark.parametrize(("rest", "expected"), [(1e9, 1), (0, 3)])
def test_the_tree_is_not_read_again_before_its_time_and_an_answer_that_was_kept_says_so(
    store: Store, readings: list[Store], monkeypatch: pytest.MonkeyPatch, rest: float, expected: int
) -> None:
    monkeypatch.setattr(entries, "_REST", rest)

    async def ask() -> list[dict[str, Any]]:
        browser = SavedPrompts(Threads())
        return [await browser.entries(store, TenantNames(), with_texts=True) for _ in range(3)]

    first, _, last = asyncio.run(ask())
    assert (len(last["entries"]), len(readings), first["age_s"]) == (1, expected, 0)
    if rest:
        assert last["age_s"] > 0
        assert 0 < last["again_s"] < first["again_s"]
    else:
        assert (last["age_s"], last["again_s"]) == (0, 0)


def test_after_something_was_deleted_it_is_read_at_once(
    store: Store, readings: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_REST", 1e9)

    async def delete() -> list[Any]:
        browser = SavedPrompts(Threads())
        [entry] = await looked(browser, store)
        purged = await browser.delete(store, deleting(store), entry["id"])
        assert purged.entries == 1
        return await looked(browser, store)

    assert asyncio.run(delete()) == []
    assert len(readings) == 2


def deleting(store: Store) -> Callable[[str], Purged]:
    return lambda entry_id: delete_entry(entry_id, partial(purge, store, now=store.clock()))


@pytest.mark.parametrize("entry_id", ["", "zz", "00", "é", "00" * 16, "00" * 1000])
def test_what_is_no_saved_prompt_is_not_found(store: Store, entry_id: str) -> None:
    with pytest.raises(EntryNotFound):
        asyncio.run(SavedPrompts(Threads()).delete(store, deleting(store), entry_id))
    assert len(asyncio.run(looked(SavedPrompts(Threads()), store))) == 1


def test_texts_are_shown_to_those_who_may_see_them(store: Store) -> None:
    for with_texts in (True, False):
        [entry] = asyncio.run(looked(SavedPrompts(Threads()), store, with_texts=with_texts))
        assert ("hello" in json.dumps(entry)) is with_texts


def test_the_page_gives_a_deletion_the_limit_that_the_code_has() -> None:
    page = (Path(entries.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"`_DELETION_S`, (\d+) s", page) == [f"{entries._DELETION_S:.0f}"]
