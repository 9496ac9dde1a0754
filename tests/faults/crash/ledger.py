"""A log in which a process records the begin and the end of each of its deeds. It survives SIGKILL.

A line is one `write` to a file. The kernel keeps it when the process dies, and only processes are killed here, so the
file is not synced.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class Ledger:
    """Writes a ledger."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def begin(self, deed: str, number: int = -1) -> None:
        """Record the begin of a deed. `number` is that of its prompt."""
        self._write({"begin": deed, "number": number})

    def end(self, deed: str, number: int = -1, gone: Iterable[int] = ()) -> None:
        """Record the end of a deed, which removed the entries of the prompts `gone`."""
        self._write({"end": deed, "number": number, "gone": sorted(gone)})

    def _write(self, line: dict[str, object]) -> None:
        os.write(self._fd, (json.dumps(line | {"at": time.monotonic()}) + "\n").encode())


@dataclass(frozen=True)
class Account:
    """The account that a ledger gives.

    `doing`: the deed that had begun and not ended, with its prompt.
    """

    saved: frozenset[int]
    """Prompts whose saving was acknowledged and that no later deed removed."""
    tried: frozenset[int]
    """All prompts whose saving began."""
    doing: tuple[str, int] | None
    durations: dict[str, list[float]]
    """Seconds that each kind of deed took."""


def num_begun(path: Path, deed: str, start: int) -> int:
    """Returns the number of such lines from byte `start` on."""
    return _text(path)[start:].count(f'"begin": "{deed}"')


def num_ended(path: Path, deed: str, start: int) -> int:
    """Returns the number of such lines from byte `start` on."""
    return _text(path)[start:].count(f'"end": "{deed}"')


def read(path: Path, saves: Iterable[str] = ("publish", "import")) -> Account:
    """`saves`: the deeds that save the prompt that they are about."""
    saved: set[int] = set()
    tried: set[int] = set()
    doing: tuple[str, int] | None = None
    durations: dict[str, list[float]] = {}
    began_at = 0.0
    for text in _text(path).splitlines():
        line = json.loads(text)
        if "begin" in line:
            doing, began_at = (line["begin"], line["number"]), line["at"]
            if line["begin"] in saves:
                tried.add(line["number"])
            continue
        durations.setdefault(line["end"], []).append(line["at"] - began_at)
        doing = None
        if line["end"] in saves:
            saved.add(line["number"])
        saved.difference_update(line["gone"])
    return Account(frozenset(saved), frozenset(tried), doing, durations)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
