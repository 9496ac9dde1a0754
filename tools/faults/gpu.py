"""Checks that `diskprefix serve` works on an accelerator: the same reply from the disk as computed, after a kill."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.live_server import LiveServer, log_tail, step
from tools.measuring.prompts import AGENT_PROMPT

QUESTION = "An invoice is wrong. What do I do first?"
MAX_TOKENS = 64


def device_of(name: str) -> str:
    """Returns the device that `--device` means here, such as "cuda:0" or "cpu"."""
    # It takes seconds.
    import torch

    if name != "auto":
        return name
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else str(found)


def replies(console: Console, server: LiveServer, system: str) -> list[tuple[str, Answer]]:
    """Returns the replies to one prompt: computed, from memory, from the disk after a kill, and without the cache."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    found = list[tuple[str, Answer]]()

    def ask(title: str, scope: str = "full") -> None:
        with step(console, title):
            found.append((title, server.chat(messages, max_tokens=MAX_TOKENS, scope=scope)))

    with step(console, "starting") as note:
        server.start(note)
    ask("computed")
    ask("from memory")
    with step(console, "saving, kill -9, starting again"):
        server.restart()
    ask("from the disk")
    ask("without the cache", scope="off")
    return found


def problems_of(found: list[tuple[str, Answer]]) -> list[str]:
    """Returns what is wrong with the replies: one that differs from the first, or nothing restored."""
    text = found[0][1].text
    differing = [f"{title}: another reply" for title, answer in found if answer.text != text]
    missed = [
        f"{title}: nothing restored" for title, answer in found if title.startswith("from") and not answer.restored
    ]
    return [*differing, *missed]


@click.command()
@click.option("--device", default="auto", show_default=True, help="As `diskprefix serve --device` takes it.")
@click.option("--model", help="A folder with a model, in place of the embedded one.")
def main(device: str, model: str | None) -> None:
    """Check the daemon on this machine's accelerator.

    Serves a model in bfloat16, sends a prompt of about 6 000 tokens, kills the server with SIGKILL, starts it again and
    compares the replies. There a model is computed by transformers' own modules in steps of one grid, one sequence a
    step. Exits with 0 if there is no accelerator, with 1 if a reply differs or nothing was restored.
    """
    console, where = Console(), device_of(device)
    if where == "cpu" and device == "auto":
        import torch

        console.print(f"no accelerator: torch {torch.__version__} sees none", highlight=False)
        return
    with tempfile.TemporaryDirectory(prefix="diskprefix-gpu-") as folder:
        flags = ("--device", where, "--weights", "native", *(() if model is None else ("--model", model)))
        log = Path(folder, "log")
        try:
            with LiveServer(kv_cache_dir=Path(folder, "kv"), log_path=log, flags=flags) as server:
                found = replies(console, server, AGENT_PROMPT.read_text(encoding="utf-8").strip())
        except LiveServerError as error:
            console.print(f"[red]{error}[/red]; the end of the server's log:", highlight=False)
            console.print(log_tail(log), highlight=False, markup=False)
            sys.exit(1)
    for title, answer in found:
        counts = f"{answer.restored} of {answer.prompt_tokens} tokens restored"
        console.print(f"{where}: {title}: first token {answer.ttft_s * 1e3:,.0f} ms, {counts}", highlight=False)
    problems = problems_of(found)
    for problem in problems:
        console.print(f"[red]{problem}[/red]", highlight=False)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(prog_name="tools/gpu")
