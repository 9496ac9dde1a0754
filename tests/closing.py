"""What a run of the tests says when it ends: which variants of the operators were tested, which tests took too long,
what samples were drawn from, and in CI, what was skipped that should not have been.

`.ci/run` sets DISKPREFIX_TEST_MISSING to the programs that it could not install, separated by blanks. Where it is set,
a skip that `LISTED` does not name fails the run; elsewhere it is named, and any program may be missing. Tests without
the mark `slow` that take over three seconds are named: no time fails a run.

`.ci/run` repeats a run's failed tests if all of them have the mark `timing` and they are few: they are written to the
file that DISKPREFIX_TEST_REPEAT names, one in a line.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.exceptions import exceptions
from tests.faults.seeds import line_of_run
from tests.reach import UNFIT

TESTED = "operators"
"""The property of a test that names the variant of the operators that it tested. The closing lines count them."""
MISSING = os.environ.get("DISKPREFIX_TEST_MISSING")

REPEAT = os.environ.get("DISKPREFIX_TEST_REPEAT")
MOST_REPEATED = 5
"""So many tests of a run are repeated at most."""

LISTED = {
    "takes long: set DISKPREFIX_TEST_EXAMPLES=2": "tools/bench checks it too",
    "could not import 'llama_cpp'": "it takes ten minutes to compile; `tools/llama tests` runs these",
    "traces are not on this machine": "published data, too large for this project",
    "needs root": "CI of a fork may not be root",
    "this process may use a GPU": "the test is about machines without one",
    "the kernel cannot populate pages": "Linux before 5.14",
    "the kernel does not tell": "systems other than Linux",
    "lets no user make a namespace": "some distributions allow it to chosen programs alone",
    "no program can have mounts of its own here": "containers without user namespaces, and systems other than Linux",
    "needs two processors": "the test is about where threads run",
    "did not fit": "`tools/test --changed` names them",
    "no operators of this CPU": "a CPU without bfloat16",
    "the embedded model is not on this machine": "pip fetches it at the first `diskprefix serve`",
    **exceptions("SKIPPED"),
}
"""Skips that CI accepts: a part of the reason that the test gives, and why it is accepted."""

LONGEST_S = 3.0
"""From these seconds on a test without the mark `slow` is named, on a machine that takes `_REFERENCE_S` for `_work`."""
_REFERENCE_S = 0.05


def _work() -> None:
    sum(number * number for number in range(1_000_000))


def slowness() -> float:
    began = time.perf_counter()
    _work()
    return max(1.0, (time.perf_counter() - began) / _REFERENCE_S)


def needs(program: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that run a program which is not one of the project's dependencies."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program}")


def unlisted(reasons: list[str], missing: str | None) -> list[str]:
    """Returns the reasons that CI does not accept. The programs in `missing` could not be installed; with None, any."""
    programs = [r"[\w-]+"] if missing is None else [re.escape(program) for program in missing.split()]
    accepted = [*map(re.escape, LISTED), *(f"needs {program}" for program in programs)]
    listed = re.compile("|".join(rf"{part}(?![\w-])" for part in accepted))
    return [reason for reason in reasons if not listed.search(reason)]


class ClosingLines:
    """A plugin of the process that prints the results."""

    def __init__(self) -> None:
        self._skips: list[tuple[str, str]] = []
        self._tested: Counter[str] = Counter()
        self._slowness = slowness()
        self._long: list[tuple[str, float]] = []
        """Tests without the mark `slow` that took too long, with their seconds."""
        self._failed: dict[str, bool] = {}
        """Tests and modules that failed, and whether they may be repeated."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_skip(report)
        if report.failed:
            self._failed[report.nodeid] = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note_skip(report)
        if report.when == "call" and report.duration > LONGEST_S * self._slowness and "slow" not in report.keywords:
            self._long.append((report.nodeid, report.duration))
        if report.failed:
            self._failed[report.nodeid] = "timing" in report.keywords
        if report.when == "call" and report.passed:
            self._tested.update(str(value) for name, value in report.user_properties if name == TESTED)

    def _note_skip(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))

    def _wrong_skips(self) -> list[tuple[str, str]]:
        return [(test, reason) for test, reason in self._skips if unlisted([reason], MISSING)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        may_repeat = session.exitstatus == pytest.ExitCode.TESTS_FAILED and all(self._failed.values())
        if MISSING is not None and self._wrong_skips():
            may_repeat = False
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if REPEAT and may_repeat and len(self._failed) <= MOST_REPEATED:
            Path(REPEAT).write_text("".join(f"{test}\n" for test in self._failed), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self._wrong_skips():
            terminalreporter.write_line(f"CI does not accept this skip: {test}: {reason}", red=True)
        if unfit := Counter(test.partition("::")[0] for test, reason in self._skips if reason == UNFIT):
            files = ", ".join(f"{file} ({count})" for file, count in unfit.items())
            terminalreporter.write_line(f"{unfit.total()} tests that the changes reach {UNFIT}: {files}", yellow=True)
        for test, seconds in self._long:
            terminalreporter.write_line(f"{seconds:.1f} s: make it cheaper or mark it slow: {test}", yellow=True)
        if MISSING:
            terminalreporter.write_line(f"not tested, because it could not be installed: {MISSING}", yellow=True)
        if self._tested:
            # It imports torch.
            from tests.native.variants import VARIANTS, of_this_cpu

            tested = ", ".join(f"{name} ({count} tests)" for name, count in sorted(self._tested.items()))
            absent = ", ".join(name for name in VARIANTS if name not in of_this_cpu())
            rest = f"; not on this CPU: {absent}" if absent else ""
            terminalreporter.write_line(f"operators tested: {tested}{rest}")
        terminalreporter.write_line(line_of_run())
