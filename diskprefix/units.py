"""Sizes, durations and counts as people write them."""

from __future__ import annotations

import re
import time
from decimal import Decimal

from diskprefix.errors import SettingsError
from diskprefix.printable import shown

_MAX_CHARS = 100
"""A longer text is no size or duration; matching a pattern against megabytes takes seconds."""
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}b": n for u, n in _UNITS.items() if u not in ("", "b")}
_UNITS |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|[smhdw]?)\s*", re.ASCII)


def parse_size(text: str | int, *, param: str) -> int:
    """Returns the bytes of `4GiB`, `500mb`, `1.5 GiB` or a number of bytes. Raises `SettingsError`."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text) if len(text := str(text)) <= _MAX_CHARS else None
    if not match or match[2].lower() not in _UNITS:
        raise SettingsError(f"{param}: {shown(text)!r} is not a size; write for example 4GiB, 500MB or 1073741824")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_duration(text: str | float, *, param: str) -> float:
    """Returns the seconds of `50ms`, `90s`, `15m`, `12h`, `7d`, `2w` or a number of seconds. Raises `SettingsError`.

    The unit must be in lower case, because many people read `M` as months.
    """
    match = _DURATION.fullmatch(text) if len(text := str(text)) <= _MAX_CHARS else None
    if not match:
        examples = "90s, 15m, 12h, 7d or 2w, in lower case"
        raise SettingsError(f"{param}: {shown(text)!r} is not a duration; write for example {examples}")
    return float(match[1]) * _SECONDS[match[2]]


def format_size(num_bytes: float) -> str:
    """Returns a size in the largest binary unit in which it is at least one: `4.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_part(part: float, whole: float) -> str:
    """Returns two sizes, in one unit unless the first one is much smaller: `0.3 of 4.0 GiB`, `3.0 MiB of 4.0 GiB`."""
    sizes = [format_size(size).split() for size in (part, whole)]
    if part and part < whole / 64:
        return " of ".join(map(" ".join, sizes))
    unit_bytes = parse_size(f"1{sizes[1][1]}", param="")
    return f"{part / unit_bytes:.{1 if unit_bytes > 1 else 0}f} of {' '.join(sizes[1])}"


def whole_size(num_bytes: int) -> str:
    """Returns a size in the largest binary unit of which it is a whole number: `4GiB`, which `parse_size` reads."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def format_duration(seconds: float) -> str:
    """Returns `40 ms`, `12.0 s`, `3.5 min`, `5.2 h` or `3.0 d`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:.1f} d"


def rough_duration(seconds: float) -> str:
    """Returns an estimate in whole units: `a few seconds`, `about 20 s`, `about a minute`, `about 7 minutes`, `about 2
    hours`."""
    if seconds < 8:
        return "a few seconds"
    if seconds < 45:
        return f"about {round(seconds, -1):.0f} s"
    minutes, hours = max(1, round(seconds / 60)), round(seconds / 3600)
    if minutes < 90:
        return "about a minute" if minutes == 1 else f"about {minutes} minutes"
    return f"about {hours} hours"


def format_age(seconds: float) -> str:
    """Returns `40 s`, `3 min`, `5 h` or `3 d`, rounded down. A negative age counts as 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ago(when: float) -> str:
    """Returns `3 min ago` for a time in seconds since the epoch."""
    return f"{format_age(time.time() - when)} ago"


def counted(number: int, noun: str) -> str:
    """Returns `1 block`, `2,000 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
