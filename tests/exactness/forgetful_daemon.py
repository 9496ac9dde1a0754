"""`diskprefix serve` that keeps no state in memory and takes a checkpoint every CHECKPOINT_INTERVAL tokens. Run as a
module, like the command."""

from __future__ import annotations

import os

from diskprefix.cli import main
from diskprefix.settings import Settings

if __name__ == "__main__":
    Settings.kv_memory_keeps = False
    Settings.kv_cache_interval = int(os.environ["CHECKPOINT_INTERVAL"])
    main()
