"""The table of architectures whose restored runs were compared with cold runs, bit for bit."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

TABLE = Path(__file__).with_name("verified_models.json")
"""The table that `tools/bench exactness --write-table` writes."""


def installed_versions() -> dict[str, str]:
    """Returns the versions of torch and transformers, without the label of a build such as `+cpu`."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
