"""The earlier prompts of one root, as a prefix tree of ghosts.

A ghost is a block that was seen, whether its state is stored or not. An earlier prompt is a leaf of this tree, so
prompts that share a beginning share its ghosts. The token ids of a ghost go with the last prompt that needs them; its
name, which stands for all before it too, is remembered for longer.

The tree also tells whether a new prompt is worth keeping. Each prompt is a trial, which succeeds when most of its new
part is seen again. Prompts with about as many new blocks are alike: for the turns of an agent nearly every trial
succeeds, for one-off questions none does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from diskprefix.tokens import ID_BYTES, TokenIds, num_common

MAX_PROMPT_BYTES = 16 << 20
"""The most memory that the prompts of one root take, with the token ids of their ghosts: 4 million tokens, each counted
once."""
MAX_GHOSTS = 1 << 17
"""The most ghosts of one root: 33 million tokens with blocks of 256."""
_GHOST_BYTES, _PROMPT_BYTES, _PATH_BYTES, _END_BYTES = 320, 384, 8, 128
"""The approximate memory of a ghost, of a prompt and of the end of one, each beside its token ids; and of a ghost in a
prompt's path."""
_MOST_OLDER = 1000
"""Prompts before the window that are compared."""
_ENDS_OF_A_GHOST = 16
"""Prompts with the same last block whose ends are remembered: turns of a conversation, and requests beside it that ask
for a title or a summary."""
_ENOUGH_TRIALS = 10
"""Fewer trials of similar prompts say nothing."""
_LIKELY = 2 / 5
"""Prompts of a kind are kept at once if a larger share of them came again, because computing takes far longer than
writing. With 1/2, an agent restored 1.7 points less (`openhands-mock` of `tools/bench`)."""


class Ghost:
    """A block of earlier prompts. `token_ids` are int32, little-endian, and empty once none of the `num_prompts` that
    are remembered has it. `ends` are the token ids behind it of prompts that end before the next block is full, newest
    last. `kind` is the kind of prompt whose trial it decides, 0 if it decides none, and `came_again` the result."""

    __slots__ = ("came_again", "ends", "kind", "name", "num_prompts", "token_ids")

    def __init__(self, name: bytes) -> None:
        self.name, self.token_ids = name, b""
        self.num_prompts = self.kind = 0
        self.ends: tuple[bytes, ...] = ()
        self.came_again = False


@dataclass(frozen=True, eq=False, slots=True)
class SeenPrompt:
    """An earlier prompt: its full blocks, and the token ids behind them (int32, little-endian)."""

    blocks: tuple[Ghost, ...]
    rest: bytes
    group: bytes = b""

    @property
    def num_tokens(self) -> int:
        num_bytes = len(self.blocks) * len(self.blocks[0].token_ids) if self.blocks else 0
        return (num_bytes + len(self.rest)) // ID_BYTES

    @property
    def token_ids(self) -> TokenIds:
        """The whole prompt, joined anew at each use."""
        return np.frombuffer(b"".join([*(block.token_ids for block in self.blocks), self.rest]), np.int32)


class Earlier(NamedTuple):
    """An earlier prompt, and the number of first tokens that it has in common with a new one."""

    prompt: SeenPrompt
    common: int

    @property
    def lost(self) -> int:
        """The number of tokens at its end that the new prompt lacks."""
        return self.prompt.num_tokens - self.common


@dataclass(frozen=True)
class Sighting:
    """Knowledge about a prompt from earlier ones.

    `recent` are those of the window, newest first. `older` is the prompt from before the window that shares more with
    this one than any of the window, if there is one. `num_blocks` of its first blocks were seen before, by any prompt.
    Of `trials` similar prompts, `again` came again. `continues`: it is an earlier prompt with more behind it.
    `is_trusting`: a prompt is kept while too few similar prompts were seen to know.
    """

    num_blocks: int = 0
    trials: int = 0
    again: int = 0
    continues: bool = False
    is_trusting: bool = False
    recent: tuple[Earlier, ...] = ()
    older: Earlier | None = None

    @property
    def is_learning(self) -> bool:
        """The prompt is kept to find out whether similar prompts come again."""
        return self.is_trusting and self.trials < _ENOUGH_TRIALS

    @property
    def is_likely_repeat(self) -> bool:
        """Similar prompts come again often enough to keep this one at once."""
        return self.trials >= _ENOUGH_TRIALS and self.again > _LIKELY * self.trials


