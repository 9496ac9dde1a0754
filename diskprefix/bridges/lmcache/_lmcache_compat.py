"""Everything that the adapter needs from LMCache, and the versions that it was tried with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from diskprefix.bridges.shared.versions import check_interface

TRIED = ("0.5.6",)

try:
    import lmcache
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError(f"{error}: this diskprefix needs LMCache {', '.join(TRIED)}") from error

__all__ = [
    "AdapterUsage",
    "Bitmap",
    "KeyEntry",
    "KeyListPage",
    "L2AdapterInterface",
    "L2StoreResult",
    "ObjectKey",
    "create_event_notifier",
]

VERSION = str(lmcache.__version__)


def check_version(adapter: type) -> None:
    """Raises `ImportError` with one line if LMCache's interface has methods that an adapter lacks. Logs one line for a
    version that was not tried."""
    check_interface("LMCache", VERSION, TRIED, "adapters", adapter)


class Form(NamedTuple):
    """The form of an object: its tensors as a text, the size of all in bytes, and torch's name for the dtype of most of
    the bytes."""

    tensors: str
    num_bytes: int
    dtype: str


def form_of(obj: Any) -> Form:
    """Returns the form of a memory object. An object without metadata is bytes. Raises `NotImplementedError` for an
    object that is not in main memory."""
    num_bytes = len(obj.byte_array)
    metadata = getattr(obj, "metadata", None) or getattr(obj, "meta", None)
    known = None
    if metadata is not None:
        known = _form(metadata.shapes or [metadata.shape], metadata.dtypes or [metadata.dtype])
    # An object that holds less than its tensors is a compressed one.
    return known if known is not None and known.num_bytes == num_bytes else Form("bytes", num_bytes, "uint8")


def form_of_layout(layout: Any) -> Form | None:
    """Returns the form of the objects with a `MemoryLayoutDesc`, None if it is unknown."""
    return _form(layout.shapes, layout.dtypes) if layout is not None and layout.shapes else None


def _form(shapes: Any, dtypes: Any) -> Form | None:
    if any(dtype is None for dtype in dtypes):
        return None
    named = [
        (str(dtype).removeprefix("torch."), tuple(map(int, shape))) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    sizes = [math.prod(shape) * dtype.itemsize for (_, shape), dtype in zip(named, dtypes, strict=True)]
    most: Mapping[str, int] = {
        name: sum(n for (other, _), n in zip(named, sizes, strict=True) if other == name) for name, _ in named
    }
    text = ";".join(f"{name}[{','.join(map(str, shape))}]" for name, shape in named)
    return Form(text, sum(sizes), max(most, key=lambda name: most[name]))
