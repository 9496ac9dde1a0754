"""The board and the alert rules ask for metrics that the daemon has; promtool accepts all of them."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from diskprefix.daemon.server.metrics import _GATE
from diskprefix.prefixstore.remote.counts import Counts
from tests.closing import needs
from tests.daemon.server.scripted import STATS
from tests.daemon.server.test_metrics import Scraped, samples_of

NEEDS_PROMTOOL = needs("promtool")
FILES = Path(__file__).parents[2] / "tools/monitoring"


@dataclass(frozen=True)
class Query:
    panel: str
    legend: str
    expression: str


def board_queries() -> list[Query]:
    board = json.loads((FILES / "board.json").read_text(encoding="utf-8"))
    return [
        Query(panel["title"], target["legendFormat"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path, text: str | None = None) -> str | None:
    """Returns the faults that promtool finds, None if there are none. `text` is its standard input."""
    answer = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, check=False, cwd=FILES
    )
    return None if answer.returncode == 0 else (answer.stderr + answer.stdout).strip()


def exposed() -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    scraped = Scraped()
    scraped.stats["gate"] = STATS["gate"] | dict.fromkeys(_GATE, 1.0)
    scraped.stats["remote"] = Counts().as_dict() | {"state": "ok"}
    scraped.metrics._http.labels("/health", "200").inc()
    text = scraped.text()
    for name, pairs in samples_of(text):
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    return labels


@pytest.mark.parametrize("source", ["board", "rules"])
def test_each_query_is_about_metrics_and_labels_that_the_daemon_has(source: str) -> None:
    known = exposed()
    asked = [query.expression for query in board_queries()] if source == "board" else [rule["expr"] for rule in rules()]
    assert len(asked) > 10
    for expression in asked:
        for name, selector in re.findall(r"(diskprefix_\w+)(?:\{([^}]*)\})?", expression):
            assert name in known, expression
            labels = set(re.findall(r"(\w+)\s*[=!]", selector)) - {"instance", "job"}
            assert labels <= known[name], expression
        for grouped in re.findall(r"by \(([^)]*)\) \(\w*\(?(diskprefix_\w+)", expression):
            assert set(grouped[0].split(", ")) - {"instance"} <= known[grouped[1]], expression


def test_each_metric_is_on_the_board_or_in_a_rule() -> None:
    asked = " ".join([*(query.expression for query in board_queries()), *(rule["expr"] for rule in rules())])
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed()}
    assert {name for name in families if name not in asked} == set()


def test_each_rule_says_what_is_wrong_and_what_to_do() -> None:
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert "instance" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.slow
@NEEDS_PROMTOOL
def test_promtool_finds_no_fault_in_the_rules_and_their_tests_pass() -> None:
    assert promtool("check", "rules", "alerts.yml") is None
    assert promtool("test", "rules", "alerts_test.yml") is None


@NEEDS_PROMTOOL
def test_promtool_finds_no_fault_in_what_is_scraped() -> None:
    assert promtool("check", "metrics", text=Scraped().text()) is None
