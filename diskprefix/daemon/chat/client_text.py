"""Separates the texts of clients from the text of the chat template, so that they spell no tokens.

Before rendering, the characters of a text that spell a token are replaced by *stand-ins*: characters of Unicode's
private use area, which a template copies, trims and joins like letters. In the template's output, a stand-in shows
which character it replaces, and that a client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Literal, TypeAlias, TypeVar

from diskprefix.errors import InvalidRequest

T = TypeVar("T")
Author: TypeAlias = Literal["client", "system", "reply"]
"""The author of a text: `system` for a system message, `reply` for an earlier reply, `client` for all others."""
Change: TypeAlias = Callable[[Author, str], str]
"""Returns a text with stand-ins."""


class TokenTexts:
    """Finds the texts of tokens in other texts as tokenizers do: the leftmost first, and of several the longest. Case
    is ignored, because a template may change it. `cuts` are texts at which a template splits other texts."""

    def __init__(self, texts: Iterable[str], cuts: Iterable[str] = ()) -> None:
        self.texts = folded(texts)
        self.known = self.texts | folded(cuts)
        shapes = {re.sub("[0-9]+(?=[^0-9])", "\0", text) for text in self.known}
        self._pattern = re.compile(f"({_alternatives(shapes) if shapes else '(?!)'})", re.IGNORECASE)
        self._longest = max(map(len, self.texts), default=0)
        # A word is not taken for the beginning or the end of a token.
        parts = [(text, k) for text in set(map(_shape, self.texts)) for k in range(1, len(text))]
        self._begins = {text[:k] for text, k in parts if not text[:k].isalnum()}
        self._ends = {text[k:] for text, k in parts if not text[k:].isalnum()}
        self._first, self._last = {text[0] for text in self._begins}, {text[-1] for text in self._ends}
        signs = "".join(map(re.escape, {text[0] for text in self.known} | self._first | self._last))
        self._sign = re.compile(f"[{signs}]" if signs else "(?!)", re.IGNORECASE)

    def split(self, text: str) -> list[str]:
        """Splits a text. Every second piece is a token's text, a cut, or a part of a token's text (at an end of the
        text or beside a cut) that adjacent text may complete. Blanks at the ends are ignored, since templates trim
        them.
        """
        if self._sign.search(text) is None:
            return [text]
        pieces: list[str] = []
        for k, piece in enumerate(self._pattern.split(text)):
            pieces += [piece] if k % 2 or self._sign.search(piece) is None else self._split_at_ends(piece)
        return pieces

    def _split_at_ends(self, text: str) -> list[str]:
        trimmed = text.strip()
        head, tail = trimmed[: self._longest], trimmed[-self._longest :]
        sizes = range(len(head), 0, -1)
        first = next((k for k in sizes if head[k - 1].lower() in self._last and _shape(head[:k]) in self._ends), 0)
        last = next((k for k in sizes if tail[-k].lower() in self._first and _shape(tail[-k:]) in self._begins), 0)
        if not first and not last:
            return [text]
        begin = text.index(trimmed)
        end = begin + len(trimmed)
        middle = begin + first
        after = max(middle, end - last)
        return [text[:begin], text[begin:middle], text[middle:after], text[after:end], text[end:]]

    def spelled(self, text: str, begin: int, end: int) -> bool:
        """Returns whether a token's text in `text` has one of the characters from `begin` to `end`."""
        at = max(0, begin - self._longest + 1)
        while (match := self._pattern.search(text, at, end + self._longest)) is not None and match.start() < end:
            if match.end() > begin:
                return True
            at = match.start() + 1
        return False


def folded(texts: Iterable[str]) -> frozenset[str]:
    """Returns the texts in lower case, without empty ones."""
    return frozenset(text.lower() for text in texts if text)


def _shape(text: str) -> str:
    """Returns a text in lower case with 0 for each number: thousands of tokens may differ only in a number."""
    return re.sub("[0-9]+", "0", text.lower())


def _alternatives(texts: Iterable[str]) -> str:
    """Returns a pattern for texts, as a tree, which tries few texts at each position. NUL stands for any number."""
    ordered = sorted(texts)
    branches = [
        ("[0-9]+" if first == "\0" else re.escape(first)) + _alternatives(text[1:] for text in begun)
        for first, begun in groupby(filter(None, ordered), key=itemgetter(0))
    ]
    if "" in ordered:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return f"(?:{'|'.join(branches)})" if len(branches) != 1 else branches[0]


class TextRules:
    """The rules for the texts of each author. A text must not spell the tokens that `never` returns for its author. It
    may spell other `markers`, which then are no boundaries. A token that a text spells together with adjacent text
    counts as such a marker with `joins`; otherwise it stays text."""

    def __init__(
        self, tokens: TokenTexts, markers: Iterable[str], never: Callable[[Author], Iterable[str]], joins: bool = False
    ) -> None:
        self.tokens, self.markers, self.joins = tokens, folded(markers), joins
        self.never = cache(lambda author: folded(never(author)))
        characters = "".join(tokens.texts)
        # JSON escapes quotes and backslashes, and a template must see them.
        self.characters = sorted({*characters, *characters.upper()} - {'"', "\\"})
        self.usual = StandIns(self)
        """The stand-ins for texts without these characters."""


