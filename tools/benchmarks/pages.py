"""What the memory of sequences costs: a prefix that many share, too little memory for all, and restores.

    tools/bench pages
    tools/bench pages --part sharing --model 3b --engine diskprefix --engine vllm
    tools/bench pages --part restore --rounds 5

Figures of memory are those of the server's processes, all others are the client's or, where the client cannot know it,
the daemon's.
"""

from __future__ import annotations

import shutil
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import click
import torch

from diskprefix.store.folder import DATA
from tools.benchmarks.engines import Engine, HttpEngine
from tools.benchmarks.results import Figure, Plan, compare, plan_options
from tools.measuring import page_cache
from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.processes import lower_peak, peak_of, status_bytes
from tools.measuring.prompts import prompt_text

_OWN_TOKENS, _REPLY_TOKENS, _FIRST_TOKENS, _ROOM = 24, 32, 4, 1024
_TASK = "Write all words of the first message again, in the same order."
_CLIENTS, _TURNS, _FITTING = 8, 3, 2.5
"""Clients with a conversation each, and the conversations that there is memory for."""
_RESTARTS, _WARMING = 3, 300
_GAUGE_S = 0.5
_MIB = 2**20
TITLES = {
    "peak_mib": "shared: memory above that before, MiB",
    "kv_mib": "shared: KV memory, says the daemon, MiB",
    "needed_mib": "shared: distinct tokens take, MiB",
    "peak_to_needed": "shared: memory / what they take",
    "first_s": "shared: first token of the first, s",
    "others_s": "shared: that of the others, median, s",
    "all_s": "shared: all replies, s",
    "turns_s": "scarce: all turns of all clients, s",
    "computed": "scarce: tokens computed",
    "twice": "scarce: of them not for the first time",
    "twice_prompts": "scarce: of these for lack of restores",
    "preemptions": "scarce: preemptions",
    "copy_gb_s": "a copy in memory, GB/s",
    "cold_gb_s": "restore from disk, GB/s",
    "warm_gb_s": "restore from the page cache, GB/s",
    "of_copy": "that, of the speed of a copy",
    "cold_s": "from disk: first token, s",
    "warm_s": "from the page cache: first token, s",
    "pair_first_s": "two at once from disk: first token, s",
    "pair_second_s": "that of the other, s",
}


@dataclass(frozen=True)
class Sizes:
    """Lengths in words, about as many tokens; replies in tokens."""

    shared: int
    numbers: Sequence[int]
    conversation: int
    reply: int


def _sharing(engine: Engine, workspace: Path, round_: int, sizes: Sizes) -> Iterator[Figure]:
    """Conversations over one system prompt, all sent at once to a server that has not seen it."""
    for number in sizes.numbers:
        # The daemon prepares as much memory as the longest prompt of its store takes.
        engine.kill()
        shutil.rmtree(workspace / "kv", ignore_errors=True)
        engine.start()
        _tokens_a_word(engine)
        shared = prompt_text(sizes.shared, f"{round_}-{number}")
        prompts = [shared + prompt_text(_OWN_TOKENS, f"own-{one}") for one in range(number)]
        pids = engine.process.pids()
        for pid in pids:
            lower_peak(pid)
        before = sum(status_bytes(pid, "VmRSS") for pid in pids)
        began = time.perf_counter()
        with peak_of(partial(_kv_bytes, engine)) as kv:
            replies = engine.ask(prompts, _REPLY_TOKENS)
            all_s = time.perf_counter() - began
        yield Figure("all_s", all_s, number)
        peak = sum(status_bytes(pid, "VmHWM") for pid in pids) - before
        yield Figure("peak_mib", peak / _MIB, number)
        first, *others = sorted(reply.ttft_s for reply in replies)
        yield Figure("first_s", first, number)
        yield Figure("others_s", statistics.median(others), number)
        if _is_daemon(engine):
            shared_tokens = engine.reply(shared, 1).prompt_tokens
            own = sum(reply.prompt_tokens - shared_tokens + reply.completion_tokens - 1 for reply in replies)
            needed = (shared_tokens + own) * engine.cache_stats()["bytes_per_token"]
            yield Figure("kv_mib", kv.peak_bytes / _MIB, number)
            yield Figure("needed_mib", needed / _MIB, number)
            yield Figure("peak_to_needed", peak / needed, number)


def _tokens_a_word(engine: Engine) -> float:
    """Asks for something else first, as the first request of a process takes longer."""
    (reply,) = engine.ask([prompt_text(_WARMING, "warm")], 8)
    return reply.prompt_tokens / _WARMING


def _kv_bytes(engine: Engine) -> int:
    if not _is_daemon(engine):
        return 0
    # Not more often: the daemon looks into its store for it.
    time.sleep(_GAUGE_S)
    return int(engine.metric("kv_memory_bytes"))


