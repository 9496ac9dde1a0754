from __future__ import annotations

from tests.clients import browser, client

__all__ = ["browser", "client"]
