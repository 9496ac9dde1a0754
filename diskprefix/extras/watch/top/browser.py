"""The saved prompts in `diskprefix top`: a tree to filter, sort, expand, and delete from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Static, Tree
from textual.widgets.tree import TreeNode

from diskprefix.cli.tooling import plain, short_id
from diskprefix.errors import DiskPrefixError
from diskprefix.extras.watch.top.live import end_of
from diskprefix.extras.watch.top.sources import Source
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import counted, format_age, format_duration, format_size

ORDERS = {"last used": "last_used_at", "hits": "hits", "size": "stored_bytes", "tokens": "end"}
"""The orders by name, each with the field of a node to sort by, the largest value first."""

Json = dict[str, Any]


class PromptBrowser(Widget):
    """Shows the saved prompts of a `Source`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("t", "list", "Tree/list"),
        Binding("d,delete", "delete", "Delete", key_display="d"),
        Binding("escape", "leave_filter", show=False),
    ]

    class Read(Message):
        """A message: the saved prompts were read again."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.trees: list[Json] = []
        self.previews: dict[str, str] = {}
        self.may_delete = True
        self._source = source
        self._entries: dict[str, Json] = {}
        self._total = 0
        self._order = 0
        self._is_list = False
        self._said = "reading …"

    def compose(self) -> ComposeResult:
        with Horizontal(id="filter-row"):
            yield Static("filter /", id="prompt")
            yield Input(placeholder="text, id, model or tenant", compact=True)
        yield Static(id="order")
        tree: Tree[str | None] = Tree("saved prompts")
        tree.show_root = False
        tree.guide_depth = 3
        yield tree

    def focus_tree(self) -> None:
        self.query_one(Tree).focus()

    def read(self) -> None:
        threading.Thread(target=self._read, name="saved", daemon=True).start()

    def _read(self) -> None:
        try:
            found = self._source.entries()
        except DiskPrefixError as error:
            self.app.call_later(self._say, error.message)
        else:
            self.app.call_later(self._show, found)

    def _show(self, found: Json) -> None:
        self._entries = {entry["id"]: entry for entry in found["entries"]}
        self.previews = {id_: entry["preview"] for id_, entry in self._entries.items() if entry["preview"]}
        self.trees, self._total, self._said = found["trees"], found["total"], ""
        self._draw()
        self.post_message(self.Read())

    def _say(self, said: str) -> None:
        self._said = said
        self._draw()

    # What is shown.

    def _draw(self) -> None:
        tree: Tree[str | None] = self.query_one(Tree)
        was_open = {node.data: node.is_expanded for node in _all(tree.root) if node.data}
        at = tree.cursor_node.data if tree.cursor_node else None
        tree.clear()
        wanted = self.query_one(Input).value.strip().lower()
        num_shown = sum(self._add_tree(tree, one, wanted, was_open) for one in self.trees)
        order, form = list(ORDERS)[self._order], "a list" if self._is_list else "a tree of what they share"
        said = f"{self._said} · " if self._said else ""
        count = f"{num_shown:,} of {counted(self._total, 'saved prompt')}"
        self.query_one("#order", Static).update(plain(f"{said}{count}, by {order}, as {form}"))
        node = next((node for node in _all(tree.root) if node.data == at and at is not None), None)
        if node is not None:
            tree.move_cursor(node)
        elif tree.root.children:
            tree.cursor_line = 0

    def _add_tree(self, tree: Tree[str | None], one: Json, wanted: str, was_open: dict[str, bool]) -> int:
        """Adds the nodes that lead to a prompt with the wanted text. Returns the number of these prompts."""
        trunks = {node["id"]: node for node in one["nodes"]}
        matching = self._matching(one, wanted)
        added = {node["id"] for node in matching}
        branch = tree.root
        if len(self.trees) > 1 and matching:
            tenant = f" · tenant {short_tenant(one['tenant'])}" if one["tenant"] else ""
            title = plain(f"{one['model']}{tenant} · {format_size(one['stored_bytes'])}")
            branch = tree.root.add(title, data=one["root"], expand=was_open.get(one["root"], True))
        if not self._is_list:
            for node in matching:
                while (parent_id := node["parent"]) is not None and parent_id not in added:
                    added.add(parent_id)
                    node = trunks[parent_id]
        below: dict[str | None, TreeNode[str | None]] = {None: branch}
        parents = {trunks[id_]["parent"] for id_ in added}
        for id_ in self._ordered(added, one["nodes"]):
            parent = branch if self._is_list else below[trunks[id_]["parent"]]
            has_more = id_ in parents and not self._is_list
            is_open = has_more if wanted else was_open.get(id_, has_more and parent is branch)
            below[id_] = self._add(parent, trunks[id_], is_open=is_open)
        return sum(len(node["entries"]) for node in matching)

    def _matching(self, tree: Json, wanted: str) -> list[Json]:
        """Returns the nodes where a prompt with the wanted text ends."""
        told = f"{tree['model']} {tree['tenant']}".lower()

        def matches(entry_id: str) -> bool:
            preview = self.previews.get(entry_id, "").lower()
            return wanted in preview or entry_id.startswith(wanted) or wanted in told

        return [node for node in tree["nodes"] if any(map(matches, node["entries"]))]

    def _ordered(self, shown: set[str], nodes: list[Json]) -> list[str]:
        """Returns the ids of nodes in the order to add them. In a tree, a node comes after its parent, and is sorted by
        the best value among itself and the nodes that continue it."""
        best = {node["id"]: node[list(ORDERS.values())[self._order]] for node in nodes}
        if self._is_list:
            return sorted(shown, key=lambda id_: -best[id_])
        depth: dict[str | None, int] = {None: -1}
        for node in nodes:
            depth[node["id"]] = depth[node["parent"]] + 1
        for node in reversed(nodes):
            if node["parent"] is not None:
                best[node["parent"]] = max(best[node["parent"]], best[node["id"]])
        return sorted(shown, key=lambda id_: (depth[id_], -best[id_]))

    def _add(self, parent: TreeNode[str | None], trunk: Json, *, is_open: bool) -> TreeNode[str | None]:
        now = time.time()
        label = Text()
        if trunk["num_entries"] > 1 and not self._is_list:
            label.append(f"{trunk['num_entries']} prompts ", "bold")
        if trunk["entries"]:
            label.append(f"{short_id(trunk['entries'][0])[:8]} ", "cyan")
        end = f"{trunk['end']:,}" if self._is_list else f"{trunk['start']:,}–{trunk['end']:,}"
        label.append(f"{end} tok · {format_size(trunk['stored_bytes'])} · {counted(trunk['hits'], 'hit')} · ")
        label.append(f"{format_age(now - trunk['last_used_at'])} ago ", "dim")
        for entry in trunk["entries"]:
            label.append_text(end_of(self.previews.get(entry) or ""))
        node = parent.add(label, data=trunk["id"], expand=is_open)
        for entry in trunk["entries"]:
            self._add_details(node, trunk, self._entries.get(entry))
        return node

    def _add_details(self, node: TreeNode[str | None], trunk: Json, entry: Json | None) -> None:
        if entry is None:
            return
        now = time.time()
        ttl = f"kept {entry['ttl_s']:,} s after its last use" if entry["ttl_s"] else "kept as --kv-cache-ttl says"
        took = f", {format_duration(trunk['prefill_s'])} to compute the last part" if trunk["prefill_s"] else ""
        lines = [
            f"id {entry['id']} · {entry['model']} · scope {entry['scope']}",
            f"{entry['num_tokens']:,} tokens · {format_size(entry['stored_bytes'])} on disk, "
            f"{format_size(entry['shared_bytes'])} of it shared · raw {format_size(entry['raw_bytes'])}{took}",
            f"saved {format_age(now - entry['created_at'])} ago · {ttl} · {counted(entry['hits'], 'hit')}",
            f"text: {entry['preview'] or 'not shown'}",
        ]
        for line in lines:
            node.add_leaf(plain(line))

    # Keys.

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        self.focus_tree()

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_leave_filter(self) -> None:
        self.query_one(Input).value = ""
        self.focus_tree()

    def action_sort(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def action_list(self) -> None:
        self._is_list = not self._is_list
        self._draw()

    def action_delete(self) -> None:
        entry = self._entry_at_cursor()
        if entry is None:
            self._say("choose a saved prompt: a line with an id")
        elif not self.may_delete:
            self._say("not deleted here, as the daemon has no keys; use `diskprefix purge` there")
        else:
            size = (
                f"{entry['num_tokens']:,} tokens, {format_size(entry['stored_bytes'] - entry['shared_bytes'])} unshared"
            )
            question = f"Delete the saved prompt {short_id(entry['id'])} ({size})?\n{entry['preview'] or ''}"
            self.app.push_screen(Confirmation(question), lambda yes: self._delete(entry["id"]) if yes else None)

    def _entry_at_cursor(self) -> Json | None:
        """Returns the prompt that ends at the chosen node, or that the chosen line describes."""
        node: TreeNode[str | None] | None = self.query_one(Tree).cursor_node
        while node is not None:
            at = next((trunk for tree in self.trees for trunk in tree["nodes"] if trunk["id"] == node.data), None)
            if at is not None:
                return self._entries.get(at["entries"][0]) if at["entries"] else None
            node = node.parent
        return None

    def _delete(self, entry_id: str) -> None:
        self._say("deleting …")

        def run() -> None:
            try:
                freed = self._source.delete(entry_id)
            except DiskPrefixError as error:
                self.app.call_later(self._say, error.message)
            else:
                self._read()
                self.app.call_later(self._say, f"deleted {short_id(entry_id)}, {format_size(freed)}")

        threading.Thread(target=run, name="delete", daemon=True).start()


class Confirmation(ModalScreen[bool]):
    """Asks before a deletion. The default answer is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(plain(self._text.partition("\n")[0]))
            yield Static(plain(self._text.partition("\n")[2]), classes="quiet")
            with Horizontal():
                yield Button("No (n)", id="no")
                yield Button("Delete (y)", variant="error", id="yes")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


def _all(node: TreeNode[str | None]) -> Iterable[TreeNode[str | None]]:
    for child in node.children:
        yield child
        yield from _all(child)
