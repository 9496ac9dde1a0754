"""Removal of objects of one namespace from a bucket: those of a tenant or a model, and those of deleted prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from diskprefix.extras.remote.bundle import ABOUT, ABOUT_MOST_BYTES, object_path
from diskprefix.extras.remote.objects import ObjectStore
from diskprefix.extras.remote.signing import ObjectRefused, verified
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.purge import GoneText
from diskprefix.store.schema import Kind, RootRecord, node_name
from diskprefix.tokens import ID_BYTES

_AT_ONCE = 500


def purge(objects: ObjectStore, key: NamespaceKey, is_wanted: Callable[[str, str], bool]) -> int:
    """Removes all objects of the roots that are wanted, by model and tenant. Returns how many. Objects whose `about` is
    missing or refused stay: their tenant is unknown. Raises `RemoteUnavailable`."""
    by_root: dict[str, list[str]] = defaultdict(list)
    for path in objects.list(f"{key.digest.hex()}/"):
        by_root[path.rpartition("/")[0]].append(path)
    gone: list[str] = []
    for root, paths in by_root.items():
        record = _record(objects, key, f"{root}/{ABOUT}") if f"{root}/{ABOUT}" in paths else None
        if record is not None and is_wanted(record.model, record.tenant):
            gone += paths
    _delete(objects, gone)
    return sum(not path.endswith(f"/{ABOUT}") for path in gone)


def _record(objects: ObjectStore, key: NamespaceKey, path: str) -> RootRecord | None:
    try:
        got = objects.get(path, ABOUT_MOST_BYTES)
        return None if got is None else msgspec.msgpack.decode(verified(key, path, got), type=RootRecord)
    except (ObjectRefused, msgspec.DecodeError):
        return None


def forget(objects: ObjectStore, key: NamespaceKey, texts: Iterable[GoneText]) -> list[str]:
    """Removes the objects that hold parts of these texts that no remaining saved prompt has. Returns their paths.
    Raises `RemoteUnavailable`.

    Objects are named by their ends, so objects that continue behind a text are not found.
    """
    names: dict[bytes, set[str]] = defaultdict(set)
    for text in texts:
        # Without the record of its root, the size of its blocks is not known.
        if text.block_size:
            names[text.root].update(_names(key, text))
    gone = [
        path
        for root, wanted in names.items()
        for path in objects.list(object_path(key, root, ""))
        if path.rpartition("/")[2].partition(".")[0] in wanted
    ]
    _delete(objects, gone)
    return gone


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


def _delete(objects: ObjectStore, gone: Sequence[str]) -> None:
    for start in range(0, len(gone), _AT_ONCE):
        objects.delete(gone[start : start + _AT_ONCE])
