"""Opens LMDB environments, always with LMDB 0.9.

The Python package lmdb 3.0 holds two engines, LMDB 0.9 and 1.0, and neither reads the other's files. By default,
the environment variable `LMDB_DEFAULT_LIB_VERSION` chooses the engine of new files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb

from diskprefix.errors import StoreUnavailable

_MAJOR = 0
"""The major version of LMDB 0.9."""
_CHOICE: dict[str, Any] = {"lib_version": _MAJOR} if hasattr(lmdb.Environment, "lib_version") else {}
"""The argument that chooses the engine. Earlier packages have one engine and no such argument."""


def open_lmdb(path: Path, **options: Any) -> lmdb.Environment:
    """Opens the environment in folder `path`; `options` are options of `lmdb.open`. Every environment of this package
    is opened here. Raises `lmdb.Error`, or `StoreUnavailable` if the installed package has no LMDB 0.9."""
    engine_version()
    return lmdb.open(str(path), **_CHOICE, **options)


def engine_version() -> str:
    """Returns the version of the engine, as "0.9.36". Raises `StoreUnavailable` if the package has no LMDB 0.9."""
    try:
        version = lmdb.version(**_CHOICE)
    except lmdb.Error:
        version = lmdb.version()
    text = ".".join(map(str, version))
    if version[0] != _MAJOR:
        problem = f"the installed Python package lmdb uses LMDB {text}, and a store needs LMDB 0.9"
        raise StoreUnavailable(f"{problem}; install lmdb from PyPI, or build it without LMDB_FORCE_SYSTEM")
    return text
