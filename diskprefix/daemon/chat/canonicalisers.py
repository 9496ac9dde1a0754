"""Undoes meaningless changes of clients before a conversation is rendered, so that the cache finds it again.

The result depends only on the conversation and on the tenant's order of tools. The mode `report` changes nothing: the
reply names what would have changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.chat.canonicaliser_rules import read_canonicalisers
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.tool_order import RECORD_ID, ToolOrder
from diskprefix.errors import SettingsError
from diskprefix.folders import policies_folder
from diskprefix.values import Change, Rewriting

if TYPE_CHECKING:
    from diskprefix.daemon.chat.draft import PromptDraft

Mode: TypeAlias = Literal["off", "report", "on"]

CANONICALISERS = read_canonicalisers(policies_folder() / "canonicalisers.toml")
_BY_NAME = {canonicaliser.name: canonicaliser for canonicaliser in CANONICALISERS}
DEFAULT_MODES: Mapping[str, Mode] = dict.fromkeys(_BY_NAME, "report")


class Canonicalisers(Struct, frozen=True):
    """All canonicalisers with their modes."""

    modes: Mapping[str, Mode] = field(default_factory=lambda: DEFAULT_MODES)

    @classmethod
    def parse(cls, text: str, *, param: str) -> Canonicalisers:
        """Returns the canonicalisers of `NAME=MODE,…`; a MODE alone applies to all others. Raises `SettingsError`."""
        modes: dict[str, Mode] = {}
        for item in map(str.strip, text.split(",")):
            name, equals, mode = (piece.strip().lower() for piece in item.rpartition("="))
            # A MODE alone has the name "".
            if mode not in get_args(Mode) or name in modes or (name not in _BY_NAME if equals else name):
                raise SettingsError(
                    f"{param}: {item[:40]!r} is not a canonicaliser with its mode, or is there twice; write "
                    f"NAME=MODE,… or a MODE for all; names: {', '.join(_BY_NAME)}; modes: {', '.join(get_args(Mode))}"
                )
            modes[name] = cast(Mode, mode)
        return cls(dict.fromkeys(_BY_NAME, modes.pop("", "report")) | modes)

    @property
    def sorts_tools(self) -> bool:
        return any(each.action == "sort tools" and self.modes[each.name] == "on" for each in CANONICALISERS)

    def apply(
        self,
        conversation: Conversation,
        tool_order: ToolOrder = ToolOrder(),  # noqa: B008 (immutable)
    ) -> tuple[Conversation, Rewriting]:
        """Returns the conversation to render, and the changes that were made or would have been made."""
        changes: list[Change] = []
        would_change: list[str] = []
        for canonicaliser in CANONICALISERS:
            if (mode := self.modes[canonicaliser.name]) == "off":
                continue
            changed, paths = canonicaliser.apply(conversation, tool_order)
            if mode == "on":
                conversation = changed
                changes += [Change(canonicaliser.name, path) for path in paths]
            elif paths:
                would_change.append(canonicaliser.name)
        return conversation, Rewriting(changes=tuple(changes), would_change=tuple(would_change))


def helpful_canonicalisers(line: str, rewriting: Rewriting) -> list[str]:
    """Returns the names of the canonicalisers that would change a line of this prompt if they were on."""
    return [name for name in rewriting.would_change if _BY_NAME[name].is_in(line)]


def canonicalise(canonicalisers: Canonicalisers, draft: PromptDraft) -> PromptDraft:
    """Undoes or reports the changes that clients make in every request. Raises `RecordsUnread`."""
    order = ToolOrder()
    if draft.replies is not None and draft.conversation.tools and canonicalisers.sorts_tools:
        order = ToolOrder.decode(draft.replies.get(RECORD_ID))
        draft.replies.require_read()
    conversation, rewriting = canonicalisers.apply(draft.conversation, order)
    if canonicalisers.sorts_tools and (after := order.after(conversation.tool_names)) is not order:
        draft = replace(draft, tool_order=after)
    return replace(draft, conversation=conversation).with_prompt(rewriting=rewriting)


_NAME = re.compile(
    r"""((?<![\w.+/-])[A-Za-z_-]{1,24}(?==["'\w/-])"""  # `name=value`; base64 ends with `=`, and has `+` and `/`
    r"""|(?<=")[A-Za-z_-]{1,24}(?=":)|\A\W*[A-Za-z_-]{1,24}(?=:))"""
)
_SHAPE_CHARS = 100


def shape_of(line: str) -> str:
    """Returns a line with # for digits and x for letters, except in names: `name=value`, `"name":`, and a leading
    `name:`. The log shows it, and a prompt may hold secrets, so a name is at most 24 letters, `_` and `-`."""
    # Values and names alternate.
    pieces = _NAME.split(" ".join(line[: 4 * _SHAPE_CHARS].split()))
    pieces[::2] = [re.sub(r"\d", "#", re.sub(r"[^\W\d_]", "x", value)) for value in pieces[::2]]
    text = "".join(char for char in "".join(pieces) if char.isprintable())
    return text if len(text) <= _SHAPE_CHARS else f"{text[: _SHAPE_CHARS - 1]}…"
