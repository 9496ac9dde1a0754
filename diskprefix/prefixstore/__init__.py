"""The store of prefixes: on disk, in memory, in a bucket. Programs with an engine of their own use these names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diskprefix.prefixstore.prefix_store import Match as Match
    from diskprefix.prefixstore.prefix_store import PrefixStore as PrefixStore
    from diskprefix.prefixstore.prefix_store import SaveTicket as SaveTicket
    from diskprefix.prefixstore.prefix_store import States as States
    from diskprefix.prefixstore.state_identity import StateIdentity as StateIdentity
    from diskprefix.prefixstore.store.pieces import LayoutGroup as LayoutGroup
    from diskprefix.prefixstore.store_options import StoreOptions as StoreOptions

_PLACES = {
    **dict.fromkeys(("Match", "PrefixStore", "SaveTicket", "States"), "prefix_store"),
    "StateIdentity": "state_identity",
    "LayoutGroup": "store.pieces",
    "StoreOptions": "store_options",
}
"""The module of each name. It is imported when the name is first used, so that parts need not the whole."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PLACES)
