"""What `diskprefix doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "problem", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. `level`: `ok`; `note`, it works, and could be better; `problem`, it will not work as it is
    meant to; `skipped`, it could not be checked. `advice` says what to do; empty where nothing is."""

    check: str
    level: Level
    text: str
    advice: str = ""
