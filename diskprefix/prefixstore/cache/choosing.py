"""The part of a prompt to keep, and its time to live: one place for daemon, vLLM connector and simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diskprefix.prefixstore.cache.policy.seen import SeenPrompts, Sighting
from diskprefix.prefixstore.cache.policy.select import AT_CHECKPOINTS, Rules, StateKind, select
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.tokens import floor_to_grid
from diskprefix.values import DEFAULT_WINDOW, CacheOptions, Mark, Prompt, Scope, Selection


def sighting_of(
    seen: SeenPrompts, prompt: Prompt, options: CacheOptions, block_names: Sequence[bytes], stays_s: float
) -> Sighting:
    """Returns the knowledge about a prompt from earlier ones. `block_names` are the names of its full blocks. The store
    keeps what is not used for `stays_s`."""
    window = options.scope.value if options.scope.kind == "auto" else DEFAULT_WINDOW
    return seen.sighting_of(prompt.token_ids, block_names, window, options.group, stays_s)


def selection_of(sighting: Sighting, rules: Rules, prompt: Prompt, options: CacheOptions, stored: int) -> Selection:
    """Returns the part of a prompt to keep. The store has its first `stored` tokens."""
    selection = select(options.scope, prompt, rules, sighting, restored=stored)
    return selection if options.save or options.scope.kind == "off" else selection.keeping_nothing("read_only")


def refused_tokens(sighting: Sighting, selection: Selection, stored: int) -> int:
    """Returns the tokens of a prompt that are not stored for want of room; the store has the first `stored` ones. State
    that cannot be cut is left out for other reasons."""
    is_asked = selection.scope.kind == "auto" and not sighting.has_room and not selection.price
    return max(0, selection.prompt_tokens - max(selection.kept, stored)) if is_asked else 0


def selection_ahead(prompt: Prompt, scope: Scope, state: StateKind, grid: int) -> Selection:
    """Returns all of a prompt that nobody has sent yet, and that ends at a place where it can be restored."""
    num_tokens, has_states = len(prompt.token_ids), state in AT_CHECKPOINTS
    return Selection(
        scope=scope,
        prompt_tokens=num_tokens,
        reason="continues",
        selected=num_tokens,
        aligned=num_tokens,
        checkpoints=(num_tokens,) if has_states else (),
        anchors=tuple(floor_to_grid(at, grid) for at in (prompt.system_end, prompt.question_end)) if has_states else (),
    )


def ttl_at(position: int, marks: Sequence[Mark], ttl_s: float | None) -> float | None:
    """Returns the time to live, in seconds after the last use, of a node that ends at `position`; None leaves it to the
    daemon. A mark holds for all positions before it, and the longest time wins. Without a mark, `ttl_s` of the request
    holds. For marks without a time see `marked_nodes`."""
    times = [mark.ttl_s or ttl_s for mark in marks if mark.position >= position]
    return max((time for time in times if time is not None), default=ttl_s)


def marked_nodes(
    nodes: PromptNodes, marks: Sequence[Mark], ttl_s: float | None
) -> Iterator[tuple[bytes, float | None]]:
    """Yields the name of the last block before each mark, with the mark's time to live. Touching these nodes makes the
    marks hold for blocks that earlier requests stored. No mark shortens the time of another one."""
    for mark in marks:
        if num_blocks := min(mark.position // nodes.block_size, nodes.num_blocks):
            yield nodes.parent(num_blocks), mark.ttl_s or ttl_s
