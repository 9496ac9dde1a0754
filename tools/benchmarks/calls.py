"""Calls of all families with awkward values and known deviations, whole, in pieces, cut off and damaged."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import track

from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES, THOUGHTS, Family
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta
from diskprefix.daemon.chat.replay import Turn
from tools.benchmarks.call_cases import FIRST, LAST, VALUES, Case, cases_of, tools_for
from tools.measuring.options import seed_option
from tools.measuring.report import new_table, none_of, verdict_table

_TOKENS = re.compile(r"[<\[{(]?\|?/?\w+[|=:]*\w*\|?[>\]})]?|\s+|.", re.DOTALL)
"""The pieces of a call that a damaged one lacks or repeats: tags, words, brackets."""
_WORDS = (FIRST, LAST)


class Read(NamedTuple):
    """The parts of a reply. `calls` are those that a client can execute: of a tool that it has, with an object."""

    calls: list[tuple[str, dict[str, Any]]]
    executed: str
    """The text of their arguments."""
    other: str
    """The text of the answer, and of arguments that no client can read."""


def read(family: Family, pieces: Iterable[str], tools: list[dict[str, Any]], *, is_whole: bool = True) -> Read:
    """Returns what the family's parser reads in the pieces of a reply."""
    parser = OutputFormat(family, THOUGHTS).parser(tools, "")
    deltas: list[OutputDelta] = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(is_whole=is_whole)
    names = {tool["function"]["name"] for tool in tools}
    calls, executed, other = [], "", "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    for name, text in Turn.of_deltas(deltas).calls:
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if name in names and isinstance(arguments, dict):
            calls.append((name, arguments))
            executed += text
        else:
            other += text
    return Read(calls, executed, other)


def fault_of(case: Case, chance: random.Random) -> str:
    """Reads a case whole, in characters, and in pieces. Returns what is wrong, "" for nothing, "shown" if the reply is
    text."""
    tools = tools_for(VALUES[case.value])
    whole = read(case.family, [case.text], tools)
    if read(case.family, case.text, tools) != whole or read(case.family, pieces_of(case.text, chance), tools) != whole:
        return "read otherwise in pieces"
    if whole.calls == case.calls:
        return ""
    return "less than was written" if whole.calls else "shown"


def pieces_of(text: str, chance: random.Random) -> list[str]:
    """Returns a text in up to five pieces."""
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(4))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def cut_off_fault(case: Case, chance: random.Random) -> str:
    """Cuts the reply off anywhere: only whole calls may be executed."""
    text = case.text[: chance.randrange(len(case.text))]
    result = read(case.family, pieces_of(text, chance), tools_for(VALUES[case.value]), is_whole=False)
    whole = all(call == wanted for call, wanted in zip(result.calls, case.calls, strict=False))
    return "" if whole and len(result.calls) <= len(case.calls) else f"less than was written, cut off: {text!r}"


def damaged(text: str, chance: random.Random) -> str:
    """Returns a text in which some pieces are missing or twice there, or have blanks between them."""
    pieces = _TOKENS.findall(text)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(pieces))
        what = chance.choice(("drop", "repeat", "blank"))
        if what == "drop":
            pieces[at] = ""
        else:
            pieces.insert(at, pieces[at] if what == "repeat" else chance.choice((" ", "\n")))
    return "".join(pieces)


def damage_fault(case: Case, chance: random.Random) -> str:
    """Damages a call. A client that executes it must have the words of its first and its last argument."""
    text = damaged(case.text, chance)
    tools = tools_for(VALUES[case.value])
    result = read(case.family, [text], tools)
    if read(case.family, text, tools) != result:
        return f"read otherwise in pieces, damaged: {text!r}"
    lost = [word for word in _WORDS if result.calls and text.count(word) > result.executed.count(word)]
    return f"less than was written, damaged: {text!r} {result}" if lost else ""


class Found(NamedTuple):
    """The counts of the verdicts, and the faults by the names of their cases."""

    counts: Counter[str]
    faults: list[str]
    shown: Counter[tuple[str, str]]
    """The calls that are text, by family and deviation."""


def run(seeds: Sequence[int], families: Sequence[Family] = FAMILIES, values: Sequence[str] = (*VALUES,)) -> Found:
    """Reads all calls of `families` with `values`. Each seed makes other pieces, cuts and damage."""
    result = Found(Counter(), [], Counter())
    for family, value in ((family, value) for family in families for value in values):
        for case in cases_of(family, value):
            for seed in seeds:
                chance = random.Random(f"{seed} {case.name}")
                for kind, fault in faults_of(case, chance):
                    result.counts[kind] += 1
                    if fault == "shown":
                        result.shown[family.name, case.deviation] += 1
                        result.counts["shown"] += 1
                    elif fault:
                        result.faults.append(f"seed {seed}: {case.name}: {fault}")
    return result


def faults_of(case: Case, chance: random.Random) -> Iterator[tuple[str, str]]:
    yield "calls", fault_of(case, chance)
    yield "cut off", cut_off_fault(case, chance)
    if len(case.calls) == 1:
        yield "damaged", damage_fault(case, chance)


@click.command()
@seed_option("calls of all families", "Decides where replies are cut, and how they are damaged.")
@click.option("--rounds", default=1, show_default=True, help="So many seeds, from --seed on.")
@click.option("--only", multiple=True, help="Only this family; repeatable.")
def main(seed: int, rounds: int, only: tuple[str, ...]) -> None:
    """Read calls of each family with awkward values, as templates write them and as models write them instead.

    Each is read whole, in characters and in pieces, cut off, and damaged. Exits with 1 if a call is executed with less
    than was written, or if a text is read otherwise in pieces. Takes about five minutes per round.
    """
    console = Console(stderr=True)
    families = [family for family in FAMILIES if not only or family.name in only]
    seeds = range(seed, seed + rounds)
    results = [run(seeds, [family]) for family in track(families, "families", console=console)]
    show(results, Console(width=120))
    sys.exit(1 if any(result.faults for result in results) else 0)


def show(results: Sequence[Found], console: Console) -> None:
    """Prints what is shown as text, the faults, and the counts."""
    table = new_table("Calls that are text", left=("family", "deviation"), right=("calls",))
    for result in results:
        for (family, deviation), count in result.shown.items():
            table.add_row(family, deviation, f"{count:,}")
    console.print(table)
    faults = [fault for result in results for fault in result.faults]
    for fault in faults:
        console.print(fault, markup=False, highlight=False)
    counts = sum((result.counts for result in results), Counter[str]())
    title = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    console.print(
        verdict_table(title, [none_of("executed with less than was written, or read otherwise", len(faults))])
    )
