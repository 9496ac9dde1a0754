"""The figures of an hour, what may not be wrong in it, and the sentence for the first page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.measuring.report import new_table, none_of, say, show_machine, verdict, verdict_table
from tools.real_agents.hour_world import Kill
from tools.real_agents.recomputing import Recomputed
from tools.real_agents.tap import Exchange

TABLE_COLUMNS = 120
_FAILED = ("damaged", "error")
"""The reasons of misses that are faults."""


@dataclass(kw_only=True)
class Part:
    """The counts of a part of the hour, in requests and prompt tokens.

    A request that was cut off says no counts. They are those of its `Kill`, `killed` is the number of these requests.
    `computed` tokens were computed while the request waited, those of `ahead` while none did.
    """

    name: str
    questions: int = 0
    requests: int = 0
    sent: int = 0
    restored: int = 0
    computed: int = 0
    ahead: int = 0
    cut: int = 0
    killed: int = 0
    repeated: int = 0

    def add_exchanges(self, exchanges: Iterable[Exchange]) -> None:
        for each in exchanges:
            reply = each.reply
            # Others are about the model, or are answered before anything is computed.
            if reply.prompt_tokens or each.is_cut_off:
                self.requests += 1
                self.sent += reply.prompt_tokens
                self.restored += reply.restored
                self.computed += reply.prompt_tokens - reply.restored
                self.cut += each.is_cut_off
                self.killed += each.is_cut_off and each.met_kill
                self.repeated += each.is_repeated

    def add_kill(self, kill: Kill) -> None:
        self.sent += kill.sent
        self.restored += kill.restored
        self.computed += kill.computed

    def row(self) -> tuple[str, ...]:
        share = f"{self.restored / self.sent:.1%}" if self.sent else ""
        counts = (self.computed, self.ahead, self.cut, self.repeated)
        before = (self.questions, self.requests, self.sent, self.restored)
        return self.name, *(f"{each:,}" for each in before), share, *(f"{each:,}" for each in counts)


def total(parts: Iterable[Part]) -> Part:
    made = Part(name="the hour")
    for part in parts:
        for each in fields(Part)[1:]:
            setattr(made, each.name, getattr(made, each.name) + getattr(part, each.name))
    return made


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an hour: the counts of its parts, the kills (`num_kills` were planned), and facts to check."""

    agent: str
    parts: list[Part]
    kills: list[Kill]
    num_kills: int
    exchanges: list[Exchange]
    first_question: str
    recomputed: Recomputed
    unanswered: list[int]
    asked_again: list[int]
    is_file_right: bool
    states_when_full: set[str]
    states_at_the_end: set[str]
    days: set[str]
    problems: list[Any]
    num_tracebacks: int

    def report(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "parts": [asdict(part) for part in self.parts],
            "kills": [asdict(kill) for kill in self.kills],
            "prompt_tokens": [each.reply.prompt_tokens for each in self.exchanges if each.is_turn],
            "recomputed": asdict(self.recomputed),
            "wrong": [*self._refused(), *self.recomputed.different, *map(str, self.problems)],
            "verdicts": self._verdicts(),
        }

    def _verdicts(self) -> list[dict[str, Any]]:
        hour = total(self.parts)
        misses = [each.reply.cache.get("miss_reason") for each in self.exchanges]
        full, end = ("/".join(sorted(states)) for states in (self.states_when_full, self.states_at_the_end))
        return [
            none_of("questions without an answer", len(self.unanswered)),
            none_of("questions that had to be asked again", len(self.asked_again)),
            verdict("the file has every edit", "yes" if self.is_file_right else "no", "yes", self.is_file_right),
            none_of("turns in another conversation", len(self._elsewhere())),
            none_of("requests refused", len(self._refused())),
            none_of("requests cut off, but by a kill", hour.cut - hour.killed),
            none_of("requests repeated, but after a kill", max(0, hour.repeated - hour.killed)),
            none_of("replies with other logits than without a cache", len(self.recomputed.different)),
            none_of("prompts whose saved state was damaged", sum(miss in _FAILED for miss in misses)),
            none_of("problems that verify finds in the store", len(self.problems)),
            none_of("tracebacks in the log", self.num_tracebacks),
            verdict("kills", str(len(self.kills)), str(self.num_kills), len(self.kills) == self.num_kills),
            verdict("the cache says while the disk is full", full, "degraded", "degraded" in self.states_when_full),
            verdict("the cache says at the end", end, "ok", end == "ok"),
            verdict("days that the template wrote", str(len(self.days)), "2", len(self.days) == 2),
        ]

    def _elsewhere(self) -> list[Exchange]:
        question = self.first_question.encode()
        return [each for each in self.exchanges if each.is_turn and question not in each.body]

    def _refused(self) -> list[str]:
        return [said for each in self.exchanges if (said := each.refused_for) is not None]


def show(report: Mapping[str, Any], console: Console) -> None:
    parts = [Part(**each) for each in report["parts"]]
    console.width = max(console.width, TABLE_COLUMNS)
    console.print(_table(report["title"], parts))
    for kill in report["kills"]:
        say(console, f"kill -9 {kill['moment']}, question {kill['question']}: {kill['detail']}")
    console.print(verdict_table("What may not be wrong", report["verdicts"]))
    for line in report["wrong"]:
        say(console, f"wrong: {line}")
    say(console, _sentence(report, total(parts)))
    show_machine(report["machine"], console)


def _table(title: str, parts: Iterable[Part]) -> Table:
    tokens = ("tokens\nsent", "restored", "share", "computed\nwaited for", "computed\nahead")
    right = ("questions", "requests", *tokens, "cut off", "repeated")
    table = new_table(title, left=("part",), right=right)
    parts = [*parts]
    for part in (*parts, total(parts)):
        table.add_row(*part.row())
    return table


def _sentence(report: Mapping[str, Any], hour: Part) -> str:
    prompts, again = [each for each in report["prompt_tokens"] if each], report["recomputed"]
    return (
        f"In an hour of {report['agent']} ({hour.questions} questions, {hour.requests} requests, prompts of "
        f"{min(prompts):,} to {max(prompts):,} tokens; {len(report['kills'])} kills, another model and back, a full "
        f"disk, midnight), {hour.sent:,} tokens were sent and {hour.restored / hour.sent:.1%} of them restored; "
        f"{hour.computed:,} were computed while somebody waited, {hour.ahead:,} ahead. {again['replies']} replies "
        f"({again['tokens']:,} tokens) were computed again without a cache: {len(again['different'])} differ in a bit."
    )
