"""Models of the size that people run: the daemon beside llama.cpp or transformers, on the same file, in the same run.

    tools/bench shapes --only a --results shapes.json      # one shape; the file of results has them all
    tools/bench shapes --layers 2 --scale 8                # all of them small, in minutes

The files have real shapes, random numbers and a real tokenizer. They are made once and stay in the cache folder (or in
`--folder`): 47 GB for all. A program is alone on the machine while it is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any

import click
from rich.console import Console

from diskprefix.errors import ModelError
from diskprefix.settings import cache_home
from tools.measuring import page_cache
from tools.measuring.installing import NotInstalled
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import disk_bytes, peak_of, status_bytes
from tools.measuring.prompts import WORDS, extended, prompt_text
from tools.measuring.report import new_table, print_report, show_machine
from tools.models import real
from tools.peers.known import PEERS, Model, diskprefix
from tools.peers.peer import Peer, PeerError, Process, rate_together
from tools.peers.results import MACHINE, OURS, Figure, Results, order, shown
from tools.programs.peers import told
from tools.shapes.known import SHAPES, shape_file

PROMPTS = (2000, 8000)
"""Words of the prompts, about as many tokens."""
REPLY_TOKENS = 32
FIRST_TOKENS = 4
"""Where the first token is measured. Those of a restored prompt are compared with those of its first reply."""
NUM_TOGETHER = 5
LIMIT_S = 1800
TOKENIZER = "qwen2.5-coder-0.5b"
_ROOM = 512
_GIB = 2**30

TITLES = {
    "read_s": "reading the file from the disk, s",
    "first_s": "first start, s",
    "later_s": "later start, s",
    "peak_gib": "peak memory of the first start, GiB",
    "later_peak_gib": "peak memory of all later, GiB",
    "resident_gib": "resident memory, GiB",
    "mapped_gib": "of it pages of files, GiB",
    "disk_gib": "disk beside the file, GiB",
    "prefill": "prefill, tokens/s",
    "rate": "decode, tokens/s",
    "together": f"{NUM_TOGETHER} at once, tokens/s",
    "recovery_s": "kill -9 to first token, same prompt, s",
    "next_s": "next turn after it, s",
}


def _highest_bytes(process: Process) -> int:
    """Returns the resident memory of a process and its children, pages of files included."""
    # VmHWM is the peak of one process, also between two samples.
    pids = process.pids()
    return max(sum(status_bytes(pid, "VmRSS") for pid in pids), *(status_bytes(pid, "VmHWM") for pid in pids), 0)


@contextmanager
def limited(peer: Peer, seconds: float, part: str) -> Iterator[None]:
    """Ends the peer when a part takes longer. Raises `PeerError` that names the part."""
    is_late = Event()

    def end() -> None:
        is_late.set()
        peer.process.end()

    timer = Timer(seconds, end)
    timer.start()
    try:
        yield
    except (PeerError, OSError, ValueError) as error:
        said = f"not done after {seconds:.0f} s" if is_late.is_set() else str(error)
        raise PeerError(f"{part}: {said}") from error
    finally:
        timer.cancel()


def measured(peer: Peer, kept: Path, sizes: Sequence[int], limit_s: float) -> Iterator[Figure]:
    """Yields the figures of one peer. `kept` is the folder where it keeps what it makes of the model. It is killed at
    the end. Raises `PeerError`."""
    answers: dict[int, str] = {}
    try:
        yield from _starts(peer, kept, limit_s)
        with peak_of(partial(_highest_bytes, peer.process)) as memory:
            for size in sizes:
                answers[size] = yield from _alone(peer, size, limit_s)
            yield from _together(peer, min(sizes), limit_s)
            yield from _resident(peer.process)
        yield Figure("later_peak_gib", 0, memory.peak_bytes / _GIB)
        for size in sizes if peer.restores else ():
            yield from _restarted(peer, size, answers[size], limit_s)
    finally:
        # Not as `Peer.kill`, which waits until all is saved.
        peer.process.kill()


def _starts(peer: Peer, kept: Path, limit_s: float) -> Iterator[Figure]:
    with limited(peer, limit_s, "first start"), peak_of(partial(_highest_bytes, peer.process)) as memory:
        seconds = peer.start()
    yield Figure("first_s", 0, seconds)
    yield Figure("peak_gib", 0, memory.peak_bytes / _GIB)
    if used := disk_bytes(kept):
        yield Figure("disk_gib", 0, used / _GIB)
    with limited(peer, limit_s, "later start"):
        peer.kill()
        yield Figure("later_s", 0, peer.start())
        peer.ask([prompt_text(32, "first")], FIRST_TOKENS)


def _alone(peer: Peer, size: int, limit_s: float) -> Generator[Figure, None, str]:
    """Returns the text of the reply."""
    with limited(peer, limit_s, f"prompt of {size}"):
        reply = peer.ask([prompt_text(size, "alone")], REPLY_TOKENS)[0]
        yield Figure("prefill", size, (reply.prompt_tokens or size) / reply.ttft_s)
        yield Figure("rate", size, reply.decode_rate)
    return reply.text


def _together(peer: Peer, size: int, limit_s: float) -> Iterator[Figure]:
    """Asks for prompts that begin with an answered one: decoding is measured, and restored prompts need no prefill."""
    prompts = [prompt_text(size, "alone") + f" {word}" for word in WORDS[:NUM_TOGETHER]]
    with limited(peer, limit_s, f"{NUM_TOGETHER} at once"):
        yield Figure("together", size, rate_together(peer.ask(prompts, REPLY_TOKENS)))


def _resident(process: Process) -> Iterator[Figure]:
    pids = list(process.pids())
    yield Figure("resident_gib", 0, sum(status_bytes(pid, "VmRSS") for pid in pids) / _GIB)
    yield Figure("mapped_gib", 0, sum(status_bytes(pid, "RssFile") for pid in pids) / _GIB)


def _restarted(peer: Peer, size: int, answer: str, limit_s: float) -> Iterator[Figure]:
    """Kills and starts it for each of two prompts, as the second would find the first in memory."""
    prompt = prompt_text(size, "alone")
    with limited(peer, limit_s, f"prompt of {size} after kill -9"):
        peer.kill()
        started_s = peer.start()
        reply = peer.ask([prompt], FIRST_TOKENS)[0]
        if not answer.startswith(reply.text):
            raise PeerError(f"the reply was {answer!r} before, and is {reply.text!r}")
        yield Figure("recovery_s", size, started_s + reply.ttft_s)
    with limited(peer, limit_s, f"next turn after {size}, after kill -9"):
        peer.kill()
        peer.start()
        yield Figure("next_s", size, peer.ask([extended(prompt)], FIRST_TOKENS)[0].ttft_s)


def measure(
    letter: str,
    path: Path,
    sizes: Mapping[str, Sequence[int]],
    limit_s: float,
    results: Results,
    folder: Path,
    progress: Console,
) -> bool:
    """Adds the missing figures of one shape, for each program with prompts of the `sizes` that it has there. Returns
    whether all of them are there; others have a reason."""
    shape, is_whole = SHAPES[letter], True
    model = Model(letter, path, path, max(map(max, sizes.values())) + REPLY_TOKENS + _ROOM)
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    for name in (OURS, shape.beside):
        if results.has(letter, name, 0) and name not in results.left_out.get(letter, {}):
            continue
        results.begin(letter, name, 0)
        with (
            step(progress, f"{letter}: {shape.what}: {name}") as note,
            TemporaryDirectory(prefix="diskprefix-shapes-", dir=folder) as made,
        ):
            workspace = Path(made)
            try:
                if name == OURS:
                    results.add(letter, MACHINE, 0, [Figure("read_s", 0, sum(map(_read_s, files)))])
                    environment = {"XDG_CACHE_HOME": str(workspace / "kept")}
                    peer = diskprefix(model, workspace, note, shape.flags, environment)
                else:
                    peer = PEERS[name](model, workspace, note)
                for file in files:
                    page_cache.drop(file)
                for figure in told(measured(peer, workspace / "kept", sizes[name], limit_s), note):
                    results.add(letter, name, 0, [figure])
                results.end(letter, name)
            except (PeerError, NotInstalled) as error:
                is_whole = False
                results.leave_out(letter, name, str(error))
                note(f"left out: {error}")
    return is_whole


def _read_s(file: Path) -> float:
    page_cache.drop(file)
    return page_cache.direct_read_s(file, file.stat().st_size)


def show(report: dict[str, Any], console: Console) -> None:
    """Prints one table. A program that failed has a row that says why."""
    table = new_table(
        "ratio: how many times better diskprefix is", left=("", ""), right=("diskprefix", "beside", "ratio")
    )
    for letter in SHAPES:
        cells, reasons = report["models"].get(letter, {}), report["left_out"].get(letter, {})
        if not cells and not reasons:
            continue
        beside = SHAPES[letter].beside
        table.add_row(letter, f"[b]{SHAPES[letter].what}", "", beside, "")
        for cell in sorted(cells, key=partial(order, TITLES)):
            of_peers = cells[cell]
            values = [_shown(of_peers.get(name) or of_peers.get(MACHINE)) for name in (OURS, beside)]
            ratio = of_peers.get(beside, {}).get("ratio")
            case, *size = cell.split()
            table.add_row("", ", ".join([TITLES[case], *size]), *values, f"{ratio:.2f}" if ratio else "")
        for name, reason in reasons.items():
            table.add_row("", f"{name}: {reason}", "", "", "")
    console.print(table)
    show_machine(report["machine"], console)


def _shown(spread: dict[str, float] | None) -> str:
    if spread is None:
        return ""
    return shown(spread["median"])


def letters(_context: click.Context, _option: click.Parameter, value: str) -> list[str]:
    found = [letter.strip() for letter in value.split(",")]
    if unknown := [letter for letter in found if letter not in SHAPES]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(SHAPES)}")
    return found


@click.command()
@click.option("--only", default=",".join(SHAPES), callback=letters, show_default=True, help="These shapes.")
@click.option("--layers", type=click.IntRange(min=1), help="So many layers, to make them small.")
@click.option("--scale", type=click.IntRange(min=1), default=1, show_default=True, help="Divides widths and experts.")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.IntRange(min=64, max=30_000),
    default=PROMPTS,
    show_default=True,
    help="Words of a prompt; repeatable.",
)
@click.option(
    "--peer-size",
    "peer_sizes",
    multiple=True,
    type=click.IntRange(min=64, max=30_000),
    help="Words of the prompts of what is beside diskprefix, if others; repeatable.",
)
@click.option("--limit", "limit_s", default=LIMIT_S, show_default=True, help="Seconds for each part of a program.")
@click.option("--write-only", is_flag=True, help="Write the files and print their paths, without measuring.")
@click.option(
    "--results",
    "results_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add to this file what it does not have yet, and show all that it has.",
)
@FOLDER
@JSON
def main(
    only: list[str],
    layers: int | None,
    scale: int,
    sizes: tuple[int, ...],
    peer_sizes: tuple[int, ...],
    limit_s: int,
    write_only: bool,
    results_path: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Serve models of the size that people run, beside llama.cpp or transformers on the same file.

    SHAPES: a dense 7B, b 30B-A3B, c gpt-oss (GGUF, beside llama.cpp); d hybrid 4B, e latent attention, f dense 3B with
    int4 (safetensors, beside transformers). Each takes half an hour to two hours on two cores; one that fails is a row
    that says why. With `--results`, a run that is stopped goes on. Nothing else should run on the machine. Exits with
    1 if a row is missing.
    """
    progress = Console(stderr=True)
    files = folder or cache_home() / "shapes"
    results = Results(results_path, "shapes")
    with step(progress, f"the tokenizer of {TOKENIZER}") as note:
        tokenizer = real.gguf_file(TOKENIZER, note)
    is_whole = True
    for letter in only:
        try:
            with step(progress, f"{letter}: the file of {SHAPES[letter].what}") as note:
                path = shape_file(letter, files, tokenizer, scale, layers, note)
        except ModelError as error:
            is_whole = False
            results.leave_out(letter, "file", error.message)
            continue
        if write_only:
            click.echo(path)
        else:
            asked = {OURS: sorted(set(sizes)), SHAPES[letter].beside: sorted(set(peer_sizes or sizes))}
            is_whole &= measure(letter, path, asked, limit_s, results, files, progress)
    if not write_only:
        print_report(results.report(), as_json, show)
    sys.exit(0 if is_whole else 1)
