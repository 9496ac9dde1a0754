"""The moving picture of the front page: a real session in a terminal, in which the daemon is killed and goes on.

bash runs in a pseudo-terminal, and the commands are typed into it. Each piece of its output is drawn where and when it
came, so the picture takes as long as the session took. It is an SVG that animates itself, without a script.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click

from diskprefix.errors import DiskPrefixError
from tools.measuring.prompts import AGENT_PROMPT

PICTURE = Path(__file__).parents[1] / "images" / "restart.svg"
_QUESTION = "A customer says that an invoice is wrong. What do I do first?\n"
_SERVE = "diskprefix serve 2>serve.log &"
_ASK = "diskprefix chat --system handbook.md --max-tokens 32 --temperature 0 <question.txt"
_COMMANDS = (_SERVE, _ASK, "kill -9 %1", _SERVE, _ASK)
_PROMPT = "$ "
_LIMIT_S = 300.0
_KEY_S, _KEYS = 0.08, 5
"""The time between two pieces of a typed command, and the characters of a piece."""
_READ_S = 1.5
"""The time to read an answer before the next command. The daemon saves the prompt meanwhile."""
_PAUSE_S = 5.0
"""The time that the last picture stays."""
_COLUMNS, _CHAR, _LINE, _EDGE = 116, 8.0, 19, 16
_TEXT = (
    '<text class="{kind}" x="{x:g}" y="{y:g}" textLength="{length:g}">{text}<animate attributeName="opacity" '
    'calcMode="discrete" dur="{duration:.2f}s" repeatCount="indefinite" values="{values}" keyTimes="{times}"/></text>'
)
_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>A recorded session: the daemon answers a long prompt, is killed and started again, and restores it.</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre; }}
.typed {{ fill: #fff; font-weight: 700; }} .figures {{ fill: #43c7b4; }} .clock {{ fill: #8b949e; }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#14171c"/>
{texts}
</svg>
"""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x07")


class Piece(NamedTuple):
    """A text that came at once, at a place on the screen. `at` is in seconds since the beginning."""

    at: float
    line: int
    column: int
    text: str


