"""What policies are measured against: the plain best-match rule with whole snapshots, and what any rule could do."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from diskprefix.policy.history import History
from diskprefix.policy.scope import DEFAULT_WINDOW, Scope
from diskprefix.prefix_cache.radix_tree import RadixTree
from diskprefix.prompt import last_safe
from diskprefix.simulate.geometry import Geometry
from diskprefix.simulate.simulator import Policy, Totals
from diskprefix.simulate.trace import Trace, TraceRequest
from diskprefix.store.schema import HISTORY_TOKENS
from diskprefix.tokens import block_hash, common_prefix_length, root_hash

_OFF = Scope("off")
_WITHOUT_END = 1 << 62


def whole_snapshots(trace: Trace, policy: Policy, geometry: Geometry, *, window: int = DEFAULT_WINDOW) -> Totals:
    """The plain best-match rule, as the systems before this one have it.

    The boundary of a prompt is the last safe one in what it shares with one of the `window` prompts before. All that
    stands before it is one snapshot under the hash of these tokens. A request restores the snapshot of its own boundary
    or none; then it writes it, if it has `min_tokens`. When the budget is full, the one that was used least recently
    goes. Of a request's own scope only `off` is heeded, of `policy` the budget, `min_tokens` and the speed of prefill.
    """
    rule = _WholeSnapshots(policy, geometry, window)
    for request in trace:
        rule.step(request)
    return rule.totals


class _WholeSnapshots:
    def __init__(self, policy: Policy, geometry: Geometry, window: int) -> None:
        self.totals = Totals()
        self._policy, self._geometry, self._window = policy, geometry, window
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        """The bytes of each snapshot by its key, the least recently used first."""
        self._used_bytes = 0
        self._written: set[bytes] = set()
        self._histories: defaultdict[str, History] = defaultdict(
            lambda: History(max_prompts=window, max_tokens=HISTORY_TOKENS)
        )

    def step(self, request: TraceRequest) -> None:
        prompt, totals = request.prompt, self.totals
        totals.requests += 1
        totals.prompt_tokens += len(prompt.token_ids)
        if request.scope == _OFF:
            return
        history = self._histories[request.tenant]
        recent = history.recent(self._window)
        boundary = last_safe(prompt, max((common_prefix_length(prompt.token_ids, ids) for ids in recent), default=0))
        if boundary >= max(self._policy.min_tokens, 1):
            self._use(request, boundary)
        if request.save and request.remembered and len(prompt.token_ids) >= self._policy.min_tokens:
            history.add(prompt.token_ids)

    def _use(self, request: TraceRequest, boundary: int) -> None:
        totals = self.totals
        totals.selected_tokens += boundary
        key = block_hash(0, root_hash(request.tenant), request.prompt.token_ids[:boundary])
        if key in self._stored:
            self._stored.move_to_end(key)
            totals.hits += 1
            totals.restored_tokens += boundary
            totals.seconds_saved += boundary * self._policy.seconds_per_token
        elif request.save and request.remembered:
            self._write(key, boundary)

    def _write(self, key: bytes, num_tokens: int) -> None:
        totals, budget_bytes = self.totals, self._policy.budget_bytes
        num_bytes = num_tokens * self._geometry.bytes_per_token + self._geometry.state_bytes
        if budget_bytes is not None:
            if num_bytes > budget_bytes:
                totals.dropped += 1
                return
            while self._used_bytes + num_bytes > budget_bytes:
                self._used_bytes -= self._stored.popitem(last=False)[1]
                totals.evictions += 1
        self._stored[key] = num_bytes
        self._used_bytes += num_bytes
        totals.peak_bytes = max(totals.peak_bytes, self._used_bytes)
        totals.written_tokens += num_tokens
        totals.written_bytes += num_bytes
        if key not in self._written:
            self._written.add(key)
            totals.distinct_bytes += num_bytes


def upper_bound(trace: Trace, policy: Policy, geometry: Geometry) -> Totals:
    """What no rule passes: of each prompt all tokens that it shares with any one before it.

    What is shared counts from one block, or from `min_tokens` if they are fewer: no rule with the settings of `policy`
    restores less. Of what a request asks for itself only the scope `off` and `save: false` are heeded. Holds
    each distinct token in memory.
    """
    totals, kept = Totals(), RadixTree(max_tokens=_WITHOUT_END)
    least = min(policy.block_size, max(policy.min_tokens, 1))
    for request in trace:
        token_ids, root = request.prompt.token_ids, request.tenant.encode()
        totals.requests += 1
        totals.prompt_tokens += len(token_ids)
        if request.scope == _OFF:
            continue
        shared = kept.shared(root, token_ids)
        restored = shared if shared >= least else 0
        totals.hits += restored > 0
        totals.restored_tokens += restored
        totals.seconds_saved += restored * policy.seconds_per_token
        if request.save and request.remembered:
            kept.add(root, token_ids)
            totals.selected_tokens += len(token_ids)
            totals.written_tokens += len(token_ids) - shared
    num_bytes = totals.written_tokens * geometry.bytes_per_token
    totals.written_bytes = totals.distinct_bytes = totals.peak_bytes = num_bytes
    return totals
