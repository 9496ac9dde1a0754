"""The policy's question: how much of a prompt to keep. The daemon, the vLLM connector and the simulator ask it here."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.cache.policy.history import History
from diskprefix.cache.policy.select import Rules, select
from diskprefix.cache.policy.sightings import AdmissionFilter, Sighting
from diskprefix.nouns import DEFAULT_WINDOW, MAX_VALUE, CacheOptions, Prompt, Scope, Selection
from diskprefix.store.schema import HISTORY_TOKENS
from diskprefix.tokens import TokenIds


class SeenPrompts:
    """The earlier prompts of one root. Not thread-safe. `is_trusting`: see `AdmissionFilter`."""

    def __init__(self, block_size: int, *, is_trusting: bool) -> None:
        self._block_size = block_size
        self.history = History(max_prompts=MAX_VALUE, max_tokens=HISTORY_TOKENS)
        self.admission = AdmissionFilter(is_trusting=is_trusting)

    def remember(self, token_ids: TokenIds, group: bytes, block_names: Sequence[bytes]) -> None:
        """Adds a prompt as the newest. `block_names` are the names of its full blocks."""
        self.history.add(token_ids, group)
        self.admission.add(token_ids, block_names, self._block_size)

    def in_window(self, scope: Scope, group: bytes) -> tuple[TokenIds, ...]:
        """Returns the prompts of the scope's window, newest first."""
        return self.history.recent(scope.value if scope.kind == "auto" else DEFAULT_WINDOW, group)

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        return self.history.num_bytes + self.admission.num_bytes


def choose_kept(
    seen: SeenPrompts,
    rules: Rules,
    prompt: Prompt,
    options: CacheOptions,
    block_names: Sequence[bytes],
    stored: int,
) -> Selection:
    """Returns the part of a prompt to keep. `block_names` are the names of its full blocks; `stored` tokens of it
    are in the store."""
    scope, sighting, older = options.scope, Sighting(), None
    if scope.kind == "auto":
        older = seen.history.similar(prompt.token_ids, scope.value, options.group)
        sighting = seen.admission.look(prompt.token_ids, block_names, rules.block_size)
    recent = seen.in_window(scope, options.group)
    selection = select(scope, prompt, recent, rules, restored=stored, sighting=sighting, older=older)
    return selection if options.save or scope.kind == "off" else selection.keeping_nothing("read_only")
