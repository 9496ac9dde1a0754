"""Runs a workload through a policy. Each request takes the steps of `cache.cached_request`, without any state.

README.md lists the omissions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.prefixstore.cache.choosing import (
    marked_nodes,
    refused_tokens,
    selection_ahead,
    selection_of,
    sighting_of,
    ttl_at,
)
from diskprefix.prefixstore.cache.matching import Matcher, RestoreResult
from diskprefix.prefixstore.cache.policy.seen import SeenPrompts
from diskprefix.prefixstore.cache.policy.select import Rules
from diskprefix.prefixstore.cache.policy.write_budget import Spending, within_budget
from diskprefix.prefixstore.cache.saving import SavePlan, SavePlanner
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulated_memory import SimulatedMemory
from diskprefix.prefixstore.simulate.simulated_store import NewEntry, SimulatedStore
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.write_counter import WrittenBytes
from diskprefix.tokens import LEAST_TOKENS, TokenIds, TokenPath, floor_to_grid, root_hash
from diskprefix.values import CacheOptions, Scope, Selection

_SECRET = 0
_OFF = Scope("off")


class Policy(Struct, frozen=True, kw_only=True):
    """The settings of a daemon that decide how much is kept, with the daemon's defaults. 0 is no limit for `ttl_s` and
    for `write_budget_bytes`, the bytes to write in 24 hours. `memory_bytes` is KV memory; with 0 every prompt is
    restored from the disk. `seconds_per_token` is the speed of prefill. `computes_ahead`: the pauses of a trace are
    used; their budget is not simulated."""

    scope: Scope
    budget_bytes: int | None = None
    block_size: int = 256
    min_tokens: int = 64
    interval: int = 10240
    cold_max: int = 10240
    ttl_s: float = 0.0
    write_budget_bytes: int = 0
    memory_bytes: int = 0
    seconds_per_token: float = 1e-3
    computes_ahead: bool = True


class Totals(Struct):
    """The effect of a policy on a workload.

    `hits` counts requests with restored tokens. `written_tokens` are the tokens of written nodes, `written_bytes` their
    size in the file. `selected_tokens` are the tokens that
    the policy chose to keep, stored before or not. `evictions` counts evicted nodes, `dropped` publications that did
    not fit, `unaffordable` prompts that were not kept whole for the write budget. `seconds_saved` is the time of
    prefill that restoring saved. `ahead_tokens` were computed while nobody waited.
    """

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    written_tokens: int = 0
    written_bytes: int = 0
    selected_tokens: int = 0
    evictions: int = 0
    dropped: int = 0
    unaffordable: int = 0
    peak_bytes: int = 0
    seconds_saved: float = 0.0
    ahead_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.requests, 1)

    @property
    def restored_share(self) -> float:
        """The restored share of prompt tokens."""
        return self.restored_tokens / max(self.prompt_tokens, 1)

    @property
    def written_share(self) -> float:
        """The number of written tokens for each prompt token."""
        return self.written_tokens / max(self.prompt_tokens, 1)


class Outcome(NamedTuple):
    """The result of one request."""

    restored: int
    selection: Selection
    written_tokens: int


class Simulator:
    """A daemon without a model. Call `step` for the requests of a trace in order, and `plan_ahead` for the prompts of a
    trace that nobody sent."""

    def __init__(self, policy: Policy, geometry: Geometry) -> None:
        self.totals = Totals()
        self._policy = policy
        self._geometry = geometry
        self.store = SimulatedStore(policy.budget_bytes, has_states=bool(geometry.state_bytes), ttl_s=policy.ttl_s)
        self._rules = Rules(
            block_size=policy.block_size,
            min_tokens=policy.min_tokens,
            cold_max=policy.cold_max,
            interval=policy.interval,
            state=geometry.state_kind,
            state_bytes=geometry.state_bytes,
        )
        self._memory = SimulatedMemory(policy.memory_bytes, geometry, policy.block_size)
        self._seen_by: dict[str, SeenPrompts] = {}
        """The seen prompts by tenant."""
        self.disk = WrittenBytes()
        """Written bytes, by the clock of the trace."""
        self._ends: set[str] = set()
        """The ends of prompts whose logits are stored as notes."""
        self._ahead: TraceRequest | None = None
        """The prompt that is computed until the next request comes."""
        self._bytes_of = lru_cache(maxsize=1024)(geometry.stored_bytes)

    def step(self, request: TraceRequest) -> Outcome:
        """Simulates a request, from its lookup to its publication."""
        self._compute_ahead(request.when)
        policy, geometry, prompt = self._policy, self._geometry, request.prompt
        scope = request.scope or policy.scope
        self.store.pass_time(request.when)
        nodes = self.nodes(request, prompt.token_ids)
        restored, in_memory = RestoreResult(), 0
        if scope.kind != "off":
            in_memory = self._memory.match(request.tenant, prompt.token_ids)
            restored = self._restore(request, nodes)
        seen, names = self._seen(request), nodes.path.block_names
        is_asked = request.scope is not None or request.ttl_s is not None
        options = CacheOptions(scope=scope, group=request.group, save=request.save, is_asked=is_asked)
        spending, stored = self._spending(request.when), restored.stored_tokens
        sighting = sighting_of(seen, prompt, options, names, self.store.stays_s)
        selection = selection_of(sighting, self._rules, prompt, options, stored)
        self.store.refuse(refused_tokens(sighting, selection, stored) * geometry.bytes_per_token, request.when)
        had = max(in_memory, stored)
        selection = within_budget(selection, prompt, spending, self._rules, stored=stored, had=had, is_asked=is_asked)
        self.totals.unaffordable += selection.reason == "write_budget"
        written = 0
        if request.remembered and scope.kind != "off":
            num_tokens = len(prompt.token_ids) + len(request.reply)
            if spending is not None and not spending.allows_reply(num_tokens, stored, is_asked=is_asked):
                selection = replace(selection, saves_reply=False)
            loaded = replace(restored, num_tokens=max(restored.num_tokens, in_memory))
            written = self._publish(request, nodes, loaded, selection)
            if request.save and len(prompt.token_ids) >= policy.min_tokens:
                seen.remember(prompt.token_ids, names, request.group, request.when)
        if scope.kind != "off":
            whole = np.concatenate([prompt.token_ids, request.reply])
            num_exact = len(whole if geometry.exact_at == "token" else prompt.token_ids)
            self._memory.keep(request.tenant, whole, num_exact)
        num_restored = max(restored.num_tokens, in_memory)
        self._count(len(prompt.token_ids), num_restored, selection, written)
        return Outcome(num_restored, selection, written)

    def plan_ahead(self, request: TraceRequest) -> None:
        """Has a prompt computed from now on."""
        self._compute_ahead(request.when)
        self._ahead = request if self._policy.computes_ahead else None

    def _compute_ahead(self, until: float) -> None:
        """Computes as much of the planned prompt as there is time for. Its state is stored if that is all of it."""
        request, self._ahead = self._ahead, None
        if request is None:
            return
        self.store.pass_time(request.when)
        state, grid = self._geometry.state_kind, self._policy.block_size
        prompt = request.prompt
        if self._geometry.exact_at == "grid":
            prompt = prompt.until(floor_to_grid(len(prompt.token_ids), grid))
        token_ids, nodes = prompt.token_ids, self.nodes(request, prompt.token_ids)
        restored, in_memory = self._restore(request, nodes), self._memory.match(request.tenant, token_ids)
        start = max(restored.num_tokens, in_memory)
        end = min(len(token_ids), start + int((until - request.when) / self._policy.seconds_per_token))
        if len(token_ids) - start < LEAST_TOKENS:
            return
        self.totals.ahead_tokens += end - start
        self._memory.keep(request.tenant, token_ids[:end], end)
        spending = self._spending(request.when)
        if end == len(token_ids) and (spending is None or spending.is_ample):
            scope = request.scope or self._policy.scope
            selection = selection_ahead(prompt, scope, state, 1 if self._geometry.exact_at == "token" else grid)
            planner = SavePlanner(nodes, restored, state, end)
            self._store(request, planner, planner.plan(selection, selection.checkpoints), selection)

    def _seen(self, request: TraceRequest) -> SeenPrompts:
        if request.tenant not in self._seen_by:
            is_trusting = request.is_trusted or not request.tenant
            self._seen_by[request.tenant] = SeenPrompts(self._policy.block_size, is_trusting=is_trusting)
        return self._seen_by[request.tenant]

    def _spending(self, now: float) -> Spending | None:
        """Returns the state of the write budget, if there is one. The simulated disk has uncompressed nodes only."""
        limit, geometry = self._policy.write_budget_bytes, self._geometry
        if not limit:
            return None
        return Spending(
            used_bytes=self.disk.last_day(now),
            limit_bytes=limit,
            bytes_per_token=geometry.bytes_per_token,
            state_bytes=geometry.state_bytes,
        )

    def _restore(self, request: TraceRequest, nodes: PromptNodes) -> RestoreResult:
        state = self._geometry.state_kind
        matcher = Matcher(nodes, [self.store], state, has_logits=lambda: nodes.end_id in self._ends)
        matcher.match()
        restorable, stop = matcher.restorable()
        restored = RestoreResult(blocks=matcher.blocks, partial_match=matcher.partial_match)
        if not restorable:
            return restored
        last = restorable[-1].name
        self.store.touch(last, request.when, 1, ttl_at(stop, request.prompt.marks, request.ttl_s))
        return replace(restored, last_node=last, num_tokens=stop, stored_tokens=stop)

    def _publish(self, request: TraceRequest, nodes: PromptNodes, restored: RestoreResult, selection: Selection) -> int:
        """Publishes the prompt, then its reply. Returns the number of written tokens."""
        state, min_tokens = self._geometry.state_kind, self._policy.min_tokens
        planner = SavePlanner(nodes, restored, state, len(nodes.token_ids), min_tokens)
        # Restored tokens are not computed, so they leave no checkpoint.
        with_end = not (len(request.reply) and planner.leaves_end(selection))
        states_at = {at for at in selection.checkpoints if at > restored.num_tokens}
        plan = planner.plan(selection, states_at, with_end=with_end)
        written = self._store(request, planner, plan, selection)
        keeps_logits = selection.keep_tail and self._geometry.state_kind == "token"
        if keeps_logits and not (plan.nodes and plan.nodes[-1].kind == NodeKind.TAIL):
            self._ends.add(nodes.end_id)
        if request.save:
            for name, ttl_s in marked_nodes(nodes, request.prompt.marks, request.ttl_s):
                self.store.touch(name, request.when, 0, ttl_s)
        if len(request.reply):
            whole = self.nodes(request, np.concatenate([request.prompt.token_ids, request.reply]))
            if not (stop := planner.reply_stop(len(whole.token_ids), selection)):
                return written
            plan = planner.plan_reply(whole, stop, selection, {stop} if self._geometry.state_bytes else ())
            if keeps_logits and plan.last_node is not None:
                self._ends.add(nodes.end_id)
            written += self._store(request, planner, plan, selection)
        return written

    def _store(self, request: TraceRequest, planner: SavePlanner, plan: SavePlan, selection: Selection) -> int:
        """Stores the nodes of a plan. Returns the number of written tokens."""
        nodes, marks, ttl_s = planner.nodes, request.prompt.marks, request.ttl_s
        to_the_token, per_token = self._geometry.state_kind == "token", self._policy.seconds_per_token
        planner.submitted.update(node.name for node in plan.nodes)
        entries = [
            NewEntry(
                node,
                self._bytes_of(node.num_tokens, node.kind),
                per_token * saved,
                ttl_at(node.end, marks, ttl_s),
                nodes.token_bytes(node) if to_the_token else None,
            )
            for node, saved in zip(plan.nodes, planner.saved_tokens(plan.nodes), strict=True)
        ]
        if not entries and plan.last_node is None:
            return 0
        *steps, last_step = self._steps(entries)
        if all(self.store.publish(step, None, None, request.when) for step in steps):
            self.store.publish(last_step, plan.last_node, ttl_at(plan.num_tokens, marks, ttl_s), request.when)
        entries = [entry for entry in entries if entry.node.name in self.store]
        for entry in entries if self._geometry.state_bytes else ():
            if entry.node.kind != NodeKind.BLOCK:
                self.store.remove_superseded(nodes, entry, selection.anchors)
        for entry in entries:
            self.totals.written_bytes += entry.num_bytes
            self.disk.add(entry.num_bytes, request.when)
        return sum(entry.node.num_tokens for entry in entries)

    def _steps(self, entries: Sequence[NewEntry]) -> list[list[NewEntry]]:
        """Returns the entries that a daemon publishes together: at each grid point of a prompt, or all of them if the
        model is exact at every token, because a step may then have thousands of tokens. There is at least one step."""
        if self._geometry.exact_at == "token":
            return [list(entries)]
        return [list(step) for _, step in groupby(entries, key=lambda entry: entry.node.end)] or [[]]

    def nodes(self, request: TraceRequest, token_ids: TokenIds) -> PromptNodes:
        """Returns the nodes of a prompt, named as in the simulated store."""
        root, layout = root_hash(request.tenant), self._geometry.layout
        return PromptNodes(TokenPath(_SECRET, root, token_ids, self._policy.block_size), layout)

    def _count(self, num_tokens: int, restored: int, selection: Selection, written: int) -> None:
        totals, store = self.totals, self.store
        totals.requests += 1
        totals.hits += restored > 0
        totals.prompt_tokens += num_tokens
        totals.restored_tokens += restored
        totals.written_tokens += written
        totals.selected_tokens += selection.kept
        totals.seconds_saved += restored * self._policy.seconds_per_token
        totals.evictions, totals.dropped = store.evicted, store.dropped
        totals.peak_bytes = max(totals.peak_bytes, store.used_bytes)


def simulate(trace: Trace, policy: Policy, geometry: Geometry) -> Totals:
    """Replays a whole trace."""
    simulator = Simulator(policy, geometry)
    for request in trace:
        simulator.plan_ahead(request) if request.is_ahead else simulator.step(request)
    return simulator.totals
