"""What `diskprefix --version` says: the versions that decide what is computed. Imports nothing that takes long."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from diskprefix.native import build
from diskprefix.store.schema import FORMAT_VERSION
from diskprefix.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "lmdb")


def version_text() -> str:
    """Returns a few lines for people, who paste them into a report."""
    packages = ", ".join(f"{name} {_installed(name)}" for name in _PACKAGES)
    return "\n".join(
        [
            f"diskprefix {__version__}",
            f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
            packages,
            f"kernels: {_kernels()}; store format {FORMAT_VERSION}",
        ]
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _kernels() -> str:
    if not build.LIBRARY.exists():
        return "not compiled (torch's are used)"
    return "compiled" if build.is_current() else "compiled from other sources (torch's are used)"
