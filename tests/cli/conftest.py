"""Running commands in this process, as a user would see them; and a small disk to run them on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diskprefix.cli import main


@dataclass
class Ended:
    """What a command left: its exit code and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `diskprefix` with some arguments; neither standard input nor standard error is a terminal."""

    def call(*args: str | Path) -> Ended:
        with pytest.raises(SystemExit) as end:
            main(list(map(str, args)))
        out = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, out.out, out.err)

    return call


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "diskprefix-test", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
