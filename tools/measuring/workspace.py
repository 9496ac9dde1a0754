"""A temporary folder to measure in, and the message of a benchmark that cannot go on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from diskprefix.errors import ModelError
from tools.measuring.answers import LiveServerError
from tools.measuring.live_server import log_tail, step
from tools.models import real


@contextmanager
def measuring(folder: Path | None, progress: Console) -> Iterator[Path]:
    """Gives a temporary folder inside `folder`, or where the system has such folders.

    A `LiveServerError` is printed with the end of the folder's `server.log`, and ends the process with exit code 1.
    """
    with tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace:
        try:
            yield Path(workspace)
        except LiveServerError as error:
            progress.print(f"[red]error:[/red] {error}; the end of the server's log:", highlight=False)
            progress.print(log_tail(Path(workspace) / "server.log"), highlight=False, markup=False)
            sys.exit(1)


def model_folder(model: str, progress: Console) -> Path:
    """Returns the folder of `model`: the name of a real model, which is fetched if need be, or a path.

    Ends the process with exit code 1 and one line where there is no such model.
    """
    if model not in real.NAMES and os.path.isdir(model):
        return Path(model)
    try:
        if model not in real.NAMES:
            raise ModelError(f"--model: {model!r} is neither a folder nor one of {', '.join(real.NAMES)}")
        with step(progress, f"model {model}") as note:
            return real.fetched(model, note)
    except ModelError as error:
        progress.print(f"[red]error:[/red] {error.message}", highlight=False)
        sys.exit(1)
