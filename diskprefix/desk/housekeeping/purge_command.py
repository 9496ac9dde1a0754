"""`diskprefix purge`: remove saved prompts on purpose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from diskprefix.daemon.cli.options import nonempty, setting_option
from diskprefix.desk.shared.tooling import (
    confirmed,
    find_entry,
    opened_store,
    print_json,
    progress,
    short_id,
    shortened,
    show_first,
    store_options,
    tenant_names,
)
from diskprefix.errors import CacheError, SettingsError
from diskprefix.prefixstore.store.compact import compact_folder, compacted_bytes, rewrite_folder
from diskprefix.prefixstore.store.opening import DAMAGED
from diskprefix.prefixstore.store.purge import Purged, PurgeFilter, PurgePlan, plan_purge
from diskprefix.prefixstore.store.purge import purge as purge_store
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import EntryInfo, list_entries
from diskprefix.tenant_ids import matches
from diskprefix.units import counted, format_size, parse_duration

if TYPE_CHECKING:
    from diskprefix.prefixstore.cache.tiers.tier import Bucket

_OWN_TOOLS = "remove them with the bucket's own tools"


@click.command(short_help="Remove saved prompts: by id, model, tenant or age.")
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option("--model", metavar="NAME", callback=nonempty, help="Only prompts of this model. inspect shows the names.")
@click.option(
    "--salt",
    metavar="VALUE",
    callback=nonempty,
    help="Only prompts of this tenant: an API key, a salt (with any key), or a tenant's id from inspect. KEYID/SALTID "
    "is one user of one key.",
)
@click.option(
    "--older-than", metavar="DURATION", help="Only prompts that were not used for this long: 90s, 15m, 12h, 7d, 2w."
)
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--erase", is_flag=True, help="Rewrite the file without the removed data. The disk needs room for both.")
@setting_option("remote_tier")
@setting_option("namespace_key_file")
@store_options
def purge(
    entries: tuple[str, ...],
    model: str | None,
    salt: str | None,
    older_than: str | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    erase: bool,
    remote_tier: str | None,
    namespace_key_file: Path | None,
    kv_cache_dir: Path,
    as_json: bool,
) -> int:
    """Remove the saved prompts that meet all given conditions. This is safe beside a running daemon.

    ENTRY is an id from inspect, or the beginning of one. A prompt is removed with its replies, stored responses, and
    all blocks that no other prompt needs. --model and --salt remove everything of the model or tenant.

    Purged prompts are no longer found, and a running daemon forgets them within seconds. If no other process has the
    store open and less data is left than was removed, the file is rewritten and shrinks. Otherwise it keeps its size,
    and the removed bytes stay in its free space until they are overwritten; --erase always rewrites the file. The disk
    itself may keep old bytes, and backups still have them.

    With --remote-tier, the prompts are also removed from the bucket, except with --older-than (a lifecycle rule of the
    bucket does this) and with --all (others share the bucket: remove its objects with its own tools).

    \b
    diskprefix purge 3fa9 42d1
    diskprefix purge --older-than 7d --yes
    diskprefix purge --salt alice --dry-run
    diskprefix purge --model SmolLM2-135M-Instruct --older-than 12h
    diskprefix purge --all --yes

    \b
    Exit codes: 0 done, or nothing to do; 1 declined, or blocks are left, here or in the bucket; 2 wrong
    usage, or no such ENTRY, model or tenant; 4 the store cannot be opened or written.
    """
    narrowed = bool(entries) or (model, salt, older_than) != (None, None, None)
    if narrowed == everything:
        wrong = "--all takes no conditions" if everything else "give ENTRY, --model, --salt, --older-than or --all"
        raise SettingsError(f"{wrong}; see `diskprefix purge --help`")
    older_than_s = None if older_than is None else parse_duration(older_than, param="--older-than")
    conditions = PurgeFilter(model=model, salt=salt, older_than_s=older_than_s)
    with opened_store(kv_cache_dir, write=not dry_run) as store:
        selection = _select(store, entries, conditions, requires_known=remote_tier is None)
        if not as_json:
            _show_plan(selection, "would be removed" if dry_run else "to remove")
        if dry_run:
            if as_json:
                print_json(_report(selection, None))
            return 0
        result = _purge_selected(store, selection, remote_tier, namespace_key_file, yes=yes)
        if result is None:
            click.echo("nothing was purged", err=True)
            return 1
        stored_bytes = store.file_bytes()
    return _rewrite_and_show(kv_cache_dir, selection, result, stored_bytes, erases=erase, as_json=as_json)


class _Selection(Struct, frozen=True, kw_only=True):
    """The conditions of a purge, the time at which they hold, and what meets them: the plan and its saved prompts."""

    conditions: PurgeFilter
    now: float
    plan: PurgePlan
    chosen: list[EntryInfo]


class _Result(Struct, frozen=True, kw_only=True):
    """The result of a purge, and whether the bucket was purged too."""

    purged: Purged
    has_bucket: bool

    @property
    def exit_code(self) -> int:
        return 1 if self.purged.left_blocks or (self.has_bucket and self.purged.remote_error) else 0


def _select(store: Store, entries: Sequence[str], conditions: PurgeFilter, *, requires_known: bool) -> _Selection:
    """Returns what a purge of these entries removes. `requires_known`: a model or tenant of which nothing is stored is
    an error. Raises `SettingsError`."""
    now = time.time()
    with store.snapshot() as snapshot:
        infos = list_entries(snapshot)
        names = frozenset(bytes.fromhex(find_entry(infos, entry).id) for entry in entries)
        conditions = replace(conditions, entries=names)
        plan = plan_purge(snapshot, conditions, now)
        # A bucket may have prompts that this store never had, or that an earlier purge removed from here only.
        if requires_known:
            _require_known(snapshot, conditions.model, conditions.salt)
    chosen = [info for info in infos if bytes.fromhex(info.id) in plan.entries]
    return _Selection(conditions=conditions, now=now, plan=plan, chosen=chosen)


def _purge_selected(
    store: Store, selection: _Selection, remote_tier: str | None, namespace_key_file: Path | None, *, yes: bool
) -> _Result | None:
    """Purges the store, and the bucket if it is given. Asks first, unless `yes`; returns None if that is declined."""
    plan, bucket, why_not = selection.plan, None, None
    # Opened first: a prompt that is gone here can no longer be named there.
    if store.names.namespace or remote_tier is not None:
        bucket, why_not = _bucket(selection.conditions, remote_tier, namespace_key_file)
    if (plan or bucket) and not yes and not _confirmed(plan, remote_tier if bucket else None):
        return None
    with progress("purging", plan.stored_bytes) as advance:
        purged = purge_store(store, selection.conditions, selection.now, advance)
    if bucket is not None:
        _purge_bucket(purged, selection.conditions, bucket)
    elif plan:
        purged.remote_error = why_not
    return _Result(purged=purged, has_bucket=bucket is not None)


def _rewrite_and_show(
    folder: Path, selection: _Selection, result: _Result, stored_bytes: int, *, erases: bool, as_json: bool
) -> int:
    """Rewrites or shrinks the store's file, and prints the result of the purge. Returns the exit code. Raises
    `CacheError`, after the result is printed, if `erases` and the file cannot be rewritten."""
    purged, not_erased, size = result.purged, None, ""
    if erases:
        try:
            with progress("rewriting the file", stored_bytes) as advance:
                purged.is_erased = rewrite_folder(folder, advance)
        except CacheError as error:
            not_erased = error
    elif purged.stored_bytes:
        size = _shrunk(folder, purged.stored_bytes, stored_bytes)
    if as_json:
        print_json(_report(selection, purged))
    else:
        if selection.plan:
            _show_purged(folder, purged)
        click.echo(size, nl=bool(size))
        _show_elsewhere(purged)
    if not_erased is not None:
        raise not_erased
    return result.exit_code


def _bucket(
    purge_filter: PurgeFilter, remote_tier: str | None, namespace_key_file: Path | None
) -> tuple[Bucket | None, str | None]:
    """Returns the opened bucket, or why nothing is removed from it."""
    if purge_filter.older_than_s is not None:
        return None, "a lifecycle rule of the bucket removes old objects"
    if purge_filter.is_everything:
        return None, f"others share it: {_OWN_TOOLS}"
    if remote_tier is None or namespace_key_file is None:
        return None, f"give it with --remote-tier and --namespace-key-file, or {_OWN_TOOLS}"
    from diskprefix.prefixstore.remote.upkeep import open_bucket

    return open_bucket(remote_tier, namespace_key_file), None


def _purge_bucket(purged: Purged, purge_filter: PurgeFilter, bucket: Bucket) -> None:
    """Removes the prompts from the shared bucket too, and records the result in `purged`."""
    try:
        if purge_filter.entries:
            purged.remote_objects = bucket.delete_texts(purged.texts)
        else:
            purged.remote_objects = bucket.purge(purge_filter.is_of)
    except CacheError as error:
        # A prompt that is gone here can no longer be named here; a tenant and a model can.
        next_step = "a lifecycle rule of the bucket removes them" if purge_filter.entries else "run this again"
        purged.remote_error = f"{error}; {next_step}"


def _confirmed(plan: PurgePlan, bucket: str | None) -> bool:
    """Asks at the terminal. `bucket` is purged too. Raises `SettingsError` without a terminal."""
    places = [_amounts(len(plan.entries), len(plan.nodes), plan.stored_bytes)] if plan else []
    places += [f"the same in {bucket}"] if bucket else []
    return confirmed(f"Purge {', and '.join(places)}?", "add --yes, or --dry-run to change nothing")


def _require_known(snapshot: Snapshot, model: str | None, salt: str | None) -> None:
    """Raises `SettingsError` for an unknown model or tenant, so that a wrong name does not look like success."""
    records = [record for _, record in snapshot.roots()]
    models = {record.model for record in records} | {served.model for _, served in snapshot.models()}
    if model is not None and model not in models:
        raise SettingsError(f"--model: nothing is stored for {model!r}; `diskprefix inspect` shows the models")
    if salt is not None and not any(matches(record.tenant, salt) for record in records):
        # The value may be a secret, so it is not repeated.
        advice = "`diskprefix inspect` shows the tenants (give an API key itself, not its name)"
        raise SettingsError(f"--salt: nothing is stored for this tenant; {advice}")


def _amounts(num_entries: int, num_blocks: int, num_bytes: int) -> str:
    return f"{counted(num_entries, 'saved prompt')}, {counted(num_blocks, 'block')}, {format_size(num_bytes)}"


def _others(num_prompts: int, num_notes: int) -> str:
    prompts = counted(num_prompts, "recent prompt")
    return f"{prompts}, {counted(num_notes, 'record')} of replies" if num_notes else prompts


def _show_plan(selection: _Selection, title: str) -> None:
    plan = selection.plan
    if not plan:
        click.echo("nothing to purge here")
        return
    named = tenant_names()
    show_first(
        [
            f"{short_id(info.id)}  {info.model}  {named(info.tenant)}  {info.num_tokens:,} tokens  "
            f"{shortened(info.preview, 60)}"
            for info in selection.chosen
        ]
    )
    amounts = _amounts(len(plan.entries), len(plan.nodes), plan.stored_bytes)
    click.echo(f"{title}: {amounts}, {_others(len(plan.prompts), len(plan.notes))}")
    if plan.kept_blocks:
        click.echo(f"{counted(plan.kept_blocks, 'block')} of them stay: other prompts need them")


def _show_purged(folder: Path, purged: Purged) -> None:
    amounts = _amounts(purged.entries, purged.blocks, purged.stored_bytes)
    click.echo(f"purged {amounts}, {_others(purged.prompts, purged.notes)}")
    if purged.left_blocks:
        why = (
            "because a daemon continues them or their counts are wrong; run `diskprefix verify --fix`, then purge again"
        )
        click.echo(f"{counted(purged.left_blocks, 'block')} could not be removed, {why}", err=True)
    if (folder / DAMAGED).exists():
        click.echo(f"{folder / DAMAGED}, which a daemon moved aside, may contain the prompts too; delete it", err=True)


def _shrunk(folder: Path, purged_bytes: int, file_bytes: int) -> str:
    """Compacts the file if no other process has the store open and the copy is not larger than the purged bytes: it
    never writes more than was removed. Returns the result, for people."""
    with suppress(CacheError):
        if (left_bytes := compacted_bytes(folder)) <= purged_bytes:
            with progress("shrinking the file", left_bytes) as advance:
                done = compact_folder(folder, advance)
            return f"the file shrank: {format_size(done.before_bytes)} → {format_size(done.after_bytes)}"
    remedy = "to shrink it, stop the daemon and run `diskprefix compact`, or purge with --erase"
    return f"the file keeps its size, {format_size(file_bytes)}; {remedy}"


def _show_elsewhere(purged: Purged) -> None:
    """Prints what became of the objects in the bucket, and of the bytes in the store's file."""
    if purged.remote_objects is not None:
        click.echo(f"purged {counted(purged.remote_objects, 'object')} from the bucket; copies on other machines stay")
    if purged.remote_error is not None:
        click.echo(f"objects in the bucket stay: {purged.remote_error}", err=True)

    if purged.is_erased:
        click.echo("rewrote the file: it holds no removed bytes")
    elif purged.is_erased is not None:
        why = "another process still has the old one open: its bytes are on the disk until that process ends"
        click.echo(f"rewrote the file, but {why}", err=True)


def _report(selection: _Selection, purged: Purged | None) -> dict[str, Any]:
    """Returns the output of --json: the numbers of `purged`, or without it of the plan."""
    plan = selection.plan
    done = purged or Purged(
        blocks=len(plan.nodes),
        prompts=len(plan.prompts),
        notes=len(plan.notes),
        roots=len(plan.roots),
        stored_bytes=plan.stored_bytes,
    )
    listed = {"kept_blocks": plan.kept_blocks, "entries": [asdict(info) for info in selection.chosen]}
    return {"dry_run": purged is None} | done.counts() | listed
