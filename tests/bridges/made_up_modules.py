"""Modules that stand for those of an engine that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def install_modules(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes packages that can be imported by these names, with this content."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__path__ = []
        sys.modules[name] = module
