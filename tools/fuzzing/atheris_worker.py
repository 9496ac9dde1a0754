"""Runs one target below Atheris: `python -m tools.fuzzing.atheris_worker NAME`, then libFuzzer's arguments."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped]  # the tool installs it into a folder of its own


def main() -> None:
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=["diskprefix"]):
        from tools.fuzzing.python_targets import TARGETS
    with tempfile.TemporaryDirectory(
        prefix="diskprefix-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        # To merge a corpus, libFuzzer starts itself by this name, through a shell.
        again = f"{shlex.quote(sys.executable)} -P -m tools.fuzzing.atheris_worker {name}"
        atheris.Setup([again, *arguments], TARGETS[name].opened(Path(folder)))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
