"""`tools/vllm`: makes an environment with vLLM in a folder of its own, and checks the connector in it."""

from __future__ import annotations

import signal
import sys

import click

from tools.connector.bits import bits
from tools.connector.machines import machines
from tools.connector.theirs import theirs
from tools.measuring.environments import python_of
from tools.measuring.options import run_tool
from tools.models.real import print_report


@click.group()
def main() -> None:
    """The connector and the tier for vLLM, in a real vLLM on this machine's processor."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@main.command()
def environment() -> None:
    """Make the environment, and print its Python."""
    print(python_of("vllm", print_report))


main.add_command(theirs)
main.add_command(machines)
main.add_command(bits)

if __name__ == "__main__":
    run_tool(main, "tools/vllm")
