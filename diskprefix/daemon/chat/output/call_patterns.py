"""Builds the regular expressions that read a family's calls from its description."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import regex

from diskprefix.daemon.chat.output.families import Family
from diskprefix.fair_cache import FairCache
from diskprefix.values import Asker, Tenant


def any_of(texts: Iterable[str]) -> regex.Pattern[str]:
    """Returns a pattern of literal texts, longest first. Without texts, it never matches."""
    return regex.compile(alternatives(texts))


def alternatives(texts: Iterable[str]) -> str:
    """Returns the regular expression of `any_of`."""
    return "|".join(regex.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"


COMPILED = FairCache[tuple[Tenant, str], regex.Pattern[str]](8)
"""Patterns with names of tools. Few: regex itself would keep 500 of up to 30 MiB."""


def compiled_for(asker: Asker, pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern with names of tools, which takes long, once for each tenant: the time must not show one tenant
    which tools another has."""
    key = asker.tenant, pattern
    return COMPILED.get_or_make(key, asker.share, lambda: regex.compile(pattern, cache_pattern=False))


NAME_KEYS = {"name", "tool_name", "function", "function_name", "tool"}
ARGUMENT_KEYS = {"arguments", "parameters", "args", "params", "input"}
OTHER_KEYS = {"id", "type", "tool_call_id", "call_id", "index"}
KNOWN_KEYS = NAME_KEYS | ARGUMENT_KEYS | OTHER_KEYS
"""The members of an object that is a call."""
_PARTS = regex.compile(
    r' (?P<attribute>\w+)="(?P<value>INDEX|TYPE|IS_TEXT)"|(?P<placeholder>NAME|KEY|INDEX)|(?P<closing></[^<>]+>)'
    r"|(?P<blanks>\s+|(?<=>)(?=<))|(?P<text>.)"
)
_READ_AS = {
    "NAME": r"(?P<name>[^%s\n]++)",
    "KEY": r"(?P<key>[^%s\n]++)",
    "INDEX": r"[^%s\n]*",
    "IS_TEXT": r"(?P<kind>true|false)",
    "TYPE": r"(?P<kind>\w+)",
}
"""The patterns of placeholders; %s is the character after the placeholder."""


def _read_as(written: str) -> str:
    """Returns the regular expression of a text of a `Family`. Models omit closing tags, and write blanks between
    tags."""
    parts = []
    for match in _PARTS.finditer(written.strip()):
        if name := match["attribute"]:
            value = _READ_AS[match["value"]].replace("%s", '"')
            parts.append(f'(?: {name}="{value}")?')
        elif match["placeholder"]:
            after = written.strip()[match.end() : match.end() + 1]
            parts.append(_READ_AS[match[0]].replace("%s", after) if after else r"(?P<name>[\w.\-]+)")
        elif match["closing"]:
            parts.append(rf"(?:\s*+{regex.escape(match[0])})?")
        else:
            parts.append(regex.escape(match[0]) if match["text"] else r"\s*+")
    return "".join(parts)


def strings_of(quotes: str) -> regex.Pattern[str]:
    """Returns a pattern of strings between `quotes`, and of JSON and Python strings. The last one may lack its end."""
    between = [rf"{regex.escape(quotes)}.*?(?:{regex.escape(quotes)}|\Z)"] if quotes else [_string("'")]
    return regex.compile("|".join([*between, _string('"')]), regex.DOTALL)


def _string(quote: str) -> str:
    return rf"{quote}(?:[^{quote}\\]|\\.)*+(?:{quote}|\\?\Z)"


def _begun_object(family: Family) -> str:
    """Returns the regular expression of the beginning of an object that is a call."""
    key = r"[^\"\s]++" if family.call.startswith("{NAME") else "|".join(sorted(KNOWN_KEYS))
    return rf"\{{\s*[\"'](?:{key})[\"']\s*:"


