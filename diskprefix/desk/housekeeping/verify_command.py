"""`diskprefix verify`: check the store, and remove damaged records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from diskprefix.desk.shared.tooling import (
    opened_store,
    packed_weights_option,
    print_json,
    progress,
    short_id,
    show_first,
    store_options,
)
from diskprefix.native.library import operators
from diskprefix.prefixstore.store.verify import (
    IndexReport,
    PayloadReport,
    RemovedRecords,
    StoreProblem,
    remove_damaged,
    verify_index,
    verify_payloads,
)
from diskprefix.printable import printable_only
from diskprefix.runtime.load.packed_weights import PackedFiles, PackedProblem
from diskprefix.units import counted, format_size


@click.command(short_help="Check the store for damage, and remove what is damaged.")
@click.option("--fix", is_flag=True, help="Remove damaged blocks and the blocks that continue them.")
@packed_weights_option
@store_options
def verify(fix: bool, packed_weights: str, kv_cache_dir: Path, as_json: bool) -> int:
    """Check the store and the packed weights for damage.

    A separate process reads the whole structure of the file. Then the command checks each record (checksum, name,
    place in the tree, counts, sizes) and its relations to other records, and reads, verifies and decodes every payload.
    It is safe beside a running daemon, even with --fix. A daemon checks everything that it restores; this command finds
    damage before a request does.

    Each matrix of the packed weights, which later starts map, is compared with its digest. A daemon does so at its
    start, and packs anew what is damaged.

    With --fix, a damaged block is removed together with the blocks that continue it; any other damaged record is
    removed alone. All other blocks can still be restored. Prompts that lost blocks are recomputed. Of the packed
    weights, files that are damaged, or that this version cannot use, are removed. Without --fix, nothing is changed.

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
    packed = PackedFiles.here(packed_weights)
    compared = None if packed is None else _compared(packed, fix=fix)
    is_damaged = bool(problems) or (compared is not None and any(problem.is_damage for problem in compared.problems))
    if as_json:
        of_packed = None if compared is None else msgspec.to_builtins(compared)
        print_json(_report(index, payloads, problems, removed) | {"clean": not is_damaged, "packed_weights": of_packed})
    else:
        _show(kv_cache_dir, index, payloads, problems, removed)
        if compared is not None and compared.files:
            _show_compared(compared)
    return 1 if is_damaged else 0


class _Compared(Struct, frozen=True):
    """The packed weights of a folder, the problems of its files, and how many --fix has removed."""

    folder: str
    files: int
    bytes: int
    problems: list[PackedProblem]
    removed: int


def _compared(packed: PackedFiles, *, fix: bool) -> _Compared:
    problems, removed = list[PackedProblem](), 0
    with progress("comparing packed weights", packed.amounts["bytes"]) as advance:
        amounts = packed.amounts
        for path, _ in packed.all():
            if (problem := packed.compare(path, operators(), advance)) is not None:
                problems.append(problem)
                # Files of others stay, which they can use.
                if fix and path.lstat().st_uid == os.geteuid():
                    path.unlink(missing_ok=True)
                    removed += 1
    return _Compared(**amounts, problems=problems, removed=removed)


def _show_compared(compared: _Compared) -> None:
    files = f"{counted(compared.files, 'file')}, {format_size(compared.bytes)} in {compared.folder}"
    if not compared.problems:
        click.echo(printable_only(f"packed weights: clean: {files}"))
        return
    show_first([f"packed weights {problem.file}: {problem.message}" for problem in compared.problems])
    click.echo(printable_only(f"packed weights: {counted(len(compared.problems), 'problem')}: {files}"))
    if compared.removed:
        click.echo(f"removed {counted(compared.removed, 'file')} of packed weights; the next start makes them anew")


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
