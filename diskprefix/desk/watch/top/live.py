"""Shows the state of a daemon in a terminal, for `diskprefix top`."""

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

from diskprefix.desk.shared.daemon_call import Call
from diskprefix.errors import DiskPrefixError, SettingsError
from diskprefix.printable import printable_only, shown
from diskprefix.units import counted, format_age, format_duration, format_part, format_size
from diskprefix.values import words_of

State = dict[str, Any]
_UPDATE_S, _MAX_ENDED = 0.5, 400
# A colon marks a column of numbers.
_REQUEST = "state", "prompt:", "restored:", "first token:", "reply:", "tokens/s:", "left:", "time:"
_DECISION = "ago", "prompt:", "restored:", "first token:", "tokens/s:", "why"


class Source:
    """A running daemon. If it has several models, `model` is watched, by default one that is loaded."""

    def __init__(self, call: Call, name: str, model: str | None = None) -> None:
        self.name = name
        self._call, self._model = call, model
        self._watched: str | None = None

    def state(self, since: int) -> dict[str, Any]:
        """Returns the state as in `/dashboard/state`, for several models with the `models` of `/props`. Raises
        `SettingsError` if the key is refused, and `DiskPrefixError` for other refusals."""
        props, path, several = self._call("GET", "/props", None), f"/dashboard/state?since={since}", {}
        # A daemon that starts or stops has no properties.
        if props.status == 200 and "models" in props.body:
            several = {"models": props.body["models"]}
            path += f"&model={quote(self._choose(props.body['models']), safe='')}"
        answer = self._call("GET", path, None)
        if answer.status in (401, 403):
            raise SettingsError(f"--api-key: {answer.message}")
        if answer.status != 200:
            raise DiskPrefixError(f"the daemon answers: {answer.message}")
        state: dict[str, Any] = answer.body | several
        return state

    def _choose(self, models: list[dict[str, Any]]) -> str:
        """Returns the model to watch: the same as before, while it is loaded. Raises `DiskPrefixError` if none is
        loaded, or once if the model changes, because each model counts its requests from the start."""
        names = [model["model"] for model in models if model["phase"] == "ready"]
        ready = [name for name in names if self._model in (None, name)]
        before, self._watched = self._watched, self._watched if self._watched in ready else next(iter(ready), None)
        if self._watched is None:
            others = ", ".join(f"{model['model']} is {model['phase']}" for model in models)
            raise DiskPrefixError(f"{self._model or 'the model'} is not loaded; {others or 'a request loads one'}")
        if before not in (None, self._watched):
            raise DiskPrefixError(f"{before} is unloaded")
        return self._watched


