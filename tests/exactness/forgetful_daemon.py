"""`diskprefix serve` that keeps no state in memory and takes a checkpoint every CHECKPOINT_INTERVAL tokens. Run as a
module, like the command."""

from __future__ import annotations

import os
from functools import partialmethod

from diskprefix.daemon.cli import main
from diskprefix.daemon.settings import Settings

if __name__ == "__main__":
    interval = int(os.environ["CHECKPOINT_INTERVAL"])
    init = partialmethod(Settings.__init__, kv_memory_keeps=False, kv_cache_interval=interval)
    Settings.__init__ = init  # type: ignore[assignment, method-assign]
    main()
