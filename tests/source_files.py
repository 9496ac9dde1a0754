"""The modules that a test of conventions reads, by the folders that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import diskprefix

PACKAGE = Path(diskprefix.__file__).parent
TESTS = Path(__file__).parent
MAY_GO = ("bridges", "desk")
"""The houses whose rooms may be taken out of the repository."""


def parts() -> list[str]:
    """Returns what may be taken out of the repository with its tests, as folders of the package: the bridges, and each
    room of the desk."""
    rooms = [file.parent for file in sorted((PACKAGE / "desk").glob("*/__init__.py")) if file.parent.name != "shared"]
    found = [PACKAGE / "bridges", *rooms]
    return [str(folder.relative_to(PACKAGE)) for folder in found if (folder / "__init__.py").is_file()]


def modules_in(*places: str, below: Path = PACKAGE) -> list[Path]:
    """Returns the Python files at places, which are folders or single modules. Raises `FileNotFoundError` if a place
    has none: a guard that reads nothing would pass."""
    return [path for place in places for path in _modules_at(below, place)]


def _modules_at(below: Path, place: str) -> Iterator[Path]:
    path = below / place
    modules = [path] if path.is_file() else sorted(path.rglob("*.py"))
    if not modules and place.partition("/")[0] not in MAY_GO:
        raise FileNotFoundError(f"a test reads the modules in {path}, and there are none")
    yield from modules
