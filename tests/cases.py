"""The mark `cases(count)`: of a test whose many cases take long together, so many run always, the others with
`tools/test --all`."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import pytest


def mark_as_slow(items: Sequence[pytest.Item]) -> None:
    """Marks the cases that run only with `--all` as slow."""
    counts: dict[str, int] = {}
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            (counts[test],) = mark.args
            of_test.setdefault(test, []).append(item)
    for test, cases in of_test.items():
        # In no order, so that they differ in every parameter; a new case seldom changes which ones are chosen.
        for item in sorted(cases, key=lambda item: crc32(item.nodeid.encode()))[counts[test] :]:
            item.add_marker("slow")
