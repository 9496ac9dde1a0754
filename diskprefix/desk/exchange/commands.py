"""`diskprefix export` and `diskprefix import`: saved prompts as `.safetensors` files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from diskprefix.daemon.cli.options import PathType
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.tooling import (
    find_entry,
    opened_store,
    print_json,
    progress,
    short_id,
    store_options,
    tenant_names,
)
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.packs.exchange import (
    encoded_notes,
    export_pack,
    import_pack,
    put_notes,
    require_known_model,
    require_room,
)
from diskprefix.prefixstore.packs.pack_file import PackReader, WrittenPack
from diskprefix.prefixstore.packs.signatures import allowed_signers, sign_digest, signer_of
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import EntryInfo, list_entries
from diskprefix.printable import printable_only, shown
from diskprefix.units import counted, format_size


@click.command(short_help="Write saved prompts to a .safetensors file.")
@click.argument("entries", metavar="ENTRY...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PathType(),
    show_default="named by the beginning of the id, in the current folder",
    help="The file to write, or the folder to write it into.",
)
@click.option("--pack", metavar="FILE", type=PathType(), help="As --output, for others: the keys are left out.")
@click.option("--sign", metavar="KEY", type=PathType(), help="Sign the file with this key of OpenSSH.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@store_options
def export(
    entries: tuple[str, ...],
    output: Path | None,
    pack: Path | None,
    sign: Path | None,
    force: bool,
    kv_cache_dir: Path,
    as_json: bool,
) -> None:
    """Write saved prompts with all their blocks to one .safetensors file.

    Each ENTRY is an id from inspect, or the beginning of one; all are of one model. `diskprefix import` adds the file
    to another store, on this machine or on one with the same model and libraries.

    Prompts of your own programs belong to the programs of the user who imports them. Any others keep their tenant: in
    the other store, only requests with the same key and salt can use them. With --pack, no key is written: the
    prompts belong to the programs of whoever imports the file.

    The SHA-256 of the content is shown. --sign signs it with `ssh-keygen`: `import` uses signed files at once where the
    signer is trusted.

    The command is safe beside a running daemon. Every block is verified; if one is damaged, no file is written. The
    file contains the prompts, so only its owner may read it.

    \b
    diskprefix inspect                            lists the ids
    diskprefix export 3fa9 -o manual.safetensors
    diskprefix export 3fa9 77b0 --pack agents.safetensors --sign ~/.ssh/id_ed25519
    diskprefix export 3fa9 --json | jq -r .file

    \b
    Exit codes: 0 done; 2 wrong usage, no such ENTRY, one that cannot be exported, or the file
    exists; 4 the store cannot be opened or is damaged, or the file cannot be written.
    """
    if output is not None and pack is not None:
        raise click.UsageError("give --output or --pack")
    with opened_store(kv_cache_dir) as store:
        with store.snapshot() as snapshot:
            known = list_entries(snapshot)
            infos = [find_entry(known, entry) for entry in entries]
        first = infos[0]
        option = "--output" if pack is None else "--pack"
        path = _destination(output if pack is None else pack, f"{short_id(first.id)}.safetensors", option)
        with progress("exporting", sum(info.raw_bytes for info in infos)) as advance:
            written = export_pack(
                store,
                [bytes.fromhex(info.id) for info in infos],
                path,
                force=force,
                advance=advance,
                without_keys=pack is not None,
                sign=None if sign is None else partial(sign_digest, sign),
            )
    tenant = "" if pack is not None else first.tenant
    _print_export(path, infos, written, tenant, is_signed=sign is not None, as_json=as_json)


def _print_export(
    path: Path, infos: Sequence[EntryInfo], written: WrittenPack, tenant: str, *, is_signed: bool, as_json: bool
) -> None:
    model, num_tokens = infos[0].model, sum(info.num_tokens for info in infos)
    if as_json:
        about = {"file": str(path), "file_bytes": written.num_bytes, "sha256": written.digest, "signed": is_signed}
        about |= {"model": model, "tenant": tenant, "num_tokens": num_tokens}
        print_json(about | {"entries": [info.id for info in infos]})
        return
    content = f"{_prompts(len(infos), num_tokens)} of {_named(model, tenant, tenant_names())}"
    click.echo(f"{path}: {content}, {format_size(written.num_bytes)}")
    click.echo(f"  sha256 {written.digest}{', signed' if is_signed else ''}")


def _destination(path: Path | None, name: str, option: str) -> Path:
    """Returns the file to write, of this `name` if `path` is a folder. Raises `SettingsError`."""
    path = Path() if path is None else path.absolute()
    path = path / name if path.is_dir() else path
    if not path.parent.is_dir():
        raise SettingsError(f"{option}: there is no folder {path.parent}; create it first")
    return path


@click.command("import", short_help="Add exported prompts to the store.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PathType())
@click.option("--trust", is_flag=True, help="Use files at once that no signer you trust has signed.")
@click.option("--dry-run", is_flag=True, help="Verify the files, show what they hold, and change nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Import the state of any model. Only a daemon with the same model, libraries and settings can use this state.",
)
@click.option("--mine", is_flag=True, help="Give the prompts to your programs, whoever they belong to.")
@store_options
def import_(
    files: tuple[Path, ...],
    trust: bool,
    dry_run: bool,
    force: bool,
    mine: bool,
    kv_cache_dir: Path,
    as_json: bool,
) -> None:
    """Add exported prompts to the store. Each FILE is a file of `diskprefix export`, or a folder of them.

    Whoever made this state can steer answers. A file is used at once if a signer whom you trust has signed it:
    $XDG_CONFIG_HOME/diskprefix/allowed_signers names them, one on a line (see ALLOWED SIGNERS in ssh-keygen(1)). Of any
    other file only the tokens are taken: the daemon computes the prompts while nobody waits, and its log says if the
    file has other state. --trust uses files at once all the same, and responses then say `unverified`.

    The command is safe beside a running daemon. All files are verified before anything is written. Blocks that the
    store already has are not stored again. If the store is full, other blocks are evicted. A file larger than the
    budget is refused.

    A prompt of the exporting user's programs is given to your programs, which a daemon without API keys tells by their
    user or by your key. Any other keeps its tenant: only requests with the same key and salt can use it. With --mine,
    it is given to your programs, too.

    State can be restored only with the same weights, libraries, device and settings. A file is therefore refused if its
    model was not served with this store; the error says what differs. A new store takes files of any model; it is made
    if there is none.

    \b
    diskprefix import manual.safetensors
    diskprefix import Qwen3-4B-Q8_0.prefixes --dry-run
    diskprefix import manual.safetensors --trust
    diskprefix import manual.safetensors --kv-cache-dir /srv/kv --force

    \b
    Exit codes: 0 done; 2 wrong usage, no such file, a file that export did not write, or of a
    model that is not known here; 4 the store cannot be opened or is full, or a file is damaged.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(PackReader.open(path)) for path in _packs(files)]
        signers = [signer_of(reader.signature, reader.digest, allowed_signers()) for reader in readers]
        for reader in readers:
            reader.give(mine=mine)
        store = stack.enter_context(_opened_target(kv_cache_dir, dry_run=dry_run))
        with store.snapshot() as snapshot:
            is_new = not (any(snapshot.models()) or any(snapshot.roots()))
            for reader in () if force or is_new else readers:
                require_known_model(snapshot, reader)
        for reader in readers:
            reader.read_nodes()
        results = [_summary(reader, signer, trust=trust) for reader, signer in zip(readers, signers, strict=True)]
        notes = _verified(store, readers, results)
        if not dry_run:
            results = _add(store, readers, results, notes)
    if as_json:
        print_json({"dry_run": dry_run, "files": results})
        return
    _print_import(readers, results, dry_run=dry_run, is_new=is_new)


