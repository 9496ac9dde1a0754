"""The versions of vLLM that were tried, and how they differ. A new version gets a row in `VERSIONS`, and no branch
elsewhere. Also checks the interfaces of other engines. Imports nothing of any engine."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

log = logging.getLogger("diskprefix")


class Version(NamedTuple):
    """A minor version of vLLM.

    `runs_connector`: it has all that the connector needs; every version here has what the tier needs. `chunk_slots` is
    the attribute of a tier's job that has the places of its chunks. `agrees_on_keys`: its processes name chunks alike
    without `PYTHONHASHSEED`.
    """

    number: str
    runs_connector: bool = True
    chunk_slots: str = "chunk_ids"
    agrees_on_keys: bool = True


VERSIONS = (
    Version("0.28", runs_connector=False, chunk_slots="block_ids", agrees_on_keys=False),
    Version("0.29", runs_connector=False, chunk_slots="block_ids"),
    Version("0.30", runs_connector=False),
    Version("0.31", runs_connector=False),
    Version("0.32"),
    # It asks a connector whether it follows sleep mode, and lets a model's drafts come before the end of a step: both
    # as the connector has it for 0.32.
    Version("0.33"),
)
"""The oldest first."""


def version_of(installed: str) -> Version:
    """Returns the row of the installed version, for example "0.33.1"; the newest row for a version without one."""
    return next((row for row in VERSIONS if installed.startswith(f"{row.number}.")), VERSIONS[-1])


def untried(installed: str, tried: Sequence[Version]) -> str | None:
    """Returns one line that names the installed version, or None if it is one of `tried`."""
    if version_of(installed) in tried and installed.startswith(f"{version_of(installed).number}."):
        return None
    return f"vLLM {installed} was not tried with this diskprefix; tried were {', '.join(row.number for row in tried)}"


def check_interface(engine: str, installed: str, tried: Sequence[str], kind: str, ours: type) -> None:
    """Checks that a class of `ours` has all methods that the installed version of an engine wants of this `kind` of
    class. Raises `ImportError` with one line if it lacks some. Logs one line for a version that was not `tried`."""
    if lacking := sorted(getattr(ours, "__abstractmethods__", ())):
        raise ImportError(
            f"this diskprefix cannot serve {engine} {installed}, whose {kind} need {', '.join(lacking)}; "
            f"it was tried with {', '.join(tried)}"
        )
    if installed not in tried:
        log.warning(
            "[disk-cache] %s %s was not tried with this diskprefix; %s was", engine, installed, ", ".join(tried)
        )


def missing(used: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the names that the installed vLLM lacks, for example "Request.cache_salt". `used` maps classes, such as
    "vllm.v1.request:Request", to the attributes that are read, called or overridden."""
    return [name for place, attributes in used.items() for name in _missing_of(place, attributes)]


def _missing_of(place: str, attributes: Sequence[str]) -> list[str]:
    module, _, name = place.partition(":")
    try:
        class_ = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return [name]
    return [f"{name}.{attribute}" for attribute in attributes if not _has(class_, attribute)]


def _has(class_: Any, attribute: str) -> bool:
    """Returns whether instances of a class have an attribute: one of the class, a field of a dataclass, or one that the
    constructor sets."""
    if hasattr(class_, attribute) or attribute in getattr(class_, "__dataclass_fields__", ()):
        return True
    constructor = inspect.unwrap(class_.__init__)
    return attribute in getattr(getattr(constructor, "__code__", None), "co_names", ())
