"""The policy's question: how much of a prompt to keep. The daemon, the vLLM connector and the simulator ask it here."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.cache.policy.seen import SeenPrompts, Sighting
from diskprefix.cache.policy.select import Rules, select
from diskprefix.nouns import DEFAULT_WINDOW, CacheOptions, Prompt, Selection


def look(seen: SeenPrompts, prompt: Prompt, options: CacheOptions, block_names: Sequence[bytes]) -> Sighting:
    """Returns what earlier prompts say about a prompt. `block_names` are the names of its full blocks."""
    window = options.scope.value if options.scope.kind == "auto" else DEFAULT_WINDOW
    return seen.look(prompt.token_ids, block_names, window, options.group)


def choose_kept(sighting: Sighting, rules: Rules, prompt: Prompt, options: CacheOptions, stored: int) -> Selection:
    """Returns the part of a prompt to keep. `stored` tokens of it are in the store."""
    selection = select(options.scope, prompt, rules, sighting, restored=stored)
    return selection if options.save or options.scope.kind == "off" else selection.keeping_nothing("read_only")
