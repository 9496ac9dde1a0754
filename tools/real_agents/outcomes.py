"""The outcomes of the agents, in one file that several runs fill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.measuring.report import UnreadableResults, machine
from tools.real_agents.agents import Agent

GOAL = 0.9
"""The least share of the prompts after the first one that is restored."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one agent. Times are medians over its turns, in milliseconds, as a client sees them."""

    agent: str
    version: str
    is_done: bool
    exit_code: int | None
    turns: int
    side_requests: int
    calls: list[str]
    prompt_tokens: list[int]
    restored: list[int]
    restored_share: float | None
    first_byte_ms: float | None
    first_token_ms: float | None
    restarts: int
    refused: list[str]
    retries: int
    cut_off: int
    hosts_refused: list[str]
    changed: list[str]
    new: list[str]

    @property
    def is_good(self) -> bool:
        """Returns whether the task is done and nothing failed. It may have taken one turn only."""
        share = 1.0 if self.restored_share is None else self.restored_share
        has_failed = self.refused or self.retries or self.cut_off or self.changed
        return self.is_done and not has_failed and share >= GOAL


class Outcomes:
    """With a path, what earlier runs wrote there belongs to them, and each is written when it is added.

    `title` says with which model. Raises `UnreadableResults`.
    """

    def __init__(self, path: Path | None, title: str) -> None:
        self.report: dict[str, Any] = {"title": title, "agents": [], "machine": machine()}
        self._path = path
        if path is not None and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                self.report["agents"] = [asdict(Outcome(**each)) for each in found["agents"]]
                others = found["title"]
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableResults(f"{path} is not a file of results: {error!r}") from error
            if others != title:
                raise UnreadableResults(f"{path} has the results of other runs: {others}")

    def __iter__(self) -> Iterator[Outcome]:
        return (Outcome(**each) for each in self.report["agents"])

    def missing(self, agents: Iterable[Agent]) -> list[Agent]:
        """Returns the agents without a good outcome of their version."""
        good = {(each.agent, each.version) for each in self if each.is_good}
        return [agent for agent in agents if (agent.name, agent.version) not in good]

    def add(self, outcome: Outcome) -> None:
        """Adds an outcome in place of that of the same agent, and writes the file."""
        others = [each for each in self.report["agents"] if each["agent"] != outcome.agent]
        self.report["agents"] = [*others, asdict(outcome)]
        if self._path is not None:
            work = self._path.with_name(f"{self._path.name}.partial")
            work.write_text(json.dumps(self.report, indent=2), encoding="utf-8")
            work.replace(self._path)