def _preemption(engine: Engine, workspace: Path, round_: int, sizes: Sizes) -> Iterator[Figure]:
    """Conversations that send all of their history with each turn, and memory for few of them."""
    del workspace
    server = _daemon(engine)
    server.start()
    limit = int(_FITTING * sizes.conversation * _tokens_a_word(server) * server.cache_stats()["bytes_per_token"])
    server.kill()
    server.process.command = [*server.process.command, "--kv-memory", str(limit)]
    server.start()
    _tokens_a_word(server)
    computed, preemptions = server.metric("step_rows_sum"), server.metric("preemptions_total")
    began = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as clients:
        talks = list(clients.map(lambda client: _talk(server, f"{round_}-{client}", sizes), range(_CLIENTS)))
    yield Figure("turns_s", time.perf_counter() - began)
    computed = server.metric("step_rows_sum") - computed
    # The last token of a reply is not computed before the next turn.
    distinct = sum(talk[-1].prompt_tokens + talk[-1].completion_tokens - 1 for talk in talks)
    prompts = sum(reply.prompt_tokens - reply.restored for talk in talks for reply in talk)
    replies = sum(reply.completion_tokens - 1 for talk in talks for reply in talk)
    yield Figure("computed", computed)
    yield Figure("twice", computed - distinct)
    yield Figure("twice_prompts", prompts + replies - distinct)
    yield Figure("preemptions", server.metric("preemptions_total") - preemptions)


def _talk(server: HttpEngine, name: str, sizes: Sizes) -> list[Answer]:
    """Returns the replies of one conversation."""
    # A template without a system message may put in its own, the same for all.
    messages, replies = [{"role": "system", "content": prompt_text(sizes.conversation, name)}], list[Answer]()
    for turn in range(_TURNS):
        own = prompt_text(_OWN_TOKENS, f"{name}-{turn}")
        messages.append({"role": "user", "content": f"{own}\n{_TASK}"})
        replies.append(server.chat(messages, sizes.reply))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


def _restore(engine: Engine, workspace: Path, round_: int, sizes: Sizes) -> Iterator[Figure]:
    """A prompt saved, and restored for others that begin with it, by new processes."""
    server, store = _daemon(engine), workspace / "kv" / DATA
    server.start()
    _tokens_a_word(server)
    shared = prompt_text(sizes.shared, round_)
    server.reply(shared, 1)
    server.settle()
    for number in range(_RESTARTS):
        for case in ("cold", "warm"):
            (reply,) = _restarted(server, store, [shared + prompt_text(_OWN_TOKENS, f"{case}-{number}")], case)
            num_bytes = server.metric("store_read_bytes_total")
            yield Figure(f"{case}_s", reply.ttft_s)
            yield Figure(f"{case}_gb_s", num_bytes / reply.timings["restore_ms"] / 1e6)
            copy_s = _copy_s(int(num_bytes))
            yield Figure("copy_gb_s", num_bytes / copy_s / 1e9)
        yield Figure("of_copy", copy_s / reply.timings["restore_ms"] * 1e3)
        prompts = [shared + prompt_text(_OWN_TOKENS, f"pair-{number}-{one}") for one in range(2)]
        first, second = sorted(one.ttft_s for one in _restarted(server, store, prompts, "cold"))
        yield Figure("pair_first_s", first)
        yield Figure("pair_second_s", second)


def _restarted(server: HttpEngine, store: Path, prompts: Sequence[str], case: str) -> list[Answer]:
    """Asks a new process. Raises `LiveServerError` if nothing was restored."""
    server.kill()
    (page_cache.drop if case == "cold" else page_cache.warm)(store)
    server.start()
    replies = server.ask(prompts, _FIRST_TOKENS)
    if not all(reply.restored for reply in replies):
        raise LiveServerError("nothing was restored after kill -9")
    return replies


def _copy_s(num_bytes: int) -> float:
    """Returns the seconds of a copy in memory by all threads, between pages that were touched, the median of seven."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return statistics.median(timeit.repeat(lambda: target.copy_(source), number=1, repeat=7))


def _is_daemon(engine: Engine) -> TypeGuard[HttpEngine]:
    return isinstance(engine, HttpEngine) and engine.without_cache is not None


def _daemon(engine: Engine) -> HttpEngine:
    if not _is_daemon(engine):
        raise LiveServerError("only --part sharing is for other programs than the daemon")
    return engine


_PARTS: Mapping[str, Callable[[Engine, Path, int, Sizes], Iterator[Figure]]] = {
    "sharing": _sharing,
    "preemption": _preemption,
    "restore": _restore,
}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice([*_PARTS]), default=(*_PARTS,), help="All if absent.")
@click.option("--words", default=8000, show_default=True, help="Of a shared prefix; a conversation has 3/4 of it.")
@click.option("--number", "numbers", multiple=True, default=(5, 20), show_default=True, help="Who share; repeatable.")
@click.option("--reply-tokens", default=160, show_default=True, help="Of the replies with little memory.")
@plan_options(rounds=3)
def main(parts: tuple[str, ...], words: int, numbers: tuple[int, ...], reply_tokens: int, **options: Any) -> None:
    """Measure what the memory of sequences costs.

    sharing: conversations over one system prompt, all sent at once. For more than eight replies at once the daemon
    needs an argument: --engine 'diskprefix --max-sequences 20'. preemption: eight clients send three turns each, with
    all of the history, and there is memory for two and a half of them. restore: after kill -9, with the store's file
    dropped from the page cache and with all of it there, beside copies in memory.
    """
    sizes = Sizes(words, numbers, words * 3 // 4, reply_tokens)

    def measured(engine: Engine, workspace: Path, round_: int) -> Iterator[Figure]:
        command = engine.process.command
        for part in parts:
            engine.kill()
            engine.process.command = command
            yield from _PARTS[part](engine, workspace, round_, sizes)

    compare("pages", Plan(**options), TITLES, words + _ROOM, measured)
