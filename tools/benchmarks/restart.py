"""Measures the cost of a restart: a cold prompt, then after `kill -9` this prompt, the next turn and another question.

    tools/bench restart
    tools/bench restart --model qwen2.5-coder-0.5b --engine diskprefix --engine llama.cpp --engine vllm
    tools/bench restart --size 32000 --rounds 1 --no-check --model 4b --model 8b \\
        --engine 'diskprefix --kv-cache-budget 16GiB' --engine 'llama.cpp --sequences 1'

An engine is alone on the machine while it is measured. Every figure is the client's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.engines import Engine, HttpEngine
from tools.benchmarks.results import Figure, Plan, compare, plan_options
from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.live_server import Process
from tools.measuring.memory import read_bandwidth
from tools.measuring.processes import disk_bytes, peak_of, status_bytes, wait_quiet
from tools.measuring.prompts import NEW_TOKENS, WORDS, extended, prompt_text

_FIRST_TOKENS = 4
_ROOM = 512
_IDLE_WORK_S = 120.0
_GIB = 2**30
TITLES = {
    "first_start_s": "first start, s",
    "first_peak_gib": "its peak of memory, GiB",
    "start_s": "later start, s",
    "cold_s": "cold: first token, s",
    "prefill": "cold: prompt tokens/s",
    "rate": "decode, tokens/s",
    "bandwidth": "all threads read memory at, GB/s",
    "peak_gib": "peak of memory, GiB",
    "short_gib": "memory after a short reply, GiB",
    "resident_gib": "resident memory, GiB",
    "mapped_gib": "of it pages of files, GiB",
    "disk_gib": "disk beside the model's file, GiB",
    "recovery_s": "after kill -9: exec to first token, same prompt, s",
    "lost_s": "that if nothing was saved, s",
    "exact_s": "after kill -9: same prompt, s",
    "next_s": "after kill -9: next turn, s",
    "other_s": "after kill -9: other question, s",
}


def measured(
    engine: Engine, workspace: Path, round_: int, sizes: Sequence[int], reply_tokens: int, *, checks: bool
) -> Iterator[Figure]:
    """Yields the figures of one engine. Raises `LiveServerError`, also if a reply differs from the expected one."""
    with peak_of(partial(_highest_bytes, engine.process)) as memory:
        seconds = engine.start()
    yield Figure("first_start_s", seconds)
    yield Figure("first_peak_gib", memory.peak_bytes / _GIB)
    # A user's later start comes after what a program keeps for it, in idle time.
    wait_quiet(engine.process.pids, _IDLE_WORK_S)
    engine.kill()
    start_s = engine.start()
    yield Figure("start_s", start_s)
    engine.ask([prompt_text(32, f"first-{round_}")], 2)
    yield Figure("short_gib", sum(status_bytes(pid, "VmRSS") for pid in engine.process.pids()) / _GIB)
    texts: dict[int, str] = {}
    with peak_of(partial(_highest_bytes, engine.process)) as memory:
        for size in sizes:
            texts[size] = yield from _cold(engine, size, round_, reply_tokens, start_s)
        yield Figure("bandwidth", read_bandwidth())
        pids = engine.process.pids()
        yield Figure("resident_gib", sum(status_bytes(pid, "VmRSS") for pid in pids) / _GIB)
        yield Figure("mapped_gib", sum(status_bytes(pid, "RssFile") for pid in pids) / _GIB)
    yield Figure("peak_gib", memory.peak_bytes / _GIB)
    for size in sizes:
        yield from _restarted(engine, size, round_, texts[size], checks=checks)
    if used := disk_bytes(workspace):
        yield Figure("disk_gib", used / _GIB)


def _highest_bytes(process: Process) -> int:
    """Returns the resident memory of a process and its children, pages of files included."""
    # VmHWM is the peak of one process, also between two samples.
    pids = process.pids()
    return max(sum(status_bytes(pid, "VmRSS") for pid in pids), *(status_bytes(pid, "VmHWM") for pid in pids), 0)


def _cold(engine: Engine, size: int, round_: int, reply_tokens: int, start_s: float) -> Generator[Figure, None, str]:
    """Returns the text of the reply."""
    (reply,) = engine.ask([prompt_text(size, round_)], reply_tokens)
    yield Figure("cold_s", reply.ttft_s, size)
    yield Figure("lost_s", start_s + reply.ttft_s, size)
    yield Figure("prefill", (reply.prompt_tokens or size) / reply.ttft_s, size)
    if reply.decode_rate:
        yield Figure("rate", reply.decode_rate, size)
    return reply.text


def _restarted(engine: Engine, size: int, round_: int, text: str, *, checks: bool) -> Iterator[Figure]:
    """Kills and starts the engine before each of three prompts: otherwise the later ones would find the first in
    memory."""
    prompt = prompt_text(size, round_)
    started_s, reply = _after_kill(engine, prompt)
    if not text.startswith(reply.text):
        raise LiveServerError(f"the reply was {text!r} before kill -9, and is {reply.text!r}")
    yield Figure("exact_s", reply.ttft_s, size)
    at_once_s = engine.first_token_s(prompt) if isinstance(engine, HttpEngine) else None
    yield Figure("recovery_s", at_once_s or started_s + reply.ttft_s, size)
    beginning = " ".join(prompt.split(" ")[:-NEW_TOKENS])
    for case, other in (("next_s", extended(prompt)), ("other_s", extended(f"{beginning} {WORDS[-1]}"))):
        # Of a state that cannot be cut, another question has nothing if no checkpoint was kept before it.
        _, reply = _after_kill(engine, other, may_miss=case == "other_s")
        yield Figure(case, reply.ttft_s, size)
        if checks and isinstance(engine, HttpEngine) and engine.without_cache:
            cold = engine.reply(other, _FIRST_TOKENS, cached=False)
            if cold.text != reply.text:
                raise LiveServerError(
                    f"{TITLES[case]}: the reply is {reply.text!r}, and {cold.text!r} without the cache"
                )


def _after_kill(engine: Engine, prompt: str, *, may_miss: bool = False) -> tuple[float, Answer]:
    """Returns the seconds of the start, and the reply. Raises `LiveServerError` if nothing was restored, unless that
    may be."""
    engine.kill()
    started_s = engine.start()
    (reply,) = engine.ask([prompt], _FIRST_TOKENS)
    if isinstance(engine, HttpEngine) and engine.without_cache and not (reply.restored or may_miss):
        raise LiveServerError("nothing was restored after kill -9")
    return started_s, reply


@click.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.IntRange(min=64),
    default=(2000, 7000),
    show_default=True,
    help="Words of a prompt, about as many tokens; repeatable.",
)
@click.option("--reply-tokens", default=32, show_default=True, help="Tokens of the cold reply.")
@click.option("--check/--no-check", "checks", default=True, help="Compute next turns and other questions cold, too.")
@plan_options(rounds=3)
def main(sizes: tuple[int, ...], reply_tokens: int, *, checks: bool, **options: Any) -> None:
    """Measure what a restart costs, beside other engines.

    Every figure after kill -9 is the first request of a new process. The operating system's page cache survives that,
    so this is a restarted process, not a rebooted machine. The file of the model is dropped from it before the first
    start. After that, each engine gets up to two minutes for idle work, until it neither computes nor writes. Engines
    are installed on first use, shapes are files of 2 to 12 GB, made once. Ends with 1 if a reply differs from the cold
    one, or an engine was left out.
    """
    measures = partial(measured, sizes=sorted(set(sizes)), reply_tokens=reply_tokens, checks=checks)
    compare("restart", Plan(**options), TITLES, max(sizes) + reply_tokens + _ROOM, measures)