def _opened_target(folder: Path, *, dry_run: bool) -> AbstractContextManager[Store]:
    """Opens the store of an import, which makes it if there is none, except in a dry run."""
    new_budget_bytes = 0 if dry_run else Settings.kv_cache_new_budget
    return opened_store(
        folder, write=not dry_run, min_free_bytes=Settings.kv_cache_min_free, new_budget_bytes=new_budget_bytes
    )


def _print_import(
    readers: Sequence[PackReader], results: Sequence[dict[str, Any]], *, dry_run: bool, is_new: bool
) -> None:
    tenant_text = tenant_names()
    for reader, result in zip(readers, results, strict=True):
        click.echo(f"{result['file']}: {_sentence(result, tenant_text, dry_run=dry_run)}")
        if not reader.manifest.is_own:
            only = "requests with its key and salt" if result["tenant"] else "requests that have no key or user"
            click.echo(f"  only {only} restore it; `import --mine` gives it to your programs")
    if is_new:
        click.echo(
            "  this store has seen no model yet: serve the same one, with the same libraries and settings, to use it"
        )


EncodedNotes: TypeAlias = dict[bytes, bytes]
"""The notes of a file that is computed before it is used, by their keys."""


def _verified(
    store: Store, readers: Sequence[PackReader], results: Sequence[dict[str, Any]]
) -> list[EncodedNotes | None]:
    """Returns the notes of each file, None for one that is used at once. Raises the errors of an import before anything
    is written."""
    notes = list[EncodedNotes | None]()
    with progress("verifying", sum(sum(reader.manifest.payload_bytes()) for reader in readers)) as advance:
        for reader, result in zip(readers, results, strict=True):
            require_room(store, reader)
            reader.verify_payloads(advance)
            notes.append(encoded_notes(store, reader) if result["use"] == "once computed" else None)
    return notes


