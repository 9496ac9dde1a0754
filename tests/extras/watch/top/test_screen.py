"""The screen of `top`, driven by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input, Static, TabbedContent, Tree

from diskprefix.errors import NotReady
from diskprefix.extras.watch.top.browser import Confirmation, PromptBrowser
from diskprefix.extras.watch.top.screen import TopApp
from tests.extras.watch.top.states import ended, request, saved, state

ALPHA, BETA, GAMMA = "aa" * 16, "bb" * 16, "cc" * 16


class Shown:
    """A source that shows what a test puts in."""

    name = "http://127.0.0.1:8642"

    def __init__(self, *states: dict[str, Any] | Exception | None) -> None:
        self.states = list(states)
        self.asked: list[int] = []
        self.saved = saved()
        self.deleted: list[str] = []

    def state(self, since: int) -> dict[str, Any] | None:
        self.asked.append(since)
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(found, Exception):
            raise found
        return found

    def entries(self) -> dict[str, Any]:
        return self.saved

    def delete(self, entry_id: str) -> int:
        self.deleted.append(entry_id)
        return 1 << 20


def drive(
    source: Shown,
    act: Callable[[TopApp, Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    update_s: float = 60.0,
) -> None:
    async def run() -> None:
        app = TopApp(source, update_s=update_s)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "Harbor" in "".join(app.query_one(PromptBrowser).previews.values()))
            await act(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await pilot.pause(0.005)


def text(app: TopApp, where: str) -> str:
    """What a part of the screen shows."""
    part = app.screen_stack[0].query_one(where, Static)
    return "\n".join("".join(segment.text for segment in part.render_line(y)) for y in range(part.size.height))


def lines(app: TopApp) -> list[str]:
    tree = app.screen_stack[0].query_one(Tree)
    return [tree.get_node_at_line(number).label.plain for number in range(tree.last_line + 1)]  # type: ignore[union-attr]


def test_the_screen_follows_the_daemon_through_an_outage() -> None:
    first = state(requests=[request(state="prefilling", ready_tokens=400)], ended=[ended(7)])
    after = state(requests=[request(state="decoding")], ended=[ended(1, restored=0)])
    source = Shown(first, NotReady("no daemon answers"), after, after, state())

    async def look(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "nothing runs" in text(app, "#requests"))
        assert "ok" in text(app, "#header")
        # The daemon was started again: what ended before it is forgotten, and its numbers begin anew.
        assert "not stored" in text(app, "#decisions")
        assert "disk" not in text(app, "#decisions")
        assert source.asked[:4] == [0, 7, 0, 0]

    drive(source, look, update_s=0.02)


def test_a_small_and_a_wide_terminal_show_all_that_fits() -> None:
    source = Shown(state(requests=[request()], ended=[ended()], problems=[]))

    async def small(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "1,000/1,000" in text(app, "#requests"))
        assert not app.screen_stack[0].query_one("#hottest-box").display
        bottom = app.query_one("#decisions-box").region
        assert bottom.height >= 4
        assert bottom.bottom <= 23

    async def wide(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "into German" in text(app, "#hottest"))
        assert app.screen_stack[0].query_one("#hottest-box").display

    drive(source, small)
    drive(source, wide, size=(140, 40))


def test_saved_prompts_are_filtered_sorted_and_expanded_by_keys() -> None:
    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("2")
        assert [line.split(" · ")[0].split()[0] for line in lines(app)] == ["2", "aaaaaaaa", "bbbbbbbb", "cccccccc"]
        await pilot.press("s")
        assert [line.split()[0] for line in lines(app)] == ["2", "bbbbbbbb", "aaaaaaaa", "cccccccc"]
        await pilot.press("t")
        assert [line.split()[0] for line in lines(app)] == ["cccccccc", "bbbbbbbb", "aaaaaaaa"]
        await pilot.press("t", "slash", *"then?")
        assert [line.split()[0] for line in lines(app)] == ["2", "bbbbbbbb"]
        await pilot.press("enter", "down", "enter")
        assert any("saved" in line for line in lines(app)), "the prompt's own lines are shown"
        await pilot.press("slash", "escape")
        assert app.query_one(Input).value == ""
        assert "3 of 3 saved prompts, by hits" in text(app, "#order")

    drive(Shown(state()), act)


def test_nothing_is_deleted_before_the_question_is_answered_with_yes() -> None:
    source = Shown(state())

    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("2", "d")
        assert "choose a saved prompt" in text(app, "#order")
        await pilot.press("down", "d")
        assert isinstance(app.screen, Confirmation)
        assert app.focused is not None
        assert app.focused.id == "no"
        await pilot.press("enter")
        await pilot.press("d", "escape")
        assert source.deleted == []
        await pilot.press("d", "y")
        await until(pilot, lambda: "deleted" in text(app, "#order"))
        assert source.deleted == [ALPHA]

    drive(source, act)


def test_what_may_not_be_deleted_is_not_asked_about() -> None:
    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("2", "down", "d")
        assert not isinstance(app.screen, Confirmation)
        assert "diskprefix purge" in text(app, "#order")

    drive(Shown(state(may_delete=False)), act)


def test_without_a_daemon_the_store_is_browsed() -> None:
    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.pause()
        assert app.query_one(TabbedContent).active == "saved"
        assert "no daemon: the store alone" in text(app, "#header")

    drive(Shown(None), act)
