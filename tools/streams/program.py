"""Each client reads the stream of each of its routes cut at every byte, and must make the same message of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer

import click
from rich.console import Console

from diskprefix.progress import Report
from tools.measuring.live_server import log_tail, step
from tools.measuring.options import FOLDER
from tools.measuring.report import say
from tools.measuring.workspace import measuring
from tools.streams.clients import CLIENTS, Client, command_of
from tools.streams.recording import BODIES, CALLS, TEXT, WITH_CALLS, record_all
from tools.streams.replayer import EACH, WHOLE, Replayer

Read = Callable[[str, int], Iterator[str]]
"""Requests a stream from a URL, as often as the number says. Yields each message as a line of JSON."""
NAMES = sorted({client.name for client in CLIENTS})
_DEADLINE_S = 7200.0
_SHOWN_CHARS, _SHOWN_MESSAGES = 300, 3
_LINES_PER_NOTE = 100


def _say_nothing(_line: str) -> None:
    """The reports of a comparison that nobody follows."""


@dataclass
class Comparison:
    """The messages that a client made of one stream. `differing` has the cuts whose message is not that of the uncut
    stream, with the message; `fault` is why there is nothing to compare."""

    num_cuts: int = 0
    whole: str = ""
    differing: list[tuple[int, str]] = field(default_factory=list)
    fault: str = ""

    @property
    def holds(self) -> bool:
        return not self.fault and not self.differing


def cuts_of(response: bytes, every: int) -> list[int]:
    """Returns the cuts to try: none at first, then each `every`-th byte, and all of them at once."""
    return [WHOLE, *range(1, len(response), every), EACH]


def compare(
    read: Read,
    path: str,
    response: bytes,
    cuts: Sequence[int],
    note: Report = _say_nothing,
) -> Comparison:
    """Sends a stream with these cuts, of which the first is `WHOLE`."""
    made, num_read = Comparison(num_cuts=len(cuts) - 1), 0
    with Replayer(path, response, cuts) as server:
        for message in read(server.url, len(cuts)):
            made.whole = made.whole or message
            if message != made.whole:
                made.differing.append((cuts[min(num_read, len(cuts) - 1)], message))
            num_read += 1
            if num_read % _LINES_PER_NOTE == 0:
                note(f"{num_read} of {len(cuts)}")
    if num_read != len(cuts) or server.served != len(cuts):
        made.fault = f"{num_read} messages and {server.served} requests instead of {len(cuts)}"
    else:
        made.fault = not_read(made.whole, response, path)
    return made


def reader(command: Sequence[str], path: str, log: Path) -> Read:
    """Returns a function that runs the program of a client. What it says goes to `log`."""

    def read(url: str, count: int) -> Iterator[str]:
        with (
            log.open("a") as errors,
            subprocess.Popen(
                [*command, path, url, str(count)], stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            ) as process,
        ):
            timer = Timer(_DEADLINE_S, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                yield from (line.rstrip("\n") for line in process.stdout)
            finally:
                timer.cancel()
                process.kill()

    return read


def not_read(whole: str, response: bytes, path: str) -> str:
    """Returns why the message of the uncut stream does not have the reply, "" if it does."""
    message = json.loads(whole)
    if isinstance(message, list):
        num_events = response.count(b"\ndata: ")
        return "" if len(message) == num_events else f"{len(message)} of {num_events} events: {whole[:_SHOWN_CHARS]}"
    wanted = [TEXT, *(name for name, _ in CALLS if path in WITH_CALLS)]
    lacking = [text for text in wanted if json.dumps(text, ensure_ascii=False)[1:-1] not in whole]
    return f"without {lacking}: {whole[:_SHOWN_CHARS]}" if lacking else ""


def show(client: Client, path: str, num_bytes: int, made: Comparison) -> None:
    """Prints a row of a table in Markdown, and below it the first messages that differ."""
    click.echo(f"| {client.versions} | {path} | {num_bytes} | {made.num_cuts} | {made.fault or len(made.differing)} |")
    for cut, message in made.differing[:_SHOWN_MESSAGES]:
        where = "each byte alone" if cut == EACH else f"cut at {cut}"
        click.echo(f"  {where}: {message[:_SHOWN_CHARS]}", err=True)


@click.command()
@click.option(
    "--client", "clients", multiple=True, type=click.Choice(NAMES), help="Only clients with this name; repeatable."
)
@click.option("--route", "routes", multiple=True, type=click.Choice([*BODIES]), help="Only this route; repeatable.")
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="The bytes between two cuts.")
@FOLDER
def main(clients: tuple[str, ...], routes: tuple[str, ...], every: int, folder: Path | None) -> None:
    """Check that clients read a stream alike wherever the network cuts it.

    A daemon with a tiny model streams a prepared reply on each route: a thought, a text, calls, signs of life. Each
    response is recorded, and sent to each client once for every byte, in two pieces, and once byte by byte. The client
    must make the message of it that it makes of the uncut response. Clients are installed on first use. Takes
    hours on two cores, and minutes with `--every 100`. Exits with 1 if a message differs or lacks a part of the reply.
    """
    console, all_hold = Console(stderr=True), True
    wanted = [client for client in CLIENTS if not clients or client.name in clients]
    with measuring(folder, console) as workspace:
        with step(console, "recording"):
            streams, log = record_all(workspace), workspace / "clients.log"
        click.echo("| client | route | bytes | cuts | other messages |\n| --- | --- | --- | --- | --- |")
        for client in wanted:
            command = command_of(client, partial(say, console))
            for path in (path for path in client.routes if not routes or path in routes):
                stream = streams[path]
                with step(console, f"{client.name} ({client.where}), {path}") as note:
                    made = compare(reader(command, path, log), path, stream, cuts_of(stream, every), note)
                if made.fault:
                    say(console, log_tail(log))
                show(client, path, len(stream), made)
                all_hold &= made.holds
    sys.exit(0 if all_hold else 1)
