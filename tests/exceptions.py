"""What conventions except, from beside the tests of what is excepted, so that both go together."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent


def exceptions(table: str) -> dict[str, Any]:
    """Returns the rows of a table of this name in all `exceptions.py` of houses and rooms."""
    rows: dict[str, Any] = {}
    for file in sorted((*_TESTS.glob("*/exceptions.py"), *_TESTS.glob("*/*/exceptions.py"))):
        module = ".".join(file.relative_to(_TESTS.parent).with_suffix("").parts)
        rows |= getattr(import_module(module), table, {})
    return rows
