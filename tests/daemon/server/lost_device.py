"""`diskprefix serve` over an engine whose accelerator is lost at the first request. Run as a module, like the command.

Closing the engine hangs, as calls into a broken driver may.
"""

from __future__ import annotations

import threading

import diskprefix.daemon.app
import diskprefix.daemon.engine.device
import diskprefix.daemon.server.process.process
from diskprefix.daemon.cli import main
from tests.daemon.server.scripted import ScriptedEngine


def fail(*_: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered\nIt may have happened in an earlier call.")


if __name__ == "__main__":
    engine = ScriptedEngine(fail)
    engine.close = threading.Event().wait  # type: ignore[method-assign]
    diskprefix.daemon.server.process.process._DEVICE_LOST_S = 0.5
    diskprefix.daemon.engine.device.probe_devices = fail
    diskprefix.daemon.app.load_engine = engine.load
    main()