class SeenPrompts:
    """The earlier prompts of one root. Not thread-safe. All names are those of full blocks, and stand for the whole
    prefix up to their end.

    `is_trusting`: the first prompts of each kind are kept, to find out whether they come again. This is not for roots
    of salts: a client may choose one for each of its users, and each new one would be trusted again. When the prompts
    take more than `max_bytes`, or there are more than `max_ghosts`, the oldest ones go.
    """

    def __init__(
        self,
        block_size: int,
        *,
        is_trusting: bool,
        max_bytes: int = MAX_PROMPT_BYTES,
        max_ghosts: int = MAX_GHOSTS,
    ) -> None:
        self._block_bytes = ID_BYTES * block_size
        self.is_trusting = is_trusting
        self._max_bytes, self._max_ghosts = max_bytes, max_ghosts
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        """By name, the one that was seen longest ago first. A ghost comes before those that it continues."""
        self._prompts: deque[SeenPrompt] = deque()
        self._windows: dict[bytes, deque[SeenPrompt]] = {}
        """The prompts of each group, oldest first. Those without a group are under the empty name."""
        self._counts: dict[int, list[int]] = {}
        """For each kind of prompt: the number of trials, and of those that came again."""
        self._prompt_bytes = self._end_bytes = 0

    def __len__(self) -> int:
        """The number of prompts of all groups."""
        return len(self._prompts)

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        return self._prompt_bytes + self._end_bytes + _GHOST_BYTES * len(self._ghosts)

    def sighting_of(self, token_ids: TokenIds, names: Sequence[bytes], window: int, group: bytes = b"") -> Sighting:
        """Returns the knowledge about a prompt from the last `window` prompts of its group, and from all others."""
        content, path = token_ids.tobytes(), self._path(names)
        trials, again = self._counts.get(_kind(len(names) - len(path)), (0, 0))
        newest_first = self._newest_first(group)
        recent = tuple(Earlier(prompt, self._common(prompt, content, path)) for prompt in islice(newest_first, window))
        return Sighting(
            num_blocks=len(path),
            trials=trials,
            again=again,
            continues=self._continues(content, path),
            is_trusting=self.is_trusting,
            recent=recent,
            older=self._older(islice(newest_first, _MOST_OLDER), content, path, recent),
        )

    def remember(self, token_ids: TokenIds, names: Sequence[bytes], group: bytes = b"") -> None:
        """Adds a prompt as the newest. One without tokens is not remembered."""
        if not len(token_ids):
            return
        content, path = token_ids.tobytes(), self._path(names)
        for ghost in path:
            if ghost.kind and not ghost.came_again:
                ghost.came_again = True
                self._counts[ghost.kind][1] += 1
        num_seen = len(path)
        path += map(Ghost, names[num_seen:])
        if num_new := len(names) - num_seen:
            trial = path[num_seen + 3 * num_new // 4]
            trial.kind = _kind(num_new)
            self._counts.setdefault(trial.kind, [0, 0])[0] += 1
        for number, ghost in enumerate(path):
            if not ghost.num_prompts:
                ghost.token_ids = content[number * self._block_bytes : (number + 1) * self._block_bytes]
                self._prompt_bytes += self._block_bytes
            ghost.num_prompts += 1
        for ghost in reversed(path):
            self._ghosts[ghost.name] = ghost
            self._ghosts.move_to_end(ghost.name)
        prompt = SeenPrompt(tuple(path), content[len(path) * self._block_bytes :], group)
        if path:
            others = [end for end in path[-1].ends if end != prompt.rest]
            self._set_ends(path[-1], (*others, prompt.rest)[-_ENDS_OF_A_GHOST:])
        self._prompts.append(prompt)
        self._windows.setdefault(group, deque()).append(prompt)
        self._prompt_bytes += _bytes_of(prompt)
        while self._prompt_bytes > self._max_bytes:
            self._forget_oldest_prompt()
        while len(self._ghosts) > self._max_ghosts:
            self._forget_oldest_ghost()

    def _forget_oldest_prompt(self) -> None:
        prompt = self._prompts.popleft()
        window = self._windows[prompt.group]
        window.popleft()
        if not window:
            del self._windows[prompt.group]
        self._prompt_bytes -= _bytes_of(prompt)
        for ghost in prompt.blocks:
            ghost.num_prompts -= 1
            if not ghost.num_prompts:
                ghost.token_ids = b""
                self._prompt_bytes -= self._block_bytes

    def _forget_oldest_ghost(self) -> None:
        ghost = next(iter(self._ghosts.values()))
        while ghost.num_prompts:
            self._forget_oldest_prompt()
        self._set_ends(ghost, ())
        del self._ghosts[ghost.name]
        if ghost.kind:
            self._counts[ghost.kind][0] -= 1
            self._counts[ghost.kind][1] -= ghost.came_again

    def _set_ends(self, ghost: Ghost, ends: tuple[bytes, ...]) -> None:
        self._end_bytes += _bytes_of_ends(ends) - _bytes_of_ends(ghost.ends)
        ghost.ends = ends

    def _newest_first(self, group: bytes) -> Iterator[SeenPrompt]:
        return reversed(self._windows.get(group, deque()))

    def _path(self, names: Sequence[bytes]) -> list[Ghost]:
        """Returns the ghosts of a prompt's first blocks, as far as they were seen."""
        path: list[Ghost] = []
        for name in names:
            ghost = self._ghosts.get(name)
            if ghost is None:
                break
            path.append(ghost)
        return path

    def _common(self, prompt: SeenPrompt, content: bytes, path: Sequence[Ghost]) -> int:
        """Returns the number of tokens that an earlier prompt shares with the one that has this content and path: the
        blocks of their common path, and what is equal in the block where they part."""
        blocks, low, high = prompt.blocks, 0, min(len(prompt.blocks), len(path))
        while low < high:
            middle = (low + high + 1) // 2
            # A ghost stands for all before it, so equal ones have equal paths.
            low, high = (middle, high) if blocks[middle - 1] is path[middle - 1] else (low, middle - 1)
        start = low * self._block_bytes
        behind = blocks[low].token_ids if low < len(blocks) else prompt.rest
        return start // ID_BYTES + num_common(behind, content[start : start + self._block_bytes])

    def _older(
        self, prompts: Iterator[SeenPrompt], content: bytes, path: Sequence[Ghost], recent: Sequence[Earlier]
    ) -> Earlier | None:
        """Returns the prompt that shares most, if that is more than any of the `recent` ones shares.

        Requests beside a conversation, such as the turns of a sub-agent, may fill the window between two of its turns.
        """
        most, found = max((one.common for one in recent), default=0), None
        for prompt in prompts:
            last, place = divmod(most * ID_BYTES, self._block_bytes)
            if last > min(len(path), len(prompt.blocks)) or (last and prompt.blocks[last - 1] is not path[last - 1]):
                continue
            # Few prompts have this token too, so few are compared.
            behind = prompt.blocks[last].token_ids if last < len(prompt.blocks) else prompt.rest
            if behind[place : place + ID_BYTES] != content[most * ID_BYTES : (most + 1) * ID_BYTES]:
                continue
            if (common := self._common(prompt, content, path)) > most:
                most, found = common, Earlier(prompt, common)
        return found

    def _continues(self, content: bytes, path: Sequence[Ghost]) -> bool:
        """Returns whether the prompt begins with a whole earlier prompt of at least a block."""
        for number, ghost in enumerate(path, start=1):
            start = number * self._block_bytes
            if any(content.startswith(end, start) for end in ghost.ends):
                return True
        return False


def _bytes_of(prompt: SeenPrompt) -> int:
    return _PROMPT_BYTES + _PATH_BYTES * len(prompt.blocks) + len(prompt.rest)


def _bytes_of_ends(ends: Sequence[bytes]) -> int:
    return sum(_END_BYTES + len(end) for end in ends)


def _kind(num_new: int) -> int:
    """Returns the kind of a prompt: numbers of new blocks that differ by less than a factor of two are of one kind."""
    return num_new.bit_length()
