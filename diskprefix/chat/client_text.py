"""Keeps the texts of clients apart from what a chat template writes, so that they spell no tokens.

Before a conversation is rendered, the characters of a text that spell a token are replaced by *stand-ins*: characters
of Unicode's private use area. A template copies, trims and joins them as it does letters. In its output each stand-in
says two things: which character it stands for, and that a client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from diskprefix.errors import InvalidRequest

T = TypeVar("T")

_PRIVATE = range(0xF0000, 0x10FFFE)
_ESCAPED = {ord('"'), ord("\\")}
"""Characters that JSON escapes. They are replaced only if a text has no others."""


class TokenTexts:
    """Finds texts of tokens as tokenizers do: the leftmost, and of these the longest. With `ignores_case` it also finds
    what becomes one in other letters. `cuts` are texts at which a template may cut others."""

    def __init__(self, texts: Iterable[str], *, ignores_case: bool = False, cuts: Iterable[str] = ()) -> None:
        self.texts = frozenset(filter(None, texts))
        self._fold: Callable[[str], str] = str.lower if ignores_case else str
        folded = {self._fold(text) for text in self.texts}
        self._pattern = re.compile(_alternatives(folded), re.IGNORECASE if ignores_case else 0)
        self._border = re.compile(_alternatives({*folded, *cuts}), self._pattern.flags)
        self._most = max(map(len, folded), default=1) - 1
        # A word is not taken for the beginning or the end of a token.
        self._begins = {text[:k] for text in folded for k in range(1, len(text)) if not text[:k].isalnum()}
        self._ends = {text[k:] for text in folded for k in range(1, len(text)) if not text[k:].isalnum()}

    def replaced(self, text: str, replace: Callable[[str], str]) -> str:
        """Returns `text` with every token's text replaced, those that overlap others too."""
        before = None
        while before != text and self._pattern.search(text):
            before, text = text, self._pattern.sub(lambda match: replace(match[0]), text)
        return text

    def with_ends_replaced(self, text: str, replace: Callable[[str], str]) -> str:
        """Returns `text` with its ends replaced where they are parts of a token's text, which the text beside them may
        complete. Templates trim blanks, so these do not count, and they cut replies at tags."""
        pieces, begin = [], 0
        for match in self._border.finditer(text):
            pieces += [self._at_ends(text[begin : match.start()], replace), match[0]]
            begin = match.end()
        return "".join([*pieces, self._at_ends(text[begin:], replace)])

    def _at_ends(self, text: str, replace: Callable[[str], str]) -> str:
        said = text.strip()
        if not said:
            return text
        begin = text.index(said)
        end = begin + len(said)
        last, first = self._fold(said[-self._most :]), self._fold(said[: self._most])
        if size := next((k for k in range(len(last), 0, -1) if last[-k:] in self._begins), 0):
            text = text[: end - size] + replace(text[end - size : end]) + text[end:]
        if size := next((k for k in range(len(first), 0, -1) if first[:k] in self._ends), 0):
            text = text[:begin] + replace(text[begin : begin + size]) + text[begin + size :]
        return text

    def spell(self, text: str, begin: int, end: int) -> bool:
        """Returns whether a token's text in `text` has one of the characters from `begin` to `end`."""
        matches = (self._pattern.match(text, start) for start in range(max(0, begin - self._most), end))
        return any(match is not None and match.end() > begin for match in matches)


