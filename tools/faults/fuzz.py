"""The fuzz matrix: schemathesis sends requests to a real daemon that it makes from the OpenAPI document.

Half of the time each value of each field is tried on its own, valid and not (schemathesis' coverage phase); the other
half of the time whole requests are random (its fuzzing phase).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from tests.daemon.server.agent_model import TEMPLATE
from tests.daemon.server.chat_model import write_chat_model
from tools.measuring.environments import NotInstalled, python_of
from tools.measuring.live_server import LiveServer, num_tracebacks
from tools.measuring.options import FOLDER, seed_option
from tools.measuring.workspace import measuring

POSITIONS = 512
"""Few positions, so that a reply without a limit ends soon."""
REQUEST_TIMEOUT_S = 60
CHECKS = ("not_a_server_error", *(f"{name}_conformance" for name in ("status_code", "content_type", "response_schema")))
"""The checks of schemathesis that every answer must pass."""
OTHERS = "others"


def routes_of(document: dict[str, Any], wanted: Sequence[str]) -> list[str]:
    """Returns the separate runs: one for each POST route, because their bodies differ so much, and one for all
    `others`."""
    known = [path for path, methods in document["paths"].items() if "post" in methods] + [OTHERS]
    if unknown := sorted(set(wanted) - set(known)):
        raise click.BadParameter(f"{unknown[0]} is not one of {', '.join(known)}", param_hint="--route")
    return [route for route in known if not wanted or route in wanted]


def run(schemathesis: Path, url: str, route: str, seconds: int, seed: int, workspace: Path) -> bool:
    """Runs schemathesis over a route. It prints each failure, with a command that sends the request again. Returns
    whether there was none."""
    others = ("--exclude-method", "POST")
    command = [str(schemathesis), "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--workers", "1"]
    command += others if route == OTHERS else ("--include-name", f"POST {route}")
    command += ["--max-time", str(seconds), "--seed", str(seed), "--generation-database", "none"]
    command += ["--continue-on-failure", "--no-shrink", "--no-color", "--request-timeout", str(REQUEST_TIMEOUT_S)]
    command += ["--checks", ",".join(CHECKS), "--output-sanitize", "false"]
    # It leaves a folder where it runs.
    ended = subprocess.run(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.stdout.write(ended.stdout.decode(errors="replace"))
    return not ended.returncode


def write_model(folder: Path) -> Path:
    """Writes the folder of a tiny random model whose template knows tools and thoughts."""
    folder = write_chat_model(folder, chat_template=TEMPLATE)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": POSITIONS}))
    return folder


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Minutes for all routes together.",
)
@seed_option("requests", "The seed of the requests.")
@click.option("--route", "routes", multiple=True, help="Only this POST route, or `others`; may be given several times.")
@FOLDER
def main(minutes: float, seed: int, routes: tuple[str, ...], folder: Path | None) -> None:
    """Send made-up requests to all routes of a daemon with a tiny model, and look for answers that must not be.

    schemathesis makes them from /openapi.json; it is installed into the cache folder on first use. A failure is an
    answer of 500 or more, one whose status, type or body the document does not have, no answer, or a traceback in the
    daemon's log. What schemathesis says of failures goes to standard output.

    Exits with 1 if anything failed.
    """
    console = Console(stderr=True)
    failed = []
    with measuring(folder, console) as workspace:
        try:
            python = python_of("schemathesis", lambda line: console.print(line, markup=False))
        except NotInstalled as error:
            raise click.ClickException(str(error)) from error
        model, log = write_model(workspace / "model"), workspace / "server.log"
        flags = ("--model", str(model), "--block-size", "16", "--kv-cache-min-tokens", "16", "--kv-cache-gate", "off")
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=log, flags=flags) as server:
            server.start()
            url = f"http://127.0.0.1:{server.port}"
            chosen = routes_of(httpx.get(f"{url}/openapi.json").json(), routes)
            seconds = max(1, int(minutes * 60 / len(chosen)))
            for route in chosen:
                holds = run(python.with_name("schemathesis"), url, route, seconds, seed, workspace)
                console.print(f"  {route}: {'nothing failed' if holds else 'failed'}", highlight=False)
                failed += [] if holds else [route]
            server.props()
        if tracebacks := num_tracebacks(log):
            failed.append(f"{tracebacks} tracebacks in the log")
    click.echo(f"failed: {', '.join(failed)}" if failed else f"nothing failed on {len(chosen)} routes")
    sys.exit(1 if failed else 0)
