"""`diskprefix export` and `diskprefix import`: saved prompts as `.safetensors` files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.options import PathType
from diskprefix.cli.tooling import find_entry, opened_store, print_json, progress, short_id, store_options, tenant_names
from diskprefix.errors import SettingsError
from diskprefix.extras.exchange.entry_file import EntryReader
from diskprefix.extras.exchange.exchange import export_entry, import_entry, require_known_model, require_room
from diskprefix.printable import printable_only
from diskprefix.settings import Settings
from diskprefix.store.tree import list_entries
from diskprefix.units import counted, format_size


@click.command(short_help="Write a saved prompt to a .safetensors file.")
@click.argument("entry")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PathType(),
    show_default="named by the beginning of the id, in the current folder",
    help="The file to write, or the folder to write it into.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@store_options
def export(entry: str, output: Path | None, force: bool, kv_cache_dir: Path, as_json: bool) -> None:
    """Write the saved prompt ENTRY with all its blocks to one .safetensors file.

    ENTRY is an id from inspect, or the beginning of one. `diskprefix import` adds the file to another store, on this
    machine or on one with the same model and libraries.

    A prompt of your own programs belongs to the programs of the user who imports it. Any other keeps its tenant: in the
    other store, only requests with the same key and salt can use it.

    The command is safe beside a running daemon. Every block is verified; if one is damaged, no file is written. The
    file contains the prompt, so only its owner may read it.

    \b
    diskprefix inspect                            lists the ids
    diskprefix export 3fa9 -o manual.safetensors
    diskprefix export 3fa9 --json | jq -r .file

    \b
    Exit codes: 0 done; 2 wrong usage, no such ENTRY, one that cannot be exported, or the file
    exists; 4 the store cannot be opened or is damaged, or the file cannot be written.
    """
    path = Path() if output is None else output.absolute()
    with opened_store(kv_cache_dir) as store:
        with store.snapshot() as snapshot:
            info = find_entry(list_entries(snapshot), entry)
        if path.is_dir():
            path = path / f"{short_id(info.id)}.safetensors"
        if not path.parent.is_dir():
            raise SettingsError(f"--output: there is no folder {path.parent}; create it first")
        with progress("exporting", info.raw_bytes) as advance:
            file_bytes = export_entry(store, bytes.fromhex(info.id), path, force=force, advance=advance)
    if as_json:
        known = {name: getattr(info, name) for name in ("id", "model", "tenant", "num_tokens")}
        print_json({"file": str(path), "file_bytes": file_bytes} | known)
    else:
        content = f"{info.num_tokens:,} tokens of {_named(info.model, info.tenant, tenant_names())}"
        click.echo(f"{path}: {content}, {format_size(file_bytes)}, entry {short_id(info.id)}")


@click.command("import", short_help="Add exported prompts to the store.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PathType())
@click.option("--dry-run", is_flag=True, help="Verify the files, show what they hold, and change nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Import the state of any model. Only a daemon with the same model, libraries and settings can use this state.",
)
@click.option("--mine", is_flag=True, help="Give the prompts to your programs, whoever they belong to.")
@store_options
def import_(files: tuple[Path, ...], dry_run: bool, force: bool, mine: bool, kv_cache_dir: Path, as_json: bool) -> None:
    """Add exported prompts to the store.

    The command is safe beside a running daemon, whose next request can restore the prompts. All files are verified
    before anything is written. Blocks that the store already has are not stored again. If the store is full, other
    blocks are evicted. A file larger than the budget is refused.

    A prompt of the exporting user's programs is given to your programs, which a daemon without API keys tells by their
    user or by your key. Any other keeps its tenant: only requests with the same key and salt can use it. With --mine,
    it is given to your programs, too.

    State can be restored only with the same weights, libraries, device and settings. A file is therefore refused if its
    model was not served with this store; the error says what differs.

    Import only files that you trust: the model answers from this state, and a checksum does not protect against
    deliberate changes.

    \b
    diskprefix import manual.safetensors
    diskprefix import *.safetensors --dry-run
    diskprefix import manual.safetensors --kv-cache-dir /srv/kv --force

    \b
    Exit codes: 0 done; 2 wrong usage, no such file, a file that export did not write, or of a
    model that is not known here; 4 the store cannot be opened or is full, or a file is damaged.
    """
    done: list[dict[str, Any]] = []
    with ExitStack() as stack:
        readers = [stack.enter_context(EntryReader.open(path)) for path in files]
        for reader in readers:
            reader.give(mine=mine)
        min_free_bytes = Settings.kv_cache_min_free
        store = stack.enter_context(opened_store(kv_cache_dir, write=not dry_run, min_free_bytes=min_free_bytes))
        num_bytes = sum(sum(reader.manifest.payload_bytes()) for reader in readers)
        with store.snapshot() as snapshot:
            for reader in () if force else readers:
                require_known_model(snapshot, reader)
        with progress("verifying", num_bytes) as advance:
            for reader in readers:
                require_room(store, reader)
                reader.verify_payloads(advance)
        if not dry_run:
            with progress("importing", num_bytes) as advance:
                done = [import_entry(store, reader, advance=advance)._asdict() for reader in readers]
    results = [_summary(reader) | result for reader, result in zip(readers, done or [{}] * len(readers), strict=True)]
    if as_json:
        print_json({"dry_run": dry_run, "entries": results})
        return
    tenant_text = tenant_names()
    for reader, result in zip(readers, results, strict=True):
        click.echo(f"{result['file']}: {_sentence(result, tenant_text)}")
        if not reader.manifest.is_own:
            only = "requests with its key and salt" if result["tenant"] else "requests that have no key or user"
            click.echo(f"  only {only} restore it; `import --mine` gives it to your programs")


def _summary(reader: EntryReader) -> dict[str, Any]:
    manifest = reader.manifest
    model = {"file": str(reader.path), "model": manifest.root.model, "tenant": manifest.root.tenant}
    return model | {"num_tokens": manifest.entry.num_tokens, "num_nodes": len(manifest.nodes)}


def _sentence(result: dict[str, Any], tenant_text: Callable[[str], str]) -> str:
    content = f"{result['num_tokens']:,} tokens of {_named(result['model'], result['tenant'], tenant_text)}"
    blocks = counted(result["num_nodes"], "block")
    if "id" not in result:
        return f"would import {content} in {blocks}"
    new = f"{result['new_nodes']:,} new ({format_size(result['new_bytes'])})" if result["new_nodes"] else "none new"
    evicted = f", evicted {counted(result['evicted'], 'block')} for them" if result["evicted"] else ""
    return f"imported {content} in {blocks}, {new}{evicted}, entry {short_id(result['id'])}"


def _named(model: str, tenant: str, tenant_text: Callable[[str], str]) -> str:
    return printable_only(model) + (f" of tenant {tenant_text(tenant)}" if tenant else "")
