"""The store's page lists every wait on the disk with its limit."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path

from tests.source_files import PACKAGE, modules_in

PAGE = PACKAGE / "prefixstore/store/README.md"
LIMIT = re.compile(r"`(\w+)\.(_?[A-Z_]+_S|[a-z_]+_s)` (\d+(?:\.\d+)?) s\b")
"""A limit on the page: its module, its constant or the field of its limits, and its seconds."""
DEFINED = re.compile(r"^([A-Z_]+(?:, [A-Z_]+)*) = ", re.MULTILINE)
"""The names that a line of a module gives values."""
FOLDERS = ("prefixstore/store", "prefixstore/cache", "daemon/engine", "daemon/server")
"""The folders of the modules that the page names."""
WAITING = modules_in("prefixstore/store", "daemon/engine/fetches.py", "prefixstore/cache/cache.py")
"""The modules whose waits must all be on the page."""
NO_WAITS = {
    "cache._NOTE_TTL_S": "a time to live",
    "eviction._EXPIRY_INTERVAL_S": "the time between two searches",
    "eviction._MAX_TTL_S": "a time to live",
    "eviction._OWN_EXPIRY_INTERVAL_S": "the time between two searches",
    "eviction._UNKNOWN_EXPIRY_INTERVAL_S": "the time between two searches",
    "eviction._USELESS_AFTER_S": "an age",
    "fetches._CHECK_S": "the time between two looks",
    "folder._LOG_AGAIN_S": "the time between two lines in the log",
    "housekeeping._TRY_AGAIN_S": "the time between two writes to a full disk",
    "note_record.SHORT_TTL_S": "a time to live",
    "reads._LOOK_S": "the time between two looks",
    "savings._TTL_S": "a time to live",
    "schema.MAX_PREFILL_S": "the largest time in a record",
    "store_file._RETRY_S": "the time between two attempts to open the folder",
    "write_lock._COMMAND_PATIENCE_S": "a command says what it waits for",
    "writer._JOIN_S": "the time between two looks",
    "writer.pause_s": "writing pauses for a prompt, not for the disk",
    "writer.touch_interval_s": "the time between two writes",
    "write_counter._HOUR_S": "an hour",
}
"""Constants in seconds that limit no wait, and what they are."""


def seconds_of(path: Path) -> dict[str, float]:
    """Returns the numbers of seconds that a module defines, but for the times between two polls."""
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    names = ", ".join(DEFINED.findall(path.read_text(encoding="utf-8"))).split(", ")
    values = {name: getattr(module, name) for name in names if name.endswith("_S") and "POLL" not in name}
    for name, limits in vars(module).items():
        if name.endswith("Limits") and limits.__module__ == module.__name__:
            values |= {field.name: field.default for field in fields(limits) if field.name.endswith("_s")}
    return {f"{path.stem}.{name}": value for name, value in values.items() if isinstance(value, (int, float))}


def on_page() -> dict[str, float]:
    limits = LIMIT.findall(PAGE.read_text(encoding="utf-8"))
    return {f"{module}.{name}": float(seconds) for module, name, seconds in limits}


def test_page_lists_every_wait_of_the_store_and_of_fetches() -> None:
    waits = {name for module in WAITING for name in seconds_of(module)}
    assert waits >= NO_WAITS.keys()
    assert waits - NO_WAITS.keys() - on_page().keys() == set()


def test_page_gives_each_wait_the_limit_that_the_code_has() -> None:
    stems = {name.partition(".")[0] for name in on_page()}
    modules = [path for path in modules_in(*FOLDERS) if path.stem in stems]
    limits = {name: seconds for module in modules for name, seconds in seconds_of(module).items()}
    assert len(on_page()) > 15
    assert {name: limits.get(name) for name in on_page()} == on_page()
