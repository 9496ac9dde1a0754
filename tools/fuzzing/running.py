"""Runs targets for some time, and reads what libFuzzer says of them. Atheris has libFuzzer inside."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diskprefix.errors import DiskPrefixError
from diskprefix.folders import cache_home
from tools.fuzzing import compiled, corpus
from tools.measuring.environments import install_once, run_installer

ATHERIS = "atheris==3.0.0"
_ROOT = Path(__file__).parents[2]
_SPARE_S = 120
"""Seconds for a target to start, to read its corpus and to end."""
_MOST_INPUT = {"planes_join": 4096, "planes_split": 4096, "pack": 4096}
"""The largest inputs of targets in C++. The inputs of other targets choose sizes, for which few bytes are enough."""
_CHOICES_BYTES, _PYTHON_BYTES = 128, 8192
_LIMITS = ("-timeout=30", "-rss_limit_mb=2500", "-print_final_stats=1", "-detect_leaks=0")
_FINDING = re.compile(r"^(WRONG: .*|.*runtime error: .*|.*ERROR: (?:libFuzzer|\w+Sanitizer): .*)$", re.M)
_RAISED = re.compile(r"Uncaught Python exception: ===\n(.*)")


class CannotFuzz(DiskPrefixError):
    """A target does not run. The message is one line."""


@dataclass(frozen=True)
class Outcome:
    """A run of a target. `edges` are branches that were reached, as libFuzzer counts them. `finding` is what it found,
    and `input` the file that shows it."""

    target: str
    language: str
    executions: int
    seconds: float
    edges: int
    inputs: int
    finding: str = ""
    input: str = ""


@dataclass(frozen=True)
class Fuzzed:
    """A target: its command, and the variables in its environment."""

    name: str
    language: str
    command: tuple[str, ...]
    most_bytes: int
    environment: tuple[tuple[str, str], ...] = ()
    seeds: Callable[[Path], Iterable[bytes]] = lambda _folder: ()
    words: Callable[[], Iterable[str]] = tuple


def home() -> Path:
    """Returns the folder of the compiled programs and of the inputs with which runs reached new code."""
    return cache_home() / "fuzz"


def targets(wanted: Sequence[str], *, races: bool = False) -> list[Fuzzed]:
    """Returns the targets with these names, or all of them, ready to run; for `races` those in C++, compiled for
    ThreadSanitizer. Raises `CannotFuzz` and `NotInstalled`."""
    from tools.fuzzing.python_targets import TARGETS  # here, as it imports much of the package

    native = [name for name in compiled.names() if not wanted or name in wanted]
    others = [] if races else [name for name in TARGETS if not wanted or name in wanted]
    if unknown := sorted(set(wanted) - {*native, *others}):
        known = (*compiled.names(), *([] if races else TARGETS))
        raise CannotFuzz(f"there is no target {unknown[0]}; there are {', '.join(known)}")
    targets = []
    if native:
        try:
            folder = compiled.compiled(home(), compiled.RACES if races else compiled.MEMORY)
        except compiled.CannotCompile as error:
            raise CannotFuzz(str(error)) from error
        targets += [
            Fuzzed(name, "C++", (str(folder / name),), _MOST_INPUT.get(name, _CHOICES_BYTES)) for name in native
        ]
    path = os.pathsep.join((str(_ROOT), str(_atheris()))) if others else ""
    for name in others:
        command = (sys.executable, "-P", "-m", "tools.fuzzing.atheris_worker", name)
        target = TARGETS[name]
        targets.append(
            Fuzzed(
                name,
                "Python",
                command,
                _PYTHON_BYTES,
                (("PYTHONPATH", path),),
                target.seeds,
                target.words,
            )
        )
    return targets


@cache
def _atheris() -> Path:
    """Returns the folder with Atheris, which is installed on first use. Raises `NotInstalled`."""
    folder = home() / "atheris"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    install_once(folder, [ATHERIS, sys.version_info[:2]], lambda: run_installer(*pip, "--target", str(folder), ATHERIS))
    return folder


def run(target: Fuzzed, seconds: float, workspace: Path) -> Outcome:
    """Runs a target, starting with the inputs in git and the inputs of earlier runs."""
    here = workspace / target.name
    seeds = _seeds(target, here)
    grown = home() / "corpus" / target.name
    grown.mkdir(parents=True, exist_ok=True)
    arguments = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={target.most_bytes}"]
    if words := list(filter(None, target.words())):
        (here / "words").write_text("".join(f'"{_escaped(word)}"\n' for word in words), encoding="utf-8")
        arguments.append(f"-dict={here / 'words'}")
    arguments += [f"-artifact_prefix={here}/", "-len_control=20", str(grown), str(seeds)]
    said = _said(target, arguments, here, seconds + _SPARE_S)
    return outcome_of(target, said, here)


def _seeds(target: Fuzzed, folder: Path) -> Path:
    """Returns a folder with a target's inputs in git and the inputs that the target makes."""
    made = folder / "made"
    made.mkdir(parents=True, exist_ok=True)
    return corpus.write_inputs(folder / "seeds", [*corpus.inputs_of(target.name).values(), *target.seeds(made)])


