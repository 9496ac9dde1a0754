"""First tokens and bytes on disk: without a connector, with vLLM's example connector, with ours, and with vLLM's own
prefix cache, which a restart empties."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from diskprefix.progress import Report
from tools.connector.server import Connector, Reply, Server, stored_blocks
from tools.measuring.options import FOLDER, JSON, codec_option
from tools.measuring.processes import disk_bytes
from tools.measuring.prompts import NEW_TOKENS, WORDS, extended, prompt_text
from tools.measuring.workspace import measuring, model_folder

_FIRST_TOKENS = 1000
_TURN_TOKENS = 100
_CONTEXT_LEFT = 256
_BLOCK_TOKENS = 128
KINDS: tuple[Connector, ...] = ("none", "example", "diskprefix")
_LABELS = {
    "cold": "cold",
    "warm": "warm",
    "warm_nearest": f"warm, +{NEW_TOKENS} tokens",
    "exact": "after a kill",
    "nearest": f"after a kill, +{NEW_TOKENS} tokens",
}


@dataclass(frozen=True)
class Case:
    """One prompt. `equal`: its reply, log-probabilities included, is that of the same server with vLLM's own cache warm
    (after a kill), or that of the first server (cold)."""

    connector: Connector
    case: str
    tokens: int
    run: int
    ttft_ms: float
    restored: int
    reply: Reply
    equal: bool | None = None


@dataclass(frozen=True)
class Conversation:
    """Bytes that a conversation adds on the disk."""

    connector: Connector
    disk_bytes: int


@dataclass(frozen=True)
class Plan:
    """The options of a run. `python` has vLLM, None is the environment of `tools/vllm`; `arguments` are more
    of vLLM's own."""

    model: Path
    sizes: tuple[int, ...]
    kinds: tuple[Connector, ...]
    turns: int
    kills: int
    codec: str
    python: Path | None = None
    arguments: tuple[str, ...] = ()


