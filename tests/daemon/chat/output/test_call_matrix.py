"""A part of `tools/bench calls`, which turns with the commit, and the deviations that must be read."""

from __future__ import annotations

import random
from pathlib import Path

import llguidance
import pytest

from diskprefix.daemon.chat.output import families
from diskprefix.daemon.chat.output.families import FAMILIES, NONE, Family
from tests.daemon.chat.output.replies import REPLIES, format_named
from tests.faults.seeds import seeds_of
from tools.benchmarks.call_cases import DEVIATIONS, NAME, VALUES, arguments_with, cases_of, tools_for
from tools.benchmarks.call_texts import call_text
from tools.benchmarks.calls import fault_of, read, run

BY_NAME = {family.name: family for family in FAMILIES}
TEXT = {
    *(("harmony", "arguments in Python"), ("functionary-3.2", "arguments in Python")),
    *(("llama-3", "arguments in Python"), ("llama-3", "object in Python"), ("llama-3", "no key of arguments")),
    ("json", "arguments in Python"),
}
"""What stays text, or becomes arguments that are no JSON: without tags, only JSON with the usual keys is a call."""


@pytest.mark.cases(2)
@pytest.mark.parametrize("sample", range(8))
def test_no_call_is_executed_with_less_than_was_written(sample: int) -> None:
    seeds = seeds_of(f"calls {sample}", 1)
    chance = random.Random(seeds[0])
    found = run(seeds, chance.sample(FAMILIES, 10), chance.sample([*VALUES], 4))
    assert found.counts["calls"]
    assert found.faults == [], "`tools/bench calls --seed N` repeats it"


@pytest.mark.cases(20)
@pytest.mark.parametrize("value", ["lines", "apostrophe", "ends of functions", "nothing", "object"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_deviation_is_read_or_known_to_stay_text(family: Family, value: str) -> None:
    read = {case.deviation: fault_of(case, random.Random(0)) for case in cases_of(family, value)}
    assert read["as written"] == ""
    shown = {(family.name, deviation) for deviation, fault in read.items() if fault == "shown"}
    assert shown - TEXT <= {("pythonic", "strings in apostrophes, not escaped")}
    assert {fault for fault in read.values() if fault} <= {"shown"}


@pytest.mark.parametrize("braces", ["}} {", "}}\n{", "}}] {", "}}\n[{", "}}, {", "}}```{"])
@pytest.mark.parametrize("family", [*FAMILIES, NONE], ids=lambda family: family.name)
def test_braces_in_a_string_that_ends_too_early_end_no_call(family: Family, braces: str) -> None:
    if family.body not in ("objects", "json"):
        return
    text = call_text(family, [(NAME, arguments_with(braces))]).replace("\\n", "\n")
    result = read(family, [text.replace(f'"{braces}', f'""{braces}')], tools_for(braces))
    assert result.calls == []


def test_the_page_counts_what_is_tried() -> None:
    page = " ".join((Path(families.__file__).parent / "README.md").read_text(encoding="utf-8").split())
    assert f"with {len(VALUES)} values, as templates write them, in {len(DEVIATIONS)} deviations" in page
    assert f"holds {len(REPLIES)} replies" in page
    assert f" {sum('unlike' in reply for reply in REPLIES)} are read otherwise" in page


@pytest.mark.parametrize("family", ["qwen3-coder", "seed-oss", "minimax", "deepseek-v3.2", "muse"])
def test_the_grammar_of_calls_takes_texts_with_tags_that_end_nothing(family: str) -> None:
    """It forbade them: a file that an agent wrote lost the rest."""
    for value in ("ends of functions", "ends of arguments", "an argument", "file", "markup"):
        grammar = format_named(family).call_grammar(tools_for(VALUES[value])[:1], many=False)
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        text = call_text(BY_NAME[family], [(NAME, arguments_with(VALUES[value]))])
        assert matcher.try_consume_tokens([*text.encode()]) == len(text.encode()), value
        assert matcher.is_accepting()
