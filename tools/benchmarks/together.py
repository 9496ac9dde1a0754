"""Several requests at once, the memory that they share, and speculative decoding.

tools/bench together
tools/bench together --part pacing
tools/bench together --part guessing --engine 'diskprefix --speculative off' --engine diskprefix
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.engines import Engine, HttpEngine
from tools.benchmarks.results import Figure, Plan, compare, plan_options
from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.processes import lower_peak, status_bytes
from tools.measuring.prompts import WORDS, prompt_text

_NUM, _REPLY_TOKENS, _CONTEXT = 5, 64, 2000
_LONG, _SHORT = 6000, 300
_DECODED, _ROOM = 400, 512
_MOST_LINES, _EDITS, _EDIT_TOKENS = 60, 20, 100
_TASKS = (
    "Rename the variable {name} to {name}_value everywhere.",
    "Add a comment above each function that says what it does. Change nothing else.",
    "Replace every occurrence of `self._` by `self.`. Change nothing else.",
    "Remove all docstrings. Change nothing else.",
)
_EDIT = "{task} Answer with the whole file and nothing else.\n\n```python\n{source}\n```"
_QUESTIONS = (
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a lighthouse keeper.",
    "How do I keep tomatoes from getting blight?",
    "Explain how a bicycle stays upright.",
    "Which sights should I see in Lisbon in two days?",
    "Why is the sky blue, and why are sunsets red?",
    "Summarise the causes of the French Revolution.",
    "What makes a good code review?",
)
TITLES = {
    "rate": "one reply, tokens/s",
    "together": f"{_NUM} replies at once, tokens/s",
    "short_alone_s": f"{_SHORT} words alone: first token, s",
    "overtaking_s": f"{_SHORT} words in the middle of {_LONG}: first token, s",
    "later_s": "the long one is later by, s",
    "gap_alone_ms": "between tokens alone, ms",
    "gap_ms": f"beside a prompt of {_CONTEXT} words, ms",
    "gap_p95_ms": "its 95th percentile, ms",
    "beside_s": "that prompt's first token, s",
    "all_s": f"{_NUM} over a prompt of {_LONG} words: all replies, s",
    "peak_mib": "their memory above that before, MiB",
    "needed_mib": "what distinct tokens take, MiB",
    "edits": "edits of code, tokens/s",
    "chat": "chat, tokens/s",
}


def _throughput(engine: Engine, round_: int) -> Iterator[Figure]:
    """Asks for prompts that begin with an answered one: decoding is measured, and restored prompts need no prefill."""
    prompt = prompt_text(_CONTEXT, round_)
    (alone,) = engine.ask([prompt], _REPLY_TOKENS)
    if alone.decode_rate:
        yield Figure("rate", alone.decode_rate, _CONTEXT)
    prompts = [f"{prompt} {word}" for word in WORDS[:_NUM]]
    replies = engine.ask(prompts, _REPLY_TOKENS)
    yield Figure("together", _rate_together(replies), _CONTEXT)
    if isinstance(engine, HttpEngine) and engine.without_cache:
        _require_equal(replies, [engine.reply(prompt, _REPLY_TOKENS) for prompt in prompts])


def _rate_together(replies: Sequence[Answer]) -> float:
    """Returns the tokens per second of all replies together, from the first token of the last reply to the end of the
    first reply."""
    begin, end = max(reply.at_s[0] for reply in replies), min(reply.at_s[-1] for reply in replies)
    if end <= begin:
        # The replies do not overlap: from the first token of the first reply to the end of the last.
        begin, end = min(reply.at_s[0] for reply in replies), max(reply.at_s[-1] for reply in replies)
        return sum(reply.completion_tokens - 1 for reply in replies) / (end - begin)
    inside = sum(
        sum(begin < at <= end for at in reply.at_s) * reply.completion_tokens / len(reply.at_s) for reply in replies
    )
    return inside / (end - begin)


def _overtaking(engine: Engine, round_: int) -> Iterator[Figure]:
    """Asks for a short prompt in the middle of a long one."""
    server = _server(engine)
    long, short = prompt_text(_LONG, round_), prompt_text(_SHORT, round_)
    long_alone, short_alone = (server.reply(prompt, 8, cached=False) for prompt in (long, short))
    with ThreadPoolExecutor(1) as client:
        running = client.submit(server.reply, long, 8, cached=False)
        time.sleep(long_alone.ttft_s / 2)
        overtaking = server.reply(short, 8, cached=False)
        overtaken = running.result()
    yield Figure("short_alone_s", short_alone.ttft_s)
    yield Figure("overtaking_s", overtaking.ttft_s)
    yield Figure("later_s", overtaken.ttft_s - long_alone.ttft_s)
    _require_equal([overtaken, overtaking], [long_alone, short_alone])


def _pacing(engine: Engine, round_: int) -> Iterator[Figure]:
    """Asks for a prompt while another request decodes."""
    server = _server(engine)
    decoded, prompt = prompt_text(_SHORT, f"decoded-{round_}"), prompt_text(_CONTEXT, f"beside-{round_}")
    alone = server.reply(decoded, _DECODED, cached=False)
    prompt_alone = server.reply(prompt, 8, cached=False)
    with ThreadPoolExecutor(1) as client:
        running = client.submit(server.reply, decoded, _DECODED, cached=False)
        time.sleep(alone.ttft_s + 1.0)
        came = server.reply(prompt, 8, cached=False)
        reply = running.result()
    began = came.asked - reply.asked
    gaps = [b - a for a, b in pairwise(at for at in reply.at_s if began <= at <= began + came.ttft_s)]
    if len(gaps) < 2:
        raise LiveServerError("the reply had ended before the prompt came")
    yield Figure("gap_alone_ms", statistics.median(b - a for a, b in pairwise(alone.at_s)) * 1e3)
    yield Figure("gap_ms", statistics.median(gaps) * 1e3)
    yield Figure("gap_p95_ms", statistics.quantiles(gaps, n=20)[-1] * 1e3)
    yield Figure("beside_s", came.ttft_s)
    _require_equal([reply, came], [alone, prompt_alone])


def _sharing(engine: Engine, round_: int) -> Iterator[Figure]:
    """Sends prompts with a common beginning at once to a server that has not seen them. The memory is that of the
    server's processes."""
    shared, pids = prompt_text(_LONG, f"shared-{round_}"), engine.process.pids()
    for pid in pids:
        lower_peak(pid)
    before, began = sum(status_bytes(pid, "VmRSS") for pid in pids), time.perf_counter()
    replies = engine.ask([f"{shared} {word}" for word in WORDS[:_NUM]], _REPLY_TOKENS)
    yield Figure("all_s", time.perf_counter() - began, _LONG)
    yield Figure("peak_mib", (sum(status_bytes(pid, "VmHWM") for pid in pids) - before) / 2**20)
    if isinstance(engine, HttpEngine) and engine.without_cache:
        distinct = replies[0].prompt_tokens + sum(reply.completion_tokens for reply in replies)
        yield Figure("needed_mib", distinct * engine.cache_stats()["bytes_per_token"] / 2**20)


