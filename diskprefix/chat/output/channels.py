"""Parses replies that are messages with headers, each for a recipient: gpt-oss, Muse Glimmer, Functionary 3.2."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar

import regex

from diskprefix.chat.output.calls import CallReader, Calls, alternatives, any_of
from diskprefix.chat.output.families import ATEM
from diskprefix.chat.output.parser import StreamParser
from diskprefix.chat.output.reader import Step, Take
from diskprefix.chat.output.tools import Tools


@lru_cache(maxsize=4)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """Returns a pattern, which may hold the names of tools: a thousand long ones take 30 MiB. The module keeps 500."""
    return regex.compile(pattern, cache_pattern=False)


class ChannelParser(StreamParser):
    """Parses a reply message by message. What has no header is content."""

    tags: ClassVar[tuple[str, ...]] = ()
    """The tags around messages; a stray one is dropped, unless it is in `kept`."""
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Tools, prompt_end: str) -> None:
        super().__init__()
        self.tools = tools
        self.made = Calls(self.emit)
        self._header = _compiled(self.header())
        self._tag = _compiled(self.tag())
        self._end = _compiled(self.end_of_message())
        # A reply that goes on with a message whose header stands in the prompt.
        self._begun = prompt_end[max(0, prompt_end.rfind("<|start|>")) :]

    @abstractmethod
    def header(self) -> str:
        """Returns a pattern of headers."""

    @abstractmethod
    def end_of_message(self) -> str:
        """Returns a pattern of what ends a message."""

    def tag(self) -> str:
        """Returns a pattern of what no content goes on with."""
        return alternatives(self.tags)

    @abstractmethod
    def message(self, header: regex.Match[str]) -> Step[None]:
        """Reads the text of a message."""

    def reply(self) -> Step[None]:
        """See `StreamParser`."""
        header = self._header.fullmatch(self._begun)
        while True:
            if header is None:
                header = yield from self.reader.match(self._header)
            if header is not None:
                yield from self._begin(header)
                header = None
            elif not (yield from self._stray()):
                break
        self.end()

    def _begin(self, header: regex.Match[str]) -> Step[None]:
        self.drop_space()
        self.reader.forget(at_line_start=True)
        yield from self.message(header)

    def _stray(self) -> Step[bool]:
        """Passes text without a header on as content, up to the next one or a tag. Returns False at the end."""
        found = yield from self.reader.until(self._tag, self.content)
        if found is None:
            return False
        header = yield from self.reader.match(self._header)
        if header is not None:
            yield from self._begin(header)
        else:
            self.reader.at = found.end()
            if found[0] in self.kept:
                self.content(found[0])
        return True

    def call(self, name: str) -> Step[None]:
        """Reads a message that is the JSON of a call's arguments. What stands behind it is content."""
        self.made.begin(name)
        first = yield from self.reader.peek()
        is_whole = False
        if first == "{":
            is_whole = yield from self.reader.json(self.made.arguments, forgets=True)
            yield from self.reader.space()
        elif not first or (yield from self.reader.looks_at(self._end)):
            self.made.arguments("{}")
            is_whole = True
        yield from self.body(self.content if is_whole else self.made.arguments)

    def body(self, take: Take) -> Step[None]:
        """Hands the text of a message to `take`, and reads its end."""
        found = yield from self.reader.until(self._end, take)
        if found is not None:
            self.reader.at = found.end()


class HarmonyParser(ChannelParser):
    """gpt-oss. The channel `analysis` is reasoning, `final` is content; what goes to `functions.…` is a call."""

    tags = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    kept = tags[:3]

    def header(self) -> str:
        """See `ChannelParser`. The recipient may stand before the channel or behind it. Nothing is given back (`++`):
        else each of many blanks or letters would be tried as the end of what repeats."""
        to = r"(?:to=(?P<to>[^\s<]++)\s*+)?"
        return (
            rf"(?:<\|start\|>\s*+assistant)?\s*+{to}<\|channel\|>\s*+(?P<channel>\w++)\s*+{to}"
            r"(?:<\|constrain\|>)?\s*+(?:\w++\s*+)?<\|message\|>"
        )

    def end_of_message(self) -> str:
        """See `ChannelParser`."""
        return r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)"

    def message(self, header: regex.Match[str]) -> Step[None]:
        """See `ChannelParser`."""
        to = header["to"] or ""
        if to.startswith("functions.") and self.tools:
            yield from self.call(to.removeprefix("functions."))
        else:
            yield from self.body(self.reasoning if header["channel"] == "analysis" else self.content)


class MuseParser(ChannelParser):
    """Muse Glimmer. What goes to `self` is reasoning, to `user` content; what goes to a tool is a call with tags."""

    tags = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
    kept = tags[:1]

    def header(self) -> str:
        """See `ChannelParser`."""
        return r"(?:<\|start\|>\s*+assistant)?\s*+(?:to=(?P<to>[^\s<]++)\s*+)?<\|message\|>"

    def end_of_message(self) -> str:
        """See `ChannelParser`."""
        return r"<\|eo[mt]\|>|(?=<\|start\|>)"

    def message(self, header: regex.Match[str]) -> Step[None]:
        """See `ChannelParser`."""
        if header["to"] not in (None, "self", "user", "commentary") and self.tools:
            yield from self.reader.space()
            calls = CallReader(self.reader, ATEM, self.tools, self.made)
            at = self.reader.at
            if not (yield from self.reader.match(any_of(ATEM.begins))) or not (yield from calls.group()):
                self.reader.at = at
        yield from self.body(self.reasoning if header["to"] == "self" else self.content)


class FunctionaryParser(ChannelParser):
    """Functionary 3.2: `>>>`, the name of a tool or `all` for content, and a line end."""

    def header(self) -> str:
        """See `ChannelParser`. The template may have written `>>>`."""
        return rf"(?:>>>)?(?P<to>{self._recipients()})\n"

    def _recipients(self) -> str:
        return alternatives(["all", *self.tools.names])

    def end_of_message(self) -> str:
        """See `ChannelParser`."""
        return rf"(?=>>>(?:{self._recipients()})\n)"

    def tag(self) -> str:
        """See `ChannelParser`."""
        return self.end_of_message()

    def message(self, header: regex.Match[str]) -> Step[None]:
        """See `ChannelParser`."""
        if header["to"] == "all":
            yield from self.body(self.content)
        else:
            yield from self.call(header["to"])
