"""`diskprefix verify`: check the store, and remove damaged records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

from diskprefix.cli.tooling import opened_store, print_json, progress, short_id, show_first, store_options
from diskprefix.store.verify import (
    IndexReport,
    PayloadReport,
    RemovedRecords,
    StoreProblem,
    remove_damaged,
    verify_index,
    verify_payloads,
)
from diskprefix.units import counted, format_size


@click.command(short_help="Check the store for damage, and remove what is damaged.")
@click.option("--fix", is_flag=True, help="Remove damaged blocks and the blocks that continue them.")
@store_options
def verify(fix: bool, kv_cache_dir: Path, as_json: bool) -> int:
    """Check the store for damage.

    A separate process reads the whole structure of the file. Then the command checks each record (checksum, name,
    place in the tree, counts, sizes) and its relations to other records, and reads, verifies and decodes every payload.
    It is safe beside a running daemon, even with --fix. A daemon checks everything that it restores; this command finds
    damage before a request does.

    With --fix, a damaged block is removed together with the blocks that continue it; any other damaged record is
    removed alone. All other blocks can still be restored. Prompts that lost blocks are recomputed. Without --fix,
    nothing is changed.

    \b
    diskprefix verify
    diskprefix verify --json | jq .clean
    diskprefix verify --fix

    \b
    Exit codes: 0 clean; 1 damage was found, and with --fix removed; 2 wrong usage; 4 the store cannot be opened.
    """
    with opened_store(kv_cache_dir, write=fix) as store:
        index = verify_index(store)
        with progress("verifying", sum(index.stored_bytes.values())) as advance:
            payloads = verify_payloads(store, index.stored_bytes, advance)
        problems = (*index.problems, *payloads.problems)
        removed = remove_damaged(store, problems) if fix else None
    if as_json:
        print_json(_report(index, payloads, problems, removed))
    else:
        _show(kv_cache_dir, index, payloads, problems, removed)
    return 1 if problems else 0


def _report(
    index: IndexReport, payloads: PayloadReport, problems: tuple[StoreProblem, ...], removed: RemovedRecords | None
) -> dict[str, Any]:
    """Returns the output of --json. `removed` is the result of --fix, None without it."""
    report = {
        "clean": not problems,
        "blocks": index.num_nodes,
        "entries": index.num_entries,
        "prompts": index.num_prompts,
        "roots": index.num_roots,
        "pieces": payloads.num_pieces,
        "payload_bytes": payloads.num_bytes,
        "problems": [asdict(problem) for problem in problems],
    }
    if removed is not None:
        entries = [name.hex() for name in removed.entries]
        report["removed"] = {"entries": entries, "blocks": removed.blocks, "prompts": removed.prompts}
    return report


def _show(
    folder: Path,
    index: IndexReport,
    payloads: PayloadReport,
    problems: tuple[StoreProblem, ...],
    removed: RemovedRecords | None,
) -> None:
    counts = f"{counted(index.num_nodes, 'block')}, {counted(index.num_entries, 'saved prompt')}"
    checked = f"{counts}, {format_size(payloads.num_bytes)} of payloads in {folder}"
    if not problems:
        click.echo(f"clean: {checked}")
        return
    show_first([f"{problem.database} {problem.key}: {problem.message}" for problem in problems])
    click.echo(f"{counted(len(problems), 'problem')}: {checked}")
    if removed:
        prompts = f"{counted(len(removed.entries), 'saved prompt')}, {counted(removed.prompts, 'recent prompt')}"
        click.echo(f"removed {counted(removed.blocks, 'block')}, {prompts}")
        show_first([short_id(name.hex()) for name in removed.entries])
