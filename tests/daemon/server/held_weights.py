"""`diskprefix serve` whose weights are in memory when somebody writes to the FIFO `HELD_WEIGHTS`. If that is no empty
text, the load fails with it. Run as a module, like the command."""

from __future__ import annotations

import os
from pathlib import Path

from diskprefix.daemon.cli import main
from diskprefix.runtime.files.folder_weights import FolderWeights


def finish_reading(_: FolderWeights) -> None:
    if problem := Path(os.environ["HELD_WEIGHTS"]).read_text():
        raise OSError(problem)


if __name__ == "__main__":
    FolderWeights.finish_reading = finish_reading  # type: ignore[assignment, method-assign]
    main()
