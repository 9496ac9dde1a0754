"""`diskprefix backup`, `restore` and `compact`: copy the store's file, put the copy back, and shrink the file."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from msgspec.structs import asdict

from diskprefix.daemon.cli.options import PathType
from diskprefix.desk.shared.tooling import (
    advised,
    confirmed,
    opened_store,
    print_json,
    progress,
    require_store,
    store_options,
)
from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.compact import (
    Compacted,
    compact_folder,
    compacted_bytes,
    copy_store,
    replace_store,
    require_unused,
)
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.prefixstore.store.verify import verify_index, verify_payloads
from diskprefix.units import counted, format_size


@click.command(short_help="Copy the store, even while a daemon runs.")
@click.argument("target", metavar="FOLDER", type=PathType(file_okay=False))
@store_options
def backup(target: Path, kv_cache_dir: Path, as_json: bool) -> None:
    """Write a consistent copy of the store to FOLDER. FOLDER is created, and must not hold a store yet.

    A daemon may keep running and saving: the copy has what was stored when it began. It contains the stored records and
    no purged data, and is checked before it is complete. `diskprefix restore` puts it back.

    \b
    diskprefix backup /mnt/backup/kv-monday
    diskprefix backup --json /mnt/backup/kv-monday
    diskprefix inspect --kv-cache-dir /mnt/backup/kv-monday

    \b
    Exit codes: 0 done; 2 wrong usage; 4 the store is damaged, FOLDER already holds one, or its disk is too full.
    """
    target = target.absolute()
    require_store(kv_cache_dir)
    with advised(), progress("copying", compacted_bytes(kv_cache_dir)) as advance:
        result = copy_store(kv_cache_dir, target, advance)
    _show("wrote", target / DATA, result, as_json)


@click.command(short_help="Replace the store with a backup.")
@click.argument("source", metavar="FOLDER", type=PathType(file_okay=False))
@click.option("--yes", is_flag=True, help="Do not ask before a store is replaced.")
@store_options
def restore(source: Path, yes: bool, kv_cache_dir: Path, as_json: bool) -> int:
    """Replace the store in the cache folder with the one that `diskprefix backup` wrote to FOLDER.

    The daemon must not be running. The current store is lost; the backup stays. First the backup is checked as `verify`
    does: a damaged one is refused. The command may be interrupted at any moment: the old file stays until the new one
    is complete, checked and on disk.

    \b
    diskprefix restore /mnt/backup/kv-monday
    diskprefix restore --yes /mnt/backup/kv-monday

    \b
    Exit codes: 0 done; 1 declined; 2 wrong usage; 4 the backup is damaged, the store is in use, or the disk is too
    full.
    """
    _require_clean(source)
    if (kv_cache_dir / DATA).exists() and not yes:
        require_unused(kv_cache_dir)
        if not confirmed(f"Replace the store in {kv_cache_dir}?"):
            return 1
    with advised(), progress("restoring", compacted_bytes(source)) as advance:
        result = replace_store(source, kv_cache_dir, advance)
    _show("restored", kv_cache_dir / DATA, result, as_json)
    return 0


def _require_clean(source: Path) -> None:
    """Raises `StoreCorrupt` if a record or payload of the backup in folder `source` is damaged, and other `CacheError`
    if it cannot be opened."""
    with opened_store(source) as store:
        index = verify_index(store)
        with progress("verifying", sum(index.stored_bytes.values())) as advance:
            payloads = verify_payloads(store, index.stored_bytes, advance)
    problems = (*index.problems, *payloads.problems)
    if problems:
        first, number = problems[0], counted(len(problems), "problem")
        what = f"{source} is damaged: {number}, the first in {first.database} {first.key}: {first.message}"
        repair = f"`diskprefix verify --fix --kv-cache-dir {shlex.quote(str(source))}`"
        raise StoreCorrupt(f"{what}; restore another backup, or remove what is damaged from this one with {repair}")


@click.command(short_help="Return unused space in the store's file to the disk.")
@store_options
def compact(kv_cache_dir: Path, as_json: bool) -> None:
    """Rewrite the store's file without the space that removed blocks left in it.

    The file never shrinks by itself: new blocks reuse the space of evicted or purged blocks, and until then that space
    still holds the old bytes. Compacting returns the space to the disk and erases purged data.

    The daemon must not be running, because its file is replaced. The disk needs as much free space as the new file
    takes. The command may be interrupted at any moment: the old file stays until the new one is complete, checked and
    on disk.

    \b
    diskprefix compact
    diskprefix compact --json
    diskprefix purge --older-than 30d --yes && diskprefix compact

    \b
    Exit codes: 0 done; 2 wrong usage; 4 the store is in use or damaged, or the disk is too full.
    """
    require_store(kv_cache_dir)
    with advised(), progress("compacting", compacted_bytes(kv_cache_dir)) as advance:
        result = compact_folder(kv_cache_dir, advance)
    _show("compacted", kv_cache_dir / DATA, result, as_json)


def _show(done: str, file: Path, result: Compacted, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(file)} | asdict(result))
    else:
        click.echo(f"{done} {file}: {format_size(result.before_bytes)} → {format_size(result.after_bytes)}")
