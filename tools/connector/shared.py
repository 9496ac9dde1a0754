"""Two vLLMs and two daemons that share a bucket, on a real object server behind a proxy that fails."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.object_server import FAULTS, ObjectServer, object_server
from tools.connector.bench import running
from tools.connector.faults import Verdicts
from tools.connector.server import Reply, Server
from tools.measuring.options import FOLDER, JSON
from tools.measuring.prompts import prompt_text
from tools.measuring.workspace import measuring, model_folder
from tools.peers.peer import PeerError
from tools.programs.remote import NETWORKS, REPLY_TOKENS, planted, share, two_daemons

_FAULT_TOKENS = 700
_DTYPE = "float32"
_SHARE_DEADLINE_S = 60.0
_PROBES = 100
_TRIED = ("planted", *(fault for fault in FAULTS if fault != "hang"), "hang")
"""The faults in their order. Those that make the bucket seem slow come last: after them the daemon expects computing to
be faster, and fetches nothing. Planted objects must be fetched, so they come first."""


@dataclass(frozen=True)
class Sample:
    """The first request of a prompt in one vLLM (cold), in the other one (remote), and there again (disk)."""

    network: str
    tier: str
    tokens: int
    restored: int
    ttft_ms: float


@click.command()
@click.option("--tokens", multiple=True, type=int, default=(700, 2000), show_default=True, help="Repeatable.")
@FOLDER
@JSON
def shared(tokens: tuple[int, ...], folder: Path | None, as_json: bool) -> None:
    """Check the shared bucket. A vLLM must restore what another one computed. Under every fault of the proxy, all
    answers must be right. A daemon and a vLLM must miss each other's objects, because their layouts differ. Exits with
    1 otherwise."""
    progress, verdicts, samples = Console(stderr=True), Verdicts(), list[Sample]()
    model = model_folder("smollm2", progress)
    with (
        measuring(folder, progress) as workspace,
        object_server(workspace / "objects") as bucket,
        _two_vllms(model, workspace, bucket, max(tokens), progress) as (one, other),
    ):
        _under(_TRIED[0], one, other, bucket, verdicts, progress)
        for network in NETWORKS:
            for size in tokens:
                samples += _by_tier(one, other, bucket, network, size, verdicts)
                progress.print(*samples[-3:], sep="\n", highlight=False)
        for fault in _TRIED[1:]:
            _under(fault, one, other, bucket, verdicts, progress)
        with two_daemons(workspace, bucket) as daemons:
            known = prompt_text(_FAULT_TOKENS, 900)
            from_daemon = share(daemons[0], known)
            answer = daemons[1].complete(known, max_tokens=REPLY_TOKENS)
            if answer.cache.get("source") != "remote" or answer.text != from_daemon.text:
                verdicts.fail(f"the second daemon: {answer.cache}")
            progress.print(f"the second daemon: {answer.cache}", highlight=False)
            strange = (other.ask(known), daemons[0].complete(prompt_text(tokens[0], 0), max_tokens=REPLY_TOKENS))
        for reply in strange:
            if reply.restored:
                verdicts.fail(f"{reply.restored} tokens of another layout were restored")
        misses = {name: count for name, count in other.metrics().items() if name.startswith("misses:") and count}
        progress.print(f"what the other one left is a miss on both sides; vLLM counts {misses}", highlight=False)
    if as_json:
        print(json.dumps({"samples": list(map(asdict, samples)), "verdicts": asdict(verdicts)}))
    else:
        _show(samples, verdicts)
    sys.exit(bool(verdicts.wrong or verdicts.problems))


@contextmanager
def _two_vllms(
    model: Path, workspace: Path, bucket: ObjectServer, most_tokens: int, progress: Console
) -> Iterator[tuple[Server, Server]]:
    """Without vLLM's own cache, so that each prompt asks the store."""
    key = workspace / "vllm.key"
    key.write_text("a key for this check alone")
    key.chmod(0o600)
    made = []
    for name in ("one", "other"):
        (workspace / f"vllm-{name}").mkdir()
        made.append(
            Server(
                model,
                workspace / f"vllm-{name}",
                progress.print,
                dtype=_DTYPE,
                context=most_tokens + 256,
                arguments=("--no-enable-prefix-caching",),
                environment=bucket.environment,
                remote_tier=bucket.url,
                namespace_key_file=str(key),
                remote_write="all",
                remote_deadline="3s",
            )
        )
    with running(made[0]) as one, running(made[1]) as other:
        for server in (one, other):
            # The first request takes longer.
            server.ask(prompt_text(300, 999 + (server is one)))
        yield one, other


