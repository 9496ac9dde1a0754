"""The types of Open Responses, as the package `openresponses-types` (Apache-2.0) generates them from the specification.

    <cache folder>/test-specifications/openresponses_types-<version>-py3-none-any.whl

pip downloads it at the first test that needs it, as it does the sources of `tests/chat/families`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from diskprefix.settings import cache_home
from tests.chat.families.sources import Package, SourcesMissing, download

TYPES = Package("openresponses-types==2.4.0", "186406592bc115bf12d9ee88320f8051ab1ade0a8fa8941fd1e44b0be16684f1")


@cache
def _found() -> ModuleType | SourcesMissing:
    folder = cache_home() / "test-specifications"
    wheel = folder / "openresponses_types-2.4.0-py3-none-any.whl"
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as work:
            try:
                download(TYPES, Path(work)).replace(wheel)
            except SourcesMissing as error:
                return error
    sys.path.append(str(wheel))
    return importlib.import_module("openresponses_types.types")


def types() -> ModuleType:
    """The module with the types; skips the test where it cannot be had, which is tried once."""
    found = _found()
    if isinstance(found, SourcesMissing):
        pytest.skip(f"the types of Open Responses are not here: {found}")
    return found
