"""A model server with OpenAI's API whose prefix (KV) cache survives restarts, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diskprefix.version import __version__

if TYPE_CHECKING:
    from diskprefix.runtime.library.session import PrefixCacheSession

__all__ = ["PrefixCacheSession", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the library, and torch with it, on the first use of `PrefixCacheSession`."""
    if name == "PrefixCacheSession":
        from diskprefix.runtime.library.session import PrefixCacheSession

        return PrefixCacheSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
