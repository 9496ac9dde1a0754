"""Counts the values of JSON texts without parsing (two bytes of text can become a hundred bytes of objects), finds
values that are nested too deeply, replaces escapes that are not characters, and keeps the digits of numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

MAX_PARTS, MAX_VALUES = 1 << 18, 1 << 21
"""Limits for a request: objects, lists and texts (keys included), and values in all. Parsing holds Python's lock."""
_FEW_PARTS, _FEW_VALUES = 1 << 13, 1 << 15
"""Up to these counts, characters in strings need not be told from others."""
_PART_BYTES, _VALUE_BYTES = 120, 36
"""The most memory that a parsed object, list or text takes beside its characters, and that another value takes."""


class Counted(NamedTuple):
    """The counts of a text: `parts` of objects, lists and texts, `values` of all values."""

    parts: int
    values: int

    @property
    def num_bytes(self) -> int:
        """The memory that the parsed values take beside the characters of texts, at most. Below a few thousand values
        up to a MiB more."""
        return self.parts * _PART_BYTES + (self.values - self.parts) * _VALUE_BYTES

    @property
    def too_many(self) -> str:
        """The exceeded limit as a text for people, "" for none."""
        if self.parts > MAX_PARTS:
            return f"{self.parts} objects, lists and texts; at most {MAX_PARTS} are read"
        return f"{self.values} values; at most {MAX_VALUES} are read" if self.values > MAX_VALUES else ""


def count_values(texts: Sequence[bytes]) -> Counted:
    """Counts the values of JSON texts. Below a few thousand values, characters in strings may be counted too."""
    quickly = _sum(
        Counted(parts := text.count(b'"') // 2 + text.count(b"[") + text.count(b"{"), text.count(b",") + parts)
        for text in texts
    )
    return _sum(map(_count, texts)) if quickly.parts > _FEW_PARTS or quickly.values > _FEW_VALUES else quickly


def _sum(counted: Iterable[Counted]) -> Counted:
    parts, values = map(sum, zip((0, 0), *counted, strict=True))
    return Counted(parts, values)


def _count(text: bytes) -> Counted:
    # Not above: the router, which reads bodies too, has no numpy.
    import numpy as np

    marks = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    # Without the characters in strings, but with the last quote of each.
    outside = marks[~np.logical_xor.accumulate(marks == ord('"'))]
    parts = sum(int((outside == ord(mark)).sum()) for mark in '"[{')
    return Counted(parts, int((outside == ord(",")).sum()) + parts)


MAX_LEVELS = 200
"""The most objects and lists inside each other that pydantic parses."""
_KEY_OR_SIGN = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))(\s*+:)?|[\[\]{},]', re.DOTALL)
"""A string, which may lack its end, as a key or not; or a sign outside of strings."""


def path_below(text: str, max_levels: int = MAX_LEVELS) -> list[str | int]:
    """Returns the path of the first value in JSON text that has more levels above it; [] if there is none."""
    path: list[str | int] = []
    for match in _KEY_OR_SIGN.finditer(text):
        sign = match[0]
        if sign in ("{", "["):
            if len(path) == max_levels:
                return path
            path.append("" if sign == "{" else 0)
        elif path and sign in ("}", "]"):
            path.pop()
        elif path and sign == "," and isinstance(path[-1], int):
            path[-1] += 1
        elif path and match[2]:
            path[-1] = match[1][1:-1]
    return []


_SURROGATES = re.compile(
    r"(?<!\\)((?:\\\\)*+)(?:((?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})++)"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, then escapes of whole surrogate pairs, or the escape of half a pair."""


def whole_characters(text: str) -> str:
    r"""Returns JSON text with U+FFFD for each escape of half a surrogate pair, such as `\ud83d` alone.

    A tool's result that was cut inside an emoji ends with such an escape, which no tokenizer takes.
    """
    if r"\ud" not in text and r"\uD" not in text:
        return text
    return _SURROGATES.sub(lambda match: match[0] if match[2] else rf"{match[1]}\ufffd", text)


class WrittenNumber(float):
    """A number and its text, whose digits a double may not hold."""

    def __new__(cls, text: str) -> WrittenNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def values_as_written(text: str | bytes) -> Any:
    """Returns the value of JSON text, in which `written` finds the digits of each number again. Raises `ValueError`,
    also for the NaN and the infinities that JSON does not know, and `RecursionError`."""
    return json.loads(text, parse_float=WrittenNumber, parse_int=_integer, parse_constant=_unknown)


def _integer(text: str) -> float:
    return WrittenNumber(text) if text == "-0" else int(text)


def _unknown(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def written(value: object) -> str:
    """Returns the JSON text of a value, with the digits of each `WrittenNumber`. Raises `RecursionError`."""
    # Bound: the nesting of the value, which Python limits.
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {written(part)}' for key, part in value.items())}}}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return value.text if isinstance(value, WrittenNumber) else json.dumps(value, ensure_ascii=False)
