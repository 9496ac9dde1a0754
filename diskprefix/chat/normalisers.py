"""Undoes meaningless changes of clients before a conversation is rendered, so that the cache finds it again.

The result depends on the conversation alone. The mode `report` changes nothing: the reply says what would have changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.chat.messages import Conversation
from diskprefix.chat.normaliser_rules import read_normalisers
from diskprefix.errors import SettingsError
from diskprefix.settings import policies_folder
from diskprefix.values import Change, Rewriting

if TYPE_CHECKING:
    from diskprefix.chat.draft import PromptDraft

Mode: TypeAlias = Literal["off", "report", "on"]

NORMALISERS = read_normalisers(policies_folder() / "normalisers.toml")
_BY_NAME = {normaliser.name: normaliser for normaliser in NORMALISERS}
DEFAULT_MODES: Mapping[str, Mode] = dict.fromkeys(_BY_NAME, "report")


class Normalisers(Struct, frozen=True):
    """All normalisers with their modes."""

    modes: Mapping[str, Mode] = field(default_factory=lambda: DEFAULT_MODES)

    @classmethod
    def parse(cls, text: str, *, param: str) -> Normalisers:
        """Returns the normalisers of `NAME=MODE,…`; a MODE alone applies to all others. Raises `SettingsError`."""
        modes: dict[str, Mode] = {}
        for item in map(str.strip, text.split(",")):
            name, equals, mode = (piece.strip().lower() for piece in item.rpartition("="))
            # A MODE alone has the name "".
            if mode not in get_args(Mode) or name in modes or (name not in _BY_NAME if equals else name):
                raise SettingsError(
                    f"{param}: {item[:40]!r} is not a normaliser with its mode, or is there twice; write NAME=MODE,… "
                    f"or a MODE for all; names: {', '.join(_BY_NAME)}; modes: {', '.join(get_args(Mode))}"
                )
            modes[name] = cast(Mode, mode)
        return cls(dict.fromkeys(_BY_NAME, modes.pop("", "report")) | modes)

    def apply(self, conversation: Conversation) -> tuple[Conversation, Rewriting]:
        """Returns the conversation to render, and the changes that were made or would have been made."""
        changes: list[Change] = []
        would_change: list[str] = []
        for normaliser in NORMALISERS:
            if (mode := self.modes[normaliser.name]) == "off":
                continue
            changed, paths = normaliser.apply(conversation)
            if mode == "on":
                conversation = changed
                changes += [Change(normaliser.name, path) for path in paths]
            elif paths:
                would_change.append(normaliser.name)
        return conversation, Rewriting(changes=tuple(changes), would_change=tuple(would_change))


def helpful_normalisers(line: str, rewriting: Rewriting) -> list[str]:
    """Returns the names of the normalisers that would change a line of this prompt if they were on."""
    return [name for name in rewriting.would_change if _BY_NAME[name].is_in(line)]


def normalise(normalisers: Normalisers, draft: PromptDraft) -> PromptDraft:
    """Undoes or reports what the client changes from request to request."""
    conversation, rewriting = normalisers.apply(draft.conversation)
    return replace(draft, conversation=conversation).with_prompt(rewriting=rewriting)


_NAME = re.compile(
    r"""((?<![\w.+/-])[A-Za-z_-]{1,24}(?==["'\w/-])"""  # `name=value`; base64 ends with `=`, and has `+` and `/`
    r"""|(?<=")[A-Za-z_-]{1,24}(?=":)|\A\W*[A-Za-z_-]{1,24}(?=:))"""
)
_SHAPE_CHARS = 100


def shape_of(line: str) -> str:
    """Returns a line with # for digits and x for letters, except in names: `name=value`, `"name":`, and a leading
    `name:`. The log shows it, and a prompt may hold secrets, so a name is at most 24 letters, `_` and `-`."""
    # Values and names in turn.
    pieces = _NAME.split(" ".join(line[: 4 * _SHAPE_CHARS].split()))
    pieces[::2] = [re.sub(r"\d", "#", re.sub(r"[^\W\d_]", "x", value)) for value in pieces[::2]]
    text = "".join(char for char in "".join(pieces) if char.isprintable())
    return text if len(text) <= _SHAPE_CHARS else f"{text[: _SHAPE_CHARS - 1]}…"
