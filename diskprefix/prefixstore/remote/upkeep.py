"""Removes objects of one namespace from a bucket: for a purge of a tenant or a model, and for deleted prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from diskprefix.folders import expanded
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.bundle import ABOUT, ABOUT_MAX_BYTES, object_path
from diskprefix.prefixstore.remote.objects import ObjectStore
from diskprefix.prefixstore.remote.signing import ObjectRefused, verified
from diskprefix.prefixstore.store.following import GoneText
from diskprefix.prefixstore.store.schema import NodeKind, RootRecord, node_name
from diskprefix.tokens import ID_BYTES

_BATCH_PATHS = 500


def open_bucket(url: str, key_file: Path) -> NamespaceObjects:
    """Opens a bucket to remove objects from it. Raises `SettingsError`."""
    # A mistyped folder is not created.
    objects = ObjectStore(url, timeout_s=60.0, makes_folder=False)
    return NamespaceObjects(objects, NamespaceKey.read(expanded(key_file)))


class NamespaceObjects(Struct, frozen=True):
    """The objects of one namespace, as a `cache.tiers.tier.Bucket`. Methods raise `RemoteUnavailable`."""

    objects: ObjectStore
    key: NamespaceKey

    def purge(self, is_wanted: Callable[[str, str], bool]) -> int:
        """See `Bucket`. Objects whose `about` is missing or refused stay, because their tenant is unknown."""
        by_root: dict[str, list[str]] = defaultdict(list)
        for path in self.objects.list(f"{self.key.digest.hex()}/"):
            by_root[path.rpartition("/")[0]].append(path)
        paths: list[str] = []
        for root, of_root in by_root.items():
            record = self._record(f"{root}/{ABOUT}") if f"{root}/{ABOUT}" in of_root else None
            if record is not None and is_wanted(record.model, record.tenant):
                paths += of_root
        self._delete(paths)
        return sum(not path.endswith(f"/{ABOUT}") for path in paths)

    def delete_texts(self, texts: Sequence[GoneText]) -> int:
        """See `Bucket`."""
        return len(self.delete_objects_of(texts))

    def delete_objects_of(self, texts: Iterable[GoneText]) -> list[str]:
        """Removes the objects that hold parts of these texts that no remaining saved prompt has. Returns their paths.
        Objects are named by their ends, so objects that extend beyond a text are not found."""
        names: dict[bytes, set[str]] = defaultdict(set)
        for text in texts:
            # If the record of the root is lost, the size of blocks is unknown.
            if text.block_size:
                names[text.root].update(_object_names(self.key, text))
        paths = [
            path
            for root, wanted in names.items()
            for path in self.objects.list(object_path(self.key, root, ""))
            if path.rpartition("/")[2].partition(".")[0] in wanted
        ]
        self._delete(paths)
        return paths

    def _record(self, path: str) -> RootRecord | None:
        try:
            data = self.objects.get(path, ABOUT_MAX_BYTES)
            return None if data is None else msgspec.msgpack.decode(verified(self.key, path, data), type=RootRecord)
        except (ObjectRefused, msgspec.DecodeError):
            return None

    def _delete(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _BATCH_PATHS):
            self.objects.delete(paths[start : start + _BATCH_PATHS])


def _object_names(key: NamespaceKey, text: GoneText) -> Iterator[str]:
    """Yields the names of all objects that may end within the part of a text that is not kept."""
    secret = key.names_seed
    token_ids, size, parent = text.token_ids.tobytes(), ID_BYTES * text.block_size, text.root
    kept_bytes = ID_BYTES * text.num_kept
    for start in range(0, len(token_ids) + 1, size):
        part = token_ids[start : start + size]
        if start + size > kept_bytes:
            for end in range(max(0, kept_bytes - start), len(part) + 1, ID_BYTES):
                yield node_name(secret, parent, part[:end], NodeKind.TAIL).hex()
        parent = node_name(secret, parent, part, NodeKind.BLOCK)
        if len(part) == size and start + size > kept_bytes:
            yield parent.hex()
