"""One description of each family of models, of `families.toml`: how it writes calls and reasoning. `call_grammar.py`
forces calls by it, `call_reader.py` and `parsers.py` read them, and `choose_format.py` chooses one for a template."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diskprefix.chat.output.format import ThoughtTags

Body: TypeAlias = Literal["objects", "json", "parameters", "elements", "python", "braces"]
"""The form of a call.

objects     a JSON object with the name and the arguments
json        the name, then the arguments in JSON
parameters  the name, then arguments with tags of their own
elements    as parameters, and members of objects and arrays have tags of their own too
python      a Python call
braces      the name, then JSON with bare keys and other quotes
"""


@dataclass(frozen=True)
class Channels:
    """Replies that are messages with headers. Regular expressions; NAMES stands for the names of the tools.

    A message is a call if `header` matched its group `name`, reasoning if it matched `thought`, content otherwise.
    `end` ends it. Outside of messages, a tag of `tags` is dropped, unless it is in `kept`.
    """

    header: str
    end: str
    tags: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The format of a family of models. Its texts are what the chat template writes, with placeholders in capitals.

    `call` has NAME and ARGUMENTS, and may have INDEX (any number). It is read with other blanks and without attributes
    that have a placeholder. `begin` and `end` stand around all calls, or (`each`) around each one. A list's brackets
    belong to them: its begin ends with "[".
    """

    name: str
    body: Body = "objects"
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'
    argument: str = ""
    """For a body that is not JSON: KEY, VALUE, and IS_TEXT (true or false) or TYPE (the JSON type)."""
    begin: str = ""
    end: str = ""
    each: bool = False
    lead: str = ""
    """What stands before `begin`, and is not needed to find it."""
    between: str = ""
    bare: str = ""
    """The beginning of a call that may stand without `begin`."""
    quotes: str = ""
    """In braces, the quotes around a text; in elements, the prefix of each tag."""
    only_one: bool = False
    """A call ends the reply."""
    dropped: tuple[str, ...] = ()
    """Tags around the answer that are left out."""
    signs: tuple[str, ...] = ()
    """Where the tags do not tell families apart: one of them stands in each call that the template writes. Of a family
    with channels, all of them stand in the template or in what it writes."""
    thought: ThoughtTags | None = None
    """The texts around reasoning, if they are not among `THOUGHTS`: in the file, its end and what comes before that."""
    channels: Channels | None = None

    # What models write besides, as texts or regular expressions. "" for what follows from the texts above.
    also_begins: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()
    head: str = ""
    """What stands before the arguments, with the group `name`."""
    tail: str = ""
    """What stands behind the arguments."""
    argument_head: str = ""
    """What stands before a value, with the group `key`; `kind` is its type, where "true" and "string" mean text."""
    argument_end: str = ""
    head_tags: tuple[str, ...] = ()
    """Tags that stand in `head` alone."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that open one or several calls. The chat template writes the first."""
        return tuple(filter(None, (self.begin.removesuffix("[").rstrip(), *self.also_begins, self.bare)))

    @property
    def ends(self) -> tuple[str, ...]:
        end = self.end.removeprefix("]") if self.begin.endswith("[") else self.end
        return tuple(filter(None, (end.strip(), *self.also_ends)))

    @property
    def before(self) -> str:
        """The text before all calls."""
        return "" if self.each else self.lead + self.begin

    @property
    def after(self) -> str:
        """The text behind all calls."""
        return "" if self.each else self.end

    @property
    def whole_call(self) -> str:
        """One call with all that is repeated for each."""
        return f"{self.lead}{self.begin}{self.call}{self.end}" if self.each else self.call

    @property
    def is_bare(self) -> bool:
        """Returns whether calls are objects without tags."""
        return bool(self.signs) and self.body == "objects"

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that together contain all tags of this family."""
        texts = (self.lead, self.begin, self.call, self.argument, self.between, self.end, self.quotes, self.bare)
        channels = self.channels.tags if self.channels else ()
        return (*texts, *self.also_begins, *self.also_ends, *self.head_tags, *self.dropped, *channels)


THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|think|>", "<|end|>"),
)
"""Tags around reasoning."""


def _family(name: str, entry: dict[str, Any]) -> Family:
    """Returns the family of a table of the file. Raises TypeError for a field that there is not."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    if thought := fields.pop("thought", None):
        fields["thought"] = ThoughtTags(None, *thought)
    if channels := fields.pop("channels", None):
        header, tags, kept = channels["header"], channels.get("tags", ()), channels.get("kept", ())
        fields["channels"] = Channels("".join(header), channels["end"], tuple(tags), tuple(kept))
    return Family(name, **fields)


_ENTRIES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
NONE = _family("none", _ENTRIES.pop("none"))
"""What small models write, whatever their template writes."""
FAMILIES = [_family(name, entry) for name, entry in _ENTRIES.items()]
"""All others, in the order in which they are tried."""
