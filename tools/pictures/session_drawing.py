"""Draws a recorded session as an SVG: two bars that say what it shows, and the terminal, which plays it.

The bars do not move. The terminal begins with its last frame, plays the session in its own time, and stays at the end.
A program that does not animate shows the last frame. There is no script.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise

from tools.pictures.session import COLUMNS, PROMPT, Piece, Session

FIRST_S, LAST_S = 4.0, 6.0
"""How long the last frame is shown before the session plays, and after it."""
_CHAR, _LINE, _EDGE, _TOP = 8.0, 19, 16, 132
"""The sizes of a character, a line and the margin, and the place of the terminal below the bars."""
_BAR_LEFT, _BAR_LONGEST, _BAR_SHORTEST = 290, 540, 3
_ANIMATED = (
    '<animate attributeName="opacity" calcMode="discrete" dur="{whole:.2f}s" repeatCount="indefinite" '
    'values="{values}" keyTimes="{times}"/>'
)
_TEXT = '<text class="{kind}" x="{x:g}" y="{y:g}"{length}>{text}{animated}</text>'
_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{title}</title>
<desc>Recorded on {recorded} with version {version}, drawn by tools/bench screenshots</desc>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre; }}
.typed {{ fill: #fff; font-weight: 700; }} .figures {{ fill: #43c7b4; }} .clock {{ fill: #8b949e; }}
.name {{ font-size: 16px; }} .value {{ font-size: 22px; font-weight: 700; fill: #fff; }}
.cold {{ fill: #d29922; }} .warm {{ fill: #43c7b4; }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#14171c"/>
{texts}
</svg>
"""


def title(session: Session) -> str:
    """Returns what the picture shows, in one sentence."""
    (tokens, _, cold), (_, _, warm) = session.figures()
    return f"First token of a prompt of {tokens:,} tokens: {cold} computed, {warm} after kill -9, from the disk."


def drawn(session: Session) -> str:
    """Returns the SVG of a session with two answers."""
    last = session.pieces[-1]
    whole = FIRST_S + last.at + LAST_S
    commands = {piece.line for piece in session.pieces if piece.column == 0 and piece.text.startswith(PROMPT)}
    texts = _bars(session)
    for piece in session.pieces:
        kind = "typed" if piece.line in commands else "figures" if "first token" in piece.text else "said"
        if piece.text.strip():
            texts.append(_shown(piece, kind, _appears(piece.at, whole)))
    seconds = [*range(int(last.at) + 1), last.at]
    for begin, end in pairwise(seconds):
        clock = f"{begin:.0f} s"
        is_last = end == last.at
        animated = _appears(begin, whole) if is_last else _passes(begin, end, whole)
        place = Piece(begin, last.line + 1, COLUMNS - len(clock), clock)
        texts.append(_shown(place, "clock", animated, is_hidden=not is_last))
    return _PICTURE.format(
        width=round(COLUMNS * _CHAR + 2 * _EDGE),
        height=_TOP + (last.line + 2) * _LINE + _EDGE,
        title=title(session),
        recorded=session.recorded,
        version=session.version,
        texts="\n".join(texts),
    )


def _bars(session: Session) -> list[str]:
    """Returns the headline and the two bars, whose lengths are the seconds to the first token."""
    (tokens, cold_s, cold), (_, warm_s, warm) = session.figures()
    longest = max(cold_s, warm_s)
    headline = f"A prompt of {tokens:,} tokens: time until its reply begins"
    parts = [_TEXT.format(kind="name", x=_EDGE, y=28, length="", text=headline, animated="")]
    rows = (
        (62, "the first time: computed", "cold", cold_s, cold),
        (98, "after kill -9: from disk", "warm", warm_s, warm),
    )
    for y, name, kind, seconds, value in rows:
        width = max(_BAR_SHORTEST, round(_BAR_LONGEST * seconds / longest))
        parts.append(_TEXT.format(kind="name", x=_EDGE, y=y, length="", text=name, animated=""))
        parts.append(f'<rect class="{kind}" x="{_BAR_LEFT}" y="{y - 17}" width="{width}" height="22" rx="2"/>')
        parts.append(_TEXT.format(kind="value", x=_BAR_LEFT + width + 12, y=y + 2, length="", text=value, animated=""))
    parts.append(f'<path d="M0 {_TOP - 10} H{COLUMNS * _CHAR + 2 * _EDGE:g}" stroke="#30363d"/>')
    return parts


def _appears(at: float, whole: float) -> str:
    """Returns the animation of what is there from `at` on: it is in the last frame, which is also the first."""
    hidden, shown = FIRST_S / whole, (FIRST_S + at + 0.01) / whole
    return _ANIMATED.format(whole=whole, values="1;0;1", times=f"0;{hidden:.5f};{shown:.5f}")


def _passes(begin: float, end: float, whole: float) -> str:
    """Returns the animation of what is there from `begin` to `end`."""
    shown, hidden = ((FIRST_S + at + 0.01) / whole for at in (begin, end))
    return _ANIMATED.format(whole=whole, values="0;1;0", times=f"0;{shown:.5f};{hidden:.5f}")


def _shown(piece: Piece, kind: str, animated: str, *, is_hidden: bool = False) -> str:
    length = f' textLength="{len(piece.text) * _CHAR:g}"' + (' opacity="0"' if is_hidden else "")
    return _TEXT.format(
        kind=kind,
        x=_EDGE + piece.column * _CHAR,
        y=_TOP + (piece.line + 1) * _LINE - 5,
        length=length,
        text=escape(piece.text),
        animated=animated,
    )