def _alternatives(texts: Collection[str]) -> str:
    """Returns a pattern for texts, written as a tree: of thousands of texts, few are tried at each place."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(char) + write(child) for char, child in sorted(node.items()) if char]
        if len(branches) == 1 and "" not in node:
            return branches[0]
        return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}" if branches else ""

    return write(tree) or "(?!)"


class TextRule(NamedTuple):
    """The tokens that a text of a client must not spell: those of `never`. It may spell those that are `doubtful`, but
    no boundary is behind them."""

    never: TokenTexts
    doubtful: TokenTexts


class TextRules:
    """The rules for the texts of clients, of system messages and of replies. `every` are all tokens of them. With
    `joins`, tokens that a text spells together with its surroundings stay tokens."""

    def __init__(
        self, client: TextRule, system: TextRule, reply: TextRule, every: TokenTexts, *, joins: bool = False
    ) -> None:
        self.client, self.system, self.reply, self.every, self.joins = client, system, reply, every, joins
        characters = "".join(every.texts)
        self.characters = sorted({*characters, *characters.lower(), *characters.upper()})
        self.usual = StandIns(self)
        """The stand-ins for clients that use none of these characters themselves."""


Change: TypeAlias = Callable[[TextRule, str], str]
"""Returns a text with stand-ins."""


class StandIns:
    """The stand-ins of one prompt, which are not `used` in it. Every function keeps the length of a text."""

    def __init__(self, rules: TextRules, used: Collection[str] = ()) -> None:
        self._rules = rules
        free = (code for code in _PRIVATE if code & 0xFFFF < 0xFFFE and chr(code) not in used)
        kinds = [{ord(char): code for char, code in zip(rules.characters, free)} for _ in range(3)]  # noqa: B905
        if len(kinds[-1]) < len(rules.characters):
            raise InvalidRequest("the prompt has nearly all characters of Unicode's private use area")
        self._never, self._doubtful, self._ends = kinds
        self._originals = {code: char for kind in kinds for char, code in kind.items()}
        self._doubtful_originals = {code: char for char, code in self._doubtful.items()}
        self._end = re.compile(_any_of(self._ends.values()))
        self._any = re.compile(_any_of(self._originals))
        self._any_escaped = re.compile(r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")

    def are_in(self, text: str) -> bool:
        return self._any.search(text) is not None

    def change(self, rule: TextRule, text: str) -> str:
        """Returns a text of a client with stand-ins."""
        text = rule.never.replaced(text, lambda spelled: _translated(spelled, self._never))
        text = self._rules.every.with_ends_replaced(text, lambda spelled: _translated(spelled, self._ends))
        return rule.doubtful.replaced(text, lambda spelled: _translated(spelled, self._doubtful))

    def unescaped(self, written: str) -> str:
        """Returns what a template wrote without the escapes of JSON in the place of stand-ins."""

        def stand_in(match: re.Match[str]) -> str:
            char = chr(0x10000 + (int(match[1], 16) - 0xD800 << 10) + int(match[2], 16) - 0xDC00)
            return char if ord(char) in self._originals else match[0]

        return self._any_escaped.sub(stand_in, written)

    def text(self, written: str) -> str:
        """Returns the text that is written: each character is the client's."""
        return self._any.sub(lambda match: match[0].translate(self._originals), written)

    def for_tokens(self, written: str) -> str:
        """Returns what is written with stand-ins only where a token's text must become no token."""
        text = self.text(written)
        shown = self._any.sub(lambda match: match[0].translate(self._doubtful_originals), written)

        def end(match: re.Match[str]) -> str:
            is_text = not self._rules.joins and self._rules.every.spell(text, *match.span())
            return match[0] if is_text else text[match.start() : match.end()]

        return self._end.sub(end, shown)


def _any_of(codes: Collection[int]) -> str:
    """Returns a pattern for characters. A range is found fast."""
    first, last = min(codes, default=1), max(codes, default=0)
    if last - first == len(codes) - 1:
        return f"[{chr(first)}-{chr(last)}]+"
    return f"[{''.join(map(chr, codes))}]+" if codes else "(?!)"


def _translated(spelled: str, stand_ins: Mapping[int, int]) -> str:
    few = spelled.translate({code: stand_in for code, stand_in in stand_ins.items() if code not in _ESCAPED})
    return few if few != spelled else spelled.translate(stand_ins)


def with_stand_ins(value: T, rules: TextRules, visit: Callable[[T, Change], T]) -> tuple[T, StandIns | None]:
    """Returns `value` with stand-ins in its texts, which `visit` finds, and the stand-ins; None if it needs none."""
    stand_ins = rules.usual
    changed = visit(value, stand_ins.change)
    if changed == value:
        return value, None
    texts: list[str] = []
    visit(value, lambda _rule, text: texts.append(text) or text)  # type: ignore[func-returns-value]
    if any(map(stand_ins.are_in, texts)):
        stand_ins = StandIns(rules, set().union(*texts))
        changed = visit(value, stand_ins.change)
    return changed, stand_ins
