"""The descriptions of families of models in `families.toml`: how they write calls and reasoning. `call_grammar.py`
forces calls, `call_reader.py` and `parsers.py` read them, and `choose_format.py` chooses the family of a template."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.daemon.chat.output.format import ThoughtTags

Body: TypeAlias = Literal["objects", "json", "parameters", "elements", "python", "braces"]
"""The form of a call.

objects     a JSON object with the name and the arguments
json        the name, then the arguments in JSON
parameters  the name, then arguments with tags of their own
elements    like parameters; members of objects and arrays also have tags of their own
python      a Python call
braces      the name, then JSON with bare keys and other quotes
"""


class Channels(Struct, frozen=True):
    """Regular expressions for replies that are messages with headers. NAMES stands for the names of the tools.

    A message is a call if `header` matched its group `name`, reasoning if it matched `thought`, else content. `end`
    ends it. Outside of messages, `tags` are dropped unless they are in `shown`.
    """

    header: str
    end: str
    tags: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    begun: str = ""
    """The beginning of a header that a prompt may end with. The reply then begins with the rest."""


class Family(Struct, frozen=True):
    """The format of calls and reasoning that a family's chat templates write, with placeholders in capitals.

    `call` has NAME and ARGUMENTS, and may have INDEX (any number). The reader allows other blanks, and attributes with
    a placeholder to be absent. `begin` and `end` surround all calls, or with `each` every call, and include the
    brackets of a list.
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
    """The text before `begin`. The reader does not need it."""
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
    """Texts that distinguish families with equal tags: a written call has one of them; with channels, all of them."""
    thought: ThoughtTags | None = None
    """The texts around reasoning, if they are not in `THOUGHTS`. In the file: the end, and the text before it."""
    channels: Channels | None = None

    # Variants that models write, as texts or regular expressions; "" if they follow from the texts above.
    also_begins: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()
    head: str = ""
    """The text before the arguments, with the group `name`."""
    tail: str = ""
    """The text after the arguments."""
    argument_head: str = ""
    """The text before a value, with the group `key`; the group `kind` is its type: "true" and "string" mean text."""
    argument_end: str = ""
    head_tags: tuple[str, ...] = ()
    """Tags in `head` only."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that open one or several calls. The chat template writes the first of them."""
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
        """The text after all calls."""
        return "" if self.each else self.end

    @property
    def whole_call(self) -> str:
        """One call with everything that is repeated for each call."""
        return f"{self.lead}{self.begin}{self.call}{self.end}" if self.each else self.call

    @property
    def is_bare(self) -> bool:
        """True if calls are objects without tags."""
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
    ("<longcat_think>", "</longcat_think>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|think|>", "<|end|>"),
)
"""Tags around reasoning."""


def _family(name: str, entry: dict[str, Any]) -> Family:
    """Returns the family that a table of the file describes. Raises TypeError for an unknown field."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    if thought := fields.pop("thought", None):
        fields["thought"] = ThoughtTags(None, *thought)
    if channels := fields.pop("channels", None):
        header, tags, shown = channels["header"], channels.get("tags", ()), channels.get("shown", ())
        begun = channels.get("begun", "")
        fields["channels"] = Channels("".join(header), channels["end"], tuple(tags), tuple(shown), begun)
    return Family(name, **fields)


_ENTRIES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
NONE = _family("none", _ENTRIES.pop("none"))
"""The format of small models that ignore their template's format."""
FAMILIES = [_family(name, entry) for name, entry in _ENTRIES.items()]
"""All other families, in the order in which they are tried."""
