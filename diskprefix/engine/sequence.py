"""What the scheduler knows of a sequence: whose it is, how many of its tokens are known, and how many are computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The tokens of one reply: its prompt, and behind it what was sampled so far.

    It is prefilled up to the last token that is known, then decoded: each step samples one more token. `arrived` orders
    sequences by age. A sequence that `packs` may share a forward with others and be cut anywhere. Another one is
    computed alone: its prompt in steps of `grid` tokens counted from position 0, then one token a step.
    """

    tenant: Hashable
    arrived: int
    prompt_tokens: int
    packs: bool = True
    grid: int = 256
    num_known: int = 0
    num_computed: int = 0
    overtaken: int = 0
    """Tokens of other prompts that were computed while this one waited for its turn."""
    draft: list[int] = field(default_factory=list)
    """Guessed tokens that are computed behind the last known one if a step has room for them."""
    last_step: int = 0
    """The number of the last step that this sequence took part in, where it is computed alone."""

    def __post_init__(self) -> None:
        self.num_known = max(self.num_known, self.prompt_tokens)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed. A sequence to be scheduled has at least one."""
        return self.num_known - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_left == 1 and self.num_computed >= self.prompt_tokens

    def next_end(self, max_rows: int) -> int:
        """Returns where the next step of this sequence ends if it may have `max_rows` rows."""
        if self.packs:
            return min(self.num_computed + max_rows, self.num_known)
        if self.num_computed >= self.prompt_tokens:
            # What was decoded once is decoded again: the steps of a prefill would give other bits.
            return self.num_computed + 1
        return min(self.num_computed - self.num_computed % self.grid + self.grid, self.prompt_tokens)
