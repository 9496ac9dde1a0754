"""The earlier prompts of one root, as a prefix tree of ghosts.

A ghost is a block that was seen, whether its state is stored or not. An earlier prompt is a leaf of this tree, so
prompts that share a beginning share its ghosts. The token ids of a ghost are dropped with the last prompt that needs
them. The ghost's name, which stands for the whole prefix up to its end, is remembered for longer.

The tree also tells whether a new prompt is worth keeping: how many similar prompts come again, and after what time (see
`reuse`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from diskprefix.prefixstore.cache.policy.reuse import ReuseTimes, kind_of_new, kind_of_used
from diskprefix.tokens import ID_BYTES, TokenIds, num_common

MAX_PROMPT_BYTES = 16 << 20
"""The maximum size of the prompts of one root, with the token ids of their ghosts: 4 million tokens, each counted
once."""
MAX_GHOSTS = 1 << 17
"""The maximum number of ghosts of one root: 33 million tokens with blocks of 256."""
_GHOST_BYTES, _PROMPT_BYTES, _PATH_BYTES, _END_BYTES = 320, 384, 8, 128
"""The approximate sizes in memory of a ghost, a prompt, a ghost in a prompt's path, and the end of a prompt, without
their token ids."""
_MAX_OLDER = 1000
"""The maximum number of prompts before the window that are compared."""
_MAX_ENDS = 64
"""The maximum number of prompts with the same last block whose ends are remembered: turns of a conversation, requests
beside it that ask for a title or a summary, and chats shorter than a block."""
ENOUGH_TRIALS = 10
"""The minimum number of trials that say something about similar prompts."""
_LIKELY = 2 / 5
"""The end of a prompt gets a checkpoint if a larger share of similar prompts came again."""


class Ghost:
    """A block of earlier prompts, of which `num_prompts` are remembered. `token_ids` are int32, little-endian, and
    empty without such prompts. `ends` are the ends of prompts after this block, each shorter than a block and without a
    name, newest last. Its prompt made it one of `new_kind`; since then it came again `uses` times, the last time at
    `used_at`."""

    __slots__ = ("ends", "name", "new_kind", "num_prompts", "token_ids", "used_at", "uses")

    def __init__(self, name: bytes, new_kind: int, token_ids: bytes = b"") -> None:
        self.name, self.new_kind, self.token_ids = name, new_kind, token_ids
        self.num_prompts = self.uses = 0
        self.used_at = 0.0
        self.ends: tuple[Ghost, ...] = ()

    @property
    def kind(self) -> int:
        """Its kind for `reuse`."""
        return kind_of_used(self.uses) if self.uses else self.new_kind


class SeenPrompt(Struct, frozen=True, eq=False):
    """An earlier prompt: its full blocks, and the token ids after them (int32, little-endian)."""

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


class Sighting(Struct, frozen=True):
    """Knowledge about a prompt from earlier ones.

    `recent` are the prompts of the window, newest first. `older` is a prompt from before the window that shares more
    with the new prompt than any of the window, or None. The first `num_blocks` blocks were seen before. Of `trials`
    similar prompts, `again` came again. `continues`: the new prompt begins with a whole earlier one. `is_repeat`: it is
    one, and brings nothing new. `is_trusting`: the new prompt is kept if too few similar ones were seen.

    `stays_s` is how long the store keeps what is not used, infinite while it has room. `new_share` of similar prompts
    come again in this time, and `seen_share` of prompts that were seen as often as the first part of this one.
    """

    num_blocks: int = 0
    trials: int = 0
    again: int = 0
    continues: bool = False
    is_repeat: bool = False
    is_trusting: bool = False
    stays_s: float = math.inf
    new_share: float = 0.0
    seen_share: float = 0.0
    recent: tuple[Earlier, ...] = ()
    older: Earlier | None = None

    @property
    def has_room(self) -> bool:
        """The store has not had to evict anything."""
        return self.stays_s == math.inf

    @property
    def is_learning(self) -> bool:
        """The prompt is kept to find out whether similar prompts come again."""
        return self.is_trusting and self.trials < ENOUGH_TRIALS

    @property
    def is_likely_repeat(self) -> bool:
        """Similar prompts come again often enough to keep this one at once."""
        return self.trials >= ENOUGH_TRIALS and self.again > _LIKELY * self.trials


class SeenPrompts:
    """The earlier prompts of one root. Not thread-safe. A name of a full block stands for the whole prefix up to the
    block's end.

    `is_trusting`: the first prompts of each kind are kept, to find out whether they come again. This is not for roots
    of salts: a client may choose a salt for each of its users, and each would be trusted anew. The oldest prompts are
    forgotten when they take more than `max_bytes`, or when there are more than `max_ghosts`.
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
        self._root = Ghost(b"", 0)
        """The empty prefix, after which the prompts end that are shorter than a block."""
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        """By name, the least recently seen first. A ghost comes before the ghosts that it continues."""
        self._prompts: deque[SeenPrompt] = deque()
        self._windows: dict[bytes, deque[SeenPrompt]] = {}
        """The prompts of each group, oldest first. The empty name has the prompts without a group."""
        self._reuse = ReuseTimes()
        self._prompt_bytes = self._end_bytes = 0

    def __len__(self) -> int:
        """The number of prompts of all groups."""
        return len(self._prompts)

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        return self._prompt_bytes + self._end_bytes + _GHOST_BYTES * len(self._ghosts)

    def sighting_of(
        self, token_ids: TokenIds, names: Sequence[bytes], window: int, group: bytes = b"", stays_s: float = math.inf
    ) -> Sighting:
        """Returns the knowledge about a prompt. `window` is the number of recent prompts of its group. For `stays_s`
        see `Sighting`."""
        content, path = token_ids.tobytes(), self._path(names)
        continues = any(self._ends(content, path))
        seen_kind, reuse = kind_of_used(path[-1].uses + 1 if path else 1), self._reuse
        rest, ends = content[len(path) * self._block_bytes :], (path[-1] if path else self._root).ends
        is_repeat = any(end.token_ids == rest for end in ends)
        kind = seen_kind if is_repeat else kind_of_new(len(names) - len(path), continues=continues)
        trials = reuse.num_prompts(kind)
        newest_first = reversed(self._windows.get(group, deque()))
        recent = tuple(Earlier(prompt, self._common(prompt, content, path)) for prompt in islice(newest_first, window))
        return Sighting(
            num_blocks=len(path),
            trials=trials,
            again=round(trials * reuse.measured_share(kind)),
            continues=continues,
            is_repeat=is_repeat,
            is_trusting=self.is_trusting,
            stays_s=stays_s,
            new_share=reuse.share(kind, stays_s),
            seen_share=reuse.share(seen_kind, stays_s),
            recent=recent,
            older=self._older(islice(newest_first, _MAX_OLDER), content, path, recent),
        )

    def remember(self, token_ids: TokenIds, names: Sequence[bytes], group: bytes = b"", came_at: float = 0.0) -> None:
        """Adds a prompt as the newest, unless it is empty. It came at `came_at`, in seconds since any time."""
        if not len(token_ids):
            return
        content, path = token_ids.tobytes(), self._path(names)
        ends = list(self._ends(content, path))
        kind = kind_of_new(len(names) - len(path), continues=bool(ends))
        self._end_trials([*path, *ends], came_at)
        path += (Ghost(name, kind) for name in names[len(path) :])
        own = self._own_end(path[-1] if path else self._root, content[len(path) * self._block_bytes :], kind)
        self._begin_trials({*path, *ends, own}, came_at)
        for number, ghost in enumerate(path):
            if not ghost.num_prompts:
                ghost.token_ids = content[number * self._block_bytes : (number + 1) * self._block_bytes]
                self._prompt_bytes += self._block_bytes
            ghost.num_prompts += 1
        for ghost in reversed(path):
            self._ghosts[ghost.name] = ghost
            self._ghosts.move_to_end(ghost.name)
        prompt = SeenPrompt(tuple(path), content[len(path) * self._block_bytes :], group)
        self._prompts.append(prompt)
        self._windows.setdefault(group, deque()).append(prompt)
        self._prompt_bytes += _bytes_of(prompt)
        # Bound: each round forgets a prompt; without any, there are no bytes.
        while self._prompt_bytes > self._max_bytes:
            self._forget_oldest_prompt()
        # Bound: each round forgets a ghost.
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
        # Bound: each round forgets a prompt.
        while ghost.num_prompts:
            self._forget_oldest_prompt()
        self._set_ends(ghost, ())
        del self._ghosts[ghost.name]

    def _end_trials(self, ghosts: Collection[Ghost], came_at: float) -> None:
        """Counts ghosts that come again."""
        for (kind, used_at), num_blocks in Counter((ghost.kind, ghost.used_at) for ghost in ghosts).items():
            self._reuse.end_trials(kind, came_at - used_at, num_blocks)
        for ghost in ghosts:
            ghost.uses += 1

    def _begin_trials(self, ghosts: Collection[Ghost], came_at: float) -> None:
        for kind, num_blocks in Counter(ghost.kind for ghost in ghosts).items():
            self._reuse.begin_trials(kind, num_blocks)
        for ghost in ghosts:
            ghost.used_at = came_at

    def _set_ends(self, ghost: Ghost, ends: tuple[Ghost, ...]) -> None:
        self._end_bytes += _bytes_of_ends(ends) - _bytes_of_ends(ghost.ends)
        ghost.ends = ends

    def _path(self, names: Sequence[bytes]) -> list[Ghost]:
        """Returns the ghosts of the first blocks of a prompt that were seen before."""
        path: list[Ghost] = []
        for name in names:
            ghost = self._ghosts.get(name)
            if ghost is None:
                break
            path.append(ghost)
        return path

    def _common(self, prompt: SeenPrompt, content: bytes, path: Sequence[Ghost]) -> int:
        """Returns the number of tokens that an earlier prompt shares with the new one, which has this content and path:
        the blocks of their common path, and the first tokens of the next block."""
        blocks, low, high = prompt.blocks, 0, min(len(prompt.blocks), len(path))
        # Bound: each round halves the range.
        while low < high:
            middle = (low + high + 1) // 2
            # A ghost stands for all blocks before it too.
            low, high = (middle, high) if blocks[middle - 1] is path[middle - 1] else (low, middle - 1)
        start = low * self._block_bytes
        rest = blocks[low].token_ids if low < len(blocks) else prompt.rest
        return start // ID_BYTES + num_common(rest, content[start : start + self._block_bytes])

    def _older(
        self, prompts: Iterator[SeenPrompt], content: bytes, path: Sequence[Ghost], recent: Sequence[Earlier]
    ) -> Earlier | None:
        """Returns the prompt that shares most tokens, if it shares more than all `recent` ones; else None.

        Requests beside a conversation, such as the turns of a sub-agent, may fill the window between two of its turns.
        """
        max_common, best = max((earlier.common for earlier in recent), default=0), None
        for prompt in prompts:
            last, place = divmod(max_common * ID_BYTES, self._block_bytes)
            if last > min(len(path), len(prompt.blocks)) or (last and prompt.blocks[last - 1] is not path[last - 1]):
                continue
            # Few prompts share the next token too, so few are compared.
            rest = prompt.blocks[last].token_ids if last < len(prompt.blocks) else prompt.rest
            if rest[place : place + ID_BYTES] != content[max_common * ID_BYTES : (max_common + 1) * ID_BYTES]:
                continue
            if (common := self._common(prompt, content, path)) > max_common:
                max_common, best = common, Earlier(prompt, common)
        return best

    def _ends(self, content: bytes, path: Sequence[Ghost]) -> Iterator[Ghost]:
        """Yields the ends of the earlier prompts with which the prompt begins."""
        for number, ghost in enumerate((self._root, *path)):
            for end in ghost.ends:
                if content.startswith(end.token_ids, number * self._block_bytes):
                    yield end

    def _own_end(self, last: Ghost, rest: bytes, kind: int) -> Ghost:
        """Returns the end of a prompt after its last block, which is now the newest one there."""
        own = next((end for end in last.ends if end.token_ids == rest), None) or Ghost(b"", kind, rest)
        self._set_ends(last, (*(end for end in last.ends if end is not own), own)[-_MAX_ENDS:])
        return own


def _bytes_of(prompt: SeenPrompt) -> int:
    return _PROMPT_BYTES + _PATH_BYTES * len(prompt.blocks) + len(prompt.rest)


def _bytes_of_ends(ends: Sequence[Ghost]) -> int:
    return sum(_END_BYTES + len(end.token_ids) for end in ends)