def _add(
    store: Store,
    readers: Sequence[PackReader],
    results: Sequence[dict[str, Any]],
    notes: Sequence[EncodedNotes | None],
) -> list[dict[str, Any]]:
    """Adds files, and returns the results with what was added."""
    with progress("importing", sum(sum(reader.manifest.payload_bytes()) for reader in readers)) as advance:
        added = list[dict[str, Any]]()
        for reader, result, of_file in zip(readers, results, notes, strict=True):
            if of_file is not None:
                put_notes(store, reader, of_file)
                added.append(result)
            else:
                done = import_pack(store, reader, advance=advance, is_unverified=result["use"] == "unverified")
                added.append(result | done._asdict())
    return added


def _packs(names: Sequence[Path]) -> list[Path]:
    """Returns the files, and those in the folders. Raises `SettingsError` for a folder without any."""
    files = list[Path]()
    for name in names:
        inside = sorted(name.glob("*.safetensors")) if name.is_dir() else [name]
        if not inside:
            raise SettingsError(f"{name}: there is no .safetensors file in this folder")
        files += inside
    return files


def _summary(reader: PackReader, signer: str | None, *, trust: bool) -> dict[str, Any]:
    manifest = reader.manifest
    about = {"file": str(reader.path), "sha256": reader.digest, "signer": signer, "is_signed": bool(reader.signature)}
    about["use"] = "at once" if signer is not None else "unverified" if trust else "once computed"
    about |= {"model": manifest.root.model, "tenant": manifest.root.tenant}
    num_tokens = sum(prompt.entry.num_tokens for prompt in manifest.prompts)
    return about | {"prompts": len(manifest.prompts), "num_tokens": num_tokens, "num_nodes": len(manifest.nodes)}


_USES = {
    "at once": "signed by {signer}",
    "unverified": "unverified: responses that use it say so",
    "once computed": "no signer whom you trust has signed it, so this machine computes it while nobody waits, then "
    "uses it; --trust uses it at once",
}


def _sentence(result: dict[str, Any], tenant_text: Callable[[str], str], *, dry_run: bool) -> str:
    content = _prompts(result["prompts"], result["num_tokens"])
    content += f" of {_named(result['model'], result['tenant'], tenant_text)}"
    content += f" in {counted(result['num_nodes'], 'block')}"
    use = _USES[result["use"]].format(signer=shown(str(result["signer"])))
    if dry_run:
        return f"would import {content}; {use}"
    if "new_nodes" not in result:
        return f"noted {content}; {use}"
    new = f"{result['new_nodes']:,} new ({format_size(result['new_bytes'])})" if result["new_nodes"] else "none new"
    evicted = f", evicted {counted(result['evicted'], 'block')} for them" if result["evicted"] else ""
    return f"imported {content}, {new}{evicted}; {use}"


def _prompts(number: int, num_tokens: int) -> str:
    tokens = counted(num_tokens, "token")
    return tokens if number == 1 else f"{counted(number, 'prompt')} with {tokens}"


def _named(model: str, tenant: str, tenant_text: Callable[[str], str]) -> str:
    return printable_only(model) + (f" of tenant {tenant_text(tenant)}" if tenant else "")
