"""The entry point of `tools/bench`: benchmarks, matrices, real models.

The module of a subcommand is imported when it runs, so that the list appears at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import click

from tools.measuring.options import run_tool


@dataclass(frozen=True)
class Tool:
    """A subcommand: the module below `tools` with its `main`, and its line in `tools/bench --help`."""

    module: str
    help: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be set before the module's libraries are imported."""


NO_THREADS = {"OMP_NUM_THREADS": "1"}
"""For a tool that forks. A fork has no threads of a numeric library, but it waits for their locks."""

SECTIONS: dict[str, dict[str, Tool]] = {
    "Benchmarks": {
        "restart": Tool("benchmarks.restart", "Cold, and after kill -9: same prompt, next turn, other question."),
        "together": Tool("benchmarks.together", "Several requests at once, overtaking, pacing, speculative decoding."),
        "swaps": Tool("benchmarks.swaps", "Two models behind one port with memory for one."),
        "step": Tool("benchmarks.step", "The time of each operator in a step, and of the Python around it."),
        "quality": Tool("benchmarks.quality", "Quantised weights and KV: perplexity and agreement."),
        "questions": Tool("benchmarks.questions", "Everyday questions by default sampling: right answers counted."),
        "fleet": Tool("benchmarks.fleet", "A day of 1,000 machines on one bucket, simulated: requests, hits, cost."),
        "policies": Tool("benchmarks.policies", "Workloads replayed with enough and with little room, and an optimum."),
        "pictures": Tool("benchmarks.pictures", "Screenshots after kill -9, known and other ones, beside texts."),
        "hostile": Tool("faults.hostile.program", "Good clients beside 56 that try to stop the daemon."),
        "hung-disk": Tool("faults.hung_disk", "Clients in conversations beside a disk that stops answering."),
    },
    "Matrices": {
        "files": Tool(
            "benchmarks.files", "Files of every architecture, against transformers and llama.cpp.", NO_THREADS
        ),
        "exactness": Tool("faults.exactness", "Restored against cold, bit for bit, for every architecture."),
        "powerloss": Tool("faults.powerloss", "Every state of the disk after a power failure.", NO_THREADS),
        "interleavings": Tool("faults.interleavings", "The whole daemon, its threads in every order.", NO_THREADS),
        "corruption": Tool("faults.corruption", "Damaged files, each opened and used twice.", NO_THREADS),
        "kills": Tool(
            "faults.kills", "kill -9 in the middle of long prompts: what the next process finds.", NO_THREADS
        ),
        "packed": Tool(
            "faults.packed", "Packed weights: kill -9 while they are written, and a bit of each flipped.", NO_THREADS
        ),
        "templates": Tool("benchmarks.templates", "A thousand chat templates: four engines, and what we serve."),
        "calls": Tool("benchmarks.calls", "Calls of each family: awkward values, deviations, cut off and damaged."),
        "tokenizers": Tool("benchmarks.token_ids", "Token ids by tokenizers, by llama.cpp and by us."),
        "witness": Tool("benchmarks.witness", "Published programs of others: cache-pressure, Open Responses' tests."),
        "streams": Tool("streams.program", "Clients read streams that are cut at every byte."),
        "fuzz": Tool("faults.fuzz", "Made-up requests to every route: no 500, no hang."),
        "walls": Tool("faults.walls", "Each part that can be taken away is, and the store stands alone."),
    },
    "Pages": {
        "screenshots": Tool("screenshots", "All pictures of the pages: drawn, recorded, or of a real browser."),
    },
    "Models and sources": {
        "sources": Tool("benchmarks.sources", "Fetch what the matrices compare with."),
        "models": Tool("models.real", "List and fetch the real models that tools and tests use."),
        "trained": Tool("models.trained", "Train a tiny mixture and a tiny delta-rule model on local text."),
    },
}
TOOLS = {name: tool for section in SECTIONS.values() for name, tool in section.items()}


class Tools(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(TOOLS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in TOOLS:
            return None
        tool = TOOLS[cmd_name]
        os.environ.update(tool.environment)
        command: click.Command = import_module(f"tools.{tool.module}").main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, tools in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, tool.help) for name, tool in tools.items()], col_max=16)


@click.command(cls=Tools, context_settings={"max_content_width": 100})
def main() -> None:
    """Benchmarks, fault and exactness matrices, and the real models that they use.

    `tools/bench NAME --help` says what each does, how long it takes and what its exit code means.
    """
    # Without this, the server of a benchmark would outlive a benchmark that gets a SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


if __name__ == "__main__":
    run_tool(main, "tools/bench")
