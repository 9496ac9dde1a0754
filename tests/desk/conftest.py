"""Running commands in this process, as a user would see them; and a small disk to run them on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diskprefix import desk
from diskprefix.daemon.cli import commands, main
from diskprefix.desk.shared import daemon_call, tooling
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import TokenIds
from tests.clients import browser, client
from tests.prefixstore.packs.exported import entry_of
from tests.prefixstore.store.building import is_clean, is_whole, open_store
from tests.small_disk import small_disk

__all__ = ["browser", "client"]


@dataclass
class Ended:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert self.stdout, self.stderr
        return json.loads(self.stdout)

    def assert_refused(self, exit_code: int, *words: str) -> None:
        found = (self.exit_code, self.stdout, self.stderr.startswith("error: "), self.stderr.count("\n"))
        assert found == (exit_code, "", True, 1), self
        assert [word for word in words if word not in self.stderr] == [], self.stderr


Run = Callable[..., Ended]
_PAGE = Path(desk.__file__).with_name("README.md")
TAKEN_AWAY = {*re.findall(r"`(\w+)`", _PAGE.read_text(encoding="utf-8"))} - commands().keys()
"""Commands of rooms that were taken away, among other words of the desk's page: tests that need them are skipped."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `diskprefix` with some arguments; neither standard input nor standard error is a terminal. No wait is long
    enough to be told of, however busy the machine is."""
    monkeypatch.setattr(tooling, "_LONG_S", 3600.0)
    # Each command is a process of its own.
    monkeypatch.setattr(daemon_call, "_own_urls", set())

    def call(*args: object) -> Ended:
        if args and args[0] in TAKEN_AWAY:
            pytest.skip(f"the room of `{args[0]}` was taken away")
        with pytest.raises(SystemExit) as end:
            main(list(map(str, args)))
        out = capsys.readouterr()
        assert isinstance(end.value.code, int)
        # click ends the ^C of a terminal with a newline of its own.
        return Ended(end.value.code, out.out, out.err.removeprefix("\n"))

    return call


def run_fresh(*commands: list[str]) -> tuple[list[str], set[str]]:
    """Runs commands in a new interpreter, one after the other.

    Returns the lines that they printed, and which of the packages that take long to import were imported.
    """
    code = (
        "import json, sys\n"
        "from diskprefix.daemon.cli import _run\n"
        "assert not any(map(_run, json.loads(sys.argv[1])))\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(ended.stderr.splitlines()[-1].split())
    return ended.stdout.splitlines(), imported & {
        *("torch", "transformers", "tokenizers", "uvicorn", "starlette", "pydantic", "jinja2", "rich"),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def saved(folder: Path, token_ids: TokenIds, *, budget_bytes: int = 32 << 20, **fields: Any) -> Publication:
    with closing(open_store(folder, budget_bytes=budget_bytes)) as store:
        made = entry_of(store, token_ids, **fields)
        store.publish(made)
    return made


def holds(folder: Path, made: Publication) -> bool:
    with closing(open_store(folder)) as store:
        return is_clean(store) and is_whole(store, made)


def overwrite(folder: Path) -> bytes:
    """Damages the file of a store behind its first pages, and returns what it then holds."""
    file = folder / "data.mdb"
    data = file.read_bytes()
    file.write_bytes(data[: 2 * 4096] + b"\xff" * (len(data) - 2 * 4096))
    return file.read_bytes()


@contextmanager
def opened_elsewhere(folder: Path) -> Iterator[None]:
    code = (
        "import sys; from pathlib import Path; from diskprefix.prefixstore.store.store import Store; "
        "s = Store(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        yield
        other.communicate("")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    with small_disk(tmp_path / "disk", "8m") as place:
        yield place
