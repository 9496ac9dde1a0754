"""Many machines on one bucket: a day of conversations, drawn from a seed, and what the bucket is asked for, holds and
costs: `tools/bench fleet`.

The places of objects, the order of fetches and what is uploaded (`--remote-write seen-twice`) are those of
`diskprefix.prefixstore.remote`. Machines and bucket are sets of names; nothing is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import click
import numpy as np
from rich.console import Console

from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.remote.bundle import BundleSlot, last_bundles, whole_bundles
from diskprefix.prefixstore.remote.prefetching import MAX_CONCURRENT
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report, say

DAY_S = 86_400.0
BLOCK = 256
PRICES = {"put": 0.005 / 1000, "get": 0.0004 / 1000, "gib_month": 0.023}
"""US dollars for a request, and for a GiB in a month: the list prices of Amazon S3 Standard in us-east-1 for the first
50 TB. Reading within the region is free."""


@dataclass(frozen=True)
class Fleet:
    """Machines and their users. A share `stays` of turns goes to the machine of the turn before; the others go
    anywhere. A block of `block_bytes` is stored and sent as `encoded` of them. The store of each machine has
    `room_bytes`. Objects are removed from the bucket `kept_days` after they were written."""

    machines: int = 1000
    conversations: int = 20_000
    agents: int = 12
    repositories: int = 300
    turns: float = 10.0
    stays: float = 0.9
    block_bytes: int = BLOCK * 147_456
    encoded: float = 0.71
    room_bytes: int = 16 << 30
    kept_days: int = 14
    uses_bucket: bool = True
    seed: int = 1

    @property
    def object_bytes(self) -> int:
        """The bytes of a block as it is stored and sent."""
        return int(self.block_bytes * self.encoded)


@dataclass(frozen=True)
class Turn:
    """A prompt: the names of its blocks, each for all tokens up to its end, and the machine that it is sent to."""

    when: float
    machine: int
    blocks: tuple[int, ...]


@dataclass
class Machine:
    """A machine: the blocks in its store, the least recently used first, and what it knows of the bucket."""

    store: OrderedDict[int, None] = field(default_factory=OrderedDict)
    seen: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)

    def num_stored(self, blocks: Sequence[int]) -> int:
        """Returns how many first blocks are stored: the ends of prompts are evicted before their beginnings."""
        return _num_first(blocks, self.store)

    def use(self, blocks: Sequence[int], room: int) -> None:
        for block in reversed(blocks):
            self.store[block] = None
            self.store.move_to_end(block)
        while len(self.store) > room:
            self.store.popitem(last=False)


def _num_first(blocks: Sequence[int], known: Container[int]) -> int:
    """Returns how many first blocks are known. A block is known only with those before it."""
    return bisect_left(range(len(blocks)), True, key=lambda number: blocks[number] not in known)


def turns_of(fleet: Fleet) -> Iterator[Turn]:
    """Yields the turns of two days, in order. A first prompt has the instructions and tools of an agent (7,000 to
    19,000 tokens), the notes of a repository (500 to 6,000) and a question; each turn adds a reply and a result (200 to
    3,000). Few agents and repositories have most of the conversations, and most conversations begin by day."""
    random, names = np.random.default_rng(fleet.seed), count()
    agents = [_blocks(names, int(random.integers(7_000, 19_000))) for _ in range(fleet.agents)]
    notes = [int(random.integers(500, 6_000)) for _ in range(fleet.repositories)]
    shared: dict[tuple[int, int], tuple[int, ...]] = {}
    of_agents, of_notes = (_weights(number) for number in (fleet.agents, fleet.repositories))
    turns = list[Turn]()
    for number in range(2 * fleet.conversations):
        agent, repository = (
            int(random.choice(fleet.agents, p=of_agents)),
            int(random.choice(fleet.repositories, p=of_notes)),
        )
        if (agent, repository) not in shared:
            shared[agent, repository] = agents[agent] + _blocks(names, notes[repository])
        blocks, machine = shared[agent, repository], int(random.integers(fleet.machines))
        when = (number % 2 + float(np.clip(random.normal(0.58, 0.14), 0.0, 0.98))) * DAY_S
        left = 0
        for _ in range(int(random.geometric(1.0 / fleet.turns))):
            # A block that is not full is not in the bucket, and another one in the next turn.
            left += int(random.integers(200, 3_000))
            blocks, left = blocks + tuple(next(names) for _ in range(left // BLOCK)), left % BLOCK
            if random.random() >= fleet.stays:
                machine = int(random.integers(fleet.machines))
            turns.append(Turn(when, machine, blocks))
            when += float(45.0 * np.exp(random.standard_normal()))
    yield from sorted(turns, key=lambda turn: turn.when)


def _blocks(names: Iterator[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(next(names) for _ in range(num_tokens // BLOCK))


def _weights(number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    weights = 1.0 / np.arange(1, number + 1)
    return cast("np.ndarray[Any, np.dtype[np.float64]]", weights / weights.sum())


def run_day(fleet: Fleet) -> dict[str, float]:
    """Returns the counts of the second day: `prompts`, tokens (`sent`, restored from the `disk` or the
    `bucket`, `computed`), requests (`get`, `get_missing`, `head`, `put`), and bytes (`read`, `written`)."""
    machines, bucket, counts = [Machine() for _ in range(fleet.machines)], set[int](), Counter[str]()
    size = max(1, min(16, -(-(4 << 20) // fleet.block_bytes)))
    encoded, is_second = fleet.object_bytes, False
    room = fleet.room_bytes // encoded
    for turn in turns_of(fleet):
        if turn.when >= DAY_S and not is_second:
            counts, is_second = Counter(), True
        machine, blocks = machines[turn.machine], turn.blocks
        stored = machine.num_stored(blocks)
        fetched = _fetch(blocks, stored, size, bucket, counts, encoded) if fleet.uses_bucket else stored
        restored = max(stored, fetched)
        counts.update(
            prompts=1,
            sent=len(blocks) * BLOCK,
            disk=stored * BLOCK,
            bucket=(restored - stored) * BLOCK,
            computed=(len(blocks) - restored) * BLOCK,
        )
        # What was restored, or shared with an earlier prompt of this machine.
        seen = _num_first(blocks, machine.seen)
        if fleet.uses_bucket:
            _upload(blocks, max(restored, seen), size, machine, bucket, counts, encoded)
        machine.seen.update(blocks)
        machine.use(blocks, room)
    return dict(counts)


def _slots(num_blocks: int, size: int) -> list[BundleSlot]:
    return whole_bundles(cast("PromptNodes", SimpleNamespace(num_blocks=num_blocks)), size)


def _fetch(blocks: Sequence[int], stored: int, size: int, bucket: set[int], counts: Counter[str], encoded: int) -> int:
    """Returns how many first blocks a machine has after the fetches of `PrefetchJob`."""
    if stored == len(blocks):
        return stored
    slots = [slot for slot in _slots(len(blocks), size) if slot.last > stored]
    in_memory_tokens, asked, wanted, concurrent = stored // size * size, 0, 0, 1
    for number, slot in enumerate(slots):
        wanted = max(wanted, min(len(slots), number + concurrent))
        asked, new = wanted, slots[asked:wanted]
        counts["get"] += sum(blocks[each.last - 1] in bucket for each in new)
        counts["get_missing"] += sum(blocks[each.last - 1] not in bucket for each in new)
        counts["read"] += sum((each.last - each.first) * encoded for each in new if blocks[each.last - 1] in bucket)
        if blocks[slot.last - 1] not in bucket:
            break
        in_memory_tokens, concurrent = slot.last, min(MAX_CONCURRENT, 2 * concurrent)
    for slot in last_bundles(size, in_memory_tokens, len(blocks)):
        # All of them are asked for at once, and the longest is used.
        is_there = not slot.has_tail and blocks[slot.last - 1] in bucket
        counts["get" if is_there else "get_missing"] += 1
        if is_there and slot.last > in_memory_tokens:
            counts["read"] += (slot.last - slot.first) * encoded
            in_memory_tokens = slot.last
    return in_memory_tokens


def _upload(
    blocks: Sequence[int],
    num_blocks: int,
    size: int,
    machine: Machine,
    bucket: set[int],
    counts: Counter[str],
    encoded: int,
) -> None:
    slots = [slot for slot in _slots(len(blocks), size) if slot.last <= num_blocks]
    if num_blocks % size:
        slots.append(BundleSlot(num_blocks // size * size, num_blocks))
    for slot in slots:
        name = blocks[slot.last - 1]
        if name in machine.known:
            continue
        machine.known.add(name)
        counts["head"] += 1
        if name not in bucket:
            bucket.add(name)
            counts["put"] += 1
            counts["written"] += (slot.last - slot.first) * encoded


def row_of(fleet: Fleet, label: str) -> dict[str, Any]:
    """Returns a row of the table. `pays_above`: the bucket pays where computing a million tokens costs more dollars."""
    day, alone = run_day(fleet), run_day(replace(fleet, uses_bucket=False))
    per_prompt = {name: day.get(name, 0) / day["prompts"] for name in ("get", "get_missing", "head", "put", "read")}
    requests = sum(day.get(name, 0) for name in ("get", "get_missing", "head"))
    gib = day.get("written", 0) / 2**30
    # Objects of the last days are kept too.
    dollars = (
        requests * PRICES["get"] + day.get("put", 0) * PRICES["put"] + gib * fleet.kept_days * PRICES["gib_month"] / 30
    )
    saved = alone["computed"] - day["computed"]
    return {
        "fleet": label,
        "prompts": int(day["prompts"]),
        "tokens": day["sent"] / day["prompts"],
        **{name: per_prompt[name] for name in ("get", "get_missing", "head", "put")},
        "read_mib": per_prompt["read"] / 2**20,
        "written_gib": gib,
        "alone": 1 - alone["computed"] / day["sent"],
        "with_bucket": 1 - day["computed"] / day["sent"],
        "dollars": dollars,
        "saved_mtok": saved / 1e6,
        "pays_above": dollars / (saved / 1e6) if saved > 0 else None,
    }


def fleets(base: Fleet) -> dict[str, Fleet]:
    return {
        "as it is": base,
        "turns go anywhere": replace(base, stays=0.0),
        "turns stay": replace(base, stays=1.0),
        "one turn each, 10 x the conversations": replace(base, turns=1.0, conversations=10 * base.conversations),
        "each repository once": replace(base, repositories=base.conversations),
        "objects kept for 2 days": replace(base, kept_days=2),
        "160 GiB on each machine": replace(base, room_bytes=10 * base.room_bytes),
        "10 machines, same work each": replace(base, machines=10, conversations=max(1, base.conversations // 100)),
        "a model with 12 KiB per token": replace(base, block_bytes=BLOCK * 12_288),
    }


@click.command()
@click.option("--machines", default=1000, show_default=True, type=click.IntRange(1))
@click.option("--conversations", default=20_000, show_default=True, type=click.IntRange(1), help="In a day.")
@JSON
def main(machines: int, conversations: int, as_json: bool) -> None:
    """Simulate a day of many machines on one bucket: requests, bytes, hit rate, cost."""
    base = Fleet(machines=machines, conversations=conversations)
    rows = [row_of(fleet, label) for label, fleet in fleets(base).items()]
    print_report({"rows": rows, "prices": PRICES}, as_json, _show)


def _show(report: dict[str, Any], console: Console) -> None:
    asked = new_table(
        "Per prompt: requests to the bucket, and MiB read from it",
        left=("fleet",),
        right=("prompts", "tokens", "GET", "missing", "HEAD", "PUT", "MiB"),
    )
    results = new_table(
        "A day",
        left=("fleet",),
        right=("hits alone", "with it", "GiB written", "$", "Mtok saved", "pays above $ per Mtok"),
    )
    for row in report["rows"]:
        numbers = (f"{row[name]:.2f}" for name in ("get", "get_missing", "head", "put", "read_mib"))
        asked.add_row(row["fleet"], f"{row['prompts']:,}", f"{row['tokens']:,.0f}", *numbers)
        results.add_row(
            row["fleet"],
            *(f"{100 * row[name]:.1f} %" for name in ("alone", "with_bucket")),
            *(f"{row[name]:,.0f}" for name in ("written_gib", "dollars", "saved_mtok")),
            "never" if row["pays_above"] is None else f"{row['pays_above']:.3f}",
        )
    console.print(asked, results)
    million = {name: 1e6 * PRICES[name] for name in ("get", "put")}
    said = f"a million GET or HEAD {million['get']:.2f} $, PUT {million['put']:.2f} $"
    say(console, f"{said}; a GiB and month {PRICES['gib_month']} $; hits of tokens sent")
