"""What requests take from the tier that machines share, and what they leave there."""

from __future__ import annotations

from collections.abc import Callable

from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.restore import Restored
from diskprefix.cache.tiers.buffer import publisher
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.shared import Prefetched, PrefetchRequest, Upload
from diskprefix.nouns import CacheOptions, Selection


def prefetch(
    cache: CacheResources,
    namespace: TenantNamespace,
    nodes: PromptNodes,
    ttl_s: float | None,
    store_id: bytes,
    is_cancelled: Callable[[], bool],
    have: int,
) -> Prefetched:
    """Fetches what the shared tier has of a prompt and nearer ones have not, into the writer's buffer: it is read from
    there like anything that was just computed, and written to the disk. Waits, up to `--remote-deadline`. It is not
    asked if hardly more is missing than the first `have` tokens, which are in memory."""
    remote, cost_model = cache.remote, cache.cost_model
    if remote is None or cache.store.problem is not None:
        return Prefetched()
    wish = PrefetchRequest(
        nodes=nodes,
        tiers=cache.tiers,
        publish=publisher(cache.writer, store_id, namespace.root, namespace.record),
        most_s=cache.settings.remote_deadline,
        have=have,
        pays=cost_model.pays_remote,
        is_cancelled=is_cancelled,
        prefill_s_per_token=cost_model.prefill_s_per_token or 0.0,
        ttl_s=ttl_s,
        replaces=cache.layout.state_kind == "token",
    )
    prefetched = remote.prefetch(wish)
    cost_model.note_remote(prefetched)
    return prefetched


def upload(
    cache: CacheResources,
    namespace: TenantNamespace,
    nodes: PromptNodes,
    options: CacheOptions,
    selection: Selection,
    restored: Restored,
) -> None:
    """Has what is stored of a prompt and its reply written to the shared tier, as far as `--remote-write` says."""
    remote = cache.remote
    if remote is None or not options.save:
        return
    num_tokens = selection.shared(cache.settings.remote_write, len(nodes.token_ids), restored.num_tokens)
    if num_tokens >= nodes.block_size:
        in_parts = cache.layout.state_kind == "token"
        remote.upload(Upload(nodes, num_tokens, namespace.record, cache.tiers, in_parts))