def outcome_of(target: Fuzzed, said: str, folder: Path) -> Outcome:
    """Returns the outcome of a run from libFuzzer's output. Keeps the artifact that is in `folder`."""

    def last(pattern: str) -> int:
        matches = re.findall(pattern, said)
        return int(matches[-1]) if matches else 0

    artifact = next(
        (path for path in folder.glob("*-*") if path.is_file() and path.name.split("-")[0] in _ARTIFACTS), None
    )
    finding = _finding(said) if artifact is not None or "Done " not in said else ""
    path = ""
    if artifact is not None:
        path = str(home() / "found" / f"{target.name}-{hashlib.sha256(artifact.read_bytes()).hexdigest()[:8]}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact, path)
    executions = last(r"number_of_executed_units: (\d+)") or last(r"#(\d+)\s")
    seconds = last(r"Done \d+ runs in (\d+) second")
    return Outcome(
        target.name, target.language, executions, seconds, last(r"cov: (\d+)"), last(r"corp: (\d+)/"), finding, path
    )


_ARTIFACTS = ("crash", "leak", "timeout", "oom", "slow")


def _finding(said: str) -> str:
    """Returns the line of the output that names the fault."""
    if raised := _RAISED.search(said):
        return raised[1].strip()
    findings = _FINDING.findall(said)
    lines = [line for line in said.splitlines() if line.strip()]
    return findings[0].strip() if findings else f"it ended early: {lines[-1] if lines else 'it said nothing'}"


def replay(target: Fuzzed, path: Path, workspace: Path) -> Outcome:
    """Runs a target once, with the input in a file."""
    here = workspace / target.name
    here.mkdir(parents=True, exist_ok=True)
    said = _said(target, [f"-artifact_prefix={here}/", str(path.absolute())], here, _SPARE_S)
    is_done = "Executed " in said
    return Outcome(target.name, target.language, 1, 0, 0, 1, "" if is_done else _finding(said), str(path))


def merged(target: Fuzzed, workspace: Path) -> Path:
    """Returns a folder with a few inputs that reach the same code as the inputs of all runs."""
    here = workspace / target.name
    folder = here / "merged"
    folder.mkdir(parents=True, exist_ok=True)
    seeds = _seeds(target, here)
    _said(
        target,
        ["-merge=1", f"-max_len={target.most_bytes}", str(folder), str(seeds), str(home() / "corpus" / target.name)],
        here,
        1800,
    )
    return folder


def _said(target: Fuzzed, arguments: Sequence[str], folder: Path, limit_s: float) -> str:
    """Runs a target's command in a folder. Returns its output."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | dict(target.environment)
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    try:
        done = subprocess.run(
            [*target.command, *_LIMITS, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        return f"{(error.stderr or b'').decode(errors='replace')}\nit did not end in time"
    said = (done.stderr + done.stdout).decode(errors="replace")
    (folder / "log").write_text(said, encoding="utf-8")
    return said


def _escaped(word: str) -> str:
    return "".join(
        char if char.isascii() and char.isalnum() else "".join(f"\\x{byte:02x}" for byte in char.encode())
        for char in word
    )
