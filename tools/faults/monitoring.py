"""Scrapes a real daemon with a real Prometheus, and asks it what the board and the alert rules ask.

Both are Debian's package `prometheus`. The daemon serves a tiny random model.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import yaml
from rich.console import Console

from tests.server.chat_model import write_chat_model
from tools.measuring.live_server import LiveServer, log_tail, step
from tools.measuring.options import JSON
from tools.measuring.processes import free_port
from tools.measuring.report import new_table, print_report, say

FILES = Path(__file__).parent.parent / "monitoring"
_SCRAPE_S = 1
_RATE_INTERVAL = "15s"
_TRAFFIC_S = 20.0
_SEED_S = 5.0
"""Seconds of traffic on another machine, which fills the shared tier."""
_DEADLINE_S = 60.0
# Nothing stays in memory: what is restored comes from the disk.
_FLAGS = (
    "--kv-memory-entries",
    "0",
    "--block-size",
    "16",
    "--kv-cache-min-tokens",
    "16",
    "--kv-cache-gate",
    "off",
    "--kv-cache-budget",
    "64MiB",
)


class MonitoringError(Exception):
    """Prometheus failed. The message is one line."""


@dataclass(frozen=True)
class Query:
    """The query of one line of a panel."""

    panel: str
    legend: str
    expression: str

    @property
    def filled_in(self) -> str:
        """The expression as Grafana sends it, for all daemons."""
        return self.expression.replace("$instance", ".*").replace("$__rate_interval", _RATE_INTERVAL)


def board_queries() -> list[Query]:
    """Returns the queries of the panels of the board."""
    board = json.loads((FILES / "board.json").read_text(encoding="utf-8"))
    return [
        Query(panel["title"], target["legendFormat"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    """Returns the alert rules."""
    groups = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path, text: str | None = None) -> str | None:
    """Returns the faults that promtool finds, None if there are none. `text` is its standard input."""
    answer = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, check=False, cwd=FILES
    )
    return None if answer.returncode == 0 else (answer.stderr + answer.stdout).strip()


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes `target` every second, and a client of it. Raises `MonitoringError`."""
    configuration = yaml.safe_load((FILES / "prometheus.yml").read_text(encoding="utf-8"))
    configuration["global"] = {"scrape_interval": f"{_SCRAPE_S}s", "evaluation_interval": f"{_SCRAPE_S}s"}
    configuration["rule_files"] = [str(FILES / name) for name in configuration["rule_files"]]
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            deadline = time.monotonic() + _DEADLINE_S
            while not _is_ready(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise MonitoringError(f"Prometheus does not start: {log_tail(folder / 'log', 3)}")
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def samples(client: httpx.Client, query: Query) -> list[float]:
    """Returns the numbers that Prometheus answers. Raises `MonitoringError` for a query that it does not understand."""
    answer = client.get("/api/v1/query", params={"query": query.filled_in}).json()
    if answer["status"] != "success":
        raise MonitoringError(f"{query.panel}: {answer['error']}")
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def send_traffic(server: LiveServer, seconds: float) -> None:
    """Sends requests that hit, that miss and that are wrong."""
    url, until, number = f"http://127.0.0.1:{server.port}/v1/chat/completions", time.monotonic() + seconds, 0
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < until:
            number += 1
            for text in ("Name three rivers and where each begins. " * 4, f"{number}: name a river. " * 8):
                messages = [{"role": "user", "content": text}]
                client.post(url, json={"messages": messages, "max_tokens": 8, "temperature": 0}).raise_for_status()
            client.post(url, json={"messages": 1})
            time.sleep(0.2)


def measure(folder: Path, console: Console) -> dict[str, Any]:
    """Returns the report as JSON values. Raises `MonitoringError`."""
    model, bucket, key = write_chat_model(folder / "model"), folder / "bucket", folder / "namespace.key"
    bucket.mkdir()
    key.write_text("a secret of all machines here")
    key.chmod(0o600)
    shared = ("--remote-tier", bucket.as_uri(), "--remote-write", "all", "--namespace-key-file", str(key))
    flags = ("--model", str(model), "--disk-prefix-cache", "full", *_FLAGS, *shared)
    other = LiveServer(kv_cache_dir=folder / "other", log_path=folder / "other.log", flags=flags)
    with other, step(console, "another machine fills the shared tier"):
        other.start()
        send_traffic(other, _SEED_S)
        other.wait_until_saved()
    with LiveServer(kv_cache_dir=folder / "kv", log_path=folder / "server.log", flags=flags) as server:
        with step(console, "starting the daemon"):
            server.start()
        (folder / "prometheus").mkdir()
        with prometheus(folder / "prometheus", f"127.0.0.1:{server.port}") as client:
            with step(console, f"sending requests for {_TRAFFIC_S:.0f} s"):
                send_traffic(server, _TRAFFIC_S)
            asked = [
                {"panel": query.panel, "line": query.legend, "samples": samples(client, query)}
                for query in board_queries()
            ]
            loaded = client.get("/api/v1/rules").json()["data"]["groups"]
        scraped = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    return {
        "benchmark": "monitoring",
        "queries": asked,
        "rules": [
            {"name": rule["name"], "health": rule["health"], "error": rule.get("lastError"), "state": rule["state"]}
            for group in loaded
            for rule in group["rules"]
        ],
        "metrics": sum(line.startswith("# TYPE diskprefix_") for line in scraped.splitlines()),
        "promtool": {
            "check metrics": promtool("check", "metrics", text=scraped),
            "check rules": promtool("check", "rules", "alerts.yml"),
            "test rules": promtool("test", "rules", "alerts_test.yml"),
        },
    }


def faults(report: dict[str, Any]) -> list[str]:
    """Returns the faults, a line each."""
    found = [f"{query['panel']}, {query['line']}: no data" for query in report["queries"] if not query["samples"]]
    found += [f"{rule['name']}: {rule['error']}" for rule in report["rules"] if rule["health"] != "ok"]
    if len(report["rules"]) != len(rules()):
        found.append(f"Prometheus loaded {len(report['rules'])} of {len(rules())} rules")
    found += [f"{rule['name']} fires" for rule in report["rules"] if rule["state"] == "firing"]
    return found + [f"promtool {what}: {fault}" for what, fault in report["promtool"].items() if fault]


def show(report: dict[str, Any], console: Console) -> None:
    table = new_table("What the board shows", left=("panel", "line"), right=("series", "now"))
    for query in report["queries"]:
        values = query["samples"]
        table.add_row(query["panel"], query["line"], str(len(values)), f"{max(values):.4g}" if values else "no data")
    console.print(table)
    say(console, f"{report['metrics']} families, {len(report['queries'])} queries, {len(report['rules'])} alert rules")
    for fault in faults(report):
        say(console, f"✗ {fault}")


@click.command()
@JSON
def main(as_json: bool) -> None:
    """Ask a real Prometheus what the board and the alert rules in tools/monitoring ask.

    Takes a minute. Exits with 1 if a query has no data, a rule cannot be evaluated or fires, or promtool finds a fault.
    """
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        raise click.ClickException(f"{missing[0]} is not installed; it comes with Debian's package prometheus")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="diskprefix-monitoring-") as folder:
        try:
            report = measure(Path(folder), console)
        except MonitoringError as error:
            raise click.ClickException(str(error)) from error
    print_report(report, as_json, show)
    sys.exit(1 if faults(report) else 0)
