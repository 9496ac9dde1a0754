"""`tools/gpu`: runs the parts one after the other, and writes a table and a JSON file that grow as they go.

Only Python's own library is imported here: it must say what is missing, and end what hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tools.accelerator.parts import INTERPRETED, Row, Task

ROOT = Path(__file__).parents[2]
PARTS = (
    ("kernels", "tiny", 2),
    ("models", "tiny", 4),
    ("copies", "1B", 1),
    ("copies", "8B", 2),
    ("graphs", "tiny", 3),
    ("exactness", "1B", 5),
    ("exactness", "8B", 7),
    ("connector", "1B", 3),
    ("vLLM", "1B", 12),
    ("decoding", "1B", 6),
    ("first token", "1B", 7),
    ("first token", "8B", 18),
)
"""The parts, each with its share of the time. Time that one leaves is for those after it, so the longest comes last."""
INTERPRETER_PARTS = (
    ("kernels", "tiny", 1),
    ("copies", "tiny", 1),
    ("exactness", "tiny", 3),
    ("connector", "tiny", 2),
    ("first token", "tiny", 4),
)
"""The parts for a machine without an accelerator."""
PROBE_S = 60.0
GRACE_S = 5.0
"""Seconds between a part's SIGTERM and its SIGKILL."""
HEADER = "| part | case | | result |\n| --- | --- | --- | --- |"


def missing_packages() -> list[str]:
    """Returns a line for each package of the daemon, or of these tools, that is not there or too old."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    clients = [requirement for requirement in extras["dev"] if requirement.startswith("httpx>=")]
    lines = []
    for requirement in (*project["dependencies"], *clients):
        name, _, least = requirement.partition(">=")
        try:
            found = version(name)
            if _numbers(found) >= _numbers(least):
                continue
            problem = f"{name} {found} is too old"
        except PackageNotFoundError:
            problem = f"{name} is missing"
        lines.append(f"{problem}: {sys.executable} -m pip install '{requirement}', or on PYTHONPATH (see --help)")
    return lines


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


class Results:
    """The rows so far: lines of a Markdown table on standard output, and a JSON file that is written anew with each."""

    def __init__(self, json_file: Path | None, minutes: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}
        self._json_file, self._minutes = json_file, minutes

    def add(self, part: str, row: Row) -> None:
        if not self.rows:
            print(HEADER)
        self.rows.append({"part": part, **asdict(row)})
        cells = (part, row.case, row.state, row.result)
        print(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |", flush=True)
        self.write()

    def write(self) -> None:
        if self._json_file is not None:
            whole = {"machine": self.machine, "minutes": self._minutes, "rows": self.rows}
            # A run that is cut off leaves a whole file.
            unfinished = self._json_file.with_name(f"{self._json_file.name}.new")
            unfinished.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self._json_file)

    @property
    def is_wrong(self) -> bool:
        return any(row["state"] in ("fail", "crash") for row in self.rows)


def rows_of(task: Task, limit_s: float) -> Iterator[Row]:
    """Yields the rows of a part, which runs in a process of its own, and one more if it hangs or crashes.

    Then, or if something fails, the ends of its logs go to standard error.
    """
    Path(task.folder).mkdir(exist_ok=True)
    log_path, is_late = Path(task.folder) / "part.log", threading.Event()
    command = [sys.executable, "-m", "tools.accelerator.parts", json.dumps(asdict(task))]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )

    def stop() -> None:
        is_late.set()
        _end(process)

    timer = threading.Timer(max(limit_s, 0), stop)
    timer.start()
    assert process.stdout is not None
    has_failed = False
    try:
        with process.stdout:
            for line in process.stdout:
                row = Row(**json.loads(line))
                has_failed |= row.state == "fail"
                yield row
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            _end(process)
    if process.returncode or has_failed:
        for each in sorted(Path(task.folder).rglob("*.log")):
            print(f"{each.name} of {task.part}, {task.shape}:\n{_text(each)[-4000:]}", file=sys.stderr)
    if process.returncode and is_late.is_set():
        yield Row("the rest", "cut off", f"not done within {limit_s:.0f} s")
    elif process.returncode:
        lines = [line.strip() for line in _text(log_path).splitlines() if line.strip()]
        yield Row("the rest", "crash", lines[-1] if lines else f"ended with {process.returncode}")


def _end(process: subprocess.Popen[str]) -> None:
    """Asks the process and its children to end, and then makes them: one of the children may not have listened."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu",
        description="Exactness and speed on this machine's accelerator, with random weights: what is restored is what "
        "was computed, bit for bit; first tokens cold and after kill -9; decoding; what saving costs; copies beside "
        "what bus and disk give; the connector for vLLM. Prints a Markdown table. Ends with 1 if something is not "
        "exact or a part crashes.",
        epilog="Without a network: on a machine with one, pip install --target FOLDER what is missing; then "
        "PYTHONPATH=FOLDER tools/gpu --python PYTHON.",
    )
    parser.add_argument("--python", help="one that has torch for the accelerator, in place of .venv")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each row, with all figures")
    parser.add_argument("--folder", type=Path, help="where stores are made; 8B takes 26 GB (default: the system's)")
    parser.add_argument("--part", action="append", choices=[*dict.fromkeys(part for part, *_ in PARTS)])
    parser.add_argument("--interpreter", action="store_true", help="what needs no accelerator: tiny shapes on the CPU")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= 60:
        parser.error("--minutes: more than 0 and at most 60")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder: {options.folder} is no folder")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent} is no folder")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    options = parsed(arguments)
    # The last part must have ended by then, even if it does not listen.
    deadline = time.monotonic() + options.minutes * 60 - 2 * GRACE_S
    for line in missing_packages():
        print(f"tools/gpu: {line}", file=sys.stderr)
    if options.interpreter:
        # Kernels in Triton, where a library has some, run in its interpreter.
        os.environ.update(INTERPRETED)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results = Results(options.json, options.minutes)
    with tempfile.TemporaryDirectory(prefix="diskprefix-gpu-", dir=options.folder) as workspace:
        probe = Task(part="probe", shape="tiny", device="cpu", folder=str(Path(workspace) / "probe"))
        found, *_ = rows_of(probe, min(PROBE_S, options.minutes * 60))
        results.machine = found.figures
        if found.state != "measured":
            print(f"tools/gpu: {found.state}: {found.result}", file=sys.stderr)
            return 2
        if found.case == "cpu" and not options.interpreter:
            hint = found.figures.get("hint", "--interpreter runs what needs none")
            print(f"no accelerator: torch {found.figures['torch']} sees none; nothing was measured; {hint}")
            results.write()
            return 0
        facts = ", ".join(f"{name} {value}" for name, value in found.figures.items() if value)
        print(f"{facts}\n", flush=True)
        listed = INTERPRETER_PARTS if options.interpreter else PARTS
        parts = [part for part in listed if not options.part or part[0] in options.part]
        for number, (name, shape, share) in enumerate(parts):
            limit_s = (deadline - time.monotonic()) * share / sum(share for *_, share in parts[number:])
            folder = Path(workspace) / f"{number}"
            task = replace(probe, part=name, shape=shape, device=found.case, folder=str(folder))
            task = replace(task, free_bytes=found.figures["free_bytes"], count=found.figures["count"])
            for row in rows_of(task, limit_s):
                results.add(f"{name}, {shape}", row)
            # The next one needs the disk.
            shutil.rmtree(folder, ignore_errors=True)
    return int(results.is_wrong)


if __name__ == "__main__":
    sys.exit(main())
