"""Tokens that were computed again, for people: by cause, client, tool and line, with what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from diskprefix.cache.other_settings import options_text
from diskprefix.chat.canonicalisers import Canonicalisers
from diskprefix.printable import printable_only
from diskprefix.settings import PARTING, flag_of
from diskprefix.units import format_age
from diskprefix.values import words_of

_ADVICE = {
    "not_stored": "raise --kv-cache-budget; or keep more, with the scope `full`",
    "other_key": "send one of the user's keys, always the same",
    "no_checkpoint": "mark the end of what comes again with cache_control",
    "no_logits": "nothing: it is at most one block",
    "damaged": "run `diskprefix verify`, and look at the disk",
    "faster_to_compute": "use a faster disk, or --kv-cache-gate off",
    "upgraded": "nothing: another version had stored it, and it is computed once",
    "too_short": "lower --kv-cache-min-tokens: prompts with fewer tokens than that are not saved",
    "image": "send the picture again in the same size",
}
_OF_CLIENT = "; `diskprefix clients` says what to switch off in agents that shorten their history"


class InEffect(Struct, frozen=True):
    """The `settings` of a daemon, by name, which it has had `since` a time in seconds since 1970."""

    settings: Mapping[str, Any]
    since: float


def may_be_solved(row: Mapping[str, Any]) -> bool:
    """Returns whether the settings of a daemon tell if the tokens of a row can be lost again."""
    return bool(row["canonicalisers"]) or row["cause"] in ("faster_to_compute", "too_short", "other_settings")


def advised(
    rows: Iterable[Mapping[str, Any]], texts: Mapping[str, str], daemons: Sequence[InEffect]
) -> list[dict[str, Any]]:
    """Returns rows of `statistics.lost_tokens.of_last_day`, each with `advice` and `what`: its cause, client, tool and
    line. `texts` has the texts of masked lines, where they may be shown. `daemons` are those that use the store: if all
    have an option with which the tokens of a row are not lost again, `solved_since` is when the last of them got it,
    else None. The solved rows are the last ones."""
    lost = []
    for row in rows:
        options = [_solution(row, daemon.settings) for daemon in daemons]
        since = max(daemon.since for daemon in daemons) if options and all(options) else None
        advice = _advice(row)
        if since is not None:
            advice = f"solved: {options[0]} has been in effect for {format_age(time.time() - since)}"
        lost.append(dict(row) | {"what": _what(row, texts), "advice": advice, "solved_since": since})
    return sorted(lost, key=lambda row: row["solved_since"] is not None)


def _solution(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns the option of these settings with which the tokens of a row are not lost again, "" if there is none."""
    cause, least = row["cause"], settings["kv_cache_min_tokens"]
    if cause == "faster_to_compute" and settings["kv_cache_gate"] == "off":
        return "--kv-cache-gate off"
    if cause == "too_short" and row["tokens"] >= least * row["requests"]:
        return f"--kv-cache-min-tokens {least}"
    if cause == "other_settings" and row["options"] == _given(settings, row["options"].split()):
        return str(row["options"])
    if row["canonicalisers"]:
        modes = Canonicalisers.parse(settings["canonicalise"], param="--canonicalise").modes
        return _canonicalise(row) if all(modes.get(name) == "on" for name in row["canonicalisers"]) else ""
    return ""


def _given(settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Returns the options among `words` that part the cache, with the values of these settings, as `options_text`."""
    given = {flag_of(name): settings[name] for name in PARTING if flag_of(name) in words}
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
        return f"start with {_canonicalise(row)}"
    written = f"what the tool {printable_only(row['tool'])} writes" if row["tool"] else "the line"
    return f"leave {written} as it was, or move it to the end of the prompt{_OF_CLIENT if row['client'] else ''}"


def _canonicalise(row: Mapping[str, Any]) -> str:
    return f"--canonicalise {','.join(f'{name}=on' for name in row['canonicalisers'])}"
