"""The tree of stored prompts is read seldom, and shows texts only to those who may see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import EntryNotFound
from diskprefix.extras.watch.dashboard import entries
from diskprefix.extras.watch.dashboard.entries import SavedPrompts
from diskprefix.store.purge import Purged, delete_entry, purge
from diskprefix.store.store import Store
from tests.store.building import BLOCK, open_store, prompt, publication


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 3 * BLOCK)))
    yield store
    store.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The stores that were read, a reading each."""
    read, found = entries._read, []

    def noted(store: Store) -> Any:
        found.append(store)
        return read(store)

    monkeypatch.setattr(entries, "_read", noted)
    return found


async def looked(browser: SavedPrompts, store: Store, times: int = 1, *, with_texts: bool = True) -> list[Any]:
    found = [await browser.entries(store, with_texts=with_texts) for _ in range(times)]
    assert all(each["age_s"] >= 0 and each["again_s"] >= 0 for each in found)
    return [each["entries"] for each in found]


@pytest.mark.parametrize(("rest", "expected"), [(1e9, 1), (0, 3)])
def test_the_tree_is_not_read_again_before_its_time(
    store: Store, readings: list[Store], monkeypatch: pytest.MonkeyPatch, rest: float, expected: int
) -> None:
    monkeypatch.setattr(entries, "_REST", rest)
    assert len(asyncio.run(looked(SavedPrompts(), store, 3))[-1]) == 1
    assert len(readings) == expected


def test_an_answer_that_was_kept_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[dict[str, Any]]:
        browser = SavedPrompts()
        return [await browser.entries(store, with_texts=True) for _ in range(2)]

    monkeypatch.setattr(entries, "_REST", 1e9)
    read, kept = asyncio.run(ask())
    assert read["age_s"] == 0 < kept["age_s"]
    assert 0 < kept["again_s"] < read["again_s"]
    monkeypatch.setattr(entries, "_REST", 0)
    assert [(each["age_s"], each["again_s"]) for each in asyncio.run(ask())] == [(0, 0), (0, 0)]


def test_after_something_was_deleted_it_is_read_at_once(
    store: Store, readings: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_REST", 1e9)

    async def delete() -> list[Any]:
        browser = SavedPrompts()
        [[entry]] = await looked(browser, store)
        purged = await browser.delete(deleting(store), entry["id"])
        assert purged.entries == 1
        [left] = await looked(browser, store)
        return list(left)

    assert asyncio.run(delete()) == []
    assert len(readings) == 2


def deleting(store: Store) -> Callable[[str], Purged]:
    return lambda entry_id: delete_entry(entry_id, partial(purge, store, now=store.clock()))


@pytest.mark.parametrize("entry_id", ["", "zz", "00", "é", "00" * 16])
def test_what_is_no_saved_prompt_is_not_found(store: Store, entry_id: str) -> None:
    with pytest.raises(EntryNotFound):
        asyncio.run(SavedPrompts().delete(deleting(store), entry_id))
    assert len(asyncio.run(looked(SavedPrompts(), store))[0]) == 1


def test_texts_are_shown_to_those_who_may_see_them(store: Store) -> None:
    for with_texts in (True, False):
        [[entry]] = asyncio.run(looked(SavedPrompts(), store, with_texts=with_texts))
        assert ("hello" in json.dumps(entry)) is with_texts
