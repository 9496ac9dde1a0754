"""Tokens that were computed again, for people: by cause, client, tool and line, with what to do about it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from diskprefix.daemon.chat.canonicalisers import Canonicalisers
from diskprefix.daemon.server.process.token_file import own_settings
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.statistics.lost_tokens import hour_of
from diskprefix.printable import printable_only
from diskprefix.runtime.runtime_options import PARTING
from diskprefix.setting import flag_of
from diskprefix.units import format_age
from diskprefix.values import words_of

_ADVICE = {
    "not_stored": "keep more, with the scope `full`; or raise --kv-cache-budget, if the folder is full",
    "partial": "nothing: its client left, or the daemon was killed, before the rest was computed and written",
    "other_key": "send one of the user's keys, always the same",
    "no_checkpoint": "mark the end of what comes again with cache_control",
    "no_logits": "nothing: it is at most one block",
    "damaged": "run `diskprefix verify`, and look at the disk",
    "faster_to_compute": "use a faster disk, or --kv-cache-gate off",
    "upgraded": "nothing: another version had stored it, and it is computed once",
    "too_short": "lower --kv-cache-min-tokens: prompts with fewer tokens than that are not saved",
    "image": "send the picture again in the same size",
}
_PRICES = {"clock": "the model then reads 12:00:00 for 12:34:56"}
"""What a model reads otherwise with a canonicaliser that changes more than the form of a text."""
_OF_CLIENT = "; `diskprefix clients` says what to switch off in agents that shorten their history"


class InEffect(Struct, frozen=True):
    """The `settings` of a daemon, by name, which it has had `since` a time in seconds since 1970. Those that
    one of several models may have for itself are missing."""

    settings: Mapping[str, Any]
    since: float


def settings_in_effect(folder: Path) -> list[InEffect]:
    """Returns the settings of this user's running daemons whose store is in `folder`. Asks none of them: those that
    are stopped, have no model in memory or have API keys count, too."""
    place = os.path.realpath(folder)
    return [InEffect(settings, since) for settings, since in own_settings() if settings.get("kv_cache_dir") == place]


def advised(
    rows: Iterable[Mapping[str, Any]], texts: Mapping[str, str], daemons: Sequence[InEffect]
) -> list[dict[str, Any]]:
    """Returns rows of `statistics.lost_tokens.of_last_day`, each with `advice`, `last`, which is when it was lost last,
    and `what`: its cause, client, tool and line. `texts` has the texts of masked lines, where they may be shown.

    `daemons` are those that use the store. If all have an option with which the tokens of a row are not lost again, and
    none were lost in a later hour, `solved_since` is when the last of them was started with it, else None. The solved
    rows are the last ones."""
    lost, now = [], time.time()
    for row in rows:
        options = [_solution(row, daemon.settings) for daemon in daemons]
        since = max((daemon.since for daemon in daemons), default=0.0)
        is_solved = bool(options) and all(options) and row["hour"] <= hour_of(since)
        solved = f"solved: {options[0]} has been in effect for {format_age(now - since)}" if is_solved else ""
        hours = hour_of(now) - row["hour"]
        further = {
            "what": _what(row, texts),
            "last": f"{hours} h ago" if hours > 0 else "this hour",
            "advice": solved or _advice(row),
            "solved_since": since if is_solved else None,
        }
        lost.append(dict(row) | further)
    return sorted(lost, key=lambda row: row["solved_since"] is not None)


def _solution(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns the option of these settings with which the tokens of a row are not lost again, "" if none is known."""
    cause = row["cause"]
    if cause == "faster_to_compute" and settings.get("kv_cache_gate") == "off":
        return "--kv-cache-gate off"
    if cause == "other_settings" and row["options"] == _given(settings, row["options"].split()):
        return str(row["options"])
    if row["canonicalisers"]:
        modes = Canonicalisers.parse(settings.get("canonicalise", "off"), param="--canonicalise").modes
        return _canonicalise(row) if all(modes.get(name) == "on" for name in row["canonicalisers"]) else ""
    return ""


def _given(settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Returns the options among `words` that part the cache, with the values of these settings, as `options_text`."""
    given = {flag_of(name): settings[name] for name in PARTING if name in settings and flag_of(name) in words}
    return options_text({flag: "" if value is None else str(value) for flag, value in given.items()})


def _what(row: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    parts = [words_of(row["cause"])]
    parts += [f"from {row['client']}"] if row["client"] else []
    parts += [f"tool {row['tool']}"] if row["tool"] else []
    parts += [f"stored with {row['options']}"] if row["options"] else []
    line = texts.get(row["line"]) or (row["line"] and f"{row['line']} (letters are masked as x, digits as #)")
    return printable_only(": ".join(filter(None, (", ".join(parts), line))))


def _advice(row: Mapping[str, Any]) -> str:
    if row["cause"] == "other_settings":
        return f"start with {row['options']} to find it; or nothing: it is saved with the new options too"
    if row["cause"] != "diverged":
        return _ADVICE.get(row["cause"], "read the daemon's log")
    if row["canonicalisers"]:
        prices = [_PRICES[name] for name in row["canonicalisers"] if name in _PRICES]
        return "".join((f"start with {_canonicalise(row)}", *(f"; {price}" for price in prices)))
    written = f"what the tool {printable_only(row['tool'])} writes" if row["tool"] else "the line"
    return f"leave {written} as it was, or move it to the end of the prompt{_OF_CLIENT if row['client'] else ''}"


def _canonicalise(row: Mapping[str, Any]) -> str:
    return f"--canonicalise {','.join(f'{name}=on' for name in row['canonicalisers'])}"
