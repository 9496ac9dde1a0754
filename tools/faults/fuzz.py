"""The fuzz matrix: schemathesis sends requests to a real daemon that it makes from the OpenAPI document.

Half of the time each value of each field is tried on its own, valid and not (schemathesis' coverage phase); the other
half of the time whole requests are random (its fuzzing phase).
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from tests.server.agent_model import TEMPLATE
from tests.server.chat_model import write_chat_model
from tools.measuring.environments import NotInstalled, python_of
from tools.measuring.live_server import LiveServer, num_tracebacks
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring

PHASES = ("coverage", "fuzzing")
LANES = 2
"""Runs of schemathesis side by side, each of one thread: with several threads CPython 3.11 may fail."""
POSITIONS = 512
"""Few positions, so that a reply without a limit ends soon."""
REQUEST_TIMEOUT_S = 60
START_S = 30.0
"""Seconds for schemathesis to end after its time."""
QUEUE_FULL = frozenset({"queue_full", "too_many_connections"})
"""Codes of a 503 that a busy daemon rightly gives."""
CONFORMANCE = ("status_code", "content_type", "response_headers", "response_schema")
"""The checks of schemathesis that every answer must pass."""


class FuzzError(Exception):
    """Schemathesis does not run; the message is one line."""


@dataclass
class Failure:
    """Requests with a wrong answer. `request` is a command that sends the first of them again."""

    route: str
    reason: str
    request: str
    count: int = 1


@dataclass
class Found:
    """The outcomes of the requests to one route."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    """Counts by reason."""

    def add(self, route: str, exchange: dict[str, Any]) -> None:
        response = exchange.get("response")
        if response is None:
            self.statuses["none"] += 1
            self._fail(route, "no answer", exchange)
            return
        status = int(response["status_code"])
        for said in exchange["undocumented"]:
            self._fail(route, f"{status}, which the document does not have: {said}", exchange)
        if status == 503 and _code(response) in QUEUE_FULL:
            self.statuses["busy"] += 1
            return
        self.statuses[str(status)] += 1
        if status >= 500:
            self._fail(route, f"{status}: {_content(response)[:300].decode(errors='replace')}", exchange)

    def _fail(self, route: str, reason: str, exchange: dict[str, Any]) -> None:
        if reason in self.failures:
            self.failures[reason].count += 1
        else:
            self.failures[reason] = Failure(route, reason, command_of(exchange["request"]))


def command_of(request: dict[str, Any]) -> str:
    """Returns a shell command that sends a recorded request again, byte for byte."""
    words = ["curl", "-X", request["method"], request["uri"]]
    for name, values in request["headers"].items():
        words += [word for value in values for word in ("-H", f"{name}: {value}")]
    body = request.get("body")
    if body is None:
        return shlex.join(words)
    return f"echo {body['$base64']} | base64 -d | {shlex.join([*words, '--data-binary', '@-'])}"


def _content(response: dict[str, Any]) -> bytes:
    content = response.get("content")
    return base64.b64decode(content["$base64"]) if content else b""


def _code(response: dict[str, Any]) -> str | None:
    """Returns the code in an error's body, in the form of either API."""
    try:
        error = json.loads(_content(response))["error"]
        code: str | None = error.get("code") or error.get("details", {}).get("error_code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return code


def exchanges(report: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the requests of a report and their answers, each with its route.

    `undocumented` has what an answer does not have as the document says. A report may have been cut off.
    """
    for line in report.read_text(encoding="utf-8").splitlines():
        try:
            [(kind, event)] = json.loads(line).items()
        except ValueError:
            continue
        if kind == "ScenarioFinished":
            recorder = event["recorder"]
            checks = recorder.get("checks", {})
            for case, exchange in recorder.get("interactions", {}).items():
                failed = [check["failure_info"]["failure"] for check in checks.get(case, ()) if "failure_info" in check]
                said = [f"{one['title']}: {one['message']}" for one in failed]
                yield recorder["label"], exchange | {"undocumented": said}


@dataclass(frozen=True)
class Job:
    """One run of schemathesis: a phase of it over some routes."""

    name: str
    phase: str
    filters: tuple[str, ...]


def jobs_of(document: dict[str, Any], routes: Sequence[str]) -> list[Job]:
    """Returns the runs for `routes`, or for all: each POST route on its own, because their bodies differ so much."""
    posts = [path for path, methods in document["paths"].items() if "post" in methods]
    # The stream of events does not end by itself.
    others = ("--exclude-method", "POST", "--exclude-path", "/dashboard/events")
    groups = [(path, ("--include-name", f"POST {path}")) for path in posts] + [("others", others)]
    if unknown := sorted(set(routes) - {name for name, _ in groups}):
        raise FuzzError(f"--route: {unknown[0]} is not one of {', '.join(name for name, _ in groups)}")
    return [Job(name, phase, chosen) for name, chosen in groups if not routes or name in routes for phase in PHASES]


class Fuzzer:
    """Runs schemathesis against the daemon at `url`."""

    def __init__(self, schemathesis: Path, url: str, workspace: Path, seed: int) -> None:
        self._schemathesis = schemathesis
        self._url = url
        self._workspace = workspace
        self._seed = seed

    def run(self, job: Job, seconds: int) -> list[tuple[str, dict[str, Any]]]:
        """Returns the requests of one run. There may be none: a large body takes long to be made.

        Raises `FuzzError` if schemathesis does not work.
        """
        report = self._workspace / f"{job.name.strip('/').replace('/', '-')}-{job.phase}.ndjson"
        command = [str(self._schemathesis), "run", f"{self._url}/openapi.json", *job.filters, "--phases", job.phase]
        command += ["--max-time", str(seconds), "--workers", "1", "--seed", str(self._seed), "--no-color"]
        command += ["--continue-on-failure", "--no-shrink", "--generation-database", "none"]
        command += ["--request-timeout", str(REQUEST_TIMEOUT_S)]
        command += ["--checks", ",".join(f"{name}_conformance" for name in CONFORMANCE)]
        command += ["--output-sanitize", "false", "--report", "ndjson", "--report-ndjson-path", str(report)]
        limit_s = seconds + REQUEST_TIMEOUT_S + START_S
        with report.with_suffix(".log").open("w") as log:
            try:
                # It leaves a folder where it runs.
                subprocess.run(command, cwd=self._workspace, stdout=log, stderr=log, check=False, timeout=limit_s)
            except subprocess.TimeoutExpired as error:
                raise FuzzError(f"schemathesis did not end: {job.name}, {job.phase}") from error
        if not report.exists():
            raise FuzzError(f"schemathesis did not begin: {job.name}, {job.phase}; {_last_line(report)}")
        return list(exchanges(report))


def _last_line(report: Path) -> str:
    lines = [line for line in report.with_suffix(".log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def write_model(folder: Path) -> Path:
    """Writes the folder of a tiny random model whose template knows tools and thoughts."""
    folder = write_chat_model(folder, chat_template=TEMPLATE)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": POSITIONS}))
    return folder


def counted(sent: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for route, exchange in sent:
        found.setdefault(route, Found()).add(route, exchange)
    return dict(sorted(found.items()))


def report_of(found: dict[str, Found], log: Path, seed: int, minutes: float) -> dict[str, Any]:
    failures = [failure for one in found.values() for failure in one.failures.values()]
    return {
        "seed": seed,
        "minutes": minutes,
        "routes": {route: dict(sorted(one.statuses.items())) for route, one in found.items()},
        "requests": sum(one.statuses.total() for one in found.values()),
        "busy": sum(one.statuses["busy"] for one in found.values()),
        "failures": [vars(failure) for failure in failures],
        "tracebacks": num_tracebacks(log),
        "machine": machine(),
    }


def show(report: dict[str, Any], console: Console) -> None:
    statuses = sorted({status for route in report["routes"].values() for status in route})
    title = f"Requests by schemathesis, {report['minutes']:g} minutes, seed {report['seed']}: by route and status"
    table = new_table(title, left=("route",), right=("requests", *statuses))
    for route, found in report["routes"].items():
        table.add_row(route, f"{sum(found.values()):,}", *(f"{found.get(status, 0):,}" for status in statuses))
    console.print(table)
    failed = sum(failure["count"] for failure in report["failures"])
    say(console, f"{report['requests']:,} requests; {failed:,} failures, {report['tracebacks']} tracebacks")
    say(console, f"{report['busy']} of them were told that the queue is full (503), which is no failure")
    for failure in report["failures"]:
        say(console, f"{failure['route']}, {failure['count']:,} times: {failure['reason']}")
        console.print(f"    {failure['request']}", highlight=False, markup=False, soft_wrap=True)
    show_machine(report["machine"], console)


def fuzz(workspace: Path, routes: Sequence[str], minutes: float, seed: int, console: Console) -> dict[str, Any]:
    """Returns the report. Raises `FuzzError`, `NotInstalled` and `LiveServerError`."""
    python = python_of("schemathesis", lambda line: console.print(line, markup=False))
    model, log = write_model(workspace / "model"), workspace / "server.log"
    flags = ("--model", str(model), "--block-size", "16", "--kv-cache-min-tokens", "16", "--kv-cache-gate", "off")
    with LiveServer(kv_cache_dir=workspace / "kv", log_path=log, flags=flags) as server:
        server.start()
        url = f"http://127.0.0.1:{server.port}"
        jobs = jobs_of(httpx.get(f"{url}/openapi.json").json(), routes)
        seconds = max(1, int(minutes * 60 * min(LANES, len(jobs)) / len(jobs)))
        fuzzer = Fuzzer(python.with_name("schemathesis"), url, workspace, seed)
        sent: list[tuple[str, dict[str, Any]]] = []
        with ThreadPoolExecutor(LANES) as lanes:
            for job, found in zip(jobs, lanes.map(lambda job: fuzzer.run(job, seconds), jobs), strict=True):
                console.print(f"  {job.name}, {job.phase}: {len(found)} requests", highlight=False)
                sent += found
        server.props()
        return report_of(counted(sent), log, seed, minutes)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="In all.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the requests.")
@click.option("--route", "routes", multiple=True, help="Only this POST route, or `others`; may be given several times.")
@FOLDER
@JSON
def main(minutes: float, seed: int, routes: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Send made-up requests to all routes of a daemon with a tiny model, and look for answers that must not be.

    schemathesis makes them from /openapi.json; it is installed into the cache folder on first use. Prints the requests
    by route and status. A failure is an answer of 500 or more, one whose status, type, headers or body the document
    does not have, no answer, or a traceback in the daemon's log; each is printed with a command that sends the request
    again. A 503 that says that the queue is full is counted apart.

    Exits with 1 if anything failed.
    """
    console = Console(stderr=True)
    try:
        with measuring(folder, console) as workspace:
            report = fuzz(workspace, routes, minutes, seed, console)
    except (FuzzError, NotInstalled) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(1)
    print_report(report, as_json, show)
    sys.exit(1 if report["failures"] or report["tracebacks"] else 0)
