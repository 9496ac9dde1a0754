"""The daemon's log on standard error, one line for each message."""

from __future__ import annotations

import logging
from typing import Any

from diskprefix.printable import escaped


def configure_logging(level: str) -> None:
    """Logs to stderr, from `level` on (`Settings.log_level`). Libraries log from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
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
