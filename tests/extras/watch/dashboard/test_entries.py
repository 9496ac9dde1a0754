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
from diskprefix.server.threads import Threads
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
    read, found = entries._read, []

    def noted(store: Store) -> Any:
        found.append(store)
        return read(store)

    monkeypatch.setattr(entries, "_read", noted)
    return found


async def looked(browser: SavedPrompts, store: Store, *, with_texts: bool = True) -> list[Any]:
    found = await browser.entries(store, with_texts=with_texts)
    return list(found["entries"])


@pytest.mark.parametrize(("rest", "expected"), [(1e9, 1), (0, 3)])
def test_the_tree_is_not_read_again_before_its_time_and_an_answer_that_was_kept_says_so(
    store: Store, readings: list[Store], monkeypatch: pytest.MonkeyPatch, rest: float, expected: int
) -> None:
    monkeypatch.setattr(entries, "_REST", rest)

    async def ask() -> list[dict[str, Any]]:
        browser = SavedPrompts(Threads())
        return [await browser.entries(store, with_texts=True) for _ in range(3)]

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
        purged = await browser.delete(deleting(store), entry["id"])
        assert purged.entries == 1
        return await looked(browser, store)

    assert asyncio.run(delete()) == []
    assert len(readings) == 2


def deleting(store: Store) -> Callable[[str], Purged]:
    return lambda entry_id: delete_entry(entry_id, partial(purge, store, now=store.clock()))


@pytest.mark.parametrize("entry_id", ["", "zz", "00", "é", "00" * 16])
def test_what_is_no_saved_prompt_is_not_found(store: Store, entry_id: str) -> None:
    with pytest.raises(EntryNotFound):
        asyncio.run(SavedPrompts(Threads()).delete(deleting(store), entry_id))
    assert len(asyncio.run(looked(SavedPrompts(Threads()), store))) == 1


def test_texts_are_shown_to_those_who_may_see_them(store: Store) -> None:
    for with_texts in (True, False):
        [entry] = asyncio.run(looked(SavedPrompts(Threads()), store, with_texts=with_texts))
        assert ("hello" in json.dumps(entry)) is with_texts
