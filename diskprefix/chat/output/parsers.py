"""Parses replies: reasoning, content and calls, by families with tags and by formats of messages with headers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import regex

from diskprefix.chat.output.call_reader import CallDeltas, CallReader, alternatives, any_of
from diskprefix.chat.output.call_values import OfferedTools
from diskprefix.chat.output.families import ATEM, PLAIN, Family
from diskprefix.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin
from diskprefix.chat.output.reader import Parsing, Reader, Take

Thoughts = Sequence[tuple[str, str]]
"""Pairs of tags around reasoning."""

_PIECE = 2048
"""Characters of a long text that are parsed at a time."""
_INLINE = r'\{(?=\s*"(?:name|type|function|arguments|parameters)"\s*:)'
_FENCE = r"```\w*"
_WRAPPERS = (
    *("tools", "tool", "tool_call", "tool_calls", "function_call", "function_calls"),
    *("response", "json", "JSON", "xml"),
)
"""Names of tags that small models write around calls, whatever their template writes."""
_WRAPPER_END = any_of(["```", *(f"</{name}>" for name in _WRAPPERS)])


class StreamParser(ABC):
    """A parser that is written as one generator, `reply`, and runs whenever text comes."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._out: list[OutputDelta] = []
        self.space: list[str] = []
        """White space that is held, because it is dropped before a tag."""
        self._space_is: Callable[[str], OutputDelta] = ContentDelta
        self._running = self.reply()

    @abstractmethod
    def reply(self) -> Parsing[None]:
        """Parses a whole reply, and calls `emit`, `content` and `reasoning`."""

    def feed(self, text: str) -> list[OutputDelta]:
        # Each step may look at all text that has come.
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return [delta for piece in pieces if self.reader.add(piece) for delta in self._run()]

    def finish(self) -> list[OutputDelta]:
        self.reader.end()
        return self._run()

    def _run(self) -> list[OutputDelta]:
        next(self._running, None)
        out, self._out = self._out, []
        return out

    def emit(self, delta: OutputDelta) -> None:
        """Adds `delta` to the result. White space before a call is dropped."""
        if isinstance(delta, ToolCallBegin):
            self.space.clear()
        self._out.append(delta)

    def content(self, text: str) -> None:
        """Adds text to the answer. White space at its end is held."""
        self._text(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        """Adds text to the reasoning. Otherwise as `content`."""
        self._text(ReasoningDelta, text)

    def _text(self, delta: Callable[[str], OutputDelta], text: str) -> None:
        shown = text.rstrip()
        if shown:
            self.emit(delta("".join([*self.space, shown])))
            self.space.clear()
        self.space.append(text[len(shown) :])
        self._space_is = delta

    def end(self) -> None:
        """Ends the reply. Held white space belongs to it."""
        if space := "".join(self.space):
            self.emit(self._space_is(space))


class FamilyParser(StreamParser):
    """Parses the replies of a family, and calls without tags if they name a tool of the request."""

    def __init__(self, family: Family, thoughts: Thoughts, tools: OfferedTools, prompt_end: str) -> None:
        super().__init__()
        self._family = family
        self._thoughts = thoughts
        self._opened = next((end for begin, end in thoughts if prompt_end.rstrip().endswith(begin)), None)
        calls = CallDeltas(self.emit)
        self._calls = CallReader(self.reader, family.calls, tools, calls)
        self._plain = CallReader(self.reader, PLAIN, tools, calls)
        self._tools = tools
        self._opener = self._openers(family, is_offered=bool(tools))
        self._begins = self._begins_in_reasoning(family, tools)

    @staticmethod
    def _openers(family: Family, *, is_offered: bool) -> regex.Pattern[str]:
        """Returns a pattern of the beginnings of calls, and of tags around content. The names of the tools are not in
        it: a thousand long ones take a second to compile."""
        kinds = [rf"(?P<drop>{alternatives(family.dropped)})"]
        if is_offered:
            own = {*family.calls.begins, *family.dropped}
            wrapper = alternatives(tag for tag in map("<{}>".format, _WRAPPERS) if tag not in own)
            kinds += [
                rf"(?P<call>{alternatives(family.calls.begins)})",
                r"^\[\s*(?P<python>[\w.]+)\s*\(" if family.calls.body == "python" else r"(?!)",
                r"<function(?:=| name=\")(?P<function>[^<>\"\n]+)\"?>\s*(?=\{)",
                rf"(?P<inline>{_INLINE if family.is_bare else r'(?!)'})",
                rf"(?P<json>^[ \t]{{0,8}}(?:{_FENCE}\s*)?(?:(?:{wrapper})\s*)?(?:\[(?=\s*\{{)|\{{(?=\s*\")))",
            ]
        return regex.compile("|".join(kinds), regex.MULTILINE)

    @staticmethod
    def _begins_in_reasoning(family: Family, tools: OfferedTools) -> str:
        """Returns a pattern of calls that may begin inside reasoning. A tag that is plain text may be quoted there."""
        begins = family.calls.begins if tools else ()
        patterns = [regex.escape(tag) if "|" in tag or "｜" in tag else rf"^{regex.escape(tag)}" for tag in begins]
        return "|".join(patterns) or r"(?!)"

    def reply(self) -> Parsing[None]:
        yield from self._reasoning()
        while (found := (yield from self.reader.until(self._opener, self.content))) is not None:
            if found.lastgroup == "drop":
                self.reader.at = found.end()
                yield from self._behind_tag()
            else:
                yield from self._try_calls(found, self.content)
        self.end()

    def _try_calls(self, found: regex.Match[str], otherwise: Callable[[str], None]) -> Parsing[bool]:
        """Reads the calls that `found` opens. If there are none, hands the text of `found` to `otherwise`."""
        kind, done = found.lastgroup, False
        if kind in ("python", "function") and found[kind] not in self._tools:
            self.reader.at = found.end()
        elif kind in ("json", "inline"):
            self.reader.at = found.end() - 1
            done = yield from self._plain.objects(known_only=True)
            yield from self._wrapper_ends(done)
        elif kind == "function":
            self.reader.at = found.start()
            done = yield from self._plain.group()
        else:
            self.reader.at = (
                found.start() if kind == "python" or found[0] in self._family.calls.bare_heads else found.end()
            )
            done = yield from self._calls.group()
        if done:
            yield from self._behind_tag()
        else:
            self.reader.give_up(found.end())
            otherwise(self.reader.text[found.start() : self.reader.at])
        return done

    def _wrapper_ends(self, done: bool) -> Parsing[None]:
        while done:
            yield from self.reader.space()
            done = (yield from self.reader.match(_WRAPPER_END)) is not None

    def _behind_tag(self) -> Parsing[None]:
        """Drops the white space beside a tag, which belongs to the tag."""
        self.space.clear()
        yield from self.reader.space()
        self.reader.forget(at_line_start=True)

    def _reasoning(self) -> Parsing[None]:
        begins = alternatives(begin for begin, _ in self._thoughts)
        found = yield from self.reader.match(regex.compile(rf"\s*(?P<begin>{begins})"))
        end = dict(self._thoughts)[found["begin"]] if found else self._opened
        if end is None:
            return
        yield from self._behind_tag()
        stop = regex.compile(f"(?P<end>{regex.escape(end)})|(?P<call>{self._begins})", regex.MULTILINE)
        while (found := (yield from self.reader.until(stop, self.reasoning))) is not None:
            if found.lastgroup == "end":
                self.reader.at = found.end()
                yield from self._behind_tag()
                return
            if (yield from self._try_calls(found, self.reasoning)):
                return


@lru_cache(maxsize=4)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern that may hold the names of tools. Keeps few: regex itself would keep 500, of up to 30 MiB."""
    return regex.compile(pattern, cache_pattern=False)


class ChannelParser(StreamParser):
    """Parses a reply message by message. Text without a header is content."""

    tags: ClassVar[tuple[str, ...]] = ()
    """The tags around messages. A stray one is dropped, unless it is in `kept`."""
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: OfferedTools, prompt_end: str) -> None:
        super().__init__()
        self.tools = tools
        self.made = CallDeltas(self.emit)
        self._header = _compiled(self.header())
        self._tag = _compiled(self.tag())
        self._end = _compiled(self.end_of_message())
        # The prompt may end with the header of the first message.
        self._begun = prompt_end[max(0, prompt_end.rfind("<|start|>")) :]

    @abstractmethod
    def header(self) -> str:
        """Returns a pattern of headers."""

    @abstractmethod
    def end_of_message(self) -> str:
        """Returns a pattern of the end of a message."""

    def tag(self) -> str:
        """Returns a pattern that ends text without a header."""
        return alternatives(self.tags)

    @abstractmethod
    def message(self, header: regex.Match[str]) -> Parsing[None]:
        """Reads the text of a message."""

    def reply(self) -> Parsing[None]:
        header = self._header.fullmatch(self._begun) or (yield from self.reader.match(self._header))
        while True:
            if header is not None:
                self.space.clear()
                self.reader.forget(at_line_start=True)
                yield from self.message(header)
            elif (found := (yield from self.reader.until(self._tag, self.content))) is None:
                break
            elif not (yield from self.reader.looks_at(self._header)):
                self.reader.at = found.end()
                if found[0] in self.kept:
                    self.content(found[0])
            header = yield from self.reader.match(self._header)
        self.end()

    def call(self, name: str) -> Parsing[None]:
        """Reads a message that is the JSON of a call's arguments. Text behind the JSON is content."""
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

    def body(self, take: Take) -> Parsing[None]:
        """Hands the text of a message to `take`, and reads its end."""
        found = yield from self.reader.until(self._end, take)
        if found is not None:
            self.reader.at = found.end()


class HarmonyParser(ChannelParser):
    """The parser of gpt-oss. The channel `analysis` is reasoning, `final` is content; `to=functions.…` is a call."""

    tags = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    kept = tags[:3]

    def header(self) -> str:
        # The recipient may stand before the channel or behind it. Possessive quantifiers (`++`) keep the time linear.
        to = r"(?:to=(?P<to>[^\s<]++)\s*+)?"
        return (
            rf"(?:<\|start\|>\s*+assistant)?\s*+{to}<\|channel\|>\s*+(?P<channel>\w++)\s*+{to}"
            r"(?:<\|constrain\|>)?\s*+(?:\w++\s*+)?<\|message\|>"
        )

    def end_of_message(self) -> str:
        return r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)"

    def message(self, header: regex.Match[str]) -> Parsing[None]:
        to = header["to"] or ""
        if to.startswith("functions.") and self.tools:
            yield from self.call(to.removeprefix("functions."))
        else:
            yield from self.body(self.reasoning if header["channel"] == "analysis" else self.content)


