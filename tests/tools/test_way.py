"""`tools/bench way` finds the modules that a request comes through, and counts returns as its page defines them."""

from __future__ import annotations

import runpy
import sys
import threading
from pathlib import Path

import pytest

from tools.programs.way import LEGS, Follower, follow, report_of

HUB = """\
from beside import deeper, shallow, Value

def run():
    for _ in range(3):
        shallow()
        deeper(callback)
    return Value().name

def callback():
    return 1
"""
BESIDE = """\
class Value:
    def __init__(self):
        self.named = "value"

    @property
    def name(self):
        return self.named

def shallow():
    return 0

def deeper(work):
    return helper() + work()

def helper():
    return 0
"""


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follower:
    (tmp_path / "hub.py").write_text(HUB, encoding="utf-8")
    (tmp_path / "beside.py").write_text(BESIDE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    run = runpy.run_path(str(tmp_path / "hub.py"))["run"]
    follower = Follower(tmp_path)
    with follower.installed(), follower.recording():
        thread = threading.Thread(target=run, name="worker_3")
        thread.start()
        thread.join()
    return follower


def test_a_loop_a_look_up_and_a_property_add_no_returns(followed: Follower) -> None:
    hub = followed.modules["hub.py"]
    assert hub.stays == {("run", 3): False, ("run", 5): True, ("callback", 9): False, ("run", 6): False}
    assert (hub.num_lookups, hub.num_returns) == (1, 2)


def test_the_steps_are_in_their_order_with_the_name_of_the_pool(followed: Follower) -> None:
    files = ["hub.py", "beside.py", "hub.py", "beside.py", "hub.py", "beside.py", "hub.py"]
    assert followed.steps == [("worker", file) for file in files]


def test_a_real_request_comes_through_all_legs() -> None:
    report = report_of(follow())
    assert set(report["returns"]) == set(LEGS)
    assert all(report["returns"].values())
    assert {"server", "chat", "engine", "store"} <= set(report["packages"])
    assert {"kv-fetch", "engine"} <= {name for module in report["modules"].values() for name in module["threads"]}
