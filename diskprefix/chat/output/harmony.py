"""Parses the replies of gpt-oss: messages with headers, each for one channel."""

from __future__ import annotations

import regex

from diskprefix.chat.output.calls import Calls
from diskprefix.chat.output.parser import StreamParser
from diskprefix.chat.output.reader import Step, Take
from diskprefix.chat.output.tools import Tools

TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_TO = r"(?:to=(?P<to>[^\s<]+)\s*)?"
_HEADER = regex.compile(
    rf"(?:<\|start\|>\s*assistant)?\s*{_TO}<\|channel\|>\s*(?P<channel>\w+)\s*{_TO}"
    r"(?:<\|constrain\|>)?\s*(?:\w+\s*)?<\|message\|>"
)
_TAG = regex.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_END = regex.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")


class HarmonyParser(StreamParser):
    """The channel `analysis` is reasoning, `final` is content; what goes to `functions.…` is a call."""

    def __init__(self, tools: Tools, prompt_end: str) -> None:
        super().__init__()
        self._tools = tools
        self._made = Calls(self.emit)
        # A reply that goes on with a message whose header stands in the prompt.
        self._begun = prompt_end[max(0, prompt_end.rfind("<|start|>")) :]

    def reply(self) -> Step[None]:
        """See `StreamParser`."""
        header = _HEADER.fullmatch(self._begun)
        while True:
            if header is None:
                header = yield from self.reader.match(_HEADER)
            if header is not None:
                yield from self._message(header)
                header = None
            elif not (yield from self._stray()):
                break
        self.end()

    def _stray(self) -> Step[bool]:
        """Passes text without a header on as content, up to the next tag. Returns False at the end."""
        found = yield from self.reader.until(_TAG, self.content)
        if found is None:
            return False
        header = yield from self.reader.match(_HEADER)
        if header is not None:
            yield from self._message(header)
        else:
            self.reader.at = found.end()
            if found[0] in ("<|start|>", "<|channel|>", "<|constrain|>"):
                self.content(found[0])
        return True

    def _message(self, header: regex.Match[str]) -> Step[None]:
        self.drop_space()
        self.reader.forget(at_line_start=True)
        to = header["to"] or ""
        if to.startswith("functions.") and self._tools:
            self._made.begin(to.removeprefix("functions."))
            if (yield from self.reader.peek()) == "{":
                yield from self.reader.json(self._made.arguments)
            yield from self._body(self._made.arguments)
        elif header["channel"] == "analysis":
            yield from self._body(self.reasoning)
        else:
            yield from self._body(self.content)

    def _body(self, take: Take) -> Step[None]:
        found = yield from self.reader.until(_END, take)
        if found is not None:
            self.reader.at = found.end()
