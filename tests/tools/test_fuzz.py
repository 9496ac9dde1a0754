"""The failures of `tools/bench fuzz`, and its report of them."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.programs.fuzz import FuzzError, counted, exchanges, jobs_of

ROUTE = "POST /v1/messages"
REQUEST: dict[str, Any] = {
    "method": "POST",
    "uri": "http://127.0.0.1:1/v1/messages",
    "headers": {"Content-Type": ["application/json"]},
    "body": {"$base64": base64.b64encode(b"{'\xff\n").decode()},
}


def exchange(status: int | None, content: Any = None) -> tuple[str, dict[str, Any]]:
    encoded = base64.b64encode(json.dumps(content).encode()).decode()
    response = None if status is None else {"status_code": status, "content": {"$base64": encoded}}
    return ROUTE, {"request": REQUEST, "response": response, "undocumented": []}


FULL = {"error": {"code": "queue_full"}}
FULL_FOR_ANTHROPIC = {"type": "error", "error": {"type": "overloaded_error", "details": {"error_code": "queue_full"}}}
LOADING = {"error": {"code": "not_ready"}}


@pytest.mark.parametrize(
    ("status", "content", "counted_as", "is_failure"),
    [
        (200, {}, "200", False),
        (422, {}, "422", False),
        (500, {}, "500", True),
        (None, None, "none", True),
        (503, FULL, "busy", False),
        (503, FULL_FOR_ANTHROPIC, "busy", False),
        (503, LOADING, "503", True),
        (503, "text", "503", True),
        (500, FULL, "500", True),
    ],
)
def test_only_a_full_queue_excuses_an_error_of_the_server(
    status: int | None, content: Any, counted_as: str, is_failure: bool
) -> None:
    found = counted([exchange(status, content)])[ROUTE]
    assert found.statuses == {counted_as: 1}
    assert bool(found.failures) is is_failure


def test_a_failure_comes_with_a_command_that_sends_the_same_bytes() -> None:
    [failure] = counted([exchange(None), exchange(None)])[ROUTE].failures.values()
    assert (failure.reason, failure.count) == ("no answer", 2)
    body, _, curl = failure.request.rpartition(" | ")
    assert subprocess.run(body, shell=True, capture_output=True, check=True).stdout == b"{'\xff\n"
    assert curl.startswith("curl -X POST http://127.0.0.1:1/v1/messages -H 'Content-Type: application/json'")


def test_a_report_is_read_with_what_is_not_documented_and_as_far_as_it_goes(tmp_path: Path) -> None:
    interactions = {name: {"request": REQUEST, "response": {"status_code": 200}} for name in "ab"}
    wrong = {"title": "Undocumented HTTP status code", "message": "Received: 200"}
    checks = {"b": [{"name": "status_code_conformance", "status": "failure", "failure_info": {"failure": wrong}}]}
    event = {"ScenarioFinished": {"recorder": {"label": ROUTE, "interactions": interactions, "checks": checks}}}
    report = tmp_path / "report.ndjson"
    report.write_text(f'{{"Initialize": {{}}}}\n{json.dumps(event)}\n{json.dumps(event)[:40]}')
    found = counted(exchanges(report))[ROUTE]
    assert found.statuses == {"200": 2}
    [failure] = found.failures.values()
    assert failure.reason == "200, which the document does not have: Undocumented HTTP status code: Received: 200"


def test_each_route_with_a_body_is_fuzzed_on_its_own() -> None:
    document: dict[str, Any] = {"paths": {"/a": {"post": {}}, "/a/b": {"post": {}}, "/c": {"get": {}}}}
    names = [job.name for job in jobs_of(document, ())]
    assert names == ["/a", "/a", "/a/b", "/a/b", "others", "others"]
    assert [job.phase for job in jobs_of(document, ["/a"])] == ["coverage", "fuzzing"]
    with pytest.raises(FuzzError, match="--route: /c is not one of /a, /a/b, others"):
        jobs_of(document, ["/c"])
