"""`diskprefix serve` over an engine whose accelerator is lost at the first request. Run as a module, like the command.

Closing the engine hangs, as calls into a broken driver may.
"""

from __future__ import annotations

import threading

import diskprefix.app
import diskprefix.engine.device
import diskprefix.server.process.process
from diskprefix.cli import main
from tests.server.scripted import ScriptedEngine


def fail(*_: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered\nIt may have happened in an earlier call.")


if __name__ == "__main__":
    engine = ScriptedEngine(fail)
    engine.close = threading.Event().wait  # type: ignore[method-assign]
    diskprefix.server.process.process._DEVICE_LOST_S = 0.5
    diskprefix.engine.device.probe_devices = fail
    diskprefix.app.load_engine = engine.load
    main()