class Guessing:
    """Edits of this project's files, whose replies repeat most of the file, and chat, whose replies repeat little.
    Other engines must give the first engine's replies."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int], str] = {}

    def __call__(self, engine: Engine, round_: int) -> Iterator[Figure]:
        del round_
        server = _server(engine)
        for case, prompts in (("edits", _edits()), ("chat", _QUESTIONS)):
            rates = []
            for number, prompt in enumerate(prompts):
                reply = server.chat([{"role": "user", "content": prompt}], _EDIT_TOKENS, cached=False)
                if self._texts.setdefault((case, number), reply.text) != reply.text:
                    raise LiveServerError(f"{case} {number}: another reply than that of the first engine")
                if reply.decode_rate:
                    rates.append(reply.decode_rate)
            yield Figure(case, statistics.fmean(rates))


def _edits() -> list[str]:
    root = Path(__file__).parents[2] / "diskprefix"
    files = sorted(path for path in root.rglob("*.py") if len(path.read_text("utf-8").splitlines()) >= _MOST_LINES)
    edits = []
    for number in range(_EDITS):
        path = files[number * len(files) // _EDITS]
        source = "\n".join(path.read_text("utf-8").splitlines()[:_MOST_LINES])
        names = [word for word in source.replace("(", " ").split() if word.isidentifier() and len(word) > 5]
        task = _TASKS[number % len(_TASKS)].format(name=max(names, key=names.count))
        edits.append(_EDIT.format(task=task, source=source))
    return edits


def _server(engine: Engine) -> HttpEngine:
    if not isinstance(engine, HttpEngine):
        raise LiveServerError("it takes one question at a time: only --part throughput")
    return engine


def _require_equal(replies: Sequence[Answer], alone: Sequence[Answer]) -> None:
    """Raises `LiveServerError` if a reply differs from the reply to the same request alone."""
    for reply, other in zip(replies, alone, strict=True):
        if reply.text != other.text:
            raise LiveServerError(f"the reply is {reply.text!r}, and {other.text!r} alone")


_PARTS: Mapping[str, Callable[[Engine, int], Iterator[Figure]]] = {
    "throughput": _throughput,
    "overtaking": _overtaking,
    "pacing": _pacing,
    "sharing": _sharing,
    "guessing": Guessing(),
}


@click.command()
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(list(_PARTS)),
    default=("throughput", "overtaking", "pacing"),
    show_default=True,
    help="The part to measure; repeatable.",
)
@plan_options(rounds=3)
def main(parts: tuple[str, ...], **options: Any) -> None:
    """Measure several requests at once: throughput, overtaking, a prompt beside a reply; and speculative decoding.

    Exits with 1 if a reply differs from that of the same request alone (guessing: from that of the first engine), or an
    engine was left out.
    """
    plan = Plan(**options)
    if "guessing" in parts and len(plan.models) > 1:
        raise click.UsageError("--part guessing: with one --model")

    def measured(engine: Engine, workspace: Path, round_: int) -> Iterator[Figure]:
        del workspace
        engine.start()
        engine.ask([prompt_text(32, "first")], 2)
        for part in parts:
            yield from _PARTS[part](engine, round_)

    compare("together", plan, TITLES, _LONG + _DECODED + _ROOM, measured)
