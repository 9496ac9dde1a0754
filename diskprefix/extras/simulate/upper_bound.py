"""The baseline of a comparison: a bound that no policy exceeds."""

from __future__ import annotations

import numpy as np

from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.radix_tree import RadixTree
from diskprefix.extras.simulate.simulator import Policy, Totals
from diskprefix.extras.simulate.trace import Trace
from diskprefix.tokens import LEAST_TOKENS
from diskprefix.values import Scope

_OFF = Scope("off")


def upper_bound(trace: Trace, policy: Policy, geometry: Geometry) -> Totals:
    """Returns totals that no policy can exceed: each prompt restores all tokens that it shares with an earlier prompt
    and its reply. Keeps every distinct token in memory.

    A shared prefix counts from the length that a policy with these settings may restore: `LEAST_TOKENS` for models that
    are exact at every token, else one block, and at most `min_tokens`. Requests' own options are ignored, except the
    scope `off` and `save: false`.
    """
    totals, tree = Totals(), RadixTree(max_tokens=None)
    min_restored = min(policy.block_size, max(policy.min_tokens, 1))
    if geometry.state_kind == "token":
        min_restored = min(min_restored, LEAST_TOKENS)
    for request in trace:
        token_ids, root = request.prompt.token_ids, request.tenant.encode()
        if request.is_ahead:
            tree.add(root, token_ids)
            continue
        totals.requests += 1
        totals.prompt_tokens += len(token_ids)
        if request.scope == _OFF:
            continue
        shared = tree.shared(root, token_ids)
        restored = shared if shared >= min_restored else 0
        totals.hits += restored > 0
        totals.restored_tokens += restored
        totals.seconds_saved += restored * policy.seconds_per_token
        if request.save and request.remembered:
            # The state of a reply is kept only if decoding gives the bits of a prefill.
            whole = np.concatenate([token_ids, request.reply]) if geometry.state_kind == "token" else token_ids
            totals.selected_tokens += len(token_ids)
            totals.written_tokens += len(whole) - tree.shared(root, whole)
            tree.add(root, whole)
    num_bytes = totals.written_tokens * geometry.bytes_per_token
    totals.written_bytes = totals.peak_bytes = num_bytes
    return totals
