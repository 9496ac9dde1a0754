"""`tools/llama`: makes an environment with llama.cpp's library for a backend, and checks its engine there."""

from __future__ import annotations

import signal
import sys

import click

from tools.llama_engine.llama_matrix import matrix
from tools.llama_engine.llama_tests import install, tests
from tools.measuring.options import run_tool


@click.group()
def main() -> None:
    """The engine `llama`, with llama.cpp's library compiled for a backend."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


for command in (install, tests, matrix):
    main.add_command(command)

if __name__ == "__main__":
    run_tool(main, "tools/llama")
