"""The daemon that `diskprefix top` watches, and its state as texts and tables for a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diskprefix.errors import DiskPrefixError, SettingsError
from diskprefix.extras.daemon_call import Call
from diskprefix.printable import printable_only, shown
from diskprefix.units import counted, format_age, format_duration, format_part, format_size

State = dict[str, Any]
_UPDATE_S, _MOST_ENDED = 0.5, 400
# A colon marks a column of numbers.
_REQUEST = "state", "prompt:", "restored:", "TTFT:", "reply:", "tok/s:", "left:", "time:"
_DECISION = "ago", "prompt:", "restored:", "TTFT:", "tok/s:", "why"


class Source:
    """A running daemon. Of one with several models, `model` is watched, or else one that is loaded."""

    def __init__(self, call: Call, name: str, model: str | None = None) -> None:
        self.name = name
        self._call, self._model = call, model
        self._watched: str | None = None

    def state(self, since: int) -> dict[str, Any]:
        """Returns the state as in `/dashboard/state`. For several models, `models` has all in memory as `/props` does.
        Raises `SettingsError` if the key is refused, else `DiskPrefixError`."""
        props, path, several = self._call("GET", "/props", None), f"/dashboard/state?since={since}", {}
        # A daemon that begins or ends has no properties.
        if props.status == 200 and "models" in props.body:
            several = {"models": props.body["models"]}
            path += f"&model={quote(self._choose(props.body['models']), safe='')}"
        answer = self._call("GET", path, None)
        if answer.status in (401, 403):
            raise SettingsError(f"--api-key: {answer.message}")
        if answer.status != 200:
            raise DiskPrefixError(f"the daemon answers: {answer.message}")
        found: dict[str, Any] = answer.body | several
        return found

    def _choose(self, places: list[dict[str, Any]]) -> str:
        """Goes on with the same model while it is loaded. Raises `DiskPrefixError` if it is another one, which counts
        its requests from the start, or none."""
        ready = [one["model"] for one in places if one["phase"] == "ready" and self._model in (None, one["model"])]
        was, self._watched = self._watched, self._watched if self._watched in ready else next(iter(ready), None)
        if self._watched is None:
            others = ", ".join(f"{place['model']} is {place['phase']}" for place in places)
            raise DiskPrefixError(f"{self._model or 'the model'} is not loaded; {others or 'a request loads one'}")
        if was not in (None, self._watched):
            raise DiskPrefixError(f"{was} is unloaded")
        return self._watched


def show(source: Source) -> None:
    """Shows `source` until `q` or Ctrl-C. A daemon that does not answer is asked again. Raises `SettingsError`."""
    ended: list[State] = []
    with suppress(KeyboardInterrupt), _keys() as is_quit, Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                state = source.state(ended[-1]["number"] if ended else 0)
                ended = [*ended, *state["ended"]][-_MOST_ENDED:]
                live.update(screen(state, ended, source.name), refresh=True)
            except SettingsError:
                raise
            except DiskPrefixError as error:
                # A daemon that is started again counts its requests from the start.
                ended = []
                live.update(Text(f"diskprefix {printable_only(error.message)}"), refresh=True)
            if is_quit():
                return


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Yields a function that waits for a key or the next update, and returns whether `q` was pressed."""
    keys = [0] if sys.stdin.isatty() else []

    def is_quit() -> bool:
        # Nothing is read from a terminal that has gone.
        return bool(select.select(keys, [], [], _UPDATE_S)[0]) and os.read(0, 1) in (b"q", b"Q", b"")

    if not keys:
        yield is_quit
        return
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    try:
        yield is_quit
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def screen(state: State, ended: Sequence[State], name: str) -> RenderableType:
    """Returns all that is shown. `ended` has the requests that ended, the latest last."""
    model, said = state["model"]["name"] if state["model"] else "…", state["message"] or state["status"]
    requests = _table(_REQUEST, map(_request, state["requests"]))
    problems = (f"{one['level']} {one['what']} → {one['todo']}" for one in state["problems"])
    return Group(
        Text(printable_only(f"diskprefix {model} · {state['scope']} · {said} · {name} · q ends it"), "bold"),
        Text(_gain(state, ended)),
        _meters(state) if state["memory"] and state["cache"] else Text(),
        *(Text(printable_only(_place(one))) for one in state.get("models", ())),
        requests if state["requests"] else Text("nothing runs"),
        *(Text(printable_only(problem), "bold") for problem in problems),
        _table(_DECISION, (_decision(one, state["now"]) for one in reversed(ended))),
    )