class StandIns:
    """The stand-ins of one prompt. None is `used` in its texts. No method changes the length of a text."""

    def __init__(self, rules: TextRules, used: Collection[str] = ()) -> None:
        self._rules = rules
        size = len(rules.characters)
        codes = private_characters(2 * size, used)
        self._never = {ord(char): code for char, code in zip(rules.characters, codes[:size], strict=True)}
        self._doubtful = {ord(char): code for char, code in zip(rules.characters, codes[size:], strict=True)}
        self._doubtful_originals = {code: char for char, code in self._doubtful.items()}
        self._originals = {code: char for char, code in self._never.items()} | self._doubtful_originals
        any_code = f"[{chr(codes[0])}-{chr(codes[-1])}]" if codes else "(?!)"
        # Searching for one character is faster than for a repetition.
        self._any = re.compile(f"({any_code}{any_code}*)")

    def are_in(self, text: str) -> bool:
        return self._any.search(text) is not None

    def change(self, author: Author, text: str) -> str:
        """Returns a text of a client with stand-ins."""
        pieces = self._rules.tokens.split(text)
        if len(pieces) == 1:
            return text
        pieces[1::2] = [piece.translate(self._of(author, piece.lower())) for piece in pieces[1::2]]
        return "".join(pieces)

    def _of(self, author: Author, spelled: str) -> Mapping[int, int]:
        """Returns the stand-ins for a token's text, a cut, or a part of a token's text."""
        is_part = spelled not in self._rules.tokens.known
        if spelled in self._rules.never(author) or (is_part and not self._rules.joins):
            return self._never
        return self._doubtful if is_part or spelled in self._rules.markers else {}

    def are_escaped_in(self, written: str) -> bool:
        """Returns whether a text has an escape of a stand-in."""
        return any(_escaped(match) in self._originals for match in _ESCAPE.finditer(written))

    def others(self) -> StandIns:
        """Returns other stand-ins for the same characters."""
        return StandIns(self._rules, set(map(chr, self._originals)))

    def moved(self, text: str, others: StandIns) -> str:
        """Returns a text with `others` in the place of these stand-ins."""
        return text.translate(dict(zip(self._originals, others._originals, strict=True)))

    def unescaped(self, written: str, others: StandIns, written_with_others: str) -> str:
        """Returns a rendered text with stand-ins instead of their escapes in JSON or Python. At such an escape,
        `written_with_others` has the escape of the other stand-in. An escape that a client typed stays."""
        moved = dict(zip(self._originals, others._originals, strict=True))

        def stand_in(match: re.Match[str]) -> str:
            other = _ESCAPE.fullmatch(written_with_others, *match.span())
            code = _escaped(match)
            return chr(code) if other is not None and moved.get(code) == _escaped(other) else match[0]

        return _ESCAPE.sub(stand_in, written)

    def text(self, written: str) -> str:
        """Returns the text with the client's characters."""
        return self._any.sub(lambda match: match[0].translate(self._originals), written)

    def read(self, written: str) -> tuple[str, str]:
        """Returns the text, and the text with stand-ins for characters that must not become tokens."""
        pieces = self._any.split(written)
        runs, pieces[1::2] = pieces[1::2], [run.translate(self._originals) for run in pieces[1::2]]
        text, ends = "".join(pieces), [*accumulate(map(len, pieces))]
        for k, run in enumerate(runs):
            if self._rules.tokens.spelled(text, ends[2 * k], ends[2 * k + 1]):
                pieces[2 * k + 1] = run.translate(self._doubtful_originals)
        return text, "".join(pieces)


_ESCAPE = re.compile(r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})|\\U(00(?:0f|10)[0-9a-f]{4})")
"""A character of the private use area, escaped as in JSON and Python."""


def _escaped(match: re.Match[str]) -> int:
    """Returns the code of the character whose escape `_ESCAPE` has matched."""
    if match[3]:
        return int(match[3], 16)
    return 0x10000 + (int(match[1], 16) - 0xD800 << 10) + int(match[2], 16) - 0xDC00


def private_characters(number: int, used: Collection[str]) -> range:
    """Returns `number` successive unused codes of the private use area. Raises `InvalidRequest` if there are none."""
    for begin in range(0xF0000, 0x10FFFE, max(number, 1)):
        codes = range(begin, begin + number)
        # The last two codes of a plane are no characters.
        if (begin & 0xFFFF) + number <= 0xFFFE and not any(chr(code) in used for code in codes):
            return codes
    raise InvalidRequest("the prompt has characters of every part of Unicode's private use area")


def with_stand_ins(value: T, rules: TextRules, visit: Callable[[T, Change], T]) -> tuple[T, StandIns | None]:
    """Returns `value` with stand-ins in the texts that `visit` visits, and the stand-ins; None if none are needed."""
    texts: list[str] = []

    def change(author: Author, text: str) -> str:
        texts.append(text)
        return rules.usual.change(author, text)

    changed = visit(value, change)
    if changed == value:
        return value, None
    if not any(map(rules.usual.are_in, texts)):
        return changed, rules.usual
    stand_ins = StandIns(rules, set().union(*texts))
    return visit(value, stand_ins.change), stand_ins
