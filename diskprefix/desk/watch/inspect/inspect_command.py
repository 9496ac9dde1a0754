"""The command `diskprefix inspect`: lists the saved prompts, with or without a running daemon."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import click
from msgspec.structs import asdict

from diskprefix.daemon.cli.options import setting_option
from diskprefix.desk.shared.tooling import (
    find_entry,
    opened_store,
    packed_weights_option,
    plain,
    print_json,
    print_table,
    short_id,
    shortened,
    store_options,
    tenant_names,
    terminal_width,
)
from diskprefix.desk.watch.browse.outline import outline
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import EntryInfo, list_entries
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.units import ago, counted, format_size

_OTHER_COLUMNS = 100
"""The approximate width of all columns except the preview, with a long model name."""
_NUMBERS = ("tokens", "checkpoints", "stored", "shared", "hits")


@click.command(short_help="List the saved prompts, and what they share.")
@click.argument("entry", required=False)
@click.option("--tree", is_flag=True, help="Show the prefix tree with its shared trunks.")
@click.option("--stats", is_flag=True, help="Show the cache's savings by model and tenant.")
@click.option("--lost", is_flag=True, help="Show the tokens that were recomputed in the last day, and why.")
@setting_option(
    "model",
    envvar=None,
    metavar="NAME",
    help="Show only the saved prompts of this model, named as in the list.",
    show_default="all",
)
@packed_weights_option
@store_options
def inspect(
    entry: str | None,
    tree: bool,
    stats: bool,
    lost: bool,
    model: str | None,
    packed_weights: str,
    kv_cache_dir: Path,
    as_json: bool,
) -> None:
    """List the saved prompts in the cache folder, the most recently used first.

    With ENTRY, an id or the beginning of one, show only that entry: its text, its blocks, the entries that share them,
    and its uses. A prompt that is extended gets a new id.
    The command is safe beside a running daemon: it reads one consistent view and changes nothing.

    \b
    stored       bytes on disk of all blocks of the entry
    shared       the part of these bytes that other entries use too (stored once)
    hits         requests that restored its beginning or all of it
    last column  the beginnings of the first message and of the last question
    Some columns are shown only if an entry has a value there:
    kind         saved, or what else it is: imported (from a pack), opening or ahead
                 (computed before it was sent), partial (not all of a prompt)
    made with    the options that the prefix was saved with, where a prompt of the
                 same weights was saved with other ones: only a daemon with
                 these options finds it
    tenant       the id of the tenant, for `purge --salt`; (yours): your programs
    checkpoints  the number of checkpoints, which are tokens at which the prompt can be
                 restored, for models with recurrent layers

    \b
    diskprefix inspect
    diskprefix inspect 3fa9
    diskprefix inspect --lost
    diskprefix inspect --tree --model unsloth/Qwen3.5-4B-GGUF:Q8_0
    diskprefix inspect --json | jq '.entries[] | {id, num_tokens, hits}'

    \b
    Exit codes: 0 done; 2 wrong usage, or no such ENTRY; 4 the store cannot be opened.
    """
    if sum([entry is not None, tree, stats, lost]) > 1:
        raise SettingsError("inspect: give one of ENTRY, --tree, --stats and --lost")
    with opened_store(kv_cache_dir) as store, store.snapshot() as snapshot:
        entries = list_entries(snapshot)
        roots = {root: record.model for root, record in snapshot.roots()}
        if model is not None:
            roots = _of_model(roots, model)
            entries = [info for info in entries if info.model == model]
        if entry is not None:
            from diskprefix.desk.watch.inspect.entry_view import show_entry

            show_entry(snapshot, entries, find_entry(entries, entry), as_json=as_json)
        else:
            view = "tree" if tree else "stats" if stats else "lost" if lost else "entries"
            packed = PackedFiles.here(packed_weights)
            _show_view(view, store, snapshot, entries, roots, kv_cache_dir, packed, as_json=as_json)


def _show_view(
    view: str,
    store: Store,
    snapshot: Snapshot,
    entries: list[EntryInfo],
    roots: Mapping[bytes, str],
    folder: Path,
    packed: PackedFiles | None,
    *,
    as_json: bool,
) -> None:
    if view == "tree":
        from diskprefix.desk.watch.inspect.tree_view import show_tree

        show_tree(snapshot, entries, roots, as_json=as_json)
    elif view == "stats":
        from diskprefix.desk.watch.inspect.stats_view import show_stats

        show_stats(snapshot, entries, roots, store.clock(), store.budget_bytes, packed, as_json=as_json)
    elif view == "lost":
        from diskprefix.desk.watch.inspect.lost_view import show_lost

        show_lost(snapshot, store.path, roots, store.clock(), as_json=as_json)
    else:
        _show_entries(snapshot, entries, roots, folder, packed, as_json=as_json)


def _of_model(roots: Mapping[bytes, str], model: str) -> dict[bytes, str]:
    """Returns the roots of a model. Raises `SettingsError` if there are none."""
    own = {root: name for root, name in roots.items() if name == model}
    if not own:
        names = ", ".join(sorted({*roots.values()})) or "no model"
        raise SettingsError(f"--model: no prompt of {model} is saved; there are prompts of {names}")
    return own


def _show_entries(
    snapshot: Snapshot,
    entries: list[EntryInfo],
    roots: Collection[bytes],
    folder: Path,
    packed: PackedFiles | None,
    *,
    as_json: bool,
) -> None:
    trees = outline(snapshot, entries, roots).trees
    names = ("blocks", "checkpoints", "checkpoint_bytes", "images")
    counts = {name: sum(getattr(tree, name) for tree in trees) for name in names}
    counts["image_bytes"] = sum(tree.stored_bytes for tree in trees if tree.images)
    of_trees = {id_: tree.made_with for tree in trees for trunk in tree.nodes for id_ in trunk.entries}
    made_with = {info.id: of_trees.get(info.id, {}) for info in entries}
    if as_json:
        rows = [asdict(info) | {"made_with": made_with[info.id]} for info in entries]
        amounts = None if packed is None else packed.amounts
        print_json({"entries": rows} | counts | {"packed_weights": amounts})
        return
    if entries:
        _print_entries(entries, made_with, terminal_width(otherwise=160))
    whose = "" if len(roots) == len(dict(snapshot.roots())) else " of all models"
    totals = [counted(len(entries), "saved prompt"), counted(counts["blocks"], "block")]
    if counts["checkpoints"]:
        size = format_size(counts["checkpoint_bytes"])
        totals.append(f"{counted(counts['checkpoints'], 'checkpoint')} ({size})")
    if counts["images"]:
        totals.append(f"images, encoded: {counts['images']:,} ({format_size(counts['image_bytes'])})")
    click.echo(f"{', '.join(totals)}, {format_size(snapshot.used_bytes())}{whose} in {folder}")


def _print_entries(entries: list[EntryInfo], made_with: Mapping[str, Mapping[str, str]], width: int) -> None:
    named = tenant_names()
    rows = [
        {
            "id": short_id(info.id),
            "kind": info.kind,
            "model": plain(info.model),
            "scope": info.scope,
            "made with": options_text(made_with[info.id]),
            "tenant": named(info.tenant),
            "tokens": f"{info.num_tokens:,}",
            "checkpoints": str(len(info.checkpoints)),
            "stored": format_size(info.stored_bytes),
            "shared": format_size(info.shared_bytes),
            "hits": str(info.hits),
            "last used": ago(info.last_used_at),
            "preview": plain(shortened(info.preview, max(20, width - _OTHER_COLUMNS))),
        }
        for info in entries
    ]
    # Most stores have no values in these columns.
    optional = {name: any(getattr(info, name) for info in entries) for name in ("tenant", "checkpoints")}
    optional["made with"] = any(made_with.values())
    optional["kind"] = any(info.kind != "saved" for info in entries)
    titles = [title for title in rows[0] if optional.get(title, True)]
    print_table(titles, [[row[title] for title in titles] for row in rows], right=_NUMBERS, wrapped=())
