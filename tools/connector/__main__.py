"""`tools/vllm`: makes an environment with vLLM in a folder of its own, and checks the connector in it."""

from __future__ import annotations

import signal
import sys

import click

from diskprefix.errors import DiskPrefixError
from diskprefix.progress import Report
from tools.connector.theirs import theirs
from tools.measuring.environments import python_of


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@click.group()
def main() -> None:
    """The connector and the tier for vLLM, in a real vLLM on this machine's processor."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@main.command()
def environment() -> None:
    """Make the environment, and print its Python."""
    report: Report = _say
    print(python_of("vllm", report))


main.add_command(theirs)

if __name__ == "__main__":
    try:
        main(prog_name="tools/vllm")
    except (OSError, DiskPrefixError) as error:
        _say(f"tools/vllm: {error}")
        sys.exit(1)
