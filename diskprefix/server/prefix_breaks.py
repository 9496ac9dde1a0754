"""What broke the prefixes of prompts since the start: for the log, which tells it once, and for `/props`."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from diskprefix.api.figures import broken_by
from diskprefix.nouns import CacheReport

log = logging.getLogger("diskprefix")

_MOST_LINES = 32


class PrefixBreaks:
    """Counts the lines that break prefixes, by their shape. Those that were not seen for longest are forgotten."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def note(self, report: CacheReport) -> None:
        """Counts what broke the prompt of a request, if something did."""
        if report.broken is None:
            return
        found = broken_by(report)
        line = found["line"]
        if line not in self._lines:
            _log(found)
        seen = self._lines.pop(line, {"requests": 0, "tokens": 0})
        self._lines[line] = {
            "line": line,
            "normalisers": found["normalisers"],
            "requests": seen["requests"] + 1,
            "tokens": seen["tokens"] + found["tokens"],
        }
        if len(self._lines) > _MOST_LINES:
            self._lines.popitem(last=False)

    def as_list(self) -> list[dict[str, Any]]:
        """Returns a JSON object for each line, the one that was seen last first."""
        return list(reversed(self._lines.values()))


def _log(found: dict[str, Any]) -> None:
    names = found["normalisers"]
    hint = f"; --normalise {','.join(f'{name}=on' for name in names)} may help" if names else ""
    log.info(
        "[disk-cache] a prompt differs from an earlier one at token %d, in the line %r, and about %d tokens behind it "
        "are the same: they are computed again%s (told once for each such line)",
        found["at"],
        found["line"],
        found["tokens"],
        hint,
    )
