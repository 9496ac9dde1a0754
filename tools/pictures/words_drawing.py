"""Draws the nouns of the cache, in the prompts of one model: `tools/images/words.svg`."""

from __future__ import annotations

from diskprefix.daemon.settings import Settings

BLOCK_SIZE = Settings().block_size
_LEFT, _BLOCK, _GAP = 130, 160, 2
"""The place of the first block, its width, and the space between two."""
_NOTES = 736
"""The place of the notes at the right."""
_SPANS = (("system prompt, tools", 130, 380), ("question", 388, 512), ("calls, results", 520, 692), ("reply", 700, 792))
_LINE = {"block": (50, 48), "ghost": (154, 48)}
"""The top and the height of the blocks of a prompt, and of another one."""
_CHECKPOINTS = (380, 516, 720)
_SENTENCES = (
    "root: a hash of the weights, tenant, options and bits that change numbers. Another root shares nothing.",
    f"block: the keys and values of {BLOCK_SIZE} tokens, named by a hash of the name before it and its own token ids.",
    "checkpoint: the state of layers that cannot be cut, at one position. A later checkpoint replaces an earlier one,",
    "anchor: except at these: the ends of the system prompt and of the last question, where other prompts will begin.",
    "ghost: a block without its state. It remembers that a prompt was seen, so that the second time is worth saving.",
)
_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 430" width="960" height="430">
<title>Root, block, page, last block, checkpoint, anchor and ghost: where each lies in the prompts of one model</title>
<desc>Drawn by tools/bench screenshots</desc>
<style>
text {{ font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }}
.name {{ font-weight: 700; }} .small {{ font-size: 12px; fill: #57606a; }}
.block {{ fill: #cfe8e3; stroke: #0f766e; }} .last {{ fill: #e6f3f0; stroke: #0f766e; }}
.page {{ fill: #fff; stroke: #0f766e; }} .ghost {{ fill: none; stroke: #6e7781; stroke-dasharray: 5 4; }}
.state {{ fill: #d4a72c; stroke: #7d4e00; }} .line {{ fill: none; stroke: #6e7781; }}
.root {{ fill: #ddd6fe; stroke: #6d28d9; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }} .small {{ fill: #9da7b3; }}
.block {{ fill: #134e4a; stroke: #43c7b4; }} .last {{ fill: #0b2e2b; stroke: #43c7b4; }}
.page {{ fill: #0d1117; stroke: #43c7b4; }} .ghost, .line {{ stroke: #8b949e; }}
.state {{ fill: #d4a72c; stroke: #f2cc60; }} .root {{ fill: #3b2a6b; stroke: #a78bfa; }}
}}
</style>
{shapes}
</svg>
"""


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'


def _box(kind: str, x: float, top: float, width: float, height: float, name: str = "") -> list[str]:
    """Returns a rectangle, with its name in the middle."""
    box = f'<rect class="{kind}" x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}"/>'
    middle = f'<text class="name" text-anchor="middle" x="{x + width / 2:g}" y="{top + height / 2 + 5:g}">{name}</text>'
    return [box, middle] if name else [box]


def _notes(y: float, *lines: str) -> list[str]:
    return [_text("small", _NOTES, y + 16 * number, line) for number, line in enumerate(lines)]


def _prompts() -> list[str]:
    """Returns the blocks of a prompt, and those that another one would have."""
    top, height = _LINE["block"]
    at = [_LEFT + number * (_BLOCK + _GAP) for number in range(4)]
    shapes = [shape for x in at[:3] for shape in _box("block", x, top, _BLOCK, height, "block")]
    shapes += _box("last", at[3], top, 104, height, "last block")
    shapes += _notes(71, f"{BLOCK_SIZE} tokens a block; the last block", "(tail) has the rest, and logits")
    ghosts, ghost_height = _LINE["ghost"]
    shapes += _box("ghost", 490, ghosts, 124, ghost_height, "ghost")
    shapes += _box("ghost", at[3], ghosts, 104, ghost_height, "ghost")
    return shapes + _notes(175, "another prompt, seen once: token", "ids alone. Seen again, it is saved")


def _pages() -> list[str]:
    """Returns the pages in memory of the first two blocks."""
    shapes = ['<path class="line" d="M170 98 V236 M332 98 V236"/>', _text("name", 20, 262, "page")]
    for x in (_LEFT, _LEFT + _BLOCK + _GAP):
        shapes += [*_box("page", x, 240, _BLOCK, 17), *_box("page", x, 259, _BLOCK, 17)]
    return [
        *shapes,
        _text("small", 138, 253, "layers with full attention"),
        _text("small", 138, 272, "layers with a window"),
        _text("small", 470, 253, "in memory, a block is a page for each group of layers;"),
        _text("small", 470, 272, "on disk and in the bucket it has the bytes of the page"),
    ]


def drawn() -> str:
    """Returns the SVG."""
    lines = " ".join(f"M{begin} 32 H{end}" for _, begin, end in _SPANS)
    diamonds = " ".join(f"M{x} 112 l9 12 l-9 12 l-9 -12 z" for x in _CHECKPOINTS)
    shapes = [
        *(_text("small", begin, 24, name) for name, begin, _ in _SPANS),
        f'<path class="line" d="{lines}"/>',
        '<circle class="root" cx="52" cy="74" r="24"/>',
        _text("name", 37, 79, "root"),
        '<path class="line" d="M76 74 H130 M452 96 C470 150 470 178 488 178"/>',
        *_prompts(),
        f'<path class="state" d="{diamonds}"/>',
        *_notes(129, "checkpoint (recurrent layers)"),
        _text("name", 356, 154, "anchor"),
        _text("name", 490, 146, "anchor"),
        *_pages(),
        *(_text("small", 20, 312 + 22 * number, text) for number, text in enumerate(_SENTENCES)),
    ]
    return _PICTURE.format(shapes="\n".join(shapes))
