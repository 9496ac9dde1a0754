"""The tables of `families.py`: how a family writes reasoning and calls. One reader serves them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Body: TypeAlias = Literal["objects", "json", "parameters", "elements", "python", "braces"]
"""What stands inside the tags of a call.

objects     JSON objects with a name and arguments, alone or in an array
json        the head has the name; the body is the JSON of the arguments
parameters  the head has the name; each argument has tags of its own
elements    as parameters, and what is in an object or array has tags of its own too
python      Python calls, alone or in a list
braces      the head has the name; the body is JSON with bare keys and other quotes
"""


@dataclass(frozen=True)
class Written:
    """How calls are written when they are forced: what `grammar.py` makes grammars of.

    In `call`, NAME and ARGUMENTS stand for the call's own, INDEX for any number; in `argument`, KEY, VALUE, and
    IS_TEXT for true or false, or TYPE for the JSON type.
    """

    call: str
    argument: str = ""
    """Of a body that is not JSON."""
    before: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True)
class CallSyntax:
    """How a family writes tool calls.

    `begins` open one or several calls; one of them stands in what the chat template writes. All of `head`, `tail`,
    `argument` and `argument_end` are regular expressions; `head` has the group `name`, `argument` the group `key`, and
    the group `kind` where the tag says whether the value is text: "true" or "string", or anything else.
    A head that is its own tag stands in `begins` too, and is listed in `bare_heads`.
    """

    body: Body
    written: Written
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare_heads: tuple[str, ...] = ()
    head: str = ""
    tail: str = ""
    argument: str = ""
    argument_end: str = ""
    quotes: str = ""
    """Of a body of braces: what stands before and after a text. Of elements: what stands before each tag."""
    name_is_key: bool = False
    """Of a body of objects: {"get_weather": {…}}."""
    more_tags: tuple[str, ...] = ()
    """Tags that only the regular expressions have."""


@dataclass(frozen=True)
class Family:
    """The format of a family of models."""

    name: str
    calls: CallSyntax
    dropped: tuple[str, ...] = ()
    """Tags around the answer that say nothing."""
    marks: tuple[str, ...] = ()
    """One of them stands in a call that the template writes, where the syntax needs no tag."""

    @property
    def is_bare(self) -> bool:
        """Whether calls are objects without tags."""
        return bool(self.marks) and self.calls.body == "objects"

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that hold all the tags of this family."""
        calls, written = self.calls, self.calls.written
        texts = (written.call, written.argument, written.before, written.between, written.after, calls.quotes)
        return (*calls.begins, *calls.ends, *texts, *calls.more_tags, *self.dropped)