def _next_call(family: Family, head: str) -> str:
    """Returns the regular expression of the beginning of another call: a text may have its tag too."""
    named = head.replace("?P<name>", "?:") or r"(?!)"
    if family.body == "objects":
        return rf"(?:{alternatives(family.begins)})\s*+(?:(?:\[\s*+)?{_begun_object(family)}|{named})"
    alone = named if family.call.partition("NAME")[0].strip() else r"(?!)"
    return rf"(?:{alternatives(family.begins)})\s*+(?:{named})|{alone}"


@lru_cache(100)
def patterns_of(family: Family) -> CallPatterns:
    """Returns the patterns of a family. Making them takes longer than reading most replies."""
    return CallPatterns(family)


class CallPatterns:
    """The regular expressions that read the calls of a family."""

    def __init__(self, family: Family) -> None:
        head, tail = (part.strip() for part in family.call.split("ARGUMENTS"))
        key, _, value_end = family.argument.partition("VALUE")
        self.ends = any_of(family.ends)
        strings = strings_of(family.quotes).pattern
        self.ends_or_strings = regex.compile(f"(?P<string>{strings})|{self.ends.pattern}", regex.DOTALL)
        """`ends`, or a string as the group `string`: a tag in a string does not end a call."""
        written_tail = family.tail or regex.escape(tail) or r"(?!)"
        self.tail = regex.compile(written_tail)
        pattern = family.head
        if not pattern and family.body not in ("objects", "python"):
            pattern = _read_as(head)
            if head.endswith("NAME"):
                # The name ends where the arguments begin.
                tags = key.partition("KEY")[0], family.end, value_end.strip()
                pattern += rf"\s*(?={alternatives(['{'] if family.body == 'braces' else filter(None, tags))})"
        self.head = regex.compile(pattern) if pattern else None
        nexts = _next_call(family, pattern)
        # A call is over before its end, the end of all calls or of the message, or the next call.
        over = rf"{r'(?!)' if family.body == 'objects' else written_tail}|{self.ends.pattern}|{nexts}"
        if family.channels and family.body != "json":
            over += f"|{family.channels.end}"
        self.over = regex.compile(over)
        self.over_or_strings = regex.compile(f"(?P<string>{strings})|{over}", regex.DOTALL)
        self.closed = regex.compile(rf"{written_tail}|{self.ends.pattern}")
        next_object = rf"[,;]?\s*{_begun_object(family)}" if family.body == "objects" else r"(?!)"
        self.after_object = regex.compile(rf"{next_object}|{family.tail or r'(?!)'}|{over}")
        """What follows a call whose braces are closed."""
        written_end = family.tail or (tail if family.body != "objects" else "")
        self.has_end = bool(written_end) or any(end != "```" for end in family.ends)
        """A fence is no end: a text may have it too."""
        argument = family.argument_head or _read_as(key)
        # One line end before a value is not part of it.
        self.argument = regex.compile(argument + (r"(?:\n|(?=[^\n]))" if key.endswith("\n") else ""))
        end = family.argument_end or regex.escape(value_end.strip()) or r"(?!)"
        self.stray = regex.compile(end)
        """A tag that ends no value."""
        following = argument.replace("?P<key>", "?P<next>")

        def end_of_value(rest: str, after_tail: str) -> regex.Pattern[str]:
            """Returns the pattern of the end of a value. What follows must be an argument (the group `next`), the end
            of the call, or `rest`: a text may have the same tag. Models omit the tag where one line end is written
            before it. Then an argument must begin a line, and a call end with `after_tail`."""
            follows = rf"(?=\s*(?:{over}|{following}|{rest}))"
            if not value_end.startswith("\n"):
                return regex.compile(end + follows)
            return regex.compile(rf"\n?{end}{follows}|\n(?={following})|\n?(?=(?:{written_tail})\s*{after_tail})")

        self.argument_end = end_of_value(r"(?!)", rf"(?:{self.ends.pattern})\s*(?:{nexts})")
        self.last_argument_end = end_of_value(r"\Z", rf"(?:(?:{self.ends.pattern})\s*)?(?:{nexts}|\Z)")
        """The end of a value in the last text of a reply that the model ended."""