class MuseParser(ChannelParser):
    """The parser of Muse Glimmer. `to=self` is reasoning, `to=user` content; a message to a tool is a call in tags."""

    tags = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
    kept = tags[:1]

    def header(self) -> str:
        return r"(?:<\|start\|>\s*+assistant)?\s*+(?:to=(?P<to>[^\s<]++)\s*+)?<\|message\|>"

    def end_of_message(self) -> str:
        return r"<\|eo[mt]\|>|(?=<\|start\|>)"

    def message(self, header: regex.Match[str]) -> Parsing[None]:
        if header["to"] not in (None, "self", "user", "commentary") and self.tools:
            yield from self.reader.space()
            calls = CallReader(self.reader, ATEM, self.tools, self.made)
            at = self.reader.at
            if not (yield from self.reader.match(any_of(ATEM.begins))) or not (yield from calls.group()):
                self.reader.at = at
        yield from self.body(self.reasoning if header["to"] == "self" else self.content)


class FunctionaryParser(ChannelParser):
    """The parser of Functionary 3.2: `>>>`, the name of a tool or `all` for content, and a line end."""

    def header(self) -> str:
        # The template may have written `>>>`.
        return rf"(?:>>>)?(?P<to>{self._recipients()})\n"

    def _recipients(self) -> str:
        return alternatives(["all", *self.tools.names])

    def end_of_message(self) -> str:
        return rf"(?=>>>(?:{self._recipients()})\n)"

    def tag(self) -> str:
        return self.end_of_message()

    def message(self, header: regex.Match[str]) -> Parsing[None]:
        if header["to"] == "all":
            yield from self.body(self.content)
        else:
            yield from self.call(header["to"])
