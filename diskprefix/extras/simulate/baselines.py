"""Two rules to measure policies against: best match with whole snapshots, and the most that any rule could do."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict

import numpy as np

from diskprefix.cache.policy.history import History
from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.radix_tree import RadixTree
from diskprefix.extras.simulate.simulator import Policy, Totals
from diskprefix.extras.simulate.trace import Trace
from diskprefix.nouns import DEFAULT_WINDOW, Scope
from diskprefix.store.schema import HISTORY_TOKENS
from diskprefix.tokens import LEAST_TOKENS, block_hash, common_prefix_length, root_hash

_OFF = Scope("off")
_WITHOUT_END = 1 << 62


def whole_snapshots(trace: Trace, policy: Policy, geometry: Geometry, *, window: int = DEFAULT_WINDOW) -> Totals:
    """The plain best-match rule, as the systems before this one have it.

    The boundary of a prompt is the last safe one in what it shares with one of the `window` prompts before. All that
    stands before it is one snapshot under the hash of these tokens. A request restores the snapshot of its own boundary
    or none; then it writes it, if it has `min_tokens`. When the budget is full, the one that was used least recently
    goes. Of a request's own scope only `off` is heeded, of `policy` the budget, `min_tokens` and the speed of prefill.
    """
    totals, snapshots = Totals(), _Snapshots(policy.budget_bytes)
    histories: defaultdict[str, History] = defaultdict(lambda: History(window, HISTORY_TOKENS))
    for request in trace:
        token_ids, history = request.prompt.token_ids, histories[request.tenant]
        totals.requests += 1
        totals.prompt_tokens += len(token_ids)
        if request.scope == _OFF:
            continue
        shared = max((common_prefix_length(token_ids, ids) for ids in history.recent(window)), default=0)
        boundary = request.prompt.last_safe(shared)
        may_save = request.save and request.remembered
        if boundary >= max(policy.min_tokens, 1):
            totals.selected_tokens += boundary
            key = block_hash(0, root_hash(request.tenant), token_ids[:boundary])
            if snapshots.restore(key):
                totals.hits += 1
                totals.restored_tokens += boundary
                totals.seconds_saved += boundary * policy.seconds_per_token
            elif may_save:
                snapshots.save(key, boundary, boundary * geometry.bytes_per_token + geometry.state_bytes, totals)
        if may_save and len(token_ids) >= policy.min_tokens:
            history.add(token_ids)
    return totals


class _Snapshots:
    """The snapshots that are stored, within a budget."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = math.inf if budget_bytes is None else budget_bytes
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        """The bytes of each snapshot by its key, the least recently used first."""
        self._used_bytes = 0
        self._written: set[bytes] = set()

    def restore(self, key: bytes) -> bool:
        """Notes a use of the snapshot. Returns whether it is stored."""
        if key in self._stored:
            self._stored.move_to_end(key)
        return key in self._stored

    def save(self, key: bytes, num_tokens: int, num_bytes: int, totals: Totals) -> None:
        if num_bytes > self._budget_bytes:
            totals.dropped += 1
            return
        while self._used_bytes + num_bytes > self._budget_bytes:
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
    """Returns what no rule passes: of each prompt all tokens that it shares with any one before it and its reply.

    What is shared counts from `LEAST_TOKENS` where prompts restore to the token. Elsewhere it counts from one block, or
    from `min_tokens` if they are fewer: no rule with the settings of `policy` restores less. Of what a request asks for
    itself only the scope `off` and `save: false` are heeded. Holds each distinct token in memory.
    """
    totals, kept = Totals(), RadixTree(max_tokens=_WITHOUT_END)
    least = min(policy.block_size, max(policy.min_tokens, 1))
    if geometry.state_kind == "token":
        least = min(least, LEAST_TOKENS)
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
            # The state of a reply is kept where decoding leaves what a prefill would.
            whole = np.concatenate([token_ids, request.reply]) if geometry.state_kind == "token" else token_ids
            totals.selected_tokens += len(token_ids)
            totals.written_tokens += len(whole) - kept.shared(root, whole)
            kept.add(root, whole)
    num_bytes = totals.written_tokens * geometry.bytes_per_token
    totals.written_bytes = totals.distinct_bytes = totals.peak_bytes = num_bytes
    return totals
