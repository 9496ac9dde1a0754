"""Published programs of other projects, at fixed versions, test a daemon.

cache-pressure (PyPI) keeps more prompts than fit and counts what is restored, stops replies in their middle, and plays
agents. The compliance tests of Open Responses are in its repository, and run with bun from npm.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import httpx
from rich.console import Console

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from tools.measuring.environments import install_once, npm_install, python_of, run_installer
from tools.measuring.live_server import LiveServer, step
from tools.measuring.options import FOLDER
from tools.measuring.report import verdict, verdict_table
from tools.measuring.workspace import measuring

OPEN_RESPONSES, COMMIT = "https://github.com/openresponses/openresponses", "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
_BUN, _ZOD = "@oven/bun-linux-x64", "zod@3.25.76"
"""The runtime of the tests, and the only package that they import."""
_BUN_VERSION = "1.4.4"
PRESSURE = {
    # More prompts than there are places in memory; each must come from somewhere.
    "cache-pressure": "--kv-size 40000 --context-tokens 2000 --num-contexts 24",
    "abort-sim": "--max-context 8192 --context-tokens 3000 --max-tokens 4000 --thinking-tokens 100 --salt 1",
    "agent-sim": "--max-context 8192 --sessions 2 --main-tokens 5000 --sub-tokens 2000 --step-tokens 1000 "
    "--finalize-tokens 500 --no-viz --salt 1",
}
"""Programs of cache-pressure, with what suits a model of 8 192 tokens. The last two are written for Python 3.12."""
NAMES = ("cache-pressure", *(("abort-sim", "agent-sim") if sys.version_info >= (3, 12) else ()), "open-responses")
_COLOR = re.compile(r"\x1b\[\d+m")
_RESULTS = re.compile(r"(?:retained|runs passed|sessions|Results|passed|survi).*", re.IGNORECASE)


def open_responses(sources: str, report: Report) -> tuple[Path, Path]:
    """Returns bun and the folder of the tests, which are fetched on first use. Raises `NotInstalled`."""
    folder = cache_home() / "environments" / "open-responses"
    tests = folder / "sources"

    def install() -> None:
        report("fetching the tests of Open Responses, and bun; this is done once")
        run_installer("git", "clone", "--quiet", sources, str(tests))
        run_installer("git", "-C", str(tests), "checkout", "--quiet", COMMIT)
        npm_install(folder, f"{_BUN}@{_BUN_VERSION}", _ZOD)

    install_once(folder, [COMMIT, _BUN_VERSION, _ZOD], install)
    return folder / "node_modules" / _BUN / "bin" / "bun", tests


def command(name: str, url: str, model: str, sources: str, report: Report) -> Sequence[str]:
    """Returns the command of a program, which is fetched on first use. Raises `NotInstalled`."""
    if name in PRESSURE:
        folder = python_of("cache-pressure", report).parent
        return [str(folder / name), "--base-url", url, *PRESSURE[name].split()]
    bun, tests = open_responses(sources, report)
    compliance = [str(bun), "run", str(tests / "bin/compliance-test.ts"), "--base-url", url, "--api-key", "none"]
    return [*compliance, "--model", model]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Only this program; repeatable.")
@click.option("--model", help="A folder, a .gguf file or a hub id, in place of the embedded model.")
@click.option("--sources", default=OPEN_RESPONSES, show_default=True, help="The repository of Open Responses.")
@FOLDER
def main(only: tuple[str, ...], model: str | None, sources: str, folder: Path | None) -> None:
    """Run the published programs of others against a daemon: cache-pressure, and the tests of Open Responses.

    What they say goes to standard output. They are installed on first use, in environments of their own. Takes about
    ten minutes on two cores. Exits with 1 if one of them does.
    """
    console, rows = Console(stderr=True), []
    with measuring(folder, console) as workspace:
        flags = () if model is None else ("--model", model)
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=flags) as server:
            with step(console, "starting the daemon"):
                server.start()
            url = f"http://127.0.0.1:{server.port}/v1"
            served = httpx.get(f"{url}/models").raise_for_status().json()["data"][0]["id"]
            for name in only or NAMES:
                program = command(name, url, served, sources, console.print)
                with step(console, name):
                    ended = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False, cwd=workspace)
                text = _COLOR.sub("", ended.stdout)
                click.echo(text)
                said = [line.strip() for line in text.splitlines() if _RESULTS.search(line)]
                figure = said[-1] if said else f"exit {ended.returncode}"
                rows.append(verdict(name, figure, "exit 0", not ended.returncode))
    Console(width=100).print(verdict_table("Programs of others", rows))
    sys.exit(0 if all(row["holds"] for row in rows) else 1)
