"""The command `diskprefix doctor`: checks whether this machine serves a model well, and gives advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
from msgspec.structs import asdict, replace

from diskprefix.daemon.catalogue.adviser import advice_lines, proposed
from diskprefix.daemon.catalogue.catalogue import open_catalogue
from diskprefix.daemon.cli.options import GroupedCommand, build_settings, option, policy_option, setting_options
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.desk.setup.doctor_machine import Finding
from diskprefix.desk.shared.tooling import print_json, status
from diskprefix.printable import printable_only
from diskprefix.setting import CACHE
from diskprefix.units import counted, format_size

_SIGNS = {"ok": "ok", "note": "note", "problem": "PROBLEM", "skipped": "–"}

_EPILOG = """\b
Examples:
  diskprefix doctor                                  loads and downloads nothing
  diskprefix doctor --model ~/models/qwen --port 9000 --json

Exit codes: 0 no problem was found; 1 a problem was found; 2 wrong usage.
"""


@click.command(cls=GroupedCommand, short_help="Check the machine, the model, the folder and the port.", epilog=_EPILOG)
@option("--json", is_flag=True, help="Print JSON for scripts, and nothing else.")
@setting_options(SETTINGS, "As for serve: ")
@policy_option("As for serve: " + CACHE)
def doctor(json: bool, **flags: Any) -> int:
    """Check whether `diskprefix serve` with the same options works well on this machine. Give advice if not.

    The command checks torch's build and instruction sets, the kernels, their speed, the model's
    size against the memory, its tokenizer, template and tool calls, the folder's permissions and file system, the
    budget against the free space, the store and the port. It changes nothing, takes a few seconds, and
    works beside a running daemon. The last line advises a model for agents on this machine.
    """
    settings = build_settings(flags)
    findings: list[Finding] = []
    with status("checking the machine") as say:
        for finding in _findings(settings, say):
            findings.append(finding)
            if not json:
                _show(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    if json:
        print_json({"ok": not problems, "findings": [asdict(finding) for finding in findings], "advice": proposed()})
    else:
        notes = sum(finding.level == "note" for finding in findings)
        click.echo(f"{counted(problems, 'problem')}, {counted(notes, 'note')}, {counted(len(findings), 'check')}")
        click.echo("\n".join(advice_lines()))
    return 1 if problems else 0


def _findings(settings: Settings, say: Callable[[str], None]) -> Iterator[Finding]:
    from diskprefix.desk.setup.doctor_llama import llama_findings
    from diskprefix.desk.setup.doctor_machine import machine_findings, torch_findings
    from diskprefix.desk.setup.doctor_model import model_findings, together_finding
    from diskprefix.desk.setup.doctor_rows import rows_finding

    yield from machine_findings(settings)
    say("importing torch")
    yield from torch_findings(settings)
    say("measuring products")
    yield rows_finding(settings)
    yield from llama_findings(settings)
    models = [("", settings)]
    if (catalogue := open_catalogue(settings)) is not None:
        yield together_finding(settings, catalogue.models())
        models = [(f"{known.name}: ", known.settings) for known in catalogue.models()]
    for label, own in models:
        for finding in model_findings(own, say):
            yield replace(finding, text=f"{label}{finding.text}")


def _show(finding: Finding) -> None:
    click.echo(f"{_SIGNS[finding.level]:<8} {finding.check:<17} {printable_only(finding.text)}")
    for label, num_bytes in finding.table:
        click.echo(f"{'':<8} {'':<17} {printable_only(label):<34} {format_size(num_bytes):>10}")
    if finding.advice:
        click.echo(f"{'':<8} {'':<17} → {printable_only(finding.advice)}")
