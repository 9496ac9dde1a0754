"""Another time of day for other processes, by a preloaded library (`false_clock.c`) that is compiled for it."""

from __future__ import annotations

import os
import struct
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

from tools.measuring.environments import NotInstalled

_SOURCE = Path(__file__).with_name("false_clock.c")


class FalseClock:
    """The time of day of the processes with `environment`. It begins as the true one."""

    def __init__(self, folder: Path) -> None:
        """Raises `NotInstalled` without a C compiler."""
        library, self._file = folder / "false_clock.so", folder / "false_clock"
        compiling = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
        try:
            subprocess.run(compiling, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotInstalled(f"another time of day needs a C compiler: {error}") from error
        self._ahead_s = 0
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "FALSE_CLOCK": str(self._file)}

    def now(self) -> datetime:
        return datetime.now() + timedelta(seconds=self._ahead_s)

    def set_before_midnight(self, seconds: float) -> None:
        """Sets it to that many seconds before the next midnight, at most one more."""
        now = self.now()
        midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time())
        self._ahead_s += int((midnight - now).total_seconds() - seconds)
        # Processes have the file mapped, and see one write of eight bytes as a whole.
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("=q", self._ahead_s), 0)
