"""The daemon's state as texts and tables for a terminal. Words and shapes say everything that colours say."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diskprefix.cli.tooling import plain
from diskprefix.printable import printable_only, shown
from diskprefix.units import format_age, format_duration, format_part, format_size

State = dict[str, Any]

_BAR, _COMPUTED, _REST = "█", "▒", "·"
"""The characters of a bar: restored or used; computed; the rest."""
_SHOWN = 50
_ROOMY, _WHY = 84, 17
"""The width of a table with all columns, and of the longest reason."""
_STYLES = {"error": "bold red", "warning": "bold yellow", "hint": "bold"}


def header(state: State | None, name: str, trouble: str | None) -> Text:
    """Returns one line with the name and the state of the daemon."""
    if trouble is not None:
        return Text.assemble(("diskprefix ", "bold"), (printable_only(trouble), "bold red"))
    if state is None:
        return Text.assemble(("diskprefix ", "bold"), "no daemon: the store alone · ", plain(name))
    model = state["model"]["name"] if state["model"] else "…"
    good = state["status"] == "ok"
    return Text.assemble(
        ("diskprefix ", "bold"),
        plain(f"{model} · {state['scope']} ·"),
        (f" {printable_only(state['message'] or state['status'])} ", "bold green" if good else "bold yellow"),
        plain(f"· {name}"),
    )


def figures(state: State, ended: Sequence[State], width: int) -> RenderableType:
    """Returns the gain of the cache, and how full memory and disk are."""
    replies = [one for one in ended if one["timings"]]
    cold, warm = (_ttft(replies, warm=warm) for warm in (False, True))
    prompt = sum(one["prompt_tokens"] for one in replies)
    restored = sum(one["prefix_cache"]["restored"] for one in replies)
    savings = (state["cache"] or {}).get("savings")
    today, in_all = (_duration(savings[name]["saved_s"] if savings else None) for name in ("today", "total"))
    faster = f" ({cold / warm:.0f}×)" if cold and warm else ""
    lines = [
        f"compute saved {today} today, {in_all} in all · restored {share(restored, prompt)}",
        f"first token {_duration(cold)} cold, {_duration(warm)} restored{faster}",
    ]
    meters = Table.grid(padding=(0, 1))
    for cells in _meters(state, max(8, width // 4)):
        meters.add_row(*cells)
    said = [Text(" · ".join(lines))] if width >= 110 else [Text(line) for line in lines]
    return Group(*said, meters, *([models(state["models"])] if "models" in state else []))


def models(places: Sequence[State]) -> RenderableType:
    """Returns a table of the models in memory, and their sums."""
    table = _table("model", "", "memory:", "requests:")
    for place in places:
        pinned = " · pinned" if place["is_pinned"] else ""
        row = (place["phase"] + pinned, format_size(place["needed_bytes"]), str(place["num_active"]))
        table.add_row(shown(place["model"], 40), *row)
    sums = [sum(place[name] for place in places) for name in ("needed_bytes", "num_active")]
    table.add_row(f"all {len(places)}", "", format_size(sums[0]), str(sums[1]))
    return table


def _meters(state: State, bar_width: int) -> list[tuple[RenderableType, ...]]:
    memory, cache = state["memory"], state["cache"]
    if memory is None or cache is None:
        return []
    waiting = sum(one["state"] == "waiting" for one in state["requests"]) + state["arriving"]
    running = f"{memory['running']} of {memory['max_running']} run, {waiting} wait"
    stored = f"{cache['entries']:,} prompts, {cache['evicted_blocks']:,} evicted"
    written = f"{cache['pending']:,} wait, {cache['dropped']:,} dropped"
    last_day, in_all = cache["disk_written_last_day_bytes"], f"{format_size(cache['disk_written_bytes'])} in all"
    left_out = f"{cache['unaffordable']:,} prompts left out, {in_all}"
    disk = (
        _meter("disk, 24 h", last_day, cache["write_budget_bytes"], bar_width, left_out)
        if cache["write_budget_bytes"]
        else (Text("disk, 24 h", "bold"), Text(), Text(format_size(last_day)), Text(in_all))
    )
    return [
        _meter("memory", memory["used_bytes"], memory["limit_bytes"], bar_width, running),
        _meter("store", cache["used_bytes"], cache["budget_bytes"], bar_width, stored),
        _meter("writer", cache["pending_bytes"], cache["buffer_bytes"], bar_width, written),
        disk,
    ]


def _meter(name: str, used: int, whole: int, bar_width: int, note: str) -> tuple[RenderableType, ...]:
    return Text(name, "bold"), bar([used], whole, bar_width), Text(format_part(used, whole)), Text(note)


def requests(state: State, width: int) -> RenderableType:
    """Returns a table of the requests in the engine and its queue."""
    if not state["requests"]:
        return Text("nothing runs", "dim")
    table = _table("state", "prompt", "tokens:", "TTFT:", "reply:", "tok/s:", "time:")
    bar_width = max(8, width - 58)
    for one in state["requests"]:
        computed = max(0, one["ready_tokens"] - one["restored_tokens"])
        table.add_row(
            one["state"],
            bar([one["restored_tokens"], computed], one["prompt_tokens"], bar_width),
            f"{one['ready_tokens']:,}/{one['prompt_tokens']:,}",
            _duration(one["ttft_s"]),
            f"{one['reply_tokens']:,}",
            f"{one['tokens_per_s']:.1f}" if one["tokens_per_s"] is not None else "–",
            _duration(one["elapsed_s"]),
        )
    return table


def decisions(ended: Sequence[State], now: float, width: int) -> RenderableType:
    """Returns the decisions of the cache for the last requests, the latest first."""
    if not ended:
        return Text("no request has ended since the start", "dim")
    more = ["tok/s:"] if width >= _ROOMY else []
    table = _table("ago", "prompt:", "restored:", "why", "kept:", "why ", "TTFT:", *more)
    for one in reversed(ended[-_SHOWN:]):
        cache = one["prefix_cache"]
        if cache is None:
            said = f"{one['status']} {one['error'] or 'the client left'}"
            table.add_row(format_age(now - one["ended_at"]), "–", "–", Text(shown(said, _WHY)), style="red")
            continue
        speed = [f"{one['timings']['decode_tokens_per_s']:.1f}"] if more else []
        table.add_row(
            format_age(now - one["ended_at"]),
            f"{one['prompt_tokens']:,}",
            share(cache["restored"], one["prompt_tokens"]),
            _words(cache.get("miss_reason") or cache.get("source", "")),
            f"{cache['boundary']:,}",
            _words(cache["boundary_reason"]),
            _duration(one["timings"]["ttft_ms"] / 1e3),
            *speed,
        )
    return table


def hottest(trees: Sequence[State], previews: dict[str, str], now: float, width: int) -> RenderableType:
    """Returns a table of the prefixes that were restored most often."""
    nodes = sorted((node for tree in trees for node in tree["nodes"]), key=lambda node: -node["hits"])
    nodes = [node for node in nodes if node["hits"]][:_SHOWN]
    if not nodes:
        return Text("nothing was restored yet", "dim")
    table = _table("hits:", "tokens:", "shared:", "used", "text")
    for node in nodes:
        text = next((previews[one] for one in node["entries"] if one in previews), "")
        numbers = (f"{node[name]:,}" for name in ("hits", "end", "num_entries"))
        table.add_row(*numbers, format_age(now - node["last_used_at"]), shown(end_of(text).plain, max(8, width - 34)))
    return table


def problems(state: State) -> RenderableType:
    """Returns the problems with advice."""
    if not state["problems"]:
        return Text("nothing", "dim")
    lines = Text()
    for one in state["problems"]:
        times = f" ({one['count']:,} times)" if one["count"] > 1 else ""
        lines.append(f"{one['level']}  ", _STYLES[one["level"]])
        lines.append(f"{printable_only(one['what'])}{times}\n")
        lines.append(f"→ {printable_only(one['todo'])}\n\n", "dim")
    return lines


def bar(parts: Sequence[float], whole: float, width: int) -> Text:
    """Returns a bar of one or two parts: `████▒▒▒···`."""
    text, filled, total = Text(), 0, 0.0
    for part, char, style in zip(parts, (_BAR, _COMPUTED), ("green", "cyan"), strict=False):
        total += part
        end = min(width, round(width * total / whole)) if whole else 0
        text.append(char * (end - filled), style)
        filled = end
    return text.append(_REST * (width - filled), "dim")


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def end_of(preview: str) -> Text:
    """Returns the end of a prompt's text. Prompts of one agent often have the same beginning."""
    text: Text = plain(preview.rpartition("…")[2] or preview)
    text.truncate(200)
    return text


def _ttft(replies: Sequence[State], *, warm: bool) -> float | None:
    """Returns the median time to the first token of the long prompts of which at least half was restored, or of the
    others."""
    outcome = "hit" if warm else "miss"
    found = [one["timings"]["ttft_ms"] / 1e3 for one in replies if one["outcome"] == outcome]
    return median(found) if found else None


def _words(code: str) -> str:
    return code.replace("_", " ")


def _table(*titles: str) -> Table:
    """Returns a table without lines. A colon at the end of a title marks a column of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        justify: Literal["left", "right"] = "right" if title.endswith(":") else "left"
        table.add_column(title.rstrip(": "), justify=justify, no_wrap=True, overflow="ellipsis")
    return table
