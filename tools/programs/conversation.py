"""The conversation benchmark: what the turns of an agent cost when the earlier ones are on disk.

Each turn sends everything again: the system prompt with the tools, the question, the replies so far and what the tools
returned. The server is killed and started again between the turns. Each turn is then sent once more without the cache.
The restored turn comes first, so it also pays what the first request of a process costs. The replies are the model's
own.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.measuring.live_server import Answer, LiveServer, LiveServerError, step
from tools.measuring.options import FOLDER, JSON, codec_option
from tools.measuring.report import machine, median, new_table, print_report, short, show_machine
from tools.measuring.workspace import measuring, model_folder
from tools.models import real

PROMPTS = Path(__file__).parents[1] / "prompts"
SECTIONS = ("You are", "# 1.", "# 2.", "# 3.", "# 5.", "# 7.", "# 9.", "# 11.")
"""The parts of the system prompt that make a third turn of about 5 000 tokens."""
NUM_TURNS = 3
MAX_TOKENS = 32
TIMES = ("lookup_ms", "restore_ms", "prefill_ms", "server_ttft_ms", "ttft_ms", "total_ms")
PUBLISHED = {"cold_s": 8.07, "warm_s": 0.22, "ratio": 37.0}
"""neuron: prefill of the third turn at about 5 000 tokens, a model of 27B on two devices."""

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn, sent with and without the cache. Times in milliseconds, as `Answer.times_ms`."""

    round: int
    turn: int
    prompt_tokens: int
    restored: int
    same_text: bool
    warm: dict[str, float]
    cold: dict[str, float]

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.restored


class Conversation:
    """The messages of one scripted conversation. The caller adds the replies."""

    def __init__(self, number: int) -> None:
        """There are three scripts; `number` 3 is the first one again."""
        scripts = json.loads((PROMPTS / "agent_turns.json").read_text(encoding="utf-8"))
        script = scripts[number % len(scripts)]
        self.messages: list[Message] = [
            {"role": "system", "content": system_prompt()},
            {"role": "user", "content": script["question"]},
        ]
        self._results: Iterator[str] = iter(script["results"])

    def go_on(self, reply: str) -> None:
        """Adds the model's reply and the scripted result of a tool call."""
        self.messages.append({"role": "assistant", "content": reply})
        self.messages.append({"role": "tool", "content": next(self._results)})


def system_prompt() -> str:
    text = (PROMPTS / "agent_system.md").read_text(encoding="utf-8")
    return "".join(part for part in re.split(r"(?m)^(?=# )", text) if part.startswith(SECTIONS)).strip()


class ConversationBench:
    """Runs conversations with one server."""

    def __init__(self, server: LiveServer, console: Console, rounds: int, restart: bool) -> None:
        self.turns: list[Turn] = []
        self._server = server
        self._console = console
        self._rounds = rounds
        self._restart = restart

    def lead(self, number: int) -> None:
        """Runs a whole conversation, of which the cache must hold nothing yet."""
        conversation = Conversation(number)
        for turn in range(NUM_TURNS):
            with step(self._console, f"round {number + 1} of {self._rounds}, turn {turn + 1}"):
                reply = self._take_turn(number, turn, conversation.messages)
            if turn < NUM_TURNS - 1:
                conversation.go_on(reply)

    def _take_turn(self, number: int, turn: int, messages: Sequence[Message]) -> str:
        if turn > 0:
            self._between_turns()
        warm = self._server.chat(messages, max_tokens=MAX_TOKENS)
        if bool(warm.restored) != (turn > 0):
            raise LiveServerError(f"turn {turn + 1} restored {warm.restored}: {warm.cache}")
        self._server.wait_until_saved()
        cold = self._server.chat(messages, max_tokens=MAX_TOKENS, scope="off")
        self.turns.append(_turn(number, turn, warm, cold))
        return warm.text

    def _between_turns(self) -> None:
        if self._restart:
            self._server.restart()
        else:
            self._server.wait_until_saved()


def _turn(number: int, turn: int, warm: Answer, cold: Answer) -> Turn:
    return Turn(
        round=number,
        turn=turn,
        prompt_tokens=warm.prompt_tokens,
        restored=warm.restored,
        same_text=warm.text == cold.text,
        warm=warm.times_ms,
        cold=cold.times_ms,
    )


