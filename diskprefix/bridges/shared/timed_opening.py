"""Opens a store for an engine, which must not wait for it forever."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait

from diskprefix.errors import DiskPrefixError
from diskprefix.prefixstore.shared_store import SharedStore, open_shared
from diskprefix.prefixstore.store_options import StoreOptions

log = logging.getLogger("diskprefix")

_OPEN_S = 30.0
"""Checking a large store takes seconds. A process that was suspended inside a write keeps others waiting for good."""


def open_in_time(settings: StoreOptions) -> SharedStore | None:
    """Returns the store of these settings, or None, with one line in the log, if it is not open after `_OPEN_S`
    seconds. Raises the errors of `open_shared`."""
    opening: Future[SharedStore] = Future()

    def run() -> None:
        try:
            shared = open_shared(settings)
        except (DiskPrefixError, OSError) as error:
            opening.set_exception(error)
            return
        if opening.set_running_or_notify_cancel():
            opening.set_result(shared)
        else:
            shared.release()

    # The thread may wait in LMDB until the process ends.
    threading.Thread(target=run, name="kv-open", daemon=True).start()
    wait([opening], _OPEN_S)
    if not opening.cancel():
        return opening.result()
    log.warning(
        "[disk-cache] %s could not be opened within %.0f s: requests are served without the cache until this process "
        "is started again",
        settings.kv_cache_dir,
        _OPEN_S,
    )
    return None
