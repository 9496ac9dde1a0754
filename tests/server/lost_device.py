"""`diskprefix serve` over an engine whose accelerator is lost at the first request. Run as a module, like the command.

With `NEVER_CLOSES` in the environment, closing the engine hangs, as calls into a broken driver may.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import diskprefix.app
import diskprefix.engine.device
import diskprefix.server.process.process
from diskprefix.cli import main
from diskprefix.engine.request import GenerateRequest
from tests.server.scripted import Emit, ScriptedEngine


def lose_device(_request: GenerateRequest, _emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
    fail()


def fail() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered\nIt may have happened in an earlier call.")


if __name__ == "__main__":
    engine = ScriptedEngine(lose_device)
    if "NEVER_CLOSES" in os.environ:
        diskprefix.server.process.process._DEVICE_LOST_S = 0.5
        engine.close = threading.Event().wait  # type: ignore[method-assign]
    diskprefix.engine.device.probe_devices = fail
    diskprefix.app.load_engine = engine.load
    main()
