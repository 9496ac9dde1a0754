"""The progress of a long step: one bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Report: TypeAlias = Callable[[str], None]
"""Takes one line of text for people."""

_SHOWN_S = 2.0
"""The shortest remaining time that is reported."""
_BESIDE_CHARS = 40
"""The columns of a bar and its figures."""


@contextmanager
def progress_bar(
    label: str, total: float | None, report: Report, *, in_bytes: bool = False
) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the work done so far, out of `total` or of an unknown amount (None).

    `label` is reported at the start. Then a bar is shown on stderr; without a terminal, each quarter is reported, with
    the time that is left. A smaller number than before changes nothing.
    """
    report(label)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
    from rich.progress import TimeElapsedColumn as ElapsedColumn
    from rich.progress import TimeRemainingColumn as RemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _quarters(label, total or math.inf, report)
        return
    amount = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
    # A narrow terminal cuts the label, which was reported, and not the time that is left.
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=console.width - _BESIDE_CHARS))
    columns = (SpinnerColumn(), text, BarColumn(), amount, ElapsedColumn(), RemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=max(done, bar.tasks[0].completed))


def _quarters(label: str, total: float, report: Report) -> Callable[[float], None]:
    reported, began_at = 0, time.monotonic()

    def advance(done: float) -> None:
        nonlocal reported
        quarter = min(int(4 * done / total), 3)
        if quarter > reported:
            reported = quarter
            left_s = (time.monotonic() - began_at) * (total - done) / done
            report(f"{label}: {25 * quarter} %" + (f", about {left_s:.0f} s more" if left_s >= _SHOWN_S else ""))

    return advance
