"""`tests/bridges/real-engines`: makes an environment with an engine in a folder of its own, and checks the store under
it there."""

from __future__ import annotations

import signal
import sys

import click

from tests.bridges.real_engines.bits import bits
from tests.bridges.real_engines.machines import machines
from tests.bridges.real_engines.theirs import beside, lmcache, sglang, theirs
from tools.measuring.environments import python_of
from tools.measuring.options import run_tool
from tools.models.real import print_report


@click.group()
def main() -> None:
    """The store under other engines, in real ones on this machine's processor: connector and tier for vLLM, adapter for
    LMCache, backend for SGLang."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@main.command()
@click.argument("engine", type=click.Choice(["vllm", "lmcache", "sglang"]), default="vllm")
def environment(engine: str) -> None:
    """Make the environment of an engine (vLLM's, if none is named), and print its Python."""
    print(python_of(engine, print_report))


for command in (theirs, machines, bits, lmcache, sglang, beside):
    main.add_command(command)

if __name__ == "__main__":
    run_tool(main, "tests/bridges/real-engines")