class Terminal:
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
            self._read(_KEY_S)
        os.write(self._file, b"\n")
        self.wait()

    def wait(self) -> None:
        """Waits for bash's prompt. Raises `DiskPrefixError` if none comes."""
        ends = time.monotonic() + _LIMIT_S
        while not self._read(0.3) or not self.text().endswith(f"\n{_PROMPT}"):
            if time.monotonic() > ends:
                raise DiskPrefixError(f"a command of the session takes longer than {_LIMIT_S:.0f} s: {self.text()}")

    def text(self) -> str:
        """Returns all that was written."""
        return "\n" + "".join(text for _, text in self.written)

    def _read(self, seconds: float) -> bool:
        """Keeps what is written within a time. Returns whether nothing more came at its end."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if not select.select([self._file], [], [], left)[0]:
                return True
            text = os.read(self._file, 65536).decode("utf-8", "replace")
            self.written.append((time.monotonic() - self._began, _CONTROLS.sub("", text).replace("\r", "")))
        return False

    def read(self, seconds: float) -> None:
        """Waits as a reader does."""
        self._read(seconds)

    def close(self) -> None:
        """Ends bash and what it started."""
        for job in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split():
            os.kill(int(job), signal.SIGTERM)
        os.kill(self._pid, signal.SIGKILL)
        os.close(self._file)
        os.waitpid(self._pid, 0)


def record(folder: Path, cache: Path, num_chars: int) -> list[tuple[float, str]]:
    """Returns the output of the session with its times. `folder` is its current folder, `cache` that of the model.
    The prompt has `num_chars` characters.

    Raises `DiskPrefixError` if the killed daemon's prompt was not restored from the disk.
    """
    (folder / "handbook.md").write_text(AGENT_PROMPT.read_text(encoding="utf-8")[:num_chars], encoding="utf-8")
    (folder / "question.txt").write_text(_QUESTION, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PS1": _PROMPT,
        "TERM": "dumb",
        "COLUMNS": str(_COLUMNS),
        "XDG_CACHE_HOME": str(cache),
        "DISKPREFIX_KV_CACHE_DIR": str(folder / "kv"),
        "DISKPREFIX_PORT": str(port),
    }
    terminal = Terminal(folder, environment)
    try:
        terminal.wait()
        for number, command in enumerate(_COMMANDS):
            terminal.type(command)
            terminal.read(_READ_S if command == _ASK else 0.5)
            click.echo(f"{number + 1} of {len(_COMMANDS)}: {command}", err=True)
        if not re.search(r"restored from disk", terminal.text()):
            raise DiskPrefixError(f"nothing was restored from the disk: {terminal.text()}")
    finally:
        terminal.close()
    end = next(at for at, text in reversed(terminal.written) if "restored from disk" in text) + 0.1
    return [(at, text) for at, text in terminal.written if at <= end]


def placed(written: Sequence[tuple[float, str]]) -> Iterator[Piece]:
    """Yields the pieces at their places. Lines that are too long are folded, as a terminal does."""
    line = column = 0
    for at, text in written:
        for part in re.findall(r"\n|[^\n]+", text):
            if part == "\n":
                line, column = line + 1, 0
                continue
            while part:
                piece, part = part[: _COLUMNS - column], part[_COLUMNS - column :]
                yield Piece(at, line, column, piece)
                column += len(piece)
                if part:
                    line, column = line + 1, 0


def drawn(pieces: Sequence[Piece]) -> str:
    """Returns the SVG of the pieces, which begins again after a pause. A program that does not animate shows the end of
    the session."""
    first, last = pieces[0].at, pieces[-1].at
    whole, lines = last - first + _PAUSE_S, pieces[-1].line + 2

    def shown(piece: Piece, kind: str, until: float | None = None) -> str:
        shares = [(at - first + 0.01) / whole for at in (piece.at, until) if at is not None]
        times, values = ";".join(["0", *(f"{share:.5f}" for share in shares)]), "0;1;0" if until else "0;1"
        return _TEXT.format(
            x=_EDGE + piece.column * _CHAR,
            y=_EDGE + (piece.line + 1) * _LINE - 5,
            length=len(piece.text) * _CHAR,
            kind=kind,
            text=escape(piece.text),
            duration=whole,
            values=values,
            times=times,
        )

    commands = {piece.line for piece in pieces if piece.column == 0 and piece.text.startswith(_PROMPT)}
    texts = []
    for piece in pieces:
        kind = "typed" if piece.line in commands else "figures" if "first token" in piece.text else "said"
        texts += [shown(piece, kind)] if piece.text.strip() else []
    for begin, end in pairwise([*range(int(last - first) + 1), last - first]):
        clock = f"{begin:.0f} s"
        texts.append(shown(Piece(first + begin, lines - 1, _COLUMNS - len(clock), clock), "clock", first + end))
    size = {"width": round(_COLUMNS * _CHAR + 2 * _EDGE), "height": lines * _LINE + 2 * _EDGE}
    return _PICTURE.format(texts="\n".join(texts), **size)


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=PICTURE, help="The SVG to write.")
@click.option(
    "--chars", default=24_000, help="The characters of the prompt. With others, the small model may answer less well."
)
def main(output: Path, chars: int) -> None:
    """Record a session in a terminal, and draw it: a long prompt is answered, the daemon gets SIGKILL and is started
    again, and answers the same prompt from the disk. About a minute. The times are those of the session.

    Exit code 1: nothing was restored from the disk.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(tempfile.mkdtemp(prefix="diskprefix-picture-"))
    try:
        svg = drawn(list(placed(record(folder, cache, chars))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    output.write_text(svg, encoding="utf-8")
    click.echo(f"{output}: {len(svg):,} bytes")
