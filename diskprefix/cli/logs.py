"""The log of a daemon on standard error: one line for each message, as text for people or as JSON for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from diskprefix.printable import escaped


def configure_logging(level: str, log_format: str = "text") -> None:
    """Logs to stderr. Libraries log from WARNING on. `log_format` is `text` or `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diskprefix").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """Writes each message on one line, whatever a client put into it. A traceback keeps its lines and is escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class JsonFormatter(logging.Formatter):
    """Writes each message as one JSON object: a request's facts under `request`, a traceback under `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if request is not None:
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII: characters that end a line for some readers, and halves of pairs, are escaped.
        return json.dumps(line, default=str)