def _shared(one: Server, prompt: str) -> Reply:
    """Asks, and waits until all of the prompt is in the bucket. Raises `PeerError`."""

    def done() -> tuple[float, float]:
        found = one.metrics()
        return found.get("remote_written", 0), found.get("remote_dropped", 0)

    before = done()
    reply = one.ask(prompt)
    deadline, last = time.monotonic() + _SHARE_DEADLINE_S, before
    while True:
        time.sleep(0.5)
        # Its counts come with its steps.
        one.ask("a few words", 1)
        if (now := done()) == last != before:
            return reply
        last = now
        if time.monotonic() > deadline:
            raise PeerError("the prompt was not shared")


def _by_tier(
    one: Server, other: Server, bucket: ObjectServer, network: str, tokens: int, verdicts: Verdicts
) -> Iterator[Sample]:
    prompt = prompt_text(tokens, list(NETWORKS).index(network))
    first = _shared(one, prompt)
    yield Sample(network, "cold", tokens, first.restored, first.ttft_s * 1e3)
    bucket.latency_s, bucket.bytes_per_s = NETWORKS[network]
    for tier in ("remote", "disk"):
        before = other.metrics().get("remote_fetched", 0)
        reply = other.ask(prompt)
        verdicts.judge(reply, first)
        is_fetched = other.metrics().get("remote_fetched", 0) > before
        if not reply.restored or is_fetched != (tier == "remote"):
            verdicts.fail(f"{network}, {tokens} tokens, {tier}: {reply.restored} restored, fetched: {is_fetched}")
        yield Sample(network, tier, tokens, reply.restored, reply.ttft_s * 1e3)
    bucket.reset()


def _under(fault: str, one: Server, other: Server, bucket: ObjectServer, verdicts: Verdicts, progress: Console) -> None:
    """Asks for prompts in the bucket while the bucket fails."""
    number = 100 + 10 * _TRIED.index(fault)
    prompts = [prompt_text(_FAULT_TOKENS, number + run) for run in range(2)]
    _wait_until_answered(other, number)
    known = set(bucket.folder.rglob("*.*"))
    firsts = [_shared(one, prompt) for prompt in prompts]
    if fault == "planted":
        for path in set(bucket.folder.rglob("*.*")) - known:
            path.write_bytes(planted(path.read_bytes()))
    else:
        bucket.fault = fault  # type: ignore[assignment]
    before = other.metrics()
    replies = [other.ask(prompt) for prompt in prompts]
    bucket.reset()
    other.ask("a few words", 1)
    for reply, first in zip(replies, firsts, strict=True):
        verdicts.judge(reply, first)
    counts = {name: int(n - before.get(name, 0)) for name, n in other.metrics().items() if name.startswith("remote_")}
    counts = {name: number for name, number in counts.items() if number}
    if fault == "planted" and (any(reply.restored for reply in replies) or not counts.get("remote_refused:mac")):
        verdicts.fail(f"planted objects: {counts}, {[reply.restored for reply in replies]} restored")
    took = ", ".join(f"{reply.ttft_s * 1e3:.0f} ms ({reply.restored} restored)" for reply in replies)
    progress.print(f"{fault}: {took}; {counts}", highlight=False)


def _wait_until_answered(other: Server, number: int) -> None:
    """Waits until the circuit breakers let requests through: each prompt here is a probe. Raises `PeerError`."""
    for probe in range(_PROBES):
        before = other.metrics()
        other.ask(prompt_text(300, 10_000 + 100 * number + probe), 1)
        now = other.metrics()
        if now.get("remote_missing", 0) > before.get("remote_missing", 0):
            return
        time.sleep(1)
    raise PeerError("the bucket is still left alone")


def _show(samples: list[Sample], verdicts: Verdicts) -> None:
    table = Table("network", "tokens", "tier", "first token, ms", "restored")
    for one in samples:
        table.add_row(one.network, str(one.tokens), one.tier, f"{one.ttft_ms:.0f}", str(one.restored))
    console = Console()
    console.print(table)
    console.print(verdicts, highlight=False)