def show(source: Source) -> None:
    """Shows `source` until `q` or Ctrl-C. A daemon that does not answer is asked again. Raises `SettingsError`."""
    ended: list[State] = []
    with suppress(KeyboardInterrupt), _keys() as is_quit, Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                state = source.state(ended[-1]["number"] if ended else 0)
                ended = [*ended, *state["ended"]][-_MAX_ENDED:]
                live.update(screen(state, ended, source.name), refresh=True)
            except SettingsError:
                raise
            except DiskPrefixError as error:
                # A daemon that was restarted counts its requests from the start.
                ended = []
                live.update(Text(f"diskprefix {printable_only(error.message)}"), refresh=True)
            if is_quit():
                return


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Yields a function that waits for a key or the next update, and returns whether `q` was pressed."""
    keys = [0] if sys.stdin.isatty() else []

    def is_quit() -> bool:
        # A terminal that was closed gives b"".
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
    """Returns the whole screen. `ended` has the ended requests, the latest last."""
    model, status = state["model"]["name"] if state["model"] else "…", state["message"] or state["status"]
    problems = (f"{problem['level']} {problem['what']} → {problem['todo']}" for problem in state["problems"])
    return Group(
        Text(printable_only(f"diskprefix {model} · {status} · {name} · q ends it"), "bold"),
        Text(_gain(state, ended)),
        _meters(state) if state["memory"] and state["cache"] else Text(),
        *(Text(printable_only(_model_line(model))) for model in state.get("models", ())),
        _table(_REQUEST, map(_request, state["requests"])) if state["requests"] else Text("nothing runs"),
        *(Text(printable_only(problem), "bold") for problem in problems),
        _table(_DECISION, (_decision(request, state["now"]) for request in reversed(ended))),
    )


def _gain(state: State, ended: Sequence[State]) -> str:
    last = [request for request in ended if request["prefix_cache"]]
    restored = sum(request["prefix_cache"]["restored"] for request in last)
    of_last = _share(restored, sum(request["prompt_tokens"] for request in last))
    savings = (state["cache"] or {}).get("savings") or {}
    today, total = savings.get("today", {}), savings.get("total", {})
    of_today = _share(today.get("restored_tokens", 0), today.get("prompt_tokens", 0))
    shares = f"restored {of_today} of today's prompt tokens, {of_last} of the last {counted(len(last), 'request')}"
    saved, of_all = _duration(today.get("saved_s")), _duration(total.get("saved_s"))
    return f"{shares}\ncomputing saved: {saved} today, {of_all} in all"


def _meters(state: State) -> Table:
    memory, cache = state["memory"], state["cache"]
    waiting = sum(request["state"] == "waiting" for request in state["requests"]) + state["arriving"]
    running = f"{memory['running']} of {memory['max_running']} run, {waiting} wait"
    running += f", {memory['kept_tokens']:,} tokens kept"
    stored = f"{cache['entries']:,} prompts, {cache['evicted_blocks']:,} evicted"
    queued = f"{cache['pending']:,} wait, {cache['dropped']:,} not saved, {cache['unaffordable']:,} left out"
    is_busy = any(cache[name] for name in ("pending", "dropped", "unaffordable"))
    to_write = ("to write", format_part(cache["pending_bytes"], cache["buffer_bytes"]), queued)
    last_day, budget = cache["disk_written_last_day_bytes"], cache["write_budget_bytes"]
    written = format_part(last_day, budget) if budget else format_size(last_day)
    rows = (
        ("memory", format_part(memory["used_bytes"], memory["limit_bytes"]), running),
        ("store", format_part(cache["used_bytes"], cache["budget_bytes"]), stored),
        *([to_write] if is_busy else []),
        ("written", written, f"in 24 hours, {format_size(cache['disk_written_bytes'])} in all"),
    )
    return _table(("", "", ""), rows)


def _model_line(model: State) -> str:
    pinned = " · pinned" if model["is_pinned"] else ""
    figures = f"{format_size(model['needed_bytes'])} · {counted(model['num_active'], 'request')}"
    return f"{model['model']} · {model['phase']}{pinned} · {figures}"


def _request(request: State) -> Sequence[str]:
    tokens = f"{request['ready_tokens']:,}/{request['prompt_tokens']:,}"
    restored = _share(request["restored_tokens"], request["prompt_tokens"])
    speed = f"{request['tokens_per_s']:.1f}" if request["tokens_per_s"] is not None else "–"
    ttft, left, elapsed = (_duration(request[name]) for name in ("ttft_s", "seconds_left", "elapsed_s"))
    return request["state"], tokens, restored, ttft, f"{request['reply_tokens']:,}", speed, left, elapsed


def _decision(request: State, now: float) -> Sequence[str]:
    cache, timings, age = request["prefix_cache"], request["timings"], format_age(now - request["ended_at"])
    if request["is_stopped"]:
        return age, f"{request['prompt_tokens']:,}", "–", "–", "–", "stopped by the client"
    if cache is None:
        return age, "–", "–", "–", "–", f"{request['status']} {request['error'] or 'no answer'}"
    speed = f"{timings['decode_tokens_per_s']:.1f}"
    if accepted := timings.get("accepted_tokens"):
        # The number of tokens for each step.
        speed += f" ×{request['reply_tokens'] / max(1, request['reply_tokens'] - accepted):.1f}"
    prompt, restored = f"{request['prompt_tokens']:,}", _share(cache["restored"], request["prompt_tokens"])
    why = words_of(cache.get("miss_reason") or cache.get("source", ""))
    return age, prompt, restored, _duration(timings["ttft_ms"] / 1e3), speed, why


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=any(titles))
    for title in titles:
        is_number = title.endswith(":")
        # Where a text is too long for the terminal, numbers and their titles stay whole.
        table.add_column(title.rstrip(":"), justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(shown(cell, 40)) for cell in row))
    return table
