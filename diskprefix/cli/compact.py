"""`diskprefix compact`: give the disk back what the store no longer uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from diskprefix.cli.tooling import advised, json_option, print_json, progress, require_store, store_folder_option
from diskprefix.settings import format_size
from diskprefix.store.compact import Compacted, compact_folder, compacted_bytes, copy_store
from diskprefix.store.folder import DATA, FolderLock, refuse_shared_folder


@click.command(short_help="Give unused room in the store's file back to the disk.")
@click.option(
    "--to",
    "target",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Leave the store as it is and write the compacted copy there; works beside a running daemon.",
)
@store_folder_option
@json_option
def compact(target: Path | None, kv_cache_dir: Path, as_json: bool) -> None:
    """Write the store's file anew without the room that deleted blocks left in it.

    The file of a store never shrinks by itself: what is evicted or purged leaves room for what comes. Compact it to get
    that room back, or to have what was purged gone from the file: until it is used again, that room still holds it.

    The daemon must not run: its file is replaced. It needs as much free disk as the new file takes, and may be
    interrupted at any moment: the old file stays in place until the new one is complete, checked and on disk.

    \b
    diskprefix compact
    diskprefix compact --to /mnt/backup/kv     a copy, while the daemon runs
    diskprefix purge --salt alice --yes && diskprefix compact

    \b
    Exit codes: 0 done, 2 wrong usage, 4 the store is in use or damaged, or the disk is too full.
    """
    require_store(kv_cache_dir)
    with advised(), progress("compacting", compacted_bytes(kv_cache_dir)) as advance:
        result = copy_store(kv_cache_dir, target, advance) if target else _compact(kv_cache_dir, advance)
    if as_json:
        print_json({"file": str((target or kv_cache_dir) / DATA)} | asdict(result))
    else:
        done = f"wrote {target / DATA}" if target else f"compacted {kv_cache_dir / DATA}"
        click.echo(f"{done}: {format_size(result.before_bytes)} → {format_size(result.after_bytes)}")


def _compact(folder: Path, advance: Callable[[int], None]) -> Compacted:
    refuse_shared_folder(folder)
    lock = FolderLock(folder, patience_s=0)
    try:
        return compact_folder(folder, lock, advance)
    finally:
        lock.close()
