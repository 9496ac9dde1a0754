"""The policy's questions: how much of a prompt to keep, and for how long. The daemon, the vLLM connector and the
simulator ask them here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diskprefix.cache.policy.seen import SeenPrompts, Sighting
from diskprefix.cache.policy.select import Rules, select
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.values import DEFAULT_WINDOW, CacheOptions, Mark, Prompt, Selection


def sighting_of(seen: SeenPrompts, prompt: Prompt, options: CacheOptions, block_names: Sequence[bytes]) -> Sighting:
    """Returns what earlier prompts say about a prompt. `block_names` are the names of its full blocks."""
    window = options.scope.value if options.scope.kind == "auto" else DEFAULT_WINDOW
    return seen.sighting_of(prompt.token_ids, block_names, window, options.group)


def choose_kept(sighting: Sighting, rules: Rules, prompt: Prompt, options: CacheOptions, stored: int) -> Selection:
    """Returns the part of a prompt to keep. `stored` tokens of it are in the store."""
    selection = select(options.scope, prompt, rules, sighting, restored=stored)
    return selection if options.save or options.scope.kind == "off" else selection.keeping_nothing("read_only")


def ttl_at(position: int, marks: Sequence[Mark], ttl_s: float | None) -> float | None:
    """Returns the time to live, after its last use, of a node that ends at `position`, in seconds; None leaves it to
    the daemon. A mark holds for all positions before it, and the longest time wins. Without a mark, `ttl_s` of the
    request holds. Marks that leave the time to the daemon count by `marked_nodes`."""
    asked = [ttl for at, ttl in _asked(marks, ttl_s) if at >= position and ttl is not None]
    return max(asked, default=ttl_s)


def marked_nodes(
    nodes: PromptNodes, marks: Sequence[Mark], ttl_s: float | None
) -> Iterator[tuple[bytes, float | None]]:
    """Yields the name of the last block before each mark, and the time that it asks for. They are to be touched: then a
    mark also holds for blocks that an earlier request stored. No mark shortens the time of another one."""
    names = nodes.path.block_names
    for position, ttl in _asked(marks, ttl_s):
        if num_blocks := min(position // nodes.block_size, len(names)):
            yield names[num_blocks - 1], ttl


def _asked(marks: Sequence[Mark], ttl_s: float | None) -> Iterator[tuple[int, float | None]]:
    for mark in marks:
        yield mark.position, ttl_s if mark.ttl_s is None else mark.ttl_s
