"""The tier that machines share, as the core sees it. An extra brings one: `hooks.open_tier`.

It is not read like the nearer tiers, because it may take seconds: what it has of a prompt is fetched to the nearest one
first, as if it had been computed, and then read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Tier
from diskprefix.store.changes import NewNode
from diskprefix.store.maintenance.purge import GoneText
from diskprefix.store.schema import RootRecord


class Prefetched(NamedTuple):
    """What `SharedTier.prefetch` did: names of nodes, their bytes before encoding, and seconds.

    `wanted_bytes` are those of all blocks that nearer tiers lacked. `is_whole`: it was not stopped by time (`is_late`),
    by a failure, or for want of room.
    """

    names: frozenset[bytes] = frozenset()
    num_bytes: int = 0
    wanted_bytes: int = 0
    seconds: float = 0.0
    is_whole: bool = True
    is_late: bool = False

    @classmethod
    def together(cls, found: Sequence[Prefetched], seconds: float) -> Prefetched:
        """What was prefetched for one prompt in several parts, which took so long in all."""
        return cls(
            frozenset().union(*(one.names for one in found)),
            sum(one.num_bytes for one in found),
            sum(one.wanted_bytes for one in found),
            seconds,
            all(one.is_whole for one in found),
            any(one.is_late for one in found),
        )

    @property
    def telling_bytes(self) -> int:
        """How many bytes `seconds` tell about the speed of the tier; 0 if they tell nothing."""
        if self.is_late:
            # It would have taken longer still.
            return self.num_bytes or self.wanted_bytes
        return self.num_bytes if self.is_whole else 0


@dataclass(frozen=True)
class PrefetchRequest:
    """One request's wish: what of its prompt the remote tier has, and nearer ones have not.

    `publish` takes nodes, parents first, to the nearest tier; it returns False if there is no room. `most_s` is how
    long it may take, in seconds. Of the first `have` tokens the request has the state in memory: nobody is asked for
    their sake. `is_cancelled` is asked meanwhile. `prefill_s_per_token` and `ttl_s` are those of the nodes; `replaces`
    as in `NewNode`. `pays` says whether fetching so many tokens of so many bytes is expected to be faster than
    computing them.
    """

    nodes: PromptNodes
    tiers: Sequence[Tier]
    publish: Callable[[tuple[NewNode, ...]], bool]
    most_s: float
    have: int = 0
    pays: Callable[[int, int], bool] = lambda _num_tokens, _num_bytes: True
    is_cancelled: Callable[[], bool] = lambda: False
    prefill_s_per_token: float = 0.0
    ttl_s: float | None = None
    replaces: bool = False


@dataclass(frozen=True)
class Upload:
    """A prompt whose first `num_tokens` tokens are to be shared, as far as `tiers` have them."""

    nodes: PromptNodes
    num_tokens: int
    record: RootRecord
    tiers: Sequence[Tier]
    in_parts: bool = False
    """Whether prompts restore to the token, so that partial blocks serve others."""


class SharedTier(Protocol):
    """Methods are for any thread. None of them raises what a network does, but for `forget`."""

    def prefetch(self, wish: PrefetchRequest) -> Prefetched:
        """Fetches what nearer tiers lack of a prompt's beginning, publishes it in the nearest one, and waits for
        it. Raises what looking into the nearer tiers raises."""

    def upload(self, upload: Upload) -> None:
        """Has what the nearer tiers have of a prompt written later, as far as it is not there. Does not wait."""

    def forget(self, texts: Sequence[GoneText], timeout_s: float) -> int:
        """Removes what holds deleted texts. Returns the number of objects. Raises `CacheError`."""

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is uploaded. Returns False if the time runs out first."""

    def stats(self) -> dict[str, Any]:
        """Returns what `/props` and `/metrics` show."""

    def close(self, timeout_s: float) -> None:
        """Writes what is to be uploaded, and ends."""


class Bucket(Protocol):
    """What a shared tier has written, opened to remove something from it. Methods raise `CacheError`."""

    def forget(self, texts: Sequence[GoneText]) -> int:
        """Removes what holds these texts, and returns the number of objects."""

    def purge(self, is_wanted: Callable[[str, str], bool]) -> int:
        """Removes the roots of which `is_wanted(model, tenant)` holds, and returns the number of objects."""
