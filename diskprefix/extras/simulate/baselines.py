"""Two baselines for policies: best match with whole snapshots, and an upper bound for all rules."""

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


def whole_snapshots(trace: Trace, policy: Policy, geometry: Geometry, *, window: int = DEFAULT_WINDOW) -> Totals:
    """Simulates the best-match rule of earlier systems.

    The boundary of a prompt is the last safe cut in the longest prefix that it shares with one of the last `window`
    prompts. The tokens before the boundary make one snapshot, named by their hash. With a boundary of `min_tokens` or
    more, a request restores its snapshot, or writes it if it is not stored. The least recently used snapshot is evicted
    first. Of a request's own scope only `off` counts; of `policy` only the budget, `min_tokens` and the speed of
    prefill.
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
    """The stored snapshots, within a budget."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = math.inf if budget_bytes is None else budget_bytes
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        """The bytes of each snapshot by key, the least recently used first."""
        self._used_bytes = 0
        self._written: set[bytes] = set()

    def restore(self, key: bytes) -> bool:
        """Records a use of the snapshot. Returns whether it is stored."""
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
    """Returns totals that no rule can exceed: each prompt restores all tokens that it shares with an earlier prompt and
    its reply.

    A shared prefix counts if it is at least as long as any rule with the settings of `policy` restores: `LEAST_TOKENS`
    for models that are exact at every token, else one block, and at most `min_tokens`. Of a request's own options only
    the scope `off` and `save: false` count. Keeps every distinct token in memory.
    """
    totals, kept = Totals(), RadixTree(max_tokens=None)
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
            # The state of a reply is kept only if decoding gives the bits of a prefill.
            whole = np.concatenate([token_ids, request.reply]) if geometry.state_kind == "token" else token_ids
            totals.selected_tokens += len(token_ids)
            totals.written_tokens += len(whole) - kept.shared(root, whole)
            kept.add(root, whole)
    num_bytes = totals.written_tokens * geometry.bytes_per_token
    totals.written_bytes = totals.distinct_bytes = totals.peak_bytes = num_bytes
    return totals