def _gain(state: State, ended: Sequence[State]) -> str:
    found = [one for one in ended if one["prefix_cache"]]
    restored = sum(one["prefix_cache"]["restored"] for one in found)
    of_last = _share(restored, sum(one["prompt_tokens"] for one in found))
    savings = (state["cache"] or {}).get("savings") or {}
    today, total = savings.get("today", {}), savings.get("total", {})
    of_today = _share(today.get("restored_tokens", 0), today.get("prompt_tokens", 0))
    shares = f"restored {of_today} of today's prompt tokens, {of_last} of the last {counted(len(found), 'request')}"
    saved_s, all_saved_s = (_duration(counts.get("saved_s")) for counts in (today, total))
    return f"{shares}\ncompute saved {saved_s} today, {all_saved_s} in all"


def _meters(state: State) -> Table:
    memory, cache = state["memory"], state["cache"]
    waiting = sum(one["state"] == "waiting" for one in state["requests"]) + state["arriving"]
    kept = f"{memory['kept_tokens']:,} tokens kept"
    running = f"{memory['running']} of {memory['max_running']} run, {waiting} wait, {kept}"
    stored = f"{cache['entries']:,} prompts, {cache['evicted_blocks']:,} evicted"
    queued = f"{cache['pending']:,} wait, {cache['dropped']:,} dropped, {cache['unaffordable']:,} left out"
    last_day, budget = cache["disk_written_last_day_bytes"], cache["write_budget_bytes"]
    written = format_part(last_day, budget) if budget else format_size(last_day)
    rows = (
        ("memory", format_part(memory["used_bytes"], memory["limit_bytes"]), running),
        ("store", format_part(cache["used_bytes"], cache["budget_bytes"]), stored),
        ("writer", format_part(cache["pending_bytes"], cache["buffer_bytes"]), queued),
        ("disk, 24 h", written, f"{format_size(cache['disk_written_bytes'])} in all"),
    )
    return _table(("", "", ""), rows)


def _place(one: State) -> str:
    pinned = " · pinned" if one["is_pinned"] else ""
    figures = f"{format_size(one['needed_bytes'])} · {counted(one['num_active'], 'request')}"
    return f"{one['model']} · {one['phase']}{pinned} · {figures}"


def _request(one: State) -> Sequence[str]:
    tokens = f"{one['ready_tokens']:,}/{one['prompt_tokens']:,}"
    restored = _share(one["restored_tokens"], one["prompt_tokens"])
    speed = f"{one['tokens_per_s']:.1f}" if one["tokens_per_s"] is not None else "–"
    left, elapsed = _duration(one["seconds_left"]), _duration(one["elapsed_s"])
    times = _duration(one["ttft_s"]), f"{one['reply_tokens']:,}", speed, left, elapsed
    return one["state"], tokens, restored, *times


def _decision(one: State, now: float) -> Sequence[str]:
    cache, timings, age = one["prefix_cache"], one["timings"], format_age(now - one["ended_at"])
    if cache is None:
        return age, "–", "–", "–", "–", f"{one['status']} {one['error'] or 'the client left'}"
    speed = f"{timings['decode_tokens_per_s']:.1f}"
    if accepted := timings.get("accepted_tokens"):
        # So many tokens a step.
        speed += f" ×{one['reply_tokens'] / max(1, one['reply_tokens'] - accepted):.1f}"
    speeds = _duration(timings["ttft_ms"] / 1e3), speed
    why = (cache.get("miss_reason") or cache.get("source", "")).replace("_", " ")
    return age, f"{one['prompt_tokens']:,}", _share(cache["restored"], one["prompt_tokens"]), *speeds, why


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=any(titles))
    for title in titles:
        table.add_column(title.rstrip(":"), justify="right" if title.endswith(":") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(shown(cell, 40)) for cell in row))
    return table
