"""The bucket that machines share: a tier behind the tiers of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.namespace_key import NamespaceKey
from diskprefix.settings import expanded

if TYPE_CHECKING:
    from diskprefix.cache.tiers.tier import Bucket, SharedTier
    from diskprefix.settings import Settings


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
    """Opens a bucket to remove objects from it. Raises `SettingsError`."""
    from diskprefix.extras.remote.objects import ObjectStore
    from diskprefix.extras.remote.upkeep import NamespaceObjects

    # A mistyped folder is not created.
    objects = ObjectStore(url, timeout_s=60.0, makes_folder=False)
    return NamespaceObjects(objects, NamespaceKey.read(expanded(key_file)))
