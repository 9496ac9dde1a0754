"""One workload on several machines. Each has its own daemon and store, with or without a shared tier.

README.md lists the assumptions about the tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.object_store import GIB_MONTH_DOLLARS, SimulatedBucket, sweep_s
from diskprefix.extras.simulate.simulated_store import NewEntry
from diskprefix.extras.simulate.simulator import Policy, Simulator, Totals
from diskprefix.extras.simulate.spread import Spread, spreader
from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import Scope
from diskprefix.store.schema import Kind

WriteRule: TypeAlias = Literal["off", "seen-twice", "all"]
WRITE_RULES: tuple[WriteRule, ...] = ("off", "seen-twice", "all")
OBJECT_BYTES = 4 << 20
"""The minimum size of an object: smaller blocks are bundled."""
_OFF = Scope("off")
_NOT_ASKED = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The number of machines, the rule that assigns requests to them, and the rule of uploads (`off`: no shared
    tier)."""

    machines: int
    spread: Spread
    write: WriteRule


@dataclass(frozen=True, eq=False)
class MachinesRow:
    """The result of a workload under a setup. `totals` are the sums of all machines. `fetched_tokens` came from the
    tier. `busiest` is the largest number of requests of one machine. `seconds` is the duration of the workload."""

    trace: str
    setup: Setup
    policy: Policy
    geometry: Geometry
    totals: Totals
    store: SimulatedBucket
    fetched_tokens: int
    busiest: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings and the figures. `most_…_per_s` are requests in the busiest second. `prefix_headroom` is
        None if the tier received no request."""
        traffic, totals, seconds = self.store.traffic, self.totals, max(self.seconds, 1.0)
        stored = self.store.stored_bytes
        return {
            "trace": self.trace,
            **asdict(self.setup),
            "scope": str(self.policy.scope),
            "regime": self.geometry.state_kind,
            "budget_bytes": self.policy.budget_bytes,
            **asdict(totals),
            "hit_rate": totals.hit_rate,
            "restored_share": totals.restored_share,
            "busiest_machine_requests": self.busiest,
            "fetched_tokens": self.fetched_tokens,
            "fetched_bytes": traffic.got_bytes,
            "put_bytes": traffic.put_bytes,
            "gets": traffic.gets,
            "heads": traffic.heads,
            "puts": traffic.puts,
            "mean_reads_per_s": (traffic.gets + traffic.heads) / seconds,
            "mean_writes_per_s": traffic.puts / seconds,
            "most_reads_per_s": traffic.reads_per_s,
            "most_writes_per_s": traffic.writes_per_s,
            "prefix_headroom": traffic.headroom if traffic.reads_at or traffic.writes_at else None,
            "objects": len(self.store.sizes),
            "stored_bytes": stored,
            "sweep_s": sweep_s(len(self.store.sizes)),
            "request_dollars": traffic.dollars,
            "stored_dollars_per_month": stored / 2**30 * GIB_MONTH_DOLLARS,
        }


def replay(
    trace: Trace,
    setup: Setup,
    policy: Policy,
    geometry: Geometry,
    on_requests: Callable[[int], None] = lambda _number: None,
) -> MachinesRow:
    """Replays a whole trace, one request after the other. `geometry` must have no checkpoints."""
    store = SimulatedBucket()
    tier = None if setup.write == "off" else store
    machines = [_Machine(policy, geometry, tier, setup.write) for _ in range(setup.machines)]
    send = spreader(setup.spread, setup.machines)
    last = 0.0
    for request in trace:
        machines[send(request)].step(request)
        last = request.when
        on_requests(1)
    return MachinesRow(
        trace=trace.name,
        setup=setup,
        policy=policy,
        geometry=geometry,
        totals=_sum([machine.simulator.totals for machine in machines]),
        store=store,
        fetched_tokens=sum(machine.fetched_tokens for machine in machines),
        busiest=max(machine.simulator.totals.requests for machine in machines),
        seconds=last,
    )


def _sum(all_totals: Sequence[Totals]) -> Totals:
    return Totals(**{each.name: sum(getattr(totals, each.name) for totals in all_totals) for each in fields(Totals)})


@dataclass(eq=False)
class _Machine:
    """A daemon without a model, with a shared tier."""

    policy: Policy
    geometry: Geometry
    tier: SimulatedBucket | None
    write: WriteRule
    fetched_tokens: int = 0
    simulator: Simulator = field(init=False)
    _known: set[bytes] = field(default_factory=set)
    """The objects that this machine knows to be in the tier."""
    _seen: set[bytes] = field(default_factory=set)
    """The objects whose tokens this machine has seen."""

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.policy, self.geometry)
        block_bytes = self.policy.block_size * self.geometry.bytes_per_token
        self._bundle = -(-OBJECT_BYTES // block_bytes)
        """The number of blocks in an object. The last block gives the object its name."""

    def step(self, request: TraceRequest) -> None:
        """Simulates a request, from its fetches to its uploads."""
        tier = self.tier
        if tier is None or (request.scope or self.policy.scope) == _OFF:
            self.simulator.step(request)
            return
        nodes = self.simulator.nodes(request, request.prompt.token_ids)
        missing_from = self._fetch(tier, request, nodes)
        self.simulator.step(request)
        if request.save and request.remembered:
            if len(request.reply):
                nodes = self.simulator.nodes(request, np.concatenate([request.prompt.token_ids, request.reply]))
            self._put(tier, request.when, nodes, missing_from)

    def _fetch(self, tier: SimulatedBucket, request: TraceRequest, nodes: PromptNodes) -> int:
        """Fetches the blocks after those of the machine's own store, as far as the tier has them.

        Returns the number of the first object that the tier is known to lack, `_NOT_ASKED` if none is known.
        """
        names, own = nodes.block_names, self._num_own(nodes)
        first = own // self._bundle
        asked = [names[end - 1] for end in self._ends(self._most_restorable(nodes)) if end > own]
        found = tier.find(asked, request.when) if asked else 0
        end = (first + found) * self._bundle
        if found:
            self._keep(request, nodes, range(own, end))
            num_tokens = (end - own) * self.policy.block_size
            tier.get(found, num_tokens * self.geometry.bytes_per_token, request.when)
            self.fetched_tokens += num_tokens
            self._known.update(asked[:found])
        return first + found if found < len(asked) else _NOT_ASKED

    def _keep(self, request: TraceRequest, nodes: PromptNodes, indices: range) -> None:
        """Stores fetched blocks on this machine. They fit, because they fitted on the machine that put them."""
        blocks = [nodes.blocks[index] for index in indices]
        per_token, is_token = self.policy.seconds_per_token, self.geometry.state_kind == "token"
        entries = [
            NewEntry(
                block,
                self.geometry.stored_bytes(block.num_tokens, Kind.BLOCK),
                per_token * block.num_tokens,
                token_ids=nodes.token_bytes(block) if is_token else None,
            )
            for block in blocks
        ]
        self.simulator.store.publish(entries, blocks[-1].name, None, request.when)

    def _put(self, tier: SimulatedBucket, now: float, nodes: PromptNodes, missing_from: int) -> None:
        """Puts the objects of a prompt that the rule selects, if all their blocks are in this machine's store."""
        names, own = nodes.block_names, self._num_own(nodes)
        chosen: list[tuple[int, bytes]] = []
        for number, end in enumerate(self._ends(len(names))):
            name = names[end - 1]
            is_wanted = self.write == "all" or name in self._seen
            self._seen.add(name)
            if is_wanted and end <= own and name not in self._known:
                chosen.append((number, name))
        # The fetch has shown that the later ones are missing.
        unsure = [name for number, name in chosen if number < missing_from]
        stored = tier.find(unsure, now)
        for _, name in chosen[stored:]:
            tier.put(name, self._bundle * self.policy.block_size * self.geometry.bytes_per_token, now)
        self._known.update(name for _, name in chosen)

    def _num_own(self, nodes: PromptNodes) -> int:
        """Returns the number of first blocks that this machine's store has."""
        names = nodes.block_names
        return next((index for index, name in enumerate(names) if name not in self.simulator.store), len(names))

    def _ends(self, num_blocks: int) -> range:
        """Returns the ends of the objects in the first blocks, in blocks."""
        return range(self._bundle, num_blocks + 1, self._bundle)

    def _most_restorable(self, nodes: PromptNodes) -> int:
        """Returns the number of blocks that may be restored. The last token is always computed, so the last block is of
        use only if a part of it can be restored."""
        is_token = self.geometry.state_kind == "token"
        return nodes.num_blocks if is_token else (len(nodes.token_ids) - 1) // self.policy.block_size


def setups(machines: Sequence[int], spreads: Sequence[Spread], rules: Sequence[WriteRule]) -> list[Setup]:
    """Returns all combinations, in this order. One machine has one spread only."""
    found = [Setup(machines=n, spread=spread, write=rule) for n in machines for spread in spreads for rule in rules]
    alone = [replace(setup, spread=spreads[0]) if setup.machines == 1 else setup for setup in found]
    return list(dict.fromkeys(alone))
