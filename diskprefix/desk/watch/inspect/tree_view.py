"""The output of `diskprefix inspect --tree`: the prefix tree with its shared trunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import click

from diskprefix.desk.shared.tooling import SHOWN, plain, print_json, short_id, tenant_names, terminal_width
from diskprefix.desk.watch.browse.outline import FoldedTree, Trunk, outline
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import EntryInfo
from diskprefix.units import ago, counted, format_size

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


def show_tree(snapshot: Snapshot, entries: list[EntryInfo], roots: Collection[bytes], *, as_json: bool) -> None:
    """Prints the folded prefix trees of some roots. `entries` are the saved prompts of these roots."""
    folded = outline(snapshot, entries, roots)
    if as_json:
        print_json({"trees": folded.listing()["trees"]})
        return
    trees = [tree for tree in folded.trees if tree.nodes]
    if not trees:
        click.echo("nothing is saved")
        return
    from rich.console import Console

    console = Console(width=terminal_width(otherwise=120), no_color=True)
    named = tenant_names()
    for tree in trees:
        with console.capture() as printed:
            console.print(_draw(tree, folded.entries, named))
        click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))
    total = sum(tree.stored_bytes for tree in trees)
    shared = sum(info.stored_bytes for info in entries) - total
    prompts = counted(len(entries), "saved prompt")
    click.echo(f"{prompts} in {format_size(total)}; sharing saves {format_size(max(0, shared))}")


def _draw(tree: FoldedTree, entries: Mapping[str, EntryInfo], named: Callable[[str], str]) -> Tree:
    from rich.tree import Tree

    tenant = f", tenant {named(tree.tenant)}" if tree.tenant else ""
    prompts = counted(tree.num_entries, "prompt")
    made_with = f", made with {options_text(tree.made_with)}" if tree.made_with else ""
    top = Tree(_line(f"{tree.model}{made_with}{tenant}: {prompts}, {format_size(tree.stored_bytes)}"))
    children = defaultdict[str | None, list[Trunk]](list)
    for trunk in tree.nodes:
        children[trunk.parent].append(trunk)
    todo: list[tuple[Tree, str | None]] = [(top, None)]
    while todo:
        branch, parent = todo.pop()
        trunks = children[parent]
        todo += [(branch.add(_trunk_line(trunk, entries)), trunk.id) for trunk in trunks[:SHOWN]]
        if len(trunks) > SHOWN:
            branch.add(_line(f"… and {len(trunks) - SHOWN:,} more; --json shows them all"))
    return top


def _trunk_line(trunk: Trunk, entries: Mapping[str, EntryInfo]) -> Text:
    facts = [f"{trunk.start:,}–{trunk.end:,}", format_size(trunk.stored_bytes)]
    if trunk.num_entries > 1:
        facts.append(f"{trunk.num_entries} prompts")
    if trunk.checkpoints:
        facts.append(counted(trunk.checkpoints, "checkpoint"))
    facts += [counted(trunk.hits, "hit"), ago(trunk.last_used_at)]
    ends = "".join(f" ● {short_id(id_)} {entries[id_].preview.rsplit(' … ', 1)[-1]}" for id_ in trunk.entries)
    return _line(" · ".join(facts) + ends)


def _line(text: str) -> Text:
    line: Text = plain(text)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
