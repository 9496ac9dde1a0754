"""The shared tier on a real object server (rclone on loopback), behind a proxy that fails.

Two daemons share a bucket. What one has computed, the other restores from the bucket. The proxy fails in every way it
knows while requests go on, and each answer is compared with that of the cold run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.extras.remote.signing import PREAMBLE_BYTES
from diskprefix.namespace_key import NamespaceKey
from tests.object_server import FAULTS, ObjectServer, object_server
from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.live_server import LiveServer, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.prompts import prompt_text
from tools.measuring.report import machine, median, new_table, print_report, show_machine
from tools.measuring.workspace import measuring

FAULT_TOKENS = 700
REPLY_TOKENS = 8
SHARE_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """Requests while one fault held. `wrong`: answers that differ from those without the tier."""

    fault: str
    requests: int
    wrong: int
    from_remote: int
    most_ttft_ms: float
    cold_ttft_ms: float
    refused: int


@contextmanager
def two_daemons(folder: Path, server: ObjectServer) -> Iterator[tuple[LiveServer, LiveServer]]:
    key_file = folder / "namespace.key"
    key_file.write_text("a key for this benchmark alone")
    key_file.chmod(0o600)
    flags: tuple[str, ...] = ("--disk-prefix-cache", "full", "--kv-memory-entries", "0", "--kv-cache-gate", "off")
    flags += ("--remote-tier", server.url, "--namespace-key-file", str(key_file), "--remote-write", "all")
    log_path = folder / "server.log"
    with (
        LiveServer(kv_cache_dir=folder / "one", log_path=log_path, flags=flags, environment=server.environment) as one,
        LiveServer(
            kv_cache_dir=folder / "other", log_path=log_path, flags=flags, environment=server.environment
        ) as other,
    ):
        one.start()
        other.start()
        yield one, other


def share(one: LiveServer, prompt: str) -> Answer:
    """Computes a prompt, and waits until it is in the bucket."""
    answer = one.complete(prompt, max_tokens=REPLY_TOKENS)
    one.wait_until_saved()
    deadline = time.monotonic() + SHARE_DEADLINE_S
    while one.cache_stats()["remote"]["offered"]:
        if time.monotonic() > deadline:
            raise LiveServerError("the prompt was not shared")
        time.sleep(0.01)
    return answer


def faults(
    one: LiveServer, other: LiveServer, server: ObjectServer, requests: int, gone_s: float, console: Console
) -> Iterator[FaultResult]:
    prompts = (prompt_text(FAULT_TOKENS, number) for number in range(10_000, 20_000))

    def shared() -> tuple[list[str], list[Answer]]:
        asked = list(islice(prompts, requests))
        return asked, [share(one, prompt) for prompt in asked]

    for fault in FAULTS:
        with step(console, f"fault: {fault}"):
            _wait_until_closed(other)
            asked, firsts = shared()
            server.fault = fault
            yield _under(fault, other, asked, firsts)
            server.reset()
    with step(console, "planted objects: good checksums, no key"):
        _wait_until_closed(other)
        known = set(server.folder.rglob("*.*"))
        asked, firsts = shared()
        for path in set(server.folder.rglob("*.*")) - known:
            path.write_bytes(planted(path.read_bytes()))
        yield _under("planted", other, asked, firsts)
    with step(console, f"gone for {gone_s:.0f} s, requests all the time"):
        asked, firsts = shared()
        server.fault = "reset"
        until = time.monotonic() + gone_s
        while time.monotonic() < until and len(asked) < 200:
            asked.append(next(prompts))
            firsts.append(one.complete(asked[-1], max_tokens=REPLY_TOKENS))
        yield _under("gone", other, asked, firsts)
        server.reset()
    with step(console, "the bucket is back"):
        _wait_until_closed(other)
        yield _under("back", other, *shared())


def planted(data: bytes) -> bytes:
    """Returns an object that an attacker without the namespace key could plant: all is right but the MAC."""
    other = NamespaceKey.of(b"the key of somebody else")
    return data[: PREAMBLE_BYTES - 32] + other.mac_key + data[PREAMBLE_BYTES:]


def _wait_until_closed(server: LiveServer) -> None:
    """Waits until the circuit breaker lets requests through again; each request here is a probe."""
    deadline = time.monotonic() + 150
    for number in range(10_000):
        if server.cache_stats()["remote"]["state"] == "ok":
            return
        if time.monotonic() > deadline:
            raise LiveServerError("the bucket is still left alone")
        server.complete(prompt_text(300, 50_000 + number), max_tokens=1)


def _under(fault: str, other: LiveServer, asked: Sequence[str], firsts: Sequence[Answer]) -> FaultResult:
    before = sum(other.cache_stats()["remote"]["refused"].values())
    answers = [other.complete(prompt, max_tokens=REPLY_TOKENS) for prompt in asked]
    refused = sum(other.cache_stats()["remote"]["refused"].values()) - before
    return FaultResult(
        fault=fault,
        requests=len(asked),
        wrong=sum(answer.text != first.text for answer, first in zip(answers, firsts, strict=True)),
        from_remote=sum(answer.cache.get("source") == "remote" for answer in answers),
        most_ttft_ms=max(answer.ttft_s * 1e3 for answer in answers),
        cold_ttft_ms=median(first.ttft_s * 1e3 for first in firsts),
        refused=refused,
    )


def _show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    columns = ("requests", "wrong answers", "from the bucket", "refused", "first token at most, ms", "cold, ms")
    table = new_table("Faults", left=("fault",), right=columns)
    for row in report["faults"]:
        counts = [str(row[name]) for name in ("requests", "wrong", "from_remote", "refused")]
        table.add_row(row["fault"], *counts, f"{row['most_ttft_ms']:.0f}", f"{row['cold_ttft_ms']:.0f}")
    console.print(table)


@click.command()
@click.option("--requests", type=click.IntRange(min=1), default=3, show_default=True, help="Requests under each fault.")
@click.option("--gone", type=float, default=60.0, show_default=True, help="Seconds for which the bucket is gone.")
@FOLDER
@JSON
def main(requests: int, gone: float, folder: Path | None, as_json: bool) -> None:
    """Check the answers of two daemons that share a bucket under faults of the object server."""
    progress: Console = Console(stderr=True)
    with (
        measuring(folder, progress) as workspace,
        object_server(workspace / "objects") as server,
        two_daemons(workspace, server) as (one, other),
    ):
        found = list(faults(one, other, server, requests, gone, progress))
    report = {
        "benchmark": "remote",
        "machine": machine(),
        "faults": [asdict(one) for one in found],
    }
    print_report(report, as_json, _show)
    if any(one.wrong for one in found):
        raise click.ClickException("an answer was wrong")
