"""An object store as a simulation sees it: names, sizes and requests. Prices and limits are those of S3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

READS_PER_S, WRITES_PER_S = 5500, 3500
"""What S3 takes at least for each partition of a bucket's keys: GET and HEAD, and PUT, requests a second."""
LISTED_KEYS = 1000
"""Keys that one LIST request returns at most."""
LIST_S = 0.1
"""About what a LIST request takes. A listing asks for one page after the other."""
READ_DOLLARS, WRITE_DOLLARS = 0.4e-6, 5e-6
"""S3 Standard, us-east-1: a GET or HEAD; a PUT or LIST. Between machines of the same region bytes cost nothing."""
GIB_MONTH_DOLLARS = 0.023
"""The same for what is stored."""


@dataclass
class Traffic:
    """The requests to the store.

    `got_bytes` and `put_bytes` are those of the objects, or of the parts that were read. `reads_at` and `writes_at`
    count requests by the second in which they came.
    """

    gets: int = 0
    heads: int = 0
    puts: int = 0
    got_bytes: int = 0
    put_bytes: int = 0
    reads_at: Counter[int] = field(default_factory=Counter)
    writes_at: Counter[int] = field(default_factory=Counter)

    @property
    def reads_per_s(self) -> int:
        """In the busiest second."""
        return max(self.reads_at.values(), default=0)

    @property
    def writes_per_s(self) -> int:
        """In the busiest second."""
        return max(self.writes_at.values(), default=0)

    @property
    def dollars(self) -> float:
        return (self.gets + self.heads) * READ_DOLLARS + self.puts * WRITE_DOLLARS

    @property
    def headroom(self) -> float:
        """Returns how many times the busiest second one partition can take. Infinite without requests."""
        rates = ((READS_PER_S, self.reads_per_s), (WRITES_PER_S, self.writes_per_s))
        return min((limit / rate for limit, rate in rates if rate), default=float("inf"))


class SimulatedBucket:
    """Immutable objects by name. Nothing is deleted."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        """Bytes of each object."""
        self.traffic = Traffic()

    @property
    def stored_bytes(self) -> int:
        return sum(self.sizes.values())

    def find(self, names: Sequence[bytes], now: float) -> int:
        """Returns how many of the first `names` are stored.

        If one is, all before it are, as a machine puts the objects of a prompt in their order. So the first is asked
        for, then one 2, 4, 8 … further, and then what lies between.
        """
        low, step, high = 0, 1, len(names)
        while low < high:
            at = min(low + step, high) - 1
            if not self._has(names[at], now):
                high = at
                break
            low, step = at + 1, 2 * step
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._has(names[middle], now) else (low, middle)
        return low

    def get(self, num_objects: int, num_bytes: int, now: float) -> None:
        """Counts the requests that read these objects, or parts of them."""
        self.traffic.gets += num_objects
        self.traffic.got_bytes += num_bytes
        self.traffic.reads_at[int(now)] += num_objects

    def put(self, name: bytes, num_bytes: int, now: float) -> None:
        self.sizes[name] = num_bytes
        self.traffic.puts += 1
        self.traffic.put_bytes += num_bytes
        self.traffic.writes_at[int(now)] += 1

    def _has(self, name: bytes, now: float) -> bool:
        self.traffic.heads += 1
        self.traffic.reads_at[int(now)] += 1
        return name in self.sizes


def sweep_s(num_objects: int) -> float:
    """Returns about the time that one sweeper takes to list this number of objects, in seconds."""
    return -(-num_objects // LISTED_KEYS) * LIST_S


def most_swept(seconds: float) -> int:
    """Returns the number of objects that one sweeper lists in this number of seconds."""
    return round(seconds / LIST_S) * LISTED_KEYS
