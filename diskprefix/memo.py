"""Keeps small results that take long to compute in the cache folder.

A memo only saves time. If its file cannot be read, it starts empty. If it cannot be written, nothing is kept.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from diskprefix.folders import cache_home
from diskprefix.private_file import distrusted_by_root, make_private_folder


class Memo:
    """The file `<name>.json` in the cache folder: the newest `max_records` records of JSON values.

    Records of another `version` are ignored, and so are files in another user's folder if the process is root's.
    """

    def __init__(self, name: str, *, version: int, max_records: int = 512) -> None:
        self._name = name
        self._version = version
        self._max_records = max_records

    def get(self, key: str) -> Any:
        """Returns the value of `key`, or None if there is none."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Keeps `value` under `key`. Ignores errors of the file system."""
        # Two processes that write at once may lose a record, which is computed again.
        records = {name: record for name, record in self._read().items() if name != key}
        records = dict(list(records.items())[-(self._max_records - 1) :]) | {key: value}
        target = cache_home() / f"{self._name}.json"
        if distrusted_by_root(target.parent):
            return
        # A new name that nobody can guess: another user may have put a link at a known name.
        with suppress(OSError):
            make_private_folder(target.parent)
            with tempfile.TemporaryDirectory(prefix=f".{self._name}.", dir=target.parent) as folder:
                new = Path(folder, target.name)
                new.touch(0o600)
                new.write_text(json.dumps({"format": self._version, "records": records}), encoding="utf-8")
                new.replace(target)

    def _read(self) -> dict[str, Any]:
        file = cache_home() / f"{self._name}.json"
        try:
            content = {} if distrusted_by_root(file) else json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        is_known = isinstance(content, dict) and content.get("format") == self._version
        return records if is_known and isinstance(records := content.get("records"), dict) else {}


PREFILL_SPEEDS = Memo("prefill-speeds", version=1)
"""The measured seconds that a token of a long prompt takes, by the model's name or file. Daemons note them when they
end, and commands tell them when no daemon runs."""
