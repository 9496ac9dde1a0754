"""A simulated object store: names, sizes and counts of requests. Prices and limits are those of S3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

READS_PER_S, WRITES_PER_S = 5500, 3500
"""The minimum rates of S3 for each partition of a bucket's keys, in requests per second: GET and HEAD; PUT."""
LISTED_KEYS = 1000
"""The maximum number of keys in the reply to a LIST request."""
LIST_S = 0.1
"""The approximate time of a LIST request. A listing asks for one page after the other."""
READ_DOLLARS, WRITE_DOLLARS = 0.4e-6, 5e-6
"""The prices of S3 Standard in us-east-1: a GET or HEAD; a PUT or LIST. Bytes within the region cost nothing."""
GIB_MONTH_DOLLARS = 0.023
"""The price of storage."""


@dataclass
class Traffic:
    """Counts of requests to the store. `got_bytes` are the bytes read, `put_bytes` the bytes written. `reads_at` and
    `writes_at` count requests by the second of their arrival."""

    gets: int = 0
    heads: int = 0
    puts: int = 0
    got_bytes: int = 0
    put_bytes: int = 0
    reads_at: Counter[int] = field(default_factory=Counter)
    writes_at: Counter[int] = field(default_factory=Counter)

    @property
    def reads_per_s(self) -> int:
        """The reads in the busiest second."""
        return max(self.reads_at.values(), default=0)

    @property
    def writes_per_s(self) -> int:
        """The writes in the busiest second."""
        return max(self.writes_at.values(), default=0)

    @property
    def dollars(self) -> float:
        return (self.gets + self.heads) * READ_DOLLARS + self.puts * WRITE_DOLLARS

    @property
    def headroom(self) -> float:
        """The factor by which the limit of one partition exceeds the busiest second. Infinite without requests."""
        rates = ((READS_PER_S, self.reads_per_s), (WRITES_PER_S, self.writes_per_s))
        return min((limit / rate for limit, rate in rates if rate), default=float("inf"))


class SimulatedBucket:
    """Immutable objects by name. Nothing is deleted."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        """The bytes of each object."""
        self.traffic = Traffic()

    @property
    def stored_bytes(self) -> int:
        return sum(self.sizes.values())

    def find(self, names: Sequence[bytes], now: float) -> int:
        """Returns the number of first `names` that are stored.

        A machine puts the objects of a prompt in order, so if one is stored, all before it are. The search asks for the
        first name, then for names 2, 4, 8 … further, and then bisects.
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
        """Counts requests that read objects, or parts of them."""
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
    """Returns the approximate time in seconds that one sweeper needs to list this number of objects."""
    return -(-num_objects // LISTED_KEYS) * LIST_S


def most_swept(seconds: float) -> int:
    """Returns the number of objects that one sweeper lists in this time."""
    return round(seconds / LIST_S) * LISTED_KEYS
