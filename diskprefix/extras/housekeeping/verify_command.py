"""`diskprefix verify`: check the store, and repair it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.tooling import opened_store, print_json, progress, short_id, show_first, store_options
from diskprefix.store.maintenance.repair import RepairReport, repair_problems
from diskprefix.store.maintenance.verify import IndexReport, PayloadReport, StoreProblem, verify_index, verify_payloads
from diskprefix.units import counted, format_size


@click.command(short_help="Check the store for damage, and repair it.")
@click.option("--fix", is_flag=True, help="Remove damaged blocks and the blocks that continue them. Correct counts.")
@store_options
def verify(fix: bool, kv_cache_dir: Path, as_json: bool) -> int:
    """Check the store for damage.

    The command checks the structure of the file, then each record (checksum, name, place in the tree, counts, sizes)
    and its relations to other records. Then it reads, verifies and decodes every payload. It is safe beside a running
    daemon, with --fix too. A daemon checks everything that it restores. This command finds damage before a request
    does.

    With --fix, a damaged block is removed together with the blocks that continue it. All other blocks can be restored.
    Prompts that lost blocks are computed again. Without --fix, nothing is changed.

    \b
    damaged      the record cannot be read, or its checksum does not match
    misnamed     its name is not the hash of its content
    detached     the block before it is missing, ends elsewhere, or cannot be continued
    rootless     the record of its model and layout is missing
    misshapen    its sizes are not those of its layout
    incomplete   a piece of its payload is missing, or there is an extra piece
    miscounted   its usage record has wrong counts
    orphaned     the record that it belongs to is missing

    \b
    diskprefix verify
    diskprefix verify --json | jq .clean
    diskprefix verify --fix

    \b
    Exit codes: 0 clean; 1 problems were found, and with --fix all were repaired; 2 wrong usage;
    4 the store cannot be opened, or --fix could not repair a problem.
    """
    with opened_store(kv_cache_dir, write=fix) as store:
        index = verify_index(store)
        with progress("verifying", sum(index.stored_bytes.values())) as advance:
            payloads = verify_payloads(store, index.stored_bytes, advance)
        problems = (*index.problems, *payloads.problems)
        mended = repair_problems(store, problems) if fix else None
    if as_json:
        print_json(_report(index, payloads, problems, mended))
    else:
        _show(kv_cache_dir, index, payloads, problems)
        if mended and problems:
            _show_mended(mended, len(problems))
    # As fsck: 1 for problems that were repaired, 4 for those that are left.
    return 0 if not problems else 4 if mended and mended.left else 1


def _report(
    index: IndexReport, payloads: PayloadReport, problems: tuple[StoreProblem, ...], mended: RepairReport | None
) -> dict[str, Any]:
    """Returns what --json prints. `mended` is what --fix did, or None without --fix."""
    report = {
        "clean": not problems,
        "blocks": index.num_nodes,
        "entries": index.num_entries,
        "prompts": index.num_prompts,
        "roots": index.num_roots,
        "pieces": payloads.num_pieces,
        "payload_bytes": payloads.num_bytes,
        "counts": Counter(problem.kind for problem in problems),
        "problems": [asdict(problem) for problem in problems],
    }
    if mended is not None:
        entries = [name.hex() for name in mended.entries]
        report["removed"] = {"entries": entries, "blocks": mended.blocks, "prompts": mended.prompts}
        report["left"] = [asdict(problem) for problem in mended.left]
    return report


def _show(folder: Path, index: IndexReport, payloads: PayloadReport, problems: tuple[StoreProblem, ...]) -> None:
    held = f"{counted(index.num_nodes, 'block')}, {counted(index.num_entries, 'saved prompt')}"
    checked = f"{held}, {format_size(payloads.num_bytes)} of payloads in {folder}"
    if not problems:
        click.echo(f"clean: {checked}")
        return
    show_first([f"{problem.kind} {problem.database} {problem.key}: {problem.message}" for problem in problems])
    counts = Counter(f"{problem.kind} {problem.database}" for problem in problems)
    kinds = ", ".join(f"{number:,} {what}" for what, number in counts.most_common())
    click.echo(f"{counted(len(problems), 'problem')} ({kinds}): {checked}")


def _show_mended(mended: RepairReport, num_problems: int) -> None:
    click.echo(
        f"repaired {num_problems - len(mended.left)} of {counted(num_problems, 'problem')}; removed "
        f"{counted(len(mended.entries), 'saved prompt')}, {counted(mended.blocks, 'block')}, "
        f"{counted(mended.prompts, 'recent prompt')}"
    )
    show_first([short_id(name.hex()) for name in mended.entries])
