"""The bucket that machines share: a tier behind those of one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.namespace_key import NamespaceKey
from diskprefix.settings import expanded

if TYPE_CHECKING:
    from diskprefix.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.extras.remote.objects import ObjectStore
    from diskprefix.settings import Settings
    from diskprefix.store.purge import GoneText


def open_tier(settings: Settings) -> SharedTier | None:
    """Returns the tier of `--remote-tier`, None without it. Does not connect. Raises `SettingsError`."""
    if settings.remote_tier is None or settings.namespace_key_file is None:
        return None
    from diskprefix.extras.remote.objects import ObjectStore
    from diskprefix.extras.remote.remote_tier import RemoteTier

    key = NamespaceKey.read(settings.namespace_key_file)
    objects = ObjectStore(settings.remote_tier, timeout_s=settings.remote_deadline)
    return RemoteTier(objects, key, writes=settings.remote_write != "off")


def open_bucket(url: str, key_file: Path) -> Bucket:
    """Opens a bucket to remove something from it. Raises `SettingsError`."""
    from diskprefix.extras.remote.objects import ObjectStore

    # A mistyped folder is not created.
    return _Bucket(ObjectStore(url, timeout_s=60.0, makes_folder=False), NamespaceKey.read(expanded(key_file)))


class _Bucket:
    """The objects of one namespace."""

    def __init__(self, objects: ObjectStore, key: NamespaceKey) -> None:
        self._objects, self._key = objects, key

    def forget(self, texts: Sequence[GoneText]) -> int:
        """See `cache.tiers.tier.Bucket`."""
        from diskprefix.extras.remote import upkeep

        return len(upkeep.forget(self._objects, self._key, texts))

    def purge(self, is_wanted: Callable[[str, str], bool]) -> int:
        """See `cache.tiers.tier.Bucket`."""
        from diskprefix.extras.remote import upkeep

        return upkeep.purge(self._objects, self._key, is_wanted)