@dataclass
class Results:
    """The findings. `load_errors`: the number of our loads that failed."""

    cases: list[Case] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    load_errors: int = 0

    @property
    def is_wrong(self) -> bool:
        return self.load_errors > 0 or any(
            one.connector == "diskprefix" and one.case in ("exact", "nearest") and not (one.equal and one.restored)
            for one in self.cases
        )

    def ttft_ms(self, connector: Connector, case: str, tokens: int) -> float | None:
        """The median; None if it was not measured."""
        times = [
            one.ttft_ms for one in self.cases if (one.connector, one.case, one.tokens) == (connector, case, tokens)
        ]
        return statistics.median(times) if times else None

    def disk_bytes(self, connector: Connector) -> int | None:
        """Of the conversation."""
        return next((one.disk_bytes for one in self.conversations if one.connector == connector), None)

    def ratios(self) -> dict[str, Any]:
        """Ours and the example connector's: first tokens after a kill by size, and bytes on the disk."""
        ttft = {
            case: {
                tokens: _ratio(self.ttft_ms("diskprefix", case, tokens), self.ttft_ms("example", case, tokens))
                for tokens in sorted({one.tokens for one in self.cases})
            }
            for case in ("exact", "nearest")
        }
        fewer = _ratio(self.disk_bytes("example"), self.disk_bytes("diskprefix"))
        return {"ttft_to_example": ttft, "times_fewer_bytes_than_example": fewer}


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else round(one / other, 3)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A real model's name or a model's folder.")
@click.option("--tokens", multiple=True, type=int, default=(2048, 4096), show_default=True, help="Repeatable.")
@click.option("--connector", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS, help="Repeatable.")
@click.option("--turns", type=click.IntRange(min=0), default=10, show_default=True, help="Of the conversation.")
@click.option(
    "--kills", type=click.IntRange(min=1), default=1, show_default=True, help="After each, all is asked again."
)
@codec_option("planes")
@FOLDER
@JSON
def bench(
    model: str,
    tokens: tuple[int, ...],
    kinds: tuple[Connector, ...],
    turns: int,
    kills: int,
    codec: str,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Cold, with vLLM's own cache warm, after a kill, each with 23 tokens more too, and a conversation.

    Ends with 1 if a reply of ours after the kill is not that of the same server before it, if nothing was restored, or
    if a load failed. Then the logs and the replies are kept.
    """
    progress = Console(stderr=True)
    weights = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        plan = Plan(weights, tokens, kinds, turns, kills, codec)
        found = measured(plan, workspace, progress.print)
        if found.is_wrong:
            _keep(workspace, found, progress.print)
    if as_json:
        print(json.dumps(asdict(found) | found.ratios()))
    else:
        _show(found)
    sys.exit(found.is_wrong)


def measured(plan: Plan, workspace: Path, report: Report) -> Results:
    """Runs all. What a size adds is asked for in the same servers, which are started once for each connector, and again
    after each kill."""
    context = max(*plan.sizes, _FIRST_TOKENS + plan.turns * _TURN_TOKENS) + _CONTEXT_LEFT
    found = Results()
    cold: dict[tuple[int, int], Reply] = {}

    def add(case: Case) -> None:
        report(
            f"{_LABELS[case.case]}, {case.tokens} tokens: {case.ttft_ms:.0f} ms, {case.restored} restored{_as(case)}"
        )
        found.cases.append(case)

    for kind in plan.kinds:
        folder = workspace / kind
        folder.mkdir()
        server = Server(
            plan.model,
            folder,
            report,
            kind,
            context=context,
            python=plan.python,
            arguments=plan.arguments,
            codec=plan.codec,
        )
        with started(server, kind, report):
            for size, run in itertools.product(plan.sizes, (1, 2)):
                case = _asked(server, "cold", size, run)
                wanted = cold.setdefault((size, run), case.reply)
                add(case if wanted is case.reply else replace(case, equal=_is_equal(case.reply, wanted)))
            warm = [_asked(server, name, size) for size in plan.sizes for name in ("warm", "warm_nearest")]
            for case in warm:
                add(case)
            if kind == "none":
                continue
            _wait_until_saved(server, sum(2 * (size // _BLOCK_TOKENS) for size in plan.sizes))
            if plan.turns:
                found.conversations.append(Conversation(kind, _talk(server, plan.turns)))
        for _ in range(plan.kills):
            with started(server, kind, report):
                names = [(name, size) for size in plan.sizes for name in ("exact", "nearest")]
                for (name, size), before in zip(names, warm, strict=True):
                    case = _asked(server, name, size)
                    add(replace(case, equal=_is_equal(case.reply, before.reply)))
                found.load_errors += int(server.metrics().get("load_errors", 0))
    return found


def _asked(server: Server, case: str, size: int, run: int = 1) -> Case:
    """Asks for a prompt of a size, of which there are two; the one with more tokens is the second."""
    prompt = extended(prompt_text(size, 2)) if case.endswith("nearest") else prompt_text(size, run)
    reply = server.ask(prompt)
    return Case(server.connector, case, size, run, reply.ttft_s * 1e3, reply.restored, reply)


def _wait_until_saved(server: Server, least: int) -> None:
    """Waits until all blocks are written, at least the given number. Raises `EngineError` if they are not."""
    server.settle()
    if server.connector == "diskprefix":
        wanted = max(least, int(server.metrics().get("saved_blocks", 0)))
        server.settle(lambda: stored_blocks(server.store) >= wanted)


def _keep(workspace: Path, found: Results, report: Report) -> None:
    kept = Path(tempfile.mkdtemp(prefix="diskprefix-differs-"))
    (kept / "replies.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    for log in workspace.glob("*/server.log"):
        shutil.copy(log, kept / f"{log.parent.name}.log")
    report(f"the logs and the replies are in {kept}")


@contextmanager
def started(server: Server, kind: Connector, report: Report) -> Iterator[None]:
    """A server that has its first request behind it, and is killed at the end."""
    with running(server):
        report(f"{kind}: ready after {server.start_s:.0f} s")
        server.ask(" ".join(WORDS[:40]))
        yield


def _talk(server: Server, turns: int) -> int:
    """Turns behind a first prompt as long as that of a small agent."""
    server.settle()
    before = disk_bytes(server.store)
    choose = random.Random(5)
    prompt = "".join(f" {word}" for word in choose.choices(WORDS, k=_FIRST_TOKENS))
    for _ in range(turns):
        prompt += "".join(f" {word}" for word in choose.choices(WORDS, k=_TURN_TOKENS))
        prompt += "".join(server.ask(prompt).tokens)
    server.settle()
    return disk_bytes(server.store) - before


def _is_equal(one: Reply, other: Reply) -> bool:
    return (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def _as(case: Case) -> str:
    """Returns in words whether the reply is the expected one."""
    if case.equal is None:
        return ""
    other = "the first server's" if case.case == "cold" else "the warm one"
    return f", {'the same' if case.equal else 'not the same'} reply as {other}"


def _show(found: Results) -> None:
    table = Table(*("connector", "prompt", "tokens", "first token, ms", "restored", "reply"))
    for case in found.cases:
        columns = (case.connector, _LABELS[case.case], str(case.tokens), f"{case.ttft_ms:.0f}", str(case.restored))
        table.add_row(*columns, _as(case).removeprefix(", "))
    console = Console()
    console.print(table)
    console.print(_summary(found))
    for one in found.conversations:
        console.print(f"{one.connector}: {one.disk_bytes / 2**20:.1f} MiB more on disk after the conversation")
    if (fewer := found.ratios()["times_fewer_bytes_than_example"]) is not None:
        console.print(f"{fewer:.1f} times fewer with diskprefix than with the example connector")
    console.print(f"{found.load_errors} loads failed")


def _summary(found: Results) -> Table:
    """First tokens by size: what the restart costs with each connector, and what vLLM does without one."""
    titles = ("prompt", "tokens", "no connector", "example", "diskprefix", "vLLM's own cache", "ours / example")
    table = Table(
        *titles, title="First token in ms: cold without a connector, after a kill, with vLLM's own cache warm"
    )
    ratios = found.ratios()["ttft_to_example"]
    for tokens, (case, warm) in itertools.product(
        sorted({one.tokens for one in found.cases}), (("exact", "warm"), ("nearest", "warm_nearest"))
    ):
        times = [
            found.ttft_ms("none", "cold", tokens),
            found.ttft_ms("example", case, tokens),
            found.ttft_ms("diskprefix", case, tokens),
            found.ttft_ms("none", warm, tokens),
        ]
        ratio = ratios[case][tokens]
        label = "the same" if case == "exact" else f"+{NEW_TOKENS} tokens"
        cells = ["" if one is None else f"{one:.0f}" for one in times]
        table.add_row(label, str(tokens), *cells, "" if ratio is None else f"{ratio:.2f}")
    return table


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server that is started, and killed at the end."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
