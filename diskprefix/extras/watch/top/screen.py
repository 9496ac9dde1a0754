"""The screen of `diskprefix top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from diskprefix.errors import DiskPrefixError
from diskprefix.extras.watch.top import live
from diskprefix.extras.watch.top.browser import PromptBrowser
from diskprefix.extras.watch.top.sources import Source

_UPDATE_S = 0.5
_AGES_S = 5.0
"""The time between redraws without news. They update the ages."""
_MOST_ENDED = 400
_WIDE = 120


class TopApp(App[None]):
    """Shows a `Source`. A thread reads it, so that the screen answers keys while the daemon is slow."""

    TITLE = "diskprefix top"
    CSS_PATH = "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide")]  # noqa: RUF012 - textual declares its type
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('now')", "Now"),
        Binding("2", "show('saved')", "Saved"),
        Binding("3", "show('problems')", "Problems"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, source: Source, update_s: float = _UPDATE_S) -> None:
        super().__init__()
        self._source = source
        self._update_s = update_s
        self._stopped = threading.Event()
        self._state: dict[str, Any] | None = None
        self._ended: list[dict[str, Any]] = []
        self._trouble: str | None = None
        self._written = -1
        self._drawn_at = float("-inf")
        self._browser = PromptBrowser(source)
        self._tabs = TabbedContent(initial="now")
        names = ("header", "figures", "requests", "decisions", "hottest", "problem-list")
        self._parts = {name: Static(id=name) for name in names}

    def compose(self) -> ComposeResult:
        yield self._parts["header"]
        with self._tabs:
            with TabPane("Now", id="now"):
                yield self._parts["figures"]
                yield Static("Requests", classes="title")
                with VerticalScroll(id="requests-box"):
                    yield self._parts["requests"]
                with Horizontal():
                    with VerticalScroll(id="decisions-box"):
                        yield Static("Last requests, and what the cache decided", classes="title")
                        yield self._parts["decisions"]
                    with VerticalScroll(id="hottest-box"):
                        yield Static("Hottest prefixes", classes="title")
                        yield self._parts["hottest"]
            with TabPane("Saved", id="saved"):
                yield self._browser
            with TabPane("Problems", id="problems"), VerticalScroll():
                yield self._parts["problem-list"]
        yield Footer()

    def on_mount(self) -> None:
        # A daemon thread, so that waiting for an answer does not keep the program from ending.
        threading.Thread(target=self._read, name="top", daemon=True).start()

    def on_unmount(self) -> None:
        self._stopped.set()

    def action_show(self, tab: str) -> None:
        self._tabs.active = tab
        if tab == "saved":
            self._browser.focus_tree()

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()

    def on_prompt_browser_read(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _read(self) -> None:
        """Reads the source in a loop."""
        since, restarted = 0, False
        while not self._stopped.is_set():
            try:
                state = self._source.state(since)
                if state is not None and restarted:
                    # A restarted daemon counts requests from the start.
                    state, restarted = self._source.state(0), False
                    self._tell(self._forget)
                if state is not None and state["ended"]:
                    since = state["ended"][-1]["number"]
                self._tell(lambda state=state: self._update(state))  # type: ignore[misc]
            except DiskPrefixError as error:
                since, restarted = 0, True
                self._tell(lambda said=error.message: self._fail(said))  # type: ignore[misc]
            if self._stopped.wait(self._update_s):
                return

    def _tell(self, act: Callable[[], None]) -> None:
        """Calls `act` in the screen's thread, unless the screen has ended."""
        self.call_later(lambda: None if self._stopped.is_set() else act())

    def _forget(self) -> None:
        self._ended = []

    def _fail(self, said: str) -> None:
        self._trouble = said
        self._draw()

    def _update(self, state: dict[str, Any] | None) -> None:
        is_news = self._trouble is not None or _without_time(state) != _without_time(self._state)
        self._state, self._trouble = state, None
        if state is None:
            if self._written < 0:
                self._written = 0
                self.action_show("saved")
                self._browser.read()
        else:
            self._ended = [*self._ended, *state["ended"]][-_MOST_ENDED:]
            self._browser.may_delete = state["may_delete"]
            self._read_saved(state)
        if is_news or time.monotonic() >= self._drawn_at + _AGES_S:
            self._draw()

    def _read_saved(self, state: dict[str, Any]) -> None:
        """Reads the saved prompts again if something was written."""
        cache = state["cache"]
        is_settled = cache is not None and (cache["pending"] == 0 or self._written < 0)
        if is_settled and cache["saved_bytes"] != self._written:
            self._written = cache["saved_bytes"]
            self._browser.read()

    def _draw(self) -> None:
        """Draws what can be seen."""
        self._drawn_at = time.monotonic()
        state, parts, width = self._state, self._parts, self.size.width - 4
        parts["header"].update(live.header(state, self._source.name, self._trouble))
        if state is None:
            return
        if self._tabs.active == "now":
            self._draw_now(state, width)
        elif self._tabs.active == "problems":
            parts["problem-list"].update(live.problems(state))
        count = len(state["problems"])
        self._tabs.get_tab("problems").label = f"Problems ({count})" if count else "Problems"

    def _draw_now(self, state: dict[str, Any], width: int) -> None:
        parts, is_wide = self._parts, width >= _WIDE - 4
        parts["figures"].update(live.figures(state, self._ended, width))
        parts["requests"].update(live.requests(state, width))
        parts["decisions"].update(live.decisions(self._ended, state["now"], width * 3 // 5 if is_wide else width))
        if is_wide:
            browser = self._browser
            hottest = live.hottest(browser.trees, browser.previews, state["now"], width * 2 // 5)
            parts["hottest"].update(hottest)


def _without_time(state: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (state or {}).items() if name != "now"}
