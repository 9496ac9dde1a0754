"""What `top` shows, and of which model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from diskprefix.desk.shared.daemon_call import Answer
from diskprefix.desk.watch.top import live
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.units import format_part
from tests.daemon.server.daemon_process import DaemonProcess
from tests.desk.conftest import Run
from tests.desk.conftest import run as run
from tests.desk.terminal import Terminal

NOW = 1_800_000_000.0
STATE: dict[str, Any] = {
    "now": NOW,
    "status": "ok",
    "message": None,
    "model": {"name": "tiny-chat"},
    "scope": "auto:30",
    "arriving": 0,
    "requests": [],
    "ended": [],
    "memory": {"limit_bytes": 1 << 30, "used_bytes": 1 << 29, "running": 1, "max_running": 8, "kept_tokens": 41_200},
    "cache": {
        "used_bytes": 3 << 20,
        "budget_bytes": 4 << 20,
        "pending_bytes": 0,
        "pending": 0,
        "buffer_bytes": 1 << 20,
        "dropped": 0,
        "unaffordable": 0,
        "disk_written_bytes": 9 << 30,
        "disk_written_last_day_bytes": 1 << 30,
        "write_budget_bytes": 0,
        "entries": 3,
        "evicted_blocks": 44,
        "savings": {
            "today": {"saved_s": 90.0, "prompt_tokens": 1000, "restored_tokens": 470},
            "total": {"saved_s": 7200.0},
        },
    },
    "problems": [],
}
REQUEST: dict[str, Any] = {
    "state": "decoding",
    "prompt_tokens": 1000,
    "restored_tokens": 900,
    "ready_tokens": 1000,
    "reply_tokens": 20,
    "elapsed_s": 2.5,
    "ttft_s": 0.25,
    "tokens_per_s": 31.2,
    "seconds_left": None,
}


def ended(number: int = 1, *, restored: int = 900, **changes: Any) -> dict[str, Any]:
    how = {"source": "disk"} if restored else {"miss_reason": "not_stored"}
    timings = {"ttft_ms": 200.0 if restored else 4000.0, "decode_tokens_per_s": 30.0, "accepted_tokens": restored and 5}
    figures = {
        "prompt_tokens": 1000,
        "reply_tokens": 10,
        "prefix_cache": {"restored": restored, **how},
        "timings": timings,
    }
    how_it_ended = {"status": 200, "error": None, "is_stopped": False}
    return {"number": number, "ended_at": NOW - 90} | how_it_ended | figures | changes


def lines(now: dict[str, Any], *over: dict[str, Any]) -> list[str]:
    console = Console(width=80, no_color=True, color_system=None)
    with console.capture() as printed:
        console.print(live.screen(now, over, "http://x"))
    return [" ".join(line.split()) for line in printed.get().splitlines()]


def test_the_first_lines_say_who_is_watched_and_how_it_is() -> None:
    assert lines(STATE)[0] == "diskprefix tiny-chat · ok · http://x · q ends it"
    loading = STATE | {"status": "loading", "message": "reading weights", "model": None, "cache": None, "memory": None}
    assert lines(loading)[:3] == [
        "diskprefix … · reading weights · http://x · q ends it",
        "restored – of today's prompt tokens, – of the last 0 requests",
        "computing saved: – today, – in all",
    ]


def test_memory_store_and_writer_are_shown_with_their_limits() -> None:
    found = lines(STATE)
    assert "memory 0.5 of 1.0 GiB 1 of 8 run, 0 wait, 41,200 tokens kept" in found
    assert "store 3.0 of 4.0 MiB 3 prompts, 44 evicted" in found
    assert "written 1.0 GiB in 24 hours, 9.0 GiB in all" in found
    assert "nothing runs" in found
    assert not any(line.startswith("to write ") for line in found), "nothing waits"
    busy = {"pending": 2, "pending_bytes": 1 << 18, "dropped": 1}
    assert "to write 0.2 of 1.0 MiB 2 wait, 1 not saved, 0 left out" in lines(STATE | {"cache": STATE["cache"] | busy})


def test_each_request_is_a_line_with_its_figures() -> None:
    nothing = {"restored_tokens": 0, "ready_tokens": 0, "ttft_s": None, "tokens_per_s": None}
    nothing |= {"reply_tokens": 0}
    begun = nothing | {"state": "prefilling", "ready_tokens": 600, "tokens_per_s": 400.0, "seconds_left": 1.0}
    found = lines(STATE | {"requests": [REQUEST, REQUEST | nothing | {"state": "waiting"}, REQUEST | begun]})
    assert "decoding 1,000/1,000 90.0% 250 ms 20 31.2 – 2.5 s" in found
    assert "waiting 0/1,000 0.0% – 0 – – 2.5 s" in found
    assert "prefilling 600/1,000 0.0% – 0 400.0 1.0 s 2.5 s" in found


def test_top_lists_restored_tokens_of_the_latest_requests_first() -> None:
    failed = ended(3, status=400, error="top_p: too large\x1b[31m" * 9, prefix_cache=None, timings=None)
    stopped = ended(4, status=499, is_stopped=True, prefix_cache=None, timings=None)
    found = lines(STATE, ended(1), ended(2, restored=0), failed, stopped)
    restored = "restored 47.0% of today's prompt tokens, 45.0% of the last 2 requests"
    assert found[found.index(restored) + 1] == "computing saved: 90.0 s today, 2.0 h in all"
    table = found[found.index("ago prompt restored first token tokens/s why") + 1 :]
    assert table[0] == "1 min 1,000 – – – stopped by the client", "which is no failure"
    assert table[1:3] == ["1 min – – – – 400 top_p: too large\\x1b[31mtop_p:", "too …"]
    assert table[3:] == ["1 min 1,000 0.0% 4.0 s 30.0 not stored", "1 min 1,000 90.0% 200 ms 30.0 ×2.0 disk"]


def test_a_problem_says_what_to_do() -> None:
    problem = {"level": "error", "what": "nothing is saved", "todo": "make room", "count": 2}
    assert "error nothing is saved → make room" in lines(STATE | {"problems": [problem]})


def test_each_model_of_several_has_a_line_with_its_state() -> None:
    place = {"model": "ash", "phase": "ready", "needed_bytes": 1 << 30, "num_active": 2, "is_pinned": True}
    other = place | {"model": "birch", "phase": "loading", "num_active": 1, "is_pinned": False}
    found = lines(STATE | {"models": [place, other]})
    assert found[found.index("ash · ready · pinned · 1.0 GiB · 2 requests") + 1] == (
        "birch · loading · 1.0 GiB · 1 request"
    )


def test_an_outage_is_waited_for_and_what_ended_before_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [
        STATE | {"ended": [ended(7)]},
        NotReady("no daemon"),
        STATE | {"ended": [ended(1)]},
        SettingsError("key"),
    ]
    asked: list[int] = []

    class Daemon(live.Source):
        def state(self, since: int) -> dict[str, Any]:
            asked.append(since)
            if isinstance(one := found[len(asked) - 1], Exception):
                raise one
            return one  # type: ignore[no-any-return]

    monkeypatch.setattr(live, "_UPDATE_S", 0.0)
    with pytest.raises(SettingsError, match="key"):
        live.show(Daemon(lambda *_: pytest.fail("nobody is asked"), "http://x"))
    assert asked == [0, 7, 0, 1]


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (7.52 * 2**30, 9.4 * 2**30, "7.5 of 9.4 GiB"),
        (2**30 - 1, 2**30, "1.0 of 1.0 GiB"),
        (3 << 20, 4 << 30, "3.0 MiB of 4.0 GiB"),
        (0, 1 << 40, "0.0 of 1.0 TiB"),
        (100, 900, "100 of 900 B"),
        (0, 0, "0 of 0 B"),
    ],
)
def test_two_sizes_have_one_unit_unless_one_is_much_smaller(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text


@pytest.mark.timing("a screen that is drawn anew each second")
@pytest.mark.parametrize("key", ["q", "\x03"])
def test_the_daemon_is_shown_at_a_terminal_until_q_or_ctrl_c(daemon: DaemonProcess, key: str) -> None:
    terminal = Terminal("top", "--url", daemon.url)
    terminal.wait_for("computing saved")
    assert f" · ok · {daemon.url}" in terminal.shown
    if key == "q":
        terminal.type("xq")
    assert (terminal.wait() if key == "q" else terminal.interrupt()) == 0


def test_at_a_terminal_without_a_daemon_there_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for url, exit_code in (("http://127.0.0.1:9", 1), ("ftp://x", 2)):
        run("top", "--url", url).assert_refused(exit_code, url)


class SmallRouter:
    """The answers of a daemon with several models. `loaded` has those in memory, and `asked` the paths that it got."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = loaded
        self.asked: list[str] = []

    def __call__(self, _method: str, path: str, _body: object) -> Answer:
        self.asked.append(path)
        places = [{"model": name, "phase": "ready"} for name in self.loaded]
        found: dict[str, Any] = {"models": places} if path == "/props" else {"status": "ok"}
        return Answer(200, json.dumps(found).encode())


