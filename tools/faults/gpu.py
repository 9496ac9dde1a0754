"""Checks that `diskprefix serve` works on an accelerator: the same reply from the disk as computed, after a kill."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tools.benchmarks.demo import QUESTION, Comparison, ask, opening, restart, results, run_part, show_replies, start
from tools.measuring.live_server import LiveServer


def device_of(name: str) -> str:
    """Returns the device that `--device` means here, such as "cuda:0" or "cpu"."""
    # It takes seconds.
    import torch

    if name != "auto":
        return name
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else str(found)


def compared(console: Console, server: LiveServer) -> list[Comparison]:
    """Compares the replies to one prompt: computed, from memory, from the disk after a kill, and without the cache."""
    start(console, server)
    prompt = opening(QUESTION)
    computed = ask(console, server, "computed", prompt)
    kept = ask(console, server, "from memory", prompt)
    restart(console, server)
    stored = ask(console, server, "from the disk", prompt)
    again = ask(console, server, "without the cache", prompt, scope="off")
    pairs = {"from memory": (computed, kept), "from the disk": (computed, stored), "computed again": (again, stored)}
    return [Comparison("full", case, cold, warm) for case, (cold, warm) in pairs.items()]


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
    flags = ("--device", where, "--weights", "native", *(() if model is None else ("--model", model)))
    with tempfile.TemporaryDirectory(prefix="diskprefix-gpu-") as folder:
        rows = run_part(console, Path(folder), "full", compared, *flags)
    console.print(results(rows))
    show_replies(console, rows)
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main(prog_name="tools/gpu")
