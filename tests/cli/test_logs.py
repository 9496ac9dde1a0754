"""The log's two forms, record by record."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest

from diskprefix.cli.logs import JsonFormatter, TextFormatter

NASTY = 'x\n2026-01-01 ERROR forged \x1b[31m "quoted" \u2028 \ud800'


def record(message: str, *values: object, **attributes: Any) -> logging.LogRecord:
    made = logging.LogRecord("diskprefix", logging.INFO, "file", 1, message, values, None)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_a_message_is_one_line_whatever_a_client_put_into_it(formatter: logging.Formatter) -> None:
    line = formatter.format(record("client says %s", NASTY))
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


def test_a_line_in_json_has_what_was_said_when_and_how_bad_it_is() -> None:
    made = record("client says %s", NASTY)
    line = json.loads(JsonFormatter().format(made))
    assert line.keys() == {"time", "level", "logger", "message"}
    assert (line["level"], line["logger"], line["message"]) == ("info", "diskprefix", f"client says {NASTY}")
    when = datetime.fromisoformat(line["time"])
    assert when.utcoffset() is not None
    assert abs(when.timestamp() - made.created) < 0.001


def test_a_line_in_json_has_the_facts_of_a_request_and_a_traceback() -> None:
    try:
        raise ValueError("in the middle")
    except ValueError:
        made = record("it failed", request={"status": 500, "id": "req_1"}, exc_info=sys.exc_info())
    line = json.loads(JsonFormatter().format(made))
    assert line["request"] == {"status": 500, "id": "req_1"}
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: in the middle")
