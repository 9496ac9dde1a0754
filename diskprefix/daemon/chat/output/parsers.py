"""Parses replies into reasoning, content and calls: one parser for tags, one for messages with headers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import regex

from diskprefix.daemon.chat.output.call_patterns import alternatives, any_of, compiled_for
from diskprefix.daemon.chat.output.call_reader import WRAPPER_END, WRAPPERS, CallDeltas, CallReader
from diskprefix.daemon.chat.output.call_values import OfferedTools
from diskprefix.daemon.chat.output.families import NONE, Channels, Family
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin
from diskprefix.daemon.chat.output.reader import Parsing, Reader, Take
from diskprefix.values import NO_ASKER, Asker

Thoughts = Sequence[tuple[str, str]]
"""Pairs of tags around reasoning."""

_PIECE = 2048
"""Characters that are parsed at a time."""
_INLINE = r'\{(?=\s*"(?:name|type|function|arguments|parameters)"\s*:)'
_FENCE = r"```\w*"


class StreamParser(ABC):
    """A parser written as one generator, `reply`, which runs whenever text comes."""

    has_draft = False

    def __init__(self) -> None:
        self.reader = Reader()
        self._out: list[OutputDelta] = []
        self.space: list[str] = []
        """Held white space, which is dropped if a tag follows."""
        self._space_is: Callable[[str], OutputDelta] = ContentDelta
        self._running = self.reply()

    @abstractmethod
    def reply(self) -> Parsing[None]:
        """Parses a whole reply, and calls `emit`, `content` and `reasoning`."""

    def feed(self, text: str) -> list[OutputDelta]:
        # Each step may look at all text so far.
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return [delta for piece in pieces if self.reader.add(piece) for delta in self._run()]

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:
        self.reader.end(is_whole=is_whole)
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
        """Adds text to the reasoning, like `content`."""
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
        self._made = CallDeltas(self._emit_call)
        self._calls = CallReader(self.reader, family, tools, self._made)
        self._plain = CallReader(self.reader, NONE, tools, self._made)
        self.has_draft = False
        self._drafted: list[OutputDelta] = []
        """The calls at the end of the thought so far, held until something follows them or the reply ends."""
        self._draft: list[str] = []
        """Their text."""
        self._tools = tools
        self._opener = self._openers(family, is_offered=bool(tools))
        # Inside reasoning, a tag of plain text may be a quotation unless it begins a line.
        begins = family.begins if tools else ()
        patterns = [regex.escape(tag) if "|" in tag or "｜" in tag else rf"^{regex.escape(tag)}" for tag in begins]
        self._begins = "|".join(patterns) or r"(?!)"

    @staticmethod
    def _openers(family: Family, *, is_offered: bool) -> regex.Pattern[str]:
        """Returns a pattern of the beginnings of calls and of tags around content. It has no names of tools, which
        would compile slowly."""
        kinds = [rf"(?P<drop>{alternatives(family.dropped)})"]
        if is_offered:
            own = {*family.begins, *family.dropped}
            wrapper = alternatives(tag for tag in map("<{}>".format, WRAPPERS) if tag not in own)
            kinds += [
                rf"(?P<call>{alternatives(family.begins)})",
                r"^\[\s*(?P<python>[\w.]+)\s*\(" if family.body == "python" else r"(?!)",
                r"<function(?:=| name=\")(?P<function>[^<>\"\n]+)\"?>\s*(?=\{)",
                rf"(?P<inline>{_INLINE if family.is_bare else r'(?!)'})",
                rf"(?P<json>^[ \t]{{0,8}}(?:{_FENCE}\s*)?(?:(?:{wrapper})\s*)?(?:\[(?=\s*\{{)|\{{(?=\s*\")))",
            ]
        return regex.compile("|".join(kinds), regex.MULTILINE)

    def reply(self) -> Parsing[None]:
        yield from self._reasoning()
        self._made.count = 0
        while (match := (yield from self.reader.until(self._opener, self.content))) is not None:
            if match.lastgroup == "drop":
                self.reader.at = match.end()
                yield from self._after_tag()
            else:
                yield from self._try_calls(match, self.content)
        if self._drafted:
            # Nothing followed them but the end of the thought.
            self._out += self._drafted
        else:
            self.end()

    def emit(self, delta: OutputDelta) -> None:
        self.has_draft = False
        if self._draft:
            # The thought continues, or something else is the reply: the calls are text of the thought.
            draft = "".join(self._draft)
            self._draft.clear()
            self._drafted.clear()
            if isinstance(delta, ReasoningDelta):
                delta = ReasoningDelta(draft + delta.text)
            else:
                super().emit(ReasoningDelta(draft.rstrip()))
        super().emit(delta)

    def _emit_call(self, delta: OutputDelta) -> None:
        if self._calls.in_thought:
            self._drafted.append(delta)
            self.has_draft = True
        else:
            self.emit(delta)

    def _try_calls(self, match: regex.Match[str], otherwise: Callable[[str], None]) -> Parsing[bool]:
        """Reads the calls that `match` opens. Without calls, passes the text of `match` to `otherwise`."""
        kind, done = match.lastgroup, False
        if kind in ("python", "function") and match[kind] not in self._tools:
            self.reader.at = match.end()
        elif kind in ("json", "inline"):
            self.reader.at = match.end() - 1
            ends = done = yield from self._plain.objects(known_only=True, in_fence="```" in match[0])
            while ends:
                yield from self.reader.space()
                ends = (yield from self.reader.match(WRAPPER_END)) is not None
        elif kind == "function":
            self.reader.at = match.start()
            done = yield from self._plain.group()
        else:
            self.reader.at = match.start() if kind == "python" or match[0] == self._family.bare else match.end()
            done = yield from self._calls.group()
        if done:
            yield from self._after_tag()
        else:
            self.reader.give_up(match.end())
            otherwise(self.reader.text[match.start() : self.reader.at])
        return done

    def _after_tag(self) -> Parsing[None]:
        """Drops the white space around a tag."""
        self.space.clear()
        yield from self.reader.space()
        self.reader.forget(at_line_start=True)

    def _reasoning(self) -> Parsing[None]:
        begins = alternatives(begin for begin, _ in self._thoughts)
        match = yield from self.reader.match(regex.compile(rf"\s*(?P<begin>{begins})"))
        end = dict(self._thoughts)[match["begin"]] if match else self._opened
        if end is None:
            return
        yield from self._after_tag()
        stop = regex.compile(f"(?P<end>{regex.escape(end)})|(?P<call>{self._begins})", regex.MULTILINE)
        while (match := (yield from self.reader.until(stop, self.reasoning))) is not None:
            if match.lastgroup == "end":
                self.reader.at = match.end()
                yield from self._after_tag()
                return
            yield from self._try_draft(match, end)
        if self._draft and not self.reader.is_whole:
            # The thought was cut off: what would have come next might have rejected the calls.
            self.emit(ReasoningDelta(""))

    def _try_draft(self, match: regex.Match[str], end: str) -> Parsing[None]:
        """Reads calls in a thought, whose tag `end` ends them too. They count if nothing but the end of the thought
        follows them."""
        if not self._drafted:
            self._made.count = 0
        num_drafted, self._calls.in_thought = len(self._drafted), True
        space, self.space = self.space, []
        refused: list[str] = []
        self.reader.begin_copy()
        self.reader.begin_bound(end)
        yield from self._try_calls(match, refused.append)
        self.reader.end_bound()
        text, self._calls.in_thought = self.reader.end_copy(), False
        if len(self._drafted) > num_drafted:
            self._draft += [*space, text]
        else:
            self.space = space
            self.reasoning("".join(refused))


class ChannelParser(StreamParser):
    """Parses a reply message by message. Text without a header is content."""

    def __init__(
        self, family: Family, channels: Channels, tools: OfferedTools, prompt_end: str, asker: Asker = NO_ASKER
    ) -> None:
        super().__init__()
        self._channels = channels
        self._tools = tools
        self._names_call = family.body == "json"
        self._has_begin = bool(family.begins)
        self._made = CallDeltas(self.emit)
        self._calls = CallReader(self.reader, family, tools, self._made)
        self._begin = any_of(family.begins)
        names = alternatives(tools.names)
        self._header = compiled_for(asker, channels.header.replace("NAMES", names))
        self._end = compiled_for(asker, channels.end.replace("NAMES", names))
        self._tag = any_of(channels.tags) if channels.tags else self._end
        # The prompt may end with the header of the first message.
        start = channels.tags[0] if channels.tags else "<|start|>"
        self._begun_header = prompt_end[max(0, prompt_end.rfind(start)) :]
        self._num_begun = len(channels.begun) if channels.begun and prompt_end.endswith(channels.begun) else 0
        if self._num_begun:
            self.reader.add(channels.begun)

    def reply(self) -> Parsing[None]:
        header = self._header.fullmatch(self._begun_header)
        if header is None or self._channels.begun:
            header = (yield from self.reader.match(self._header)) or header
        if header is None:
            self.reader.at += self._num_begun
        while True:
            if header is not None:
                self.space.clear()
                self.reader.forget(at_line_start=True)
                yield from self._message(header.groupdict())
            elif (match := (yield from self.reader.until(self._tag, self.content))) is None:
                break
            elif not (yield from self.reader.looks_at(self._header)):
                self.reader.at = match.end()
                if match[0] in self._channels.shown:
                    self.content(match[0])
            header = yield from self.reader.match(self._header)
        self.end()

    def _message(self, header: dict[str, str | None]) -> Parsing[None]:
        if (name := header["name"]) is None or not self._tools:
            yield from self._body(self.reasoning if header.get("thought") else self.content)
        elif self._names_call:
            yield from self._call(name)
        else:
            yield from self.reader.space()
            at = self.reader.at
            has_begun = not self._has_begin or (yield from self.reader.match(self._begin)) is not None
            if not has_begun or not (yield from self._calls.group()):
                self.reader.at = at
            yield from self._body(self.content)

    def _call(self, name: str) -> Parsing[None]:
        """Reads a message that is the JSON of a call's arguments. Other text is added to them, so that no client takes
        them for whole."""
        self._made.begin(name)
        first = yield from self.reader.peek()
        if first == "{" and (yield from self.reader.json(self._made.arguments, forgets=True, closes=False)):
            yield from self._calls.stray_braces()
            if (yield from self._is_over()):
                self._made.arguments("}")
        elif first != "{" and (yield from self._is_over()):
            self._made.arguments("{}")
        yield from self._body(self._made.arguments)

    def _is_over(self) -> Parsing[bool]:
        return self.reader.is_over or (yield from self.reader.looks_at(self._end))

    def _body(self, take: Take) -> Parsing[None]:
        """Hands the text of a message to `take`, and reads its end."""
        match = yield from self.reader.until(self._end, take)
        if match is not None:
            self.reader.at = match.end()
