"""Maintenance of the objects of one namespace in a bucket: listing, and purge of a tenant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from diskprefix.extras.remote.bundle import ABOUT, ABOUT_MOST_BYTES, object_path
from diskprefix.extras.remote.objects import ObjectInfo, ObjectStore
from diskprefix.extras.remote.signing import ObjectRefused, verified
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.purge import GoneText
from diskprefix.store.schema import Kind, RootRecord, node_name
from diskprefix.tokens import ID_BYTES

_ROOT = re.compile(r"[0-9a-f]{32}")
_AT_ONCE = 500


@dataclass(frozen=True)
class RemoteRoot:
    """The objects of one root: of one model and one tenant. Times are in seconds since the epoch; `model` is empty if
    the root's description is missing or was refused."""

    root: str
    model: str
    tenant: str
    block_size: int
    objects: tuple[ObjectInfo, ...]
    about: ObjectInfo | None

    @property
    def is_unknown(self) -> bool:
        """The description is missing, so the tenant of its objects is unknown."""
        return bool(self.objects) and not self.model

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.objects)

    @property
    def oldest(self) -> float:
        return min((one.modified_at for one in self.objects), default=0.0)

    @property
    def newest(self) -> float:
        return max((one.modified_at for one in self.objects), default=0.0)


@dataclass(frozen=True)
class Removed:
    """The objects that were removed, or would be, of all `found` ones. `unknown_objects` stay; their tenant is unknown,
    because the description beside them is missing or was refused."""

    found: int
    found_bytes: int
    objects: int
    num_bytes: int
    unknown_objects: int


def roots(objects: ObjectStore, key: NamespaceKey) -> list[RemoteRoot]:
    """Returns the objects of the namespace by root, in the order of models and tenants. Raises `RemoteUnavailable`."""
    by_root: dict[str, list[ObjectInfo]] = {}
    for one in objects.list(f"{key.digest.hex()}/"):
        _, root, *name = one.path.split("/")
        if len(name) == 1 and _ROOT.fullmatch(root):
            by_root.setdefault(root, []).append(one)
    found = [_root(objects, key, root, its) for root, its in by_root.items()]
    return sorted(found, key=lambda root: (root.model, root.tenant, root.root))


def purge(
    objects: ObjectStore, key: NamespaceKey, wanted: Callable[[RemoteRoot], bool], *, dry_run: bool = False
) -> tuple[list[RemoteRoot], Removed]:
    """Removes all objects of the roots that are `wanted`. Returns these roots. Raises `RemoteUnavailable`."""
    found = roots(objects, key)
    chosen = [root for root in found if wanted(root)]
    gone = [one for root in chosen for one in root.objects]
    abouts = [root.about for root in chosen if root.about is not None]
    if not dry_run:
        _delete(objects, [*gone, *abouts])
    return chosen, _removed(found, gone)


def forget(objects: ObjectStore, key: NamespaceKey, texts: Iterable[GoneText]) -> list[str]:
    """Removes the objects that hold parts of these texts that no remaining saved prompt has. Returns their paths.
    Raises `RemoteUnavailable`.

    Objects are named by their ends, so objects that continue behind a text are not found.
    """
    names: dict[bytes, set[str]] = {}
    for text in texts:
        # Without the record of its root, the size of its blocks is not known.
        if text.block_size:
            names.setdefault(text.root, set()).update(_names(key, text))
    gone = [
        one
        for root, wanted in names.items()
        for one in objects.list(f"{object_path(key, root, '')}")
        if one.path.rpartition("/")[2].partition(".")[0] in wanted
    ]
    _delete(objects, gone)
    return [one.path for one in gone]


def _names(key: NamespaceKey, text: GoneText) -> Iterator[str]:
    """Yields the names of all objects that may end with a part of a text that is not kept."""
    secret = key.names_seed
    token_ids, size, parent = text.token_ids.tobytes(), ID_BYTES * text.block_size, text.root
    kept = ID_BYTES * text.num_kept
    for start in range(0, len(token_ids) + 1, size):
        part = token_ids[start : start + size]
        if start + size > kept:
            for end in range(max(0, kept - start), len(part) + 1, ID_BYTES):
                yield node_name(secret, parent, part[:end], Kind.TAIL).hex()
        parent = node_name(secret, parent, part, Kind.BLOCK)
        if len(part) == size and start + size > kept:
            yield parent.hex()


def _root(objects: ObjectStore, key: NamespaceKey, root: str, found: list[ObjectInfo]) -> RemoteRoot:
    about = next((one for one in found if one.path.endswith(f"/{ABOUT}")), None)
    record = RootRecord(model="", block_size=0, layout="", created_at=0.0)
    if about is not None:
        with suppress(ObjectRefused, msgspec.DecodeError):
            if (got := objects.get(about.path, ABOUT_MOST_BYTES)) is not None:
                record = msgspec.msgpack.decode(verified(key, about.path, got), type=RootRecord)
    others = tuple(one for one in found if one is not about)
    return RemoteRoot(root, record.model, record.tenant, record.block_size, others, about)


def _removed(found: Iterable[RemoteRoot], gone: list[ObjectInfo]) -> Removed:
    everything = [one for root in found for one in root.objects]
    unknown = {one for root in found if root.is_unknown for one in root.objects}
    found_bytes, gone_bytes = (sum(one.num_bytes for one in some) for some in (everything, gone))
    return Removed(len(everything), found_bytes, len(gone), gone_bytes, len(unknown.difference(gone)))


def _delete(objects: ObjectStore, gone: list[ObjectInfo]) -> None:
    for start in range(0, len(gone), _AT_ONCE):
        objects.delete([one.path for one in gone[start : start + _AT_ONCE]])
