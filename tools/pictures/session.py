"""A session in a terminal, recorded: the daemon answers a long prompt, gets SIGKILL, starts again and answers it.

bash runs in a pseudo-terminal, and the commands are typed into it. The record has each piece of the output with its
time and place, so the picture is drawn from what happened, and can be drawn again without a daemon.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import msgspec

from diskprefix import __version__
from diskprefix.errors import DiskPrefixError
from diskprefix.units import parse_duration
from tools.measuring.processes import free_port
from tools.measuring.prompts import AGENT_PROMPT

_QUESTION = "A customer says that an invoice is wrong. What do I do first?\n"
_SERVE = "diskprefix serve 2>serve.log &"
_ASK = "diskprefix chat --system handbook.md --max-tokens 32 --temperature 0 <question.txt"
COMMANDS = (_SERVE, _ASK, "kill -9 %1", _SERVE, _ASK)
PROMPT = "$ "
COLUMNS = 116
_CHARS = 24_000
"""The characters of the handbook. With others, the small model may answer less well."""
_LIMIT_S = 300.0
_KEY_S, _KEYS = 0.08, 5
"""The time between two pieces of a typed command, and the characters of a piece."""
_READ_S = 1.5
"""The time to read an answer before the next command. The daemon saves the prompt meanwhile."""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x07")
_FIGURES = re.compile(r"(?P<tokens>[\d,]+) (?:of [\d,]+ )?tokens .* first token after (?P<time>[\d.]+ \w+)")


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A text that came at once, at its place on the screen. `at` is in seconds since the first piece."""

    at: float
    line: int
    column: int
    text: str


class Session(msgspec.Struct, frozen=True):
    """The output of a terminal of `COLUMNS` columns, with the day and the version that ran."""

    recorded: str
    version: str
    pieces: list[Piece]

    def encoded(self) -> bytes:
        """Returns the session as JSON, a piece on each line."""
        head = msgspec.json.encode({"recorded": self.recorded, "version": self.version})
        pieces = b",\n".join(map(msgspec.json.encode, self.pieces))
        return head.removesuffix(b"}") + b',"pieces":[\n' + pieces + b"\n]}\n"

    def lines(self) -> list[str]:
        """Returns the screen at the end."""
        texts = [""] * (self.pieces[-1].line + 1)
        for piece in self.pieces:
            texts[piece.line] = texts[piece.line].ljust(piece.column) + piece.text
        return texts

    def figures(self) -> list[tuple[int, float, str]]:
        """Returns of each answer the tokens of the prompt, the seconds to the first token, and these as shown."""
        matches = filter(None, map(_FIGURES.match, self.lines()))
        return [
            (int(line["tokens"].replace(",", "")), parse_duration(line["time"], param="the picture"), line["time"])
            for line in matches
        ]


class _Terminal:
    """bash in a pseudo-terminal, and what it wrote with its times."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.written: list[tuple[float, str]] = []
        self._began = time.monotonic()
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)

    def type(self, command: str) -> None:
        """Types a command, and returns when bash asks for the next one."""
        for start in range(0, len(command), _KEYS):
            os.write(self._file, command[start : start + _KEYS].encode())
            self.read(_KEY_S)
        os.write(self._file, b"\n")
        self.wait_prompt()

    def wait_prompt(self) -> None:
        """Waits for bash's prompt. Raises `DiskPrefixError` if none comes."""
        ends = time.monotonic() + _LIMIT_S
        while not self.read(0.3) or not self.text().endswith(f"\n{PROMPT}"):
            if time.monotonic() > ends:
                raise DiskPrefixError(f"a command of the session takes longer than {_LIMIT_S:.0f} s: {self.text()}")

    def text(self) -> str:
        """Returns all that was written."""
        return "\n" + "".join(text for _, text in self.written)

    def read(self, seconds: float) -> bool:
        """Keeps what is written within a time. Returns whether nothing more came at its end."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if not select.select([self._file], [], [], left)[0]:
                return True
            text = os.read(self._file, 65536).decode("utf-8", "replace")
            self.written.append((time.monotonic() - self._began, _CONTROLS.sub("", text).replace("\r", "")))
        return False

    def close(self) -> None:
        """Ends bash and what it started."""
        for job in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split():
            os.kill(int(job), signal.SIGTERM)
        os.kill(self._pid, signal.SIGKILL)
        os.close(self._file)
        os.waitpid(self._pid, 0)


def record(folder: Path) -> Session:
    """Runs the session in an empty folder, with the user's cache of models. Takes half a minute.

    Raises `DiskPrefixError` if the killed daemon's prompt was not restored from the disk.
    """
    handbook = AGENT_PROMPT.read_text(encoding="utf-8")[:_CHARS]
    (folder / "handbook.md").write_text(handbook, encoding="utf-8")
    (folder / "question.txt").write_text(_QUESTION, encoding="utf-8")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PS1": PROMPT,
        "TERM": "dumb",
        "COLUMNS": str(COLUMNS),
        "DISKPREFIX_KV_CACHE_DIR": str(folder / "kv"),
        "DISKPREFIX_PORT": str(free_port()),
    }
    terminal = _Terminal(folder, environment)
    try:
        terminal.wait_prompt()
        for command in COMMANDS:
            terminal.type(command)
            terminal.read(_READ_S if command == _ASK else 0.5)
        if "restored from disk" not in terminal.text():
            raise DiskPrefixError(f"nothing was restored from the disk: {terminal.text()}")
    finally:
        terminal.close()
    end = next(at for at, text in reversed(terminal.written) if "restored from disk" in text)
    shown = [(at, text) for at, text in terminal.written if at <= end]
    return Session(date.today().isoformat(), __version__, list(placed(shown)))


def placed(written: Sequence[tuple[float, str]]) -> Iterator[Piece]:
    """Yields the pieces at their places. Lines that are too long are folded, as a terminal does."""
    line = column = 0
    for at, text in written:
        for part in re.findall(r"\n|[^\n]+", text):
            if part == "\n":
                line, column = line + 1, 0
                continue
            while part:
                piece, part = part[: COLUMNS - column], part[COLUMNS - column :]
                yield Piece(round(at - written[0][0], 3), line, column, piece)
                column += len(piece)
                if part:
                    line, column = line + 1, 0
