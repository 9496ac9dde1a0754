"""The table of versions, and the check of what a version that is not in it lacks. Needs no vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from diskprefix.bridges.shared.versions import VERSIONS, missing, untried, version_of

TRIED = [row for row in VERSIONS if row.runs_connector]


def test_each_version_has_one_row_and_the_oldest_is_the_first() -> None:
    numbers = [tuple(map(int, row.number.split("."))) for row in VERSIONS]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("installed", "number"),
    [("0.28.0", "0.28"), ("0.33.1rc1", "0.33"), ("0.330.0", "0.33"), ("0.34.0.dev7+cpu", "0.33"), ("1.0", "0.33")],
)
def test_a_version_without_a_row_is_taken_for_the_newest(installed: str, number: str) -> None:
    assert version_of(installed).number == number


def test_a_version_that_was_not_tried_is_named_with_those_that_were() -> None:
    assert untried("0.33.1", TRIED) is None
    line = untried("0.34.0", TRIED)
    assert line == "vLLM 0.34.0 was not tried with this diskprefix; tried were 0.32, 0.33"
    assert untried("0.31.0", TRIED) is not None, "the tier takes it, the connector was not tried with it"
    assert untried("0.31.0", VERSIONS) is None


@dataclass
class Output:
    tokens: int


class Request:
    kind = "request"

    def __init__(self, salt: str) -> None:
        self.salt = salt

    @property
    def num_tokens(self) -> int:
        return 1


def test_what_the_engine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some_engine")
    vars(module).update(Output=Output, Request=Request)
    monkeypatch.setitem(sys.modules, "some_engine", module)
    used = {
        "some_engine:Output": ("tokens", "blocks"),
        "some_engine:Request": ("kind", "salt", "num_tokens", "priority"),
        "some_engine:Pool": ("get",),
        "no_such_engine:Config": ("size",),
    }
    assert missing(used) == ["Output.blocks", "Request.priority", "Pool", "Config"]
