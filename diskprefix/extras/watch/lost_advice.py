"""Tokens that were computed again, for people: by cause, client, tool and line, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diskprefix.printable import printable_only

_ADVICE = {
    "not_stored": "raise --kv-cache-budget; or keep more, with the scope `full`",
    "other_key": "send one of the user's keys, always the same",
    "no_checkpoint": "mark the end of what comes again with cache_control",
    "no_logits": "nothing: it is at most one block",
    "damaged": "run `diskprefix verify`, and look at the disk",
    "faster_to_compute": "use a faster disk, or --kv-cache-gate off",
    "upgraded": "nothing: another version had stored it, and it is computed once",
    "too_short": "lower --kv-cache-min-tokens",
    "image": "send the picture again in the same size",
}
_OF_CLIENT = "; `diskprefix clients` says what to switch off in agents that shorten their history"


def advised(rows: Iterable[Mapping[str, Any]], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns rows of `statistics.lost_tokens.of_last_day`, each with `advice` and `what`: its cause, client, tool and
    line. `texts` has the texts of masked lines, where they may be shown."""
    return [dict(row) | {"what": _what(row, texts), "advice": _advice(row)} for row in rows]


def _what(row: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    parts = [row["cause"].replace("_", " ")]
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
        return f"start with --canonicalise {','.join(f'{name}=on' for name in row['canonicalisers'])}"
    written = f"what the tool {printable_only(row['tool'])} writes" if row["tool"] else "the line"
    return f"leave {written} as it was, or move it to the end of the prompt{_OF_CLIENT if row['client'] else ''}"
