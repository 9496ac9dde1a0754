"""The log, record by record."""

from __future__ import annotations

import logging
import sys
from typing import Any

from diskprefix.cli.logs import TextFormatter

NASTY = 'x\n2026-01-01 ERROR forged \x1b[31m "quoted" \u2028 \ud800'


def record(message: str, *values: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("diskprefix", logging.INFO, "file", 1, message, values, exc_info)


def test_a_message_is_one_line_whatever_a_client_put_into_it() -> None:
    line = TextFormatter().format(record("client says %s", NASTY))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_a_traceback_keeps_its_lines_and_cannot_steer_the_terminal() -> None:
    try:
        raise ValueError("\x1b[2J\x9b31m")
    except ValueError:
        lines = TextFormatter().format(record("failed", exc_info=sys.exc_info())).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "Traceback" in lines[1]
    assert lines[-1] == r"ValueError: \x1b[2J\x9b31m"
