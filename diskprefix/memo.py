"""Small results that are slow to find and stay true, remembered between runs in the cache folder.

A memory is only a speed-up: unreadable, it is started afresh; unwritable, it is done without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from diskprefix.settings import cache_home


class Memo:
    """`<name>.json` in the cache folder, at most `max_records` records of JSON values, the newest kept.

    Records of another `version` are forgotten. `is_kept`: whether a key is still of use, asked when one is written.
    """

    def __init__(
        self, name: str, *, version: int, max_records: int = 512, is_kept: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._name = name
        self._version = version
        self._max_records = max_records
        self._is_kept = is_kept

    def get(self, key: str) -> Any:
        """What was remembered, None if nothing."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        # Two processes that write at once may lose one of the records: it is found again.
        records = {known: kept for known, kept in self._read().items() if known != key and self._is_kept(known)}
        records = dict(list(records.items())[-(self._max_records - 1) :]) | {key: value}
        target = cache_home() / f"{self._name}.json"
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"format": self._version, "records": records}), encoding="utf-8")
            partial.replace(target)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((cache_home() / f"{self._name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict) or found.get("format") != self._version:
            return {}
        records = found.get("records")
        return records if isinstance(records, dict) else {}
