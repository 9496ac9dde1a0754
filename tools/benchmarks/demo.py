"""The demo: a server is killed, started again, and answers a long prompt from disk with the same text.

The prompt is `tools/prompts/agent_system.txt`, written for this project, as the system message of a ChatML chat.
Prefill runs in steps of 256 tokens and a prefix is restored at a multiple of 256, so what a follow-up turn computes is
the remainder of the previous prompt (its tokens modulo 256), the reply and the new question. The system message is 6
151 tokens long, 7 past a grid point, which keeps this remainder small; another length costs up to 255 tokens more in
the next-turn and other-question rows. An exact repeat does not depend on it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.live_server import LiveServer, log_tail, step
from tools.measuring.prompts import AGENT_PROMPT
from tools.measuring.report import new_table

QUESTION = "An invoice is wrong. What do I do first?"
NEXT_QUESTION = "And what do I do after that?"
OTHER_QUESTION = "What do I do when the disk of a server is nearly full?"
MAX_TOKENS = 28
BLOCK_SIZE = 256

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Comparison:
    """One row of the table: the same prompt computed from scratch and answered by a restarted server."""

    scope: str
    case: str
    cold: Answer
    warm: Answer

    @property
    def ratio(self) -> float:
        return self.cold.ttft_s / self.warm.ttft_s

    @property
    def same_text(self) -> bool:
        return self.cold.text == self.warm.text

    @property
    def holds(self) -> bool:
        return bool(self.warm.text) and self.same_text and self.warm.restored > 0


def opening(question: str) -> Messages:
    system = AGENT_PROMPT.read_text(encoding="utf-8").strip()
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def ask(console: Console, server: LiveServer, title: str, messages: Messages, scope: str | None = None) -> Answer:
    with step(console, title):
        answer = server.chat(messages, max_tokens=MAX_TOKENS, scope=scope)
    computed = answer.prompt_tokens - answer.restored
    console.print(
        f"    {answer.prompt_tokens} prompt tokens = {answer.restored} restored + {computed} computed; "
        f"first token after [bold]{answer.ttft_s * 1e3:,.0f} ms[/bold]",
        highlight=False,
        soft_wrap=True,
    )
    return answer


def start(console: Console, server: LiveServer, hint: str = "") -> None:
    with step(console, f"server starting{hint}") as note:
        server.start(note)


def restart(console: Console, server: LiveServer) -> None:
    with step(console, "waiting until the cache is on disk"):
        server.wait_until_saved()
    server.kill()
    console.print("  kill -9: the server process is gone", highlight=False)
    with step(console, "server starting again"):
        server.start()


def show_full(console: Console, server: LiveServer) -> list[Comparison]:
    console.rule("scope full: the same prompt again, and the next turn")
    first = opening(QUESTION)
    start(console, server, " (the first time ever, it fetches and converts its model)")
    cold = ask(console, server, "cold: computing the whole prompt", first)
    restart(console, server)
    repeat = ask(console, server, "the same prompt after the restart", first)
    following = [
        *first,
        {"role": "assistant", "content": repeat.text},
        {"role": "user", "content": NEXT_QUESTION},
    ]
    next_turn = ask(console, server, "the next turn of the conversation", following)
    next_cold = ask(console, server, "the next turn once more without the cache, to compare", following, scope="off")
    return [
        Comparison("full", "exact repeat", cold, repeat),
        Comparison("full", "next turn", next_cold, next_turn),
    ]


def show_recovery(console: Console, server: LiveServer) -> float:
    """Returns the seconds from `kill -9` to the first token of the stored prompt, which is sent at once."""
    console.rule("kill -9, and the same prompt at once")
    start(console, server)
    with step(console, "kill -9, start, and asking"):
        seconds, answer = server.recover(lambda: server.chat(opening(QUESTION), max_tokens=MAX_TOKENS))
    if not answer.restored:
        raise LiveServerError(f"nothing was restored: {answer.cache}")
    console.print(f"    from kill -9 to the first token: [bold]{seconds:.1f} s[/bold]", highlight=False)
    return seconds


def show_auto(console: Console, server: LiveServer) -> list[Comparison]:
    console.rule("scope auto:30: another question after the same system prompt")
    start(console, server)
    ask(console, server, "cold: the first question", opening(QUESTION))
    restart(console, server)
    other = ask(console, server, "another question after the restart", opening(OTHER_QUESTION))
    cold = ask(
        console, server, "that question once more without the cache, to compare", opening(OTHER_QUESTION), scope="off"
    )
    return [Comparison("auto:30", "another question", cold, other)]


def results(rows: list[Comparison]) -> Table:
    title = "After kill -9 and restart: time to first token, measured by the client"
    right = ("prompt\ntokens", "restored\ntokens", "cold\nms", "restored\nms", "ratio", "same\ntext")
    table = new_table(title, left=("scope", "request"), right=right)
    for row in rows:
        table.add_row(
            row.scope,
            row.case,
            f"{row.warm.prompt_tokens}",
            f"{row.warm.restored}",
            f"{row.cold.ttft_s * 1e3:,.0f}",
            f"{row.warm.ttft_s * 1e3:,.0f}",
            f"{row.ratio:.0f}×",
            "yes" if row.same_text else "NO",
        )
    return table


def show_replies(console: Console, rows: list[Comparison]) -> None:
    for row in rows:
        console.print(f"  {row.case}: {row.warm.text.strip()!r}", highlight=False, markup=False)
        if not row.same_text:
            console.print(f"  computed from scratch: {row.cold.text.strip()!r}", highlight=False, markup=False)


def inspect(console: Console, kv_cache_dir: Path) -> None:
    console.print(f"\n$ diskprefix inspect --kv-cache-dir {kv_cache_dir}", highlight=False, markup=False)
    subprocess.run([sys.executable, "-m", "diskprefix", "inspect", "--kv-cache-dir", str(kv_cache_dir)], check=True)


T = TypeVar("T")


def run_part(console: Console, folder: Path, scope: str, part: Callable[[Console, LiveServer], T], *flags: str) -> T:
    name = scope.partition(":")[0]
    log_path = folder / f"{len([*folder.glob('*.log')])}.log"
    flags = ("--disk-prefix-cache", scope, "--block-size", str(BLOCK_SIZE), *flags)
    try:
        with LiveServer(kv_cache_dir=folder / f"kv-{name}", log_path=log_path, flags=flags) as server:
            return part(console, server)
    except LiveServerError as error:
        console.print(f"[red]{error}[/red]; the end of the server's log:", highlight=False)
        console.print(log_tail(log_path), highlight=False, markup=False)
        sys.exit(1)


@click.command()
@click.option("--keep", is_flag=True, help="Keep the cache folders and the server's log, and say where they are.")
def main(keep: bool) -> None:
    """Show a killed server answer from disk.

    Starts the real `diskprefix serve` with its embedded model, sends a prompt of about 6 000 tokens, kills the
    server with SIGKILL, starts it again and sends the prompt again, then a follow-up turn. Also shows how long it is
    from the kill to the first token. Exits with 1 if a text differs or if nothing was restored.
    """
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="diskprefix-demo-"))
    try:
        rows = run_part(console, folder, "full", show_full)
        recovered_s = run_part(console, folder, "full", show_recovery)
        rows += run_part(console, folder, "auto:30", show_auto)
        console.print()
        console.print(results(rows))
        said = f"  From kill -9 to the first token of the stored prompt: {recovered_s:.1f} s."
        console.print(said, highlight=False)
        show_replies(console, rows)
        for kv_cache_dir in sorted(folder.glob("kv-*")):
            inspect(console, kv_cache_dir)
    finally:
        if keep:
            console.print(f"kept: {folder}", highlight=False)
        else:
            shutil.rmtree(folder)
    if not all(row.holds for row in rows):
        console.print("[red]the demo failed: a text differs or nothing was restored[/red]")
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="tools/demo")
