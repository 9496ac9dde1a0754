"""The figures of a session of ten questions, and what may not be wrong in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tools.measuring.report import new_table, none_of, say, show_machine, verdict, verdict_table
from tools.real_agents.tap import Exchange

TABLE_COLUMNS = 120
KEPT = 0.99
"""The least share of the prompt before that a prompt restores."""
READ = frozenset({"thinking", "redacted_thinking", "reasoning", "tool_search_call", "tool_search_output"})
"""Types of another server that are read here: thoughts, as far as they can be, and searches."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a session. `results` are what the called tools answered, `added` the types of the values of another
    server that were added to its conversation."""

    agent: str
    questions: Sequence[str]
    exchanges: Sequence[Exchange]
    unanswered: Sequence[str]
    results: Sequence[str]
    added: Sequence[str]
    num_tracebacks: int
    hosts_refused: Sequence[str]

    def report(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "turns": self._turns(),
            "added": [*self.added],
            "left_out": self._left_out(),
            "wrong": [*self.unanswered, *self._refused()],
            "hosts_refused": [*self.hosts_refused],
            "verdicts": self._verdicts(),
        }

    def _turns(self) -> list[dict[str, Any]]:
        turns = [each for each in self.exchanges if each.is_turn]
        befores = [0, *(each.reply.prompt_tokens for each in turns)]
        return [
            {
                "question": sum(question.encode() in each.body for question in self.questions),
                "calls": each.reply.calls,
                "prompt": each.reply.prompt_tokens,
                "restored": each.reply.restored,
                "kept": min(1.0, each.reply.restored / before) if before else None,
                "miss": each.reply.cache.get("miss_reason"),
                "status": each.status,
            }
            for each, before in zip(turns, befores, strict=False)
        ]

    def _left_out(self) -> dict[str, int]:
        """The types and counts of what was left out of the last prompt."""
        turns = [each for each in self.exchanges if each.is_turn]
        named = turns[-1].reply.cache.get("left_out") or [] if turns else []
        return {each["type"]: each["count"] for each in named}

    def _refused(self) -> list[str]:
        return [said for each in self.exchanges if (said := each.refused_for) is not None]

    def _verdicts(self) -> list[dict[str, Any]]:
        turns = self._turns()
        least = min((turn["kept"] for turn in turns if turn["kept"] is not None), default=0.0)
        last = self.exchanges[-1].body.decode("utf-8", "replace") if self.exchanges else ""
        missing = [result for result in self.results if result not in last]
        sent = {kind for kind in self.added if f'"{kind}"' in last}
        return [
            none_of("questions without an answer", len(self.unanswered)),
            none_of("requests refused", len(self._refused())),
            none_of(
                "requests repeated or cut off", sum(each.is_repeated or each.is_cut_off for each in self.exchanges)
            ),
            none_of("called tools without their answer in the conversation", len(missing)),
            none_of("types of another server that nothing names", len(sent - READ - self._left_out().keys())),
            none_of("tracebacks in the log", self.num_tracebacks),
            verdict("the least share of the prompt before that was restored", f"{least:.1%}", "≥ 99 %", least >= KEPT),
        ]


def show(report: Mapping[str, Any], console: Console) -> None:
    right = ("turn", "question", "prompt", "restored", "of the\nprompt before", "status")
    table = new_table(f"{report['agent']}: {report['title']}", left=("calls",), right=right)
    for number, turn in enumerate(report["turns"], start=1):
        table.add_row(
            ", ".join(turn["calls"]),
            str(number),
            str(turn["question"]),
            f"{turn['prompt']:,}",
            f"{turn['restored']:,}",
            "" if turn["kept"] is None else f"{turn['kept']:.1%}",
            str(turn["status"]),
        )
    console.width = max(console.width, TABLE_COLUMNS)
    console.print(table)
    say(console, f"The conversation began elsewhere: {', '.join(report['added'])}.")
    left_out = ", ".join(f"{count} {kind}" for kind, count in report["left_out"].items())
    say(console, f"Left out of the last prompt: {left_out or 'nothing'}.")
    console.print(verdict_table("What may not be wrong", report["verdicts"]))
    for line in report["wrong"]:
        say(console, f"wrong: {line}")
    say(console, "The daemon was killed with SIGKILL and started again before each turn but the first.")
    show_machine(report["machine"], console)
