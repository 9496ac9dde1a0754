"""`diskprefix serve` whose load is killed, as by a machine without memory. Run as a module, like the command."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import diskprefix.app
from diskprefix.cli import main
from diskprefix.progress import Report
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from diskprefix.engine.engine import Engine


def die(settings: Settings, progress: Report) -> Engine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(settings, progress)


if __name__ == "__main__":
    diskprefix.app.load_engine = die
    main()