def test_top_watches_one_model_as_long_as_it_is_loaded() -> None:
    router = SmallRouter("a/b", "birch")
    source = live.Source(router, "here")
    assert [place["model"] for place in source.state(0)["models"]] == ["a/b", "birch"]
    router.loaded = ("birch", "a/b")
    source.state(7)
    assert [path for path in router.asked if path != "/props"] == [
        "/dashboard/state?since=0&model=a%2Fb",
        "/dashboard/state?since=7&model=a%2Fb",
    ]
    router.loaded = ("birch",)
    with pytest.raises(DiskPrefixError, match="a/b is unloaded"):
        source.state(7)
    source.state(0)
    assert router.asked[-1] == "/dashboard/state?since=0&model=birch"


@pytest.mark.parametrize(
    ("model", "said"),
    [(None, "the model is not loaded; a request loads one"), ("ash", "ash is not loaded; birch is ready")],
)
def test_without_a_loaded_model_nothing_is_asked_of_one(model: str | None, said: str) -> None:
    router = SmallRouter(*(["birch"] if model else []))
    source = live.Source(router, "here", model)
    with pytest.raises(DiskPrefixError, match=said):
        source.state(0)
    assert router.asked == ["/props"]
    router.loaded = (model or "birch",)
    assert source.state(0)["status"] == "ok"


def test_top_shows_one_of_several_models_to_the_holder_of_a_key(daemon: DaemonProcess) -> None:
    terminal = Terminal("top", "--url", daemon.url, "--model", "tiny-chat", "--api-key", daemon.token)
    terminal.wait_for("computing saved")
    terminal.type("q")
    assert terminal.wait() == 0