def measure(
    workspace: Path, model: str, folder: Path, rounds: int, restart: bool, codec: str, console: Console
) -> dict[str, Any]:
    """Runs `rounds` conversations, each with an empty cache. Returns the report as JSON values.

    The server's log is `server.log` in `workspace`. Raises `LiveServerError`.
    """
    turns: list[Turn] = []
    flags = ("--model", str(folder), "--disk-prefix-cache", "full", "--kv-cache-codec", codec)
    for number in range(rounds):
        kv_cache_dir, log_path = workspace / f"kv-{number}", workspace / "server.log"
        with LiveServer(kv_cache_dir=kv_cache_dir, log_path=log_path, flags=flags) as server:
            bench = ConversationBench(server, console, rounds, restart)
            with step(console, f"round {number + 1} of {rounds}: server starting") as note:
                server.start(note)
            bench.lead(number)
        turns += bench.turns
    reports = [_turn_report([turn for turn in turns if turn.turn == index]) for index in range(NUM_TURNS)]
    return {
        "benchmark": "conversation",
        "model": model,
        "rounds": rounds,
        "restart": restart,
        "codec": codec,
        "machine": machine(),
        "texts_equal": all(turn.same_text for turn in turns),
        "turns": reports,
        "third_turn_prefill_ratio": reports[-1]["ratios"]["prefill"],
        "published": PUBLISHED,
        "samples": [asdict(turn) for turn in turns],
    }


def _turn_report(turns: Sequence[Turn]) -> dict[str, Any]:
    warm, cold = (_medians(getattr(turn, which) for turn in turns) for which in ("warm", "cold"))
    return {
        "turn": turns[0].turn + 1,
        "prompt_tokens": statistics.median(turn.prompt_tokens for turn in turns),
        "restored": statistics.median(turn.restored for turn in turns),
        "computed": statistics.median(turn.computed for turn in turns),
        "cold": cold,
        "warm": warm,
        "ratios": {
            "prefill": round(cold["prefill_ms"] / warm["prefill_ms"], 1),
            "ttft": round(cold["ttft_ms"] / warm["ttft_ms"], 1),
        },
    }


def _medians(times: Iterable[dict[str, float]]) -> dict[str, float]:
    collected = list(times)
    return {name: median(sample[name] for sample in collected) for name in TIMES}


def show(report: dict[str, Any], console: Console) -> None:
    console.print(_table(report))
    console.print()
    third, published = report["turns"][-1], report["published"]
    console.print(
        f"Third turn, prefill: {third['cold']['prefill_ms'] / 1e3:.2f} s → {third['warm']['prefill_ms'] / 1e3:.3f} s "
        f"= {short(third['ratios']['prefill'])}×. Published: {published['cold_s']} s → {published['warm_s']} s = "
        f"{published['ratio']:.0f}× (neuron, 27B).",
        highlight=False,
        soft_wrap=True,
    )
    texts = "equal to the cold ones" if report["texts_equal"] else "[red]DIFFER from the cold ones[/red]"
    between = "kill -9 and restart between the turns" if report["restart"] else "one process for all turns"
    console.print(f"Replies of {MAX_TOKENS} tokens: {texts}; {between}.", highlight=False, soft_wrap=True)
    show_machine(report["machine"], console)


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['model']}: a conversation of {NUM_TURNS} turns, medians of {report['rounds']}, times in ms"
    times = ("prefill\ncold", "prefill\nwarm", "prefill\nratio", "TTFT\ncold", "TTFT\nwarm", "TTFT\nratio")
    table = new_table(title, right=("turn", "tokens", "restored", "new", *times))
    for turn in report["turns"]:
        warm, cold = turn["warm"], turn["cold"]
        table.add_row(
            *(f"{turn[name]:.0f}" for name in ("turn", "prompt_tokens", "restored", "computed")),
            *(short(cold["prefill_ms"]), short(warm["prefill_ms"]), f"{short(turn['ratios']['prefill'])}×"),
            *(short(cold["ttft_ms"]), short(warm["ttft_ms"]), f"{short(turn['ratios']['ttft'])}×"),
        )
    return table


@click.command()
@click.option(
    "--model",
    default=real.DEFAULT,
    show_default=True,
    help=f"One that has a chat template: {real.DEFAULT}, {real.QWEN2_CODER.name} or a model's folder.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Conversations; figures are their medians. Three differ, with prompts that end elsewhere on the grid.",
)
@click.option("--restart/--no-restart", default=True, show_default=True, help="Kill the server between the turns.")
@codec_option("planes")
@FOLDER
@JSON
def main(model: str, rounds: int, restart: bool, codec: str, folder: Path | None, as_json: bool) -> None:
    """Measure what the three turns of an agent cost: cold, and with the earlier turns on disk.

    The third turn has about 5 000 tokens. Exits with 1 if a reply differs from that of a run without the cache.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = measure(workspace, model, source, rounds, restart, codec, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
