"""A process that is suspended while it writes to a store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CODE = """
import sys, time
from pathlib import Path
from diskprefix.prefixstore.store.store import Store
with Store(Path(sys.argv[1])).changes():
    print("writing", flush=True)
    time.sleep(3600)
"""


@contextmanager
def suspended_writer(folder: Path) -> Iterator[int]:
    """Yields the id of a process that was suspended in a write transaction. It is killed at the end."""
    with subprocess.Popen([sys.executable, "-P", "-c", _CODE, str(folder)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            os.kill(process.pid, signal.SIGSTOP)
            yield process.pid
        finally:
            process.kill()
