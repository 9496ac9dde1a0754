"""The output of `diskprefix inspect --tree`: the prefix tree with its shared trunks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from diskprefix.cli.tooling import SHOWN, plain, print_json, short_id, terminal_width
from diskprefix.extras.watch.browse.outline import Outline, RootOutline, Trunk, outline
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import ago, counted, format_size

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


def show_tree(snapshot: Snapshot, entries: list[EntryInfo], roots: Collection[bytes], *, as_json: bool) -> None:
    """Prints the folded prefix trees of some roots. `entries` are those of `snapshot` that they have."""
    found = outline(snapshot, entries, roots)
    if as_json:
        print_json({"roots": [asdict(root) for root in found.roots]})
        return
    if not found.roots:
        click.echo("nothing is saved")
        return
    from rich.console import Console

    console = Console(width=terminal_width(otherwise=120), no_color=True)
    for root in found.roots:
        with console.capture() as printed:
            console.print(_root_tree(root, found))
        click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))
    total = sum(root.stored_bytes for root in found.roots)
    shared = sum(max(0, info.stored_bytes) for info in entries) - total
    prompts = counted(len(entries), "saved prompt")
    click.echo(f"{prompts} in {format_size(total)}; sharing saves {format_size(max(0, shared))}")


def _root_tree(root: RootOutline, found: Outline) -> Tree:
    from rich.tree import Tree

    whose = f", tenant {short_tenant(root.tenant)}" if root.tenant else ""
    prompts = counted(root.num_entries, "prompt")
    tree = Tree(_line(f"{root.model}{whose}: {prompts}, {format_size(root.stored_bytes)}"))
    todo = [(tree, root.trunks)]
    while todo:
        branch, trunks = todo.pop()
        todo += [(branch.add(_trunk_line(trunk, found)), trunk.children) for trunk in trunks[:SHOWN]]
        if len(trunks) > SHOWN:
            branch.add(_line(f"… and {len(trunks) - SHOWN:,} more; --json shows them all"))
    return tree


def _trunk_line(trunk: Trunk, found: Outline) -> Text:
    facts = [f"{trunk.start:,}–{trunk.end:,}", format_size(trunk.stored_bytes)]
    if trunk.num_entries > 1:
        facts.append(f"{trunk.num_entries} prompts")
    if trunk.checkpoints:
        facts.append(counted(trunk.checkpoints, "checkpoint"))
    facts.append(counted(trunk.hits, "hit"))
    facts.append(ago(trunk.last_used_at))
    ended = [found.entries[one] for one in trunk.entries if one in found.entries]
    text = " · ".join(facts)
    if ended:
        return _line(f"{text} ● {short_id(ended[0].id)} {_end_of(ended[0].preview)}")
    below = _any_entry(trunk, found)
    return _line(f"{text} · {below.preview.split(' … ')[0]}" if below and not trunk.start else text)


def _end_of(preview: str) -> str:
    return preview.rsplit(" … ", 1)[-1]


def _any_entry(trunk: Trunk, found: Outline) -> EntryInfo | None:
    todo = [trunk]
    while todo:
        one = todo.pop()
        for id_ in one.entries:
            if id_ in found.entries:
                return found.entries[id_]
        todo += one.children
    return None


def _line(text: str) -> Text:
    line: Text = plain(text)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
