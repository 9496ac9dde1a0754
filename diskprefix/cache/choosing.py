"""What a request's policy selects, with what this tenant's earlier prompts and this machine's speeds say."""

from __future__ import annotations

from dataclasses import replace

from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.policy.admission import Sighting
from diskprefix.cache.policy.breaks import find_break
from diskprefix.cache.policy.select import select
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.restore import Restored
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.nouns import DEFAULT_WINDOW, Break, CacheOptions, MissReason, Prompt, Selection
from diskprefix.store.savings import Tally
from diskprefix.tokens import TokenIds


def selected(
    cache: CacheResources,
    namespace: TenantNamespace,
    prompt: Prompt,
    options: CacheOptions,
    nodes: PromptNodes,
    restored: Restored,
    *,
    goes_on: bool,
) -> Selection:
    """Returns what is to be kept of a prompt. `goes_on`: it is only a beginning, whose end is not kept."""
    settings, scope = cache.settings, options.scope
    sighting, older = Sighting(), None
    if scope.kind == "auto":
        older = namespace.history.similar(prompt.token_ids, scope.value, options.group)
        sighting = namespace.admission.look(prompt.token_ids, nodes.block_names, settings.block_size)
    selection = select(
        scope,
        prompt,
        _recent(namespace, options),
        block_size=settings.block_size,
        min_tokens=settings.kv_cache_min_tokens,
        cold_max=settings.kv_cache_cold_max,
        interval=settings.kv_cache_interval,
        state=cache.layout.state_kind,
        restored=restored.stored_tokens,
        sighting=sighting,
        older=older,
    )
    if goes_on:
        selection = replace(selection, keep_tail=False)
    if not options.save:
        return selection.keeping_nothing("read_only")
    if selection.kept and not cache.cost_model.allows(selection.kept, use="save"):
        return selection.keeping_nothing("faster_to_compute")
    return selection


def found_break(
    namespace: TenantNamespace, prompt: Prompt, options: CacheOptions, restored: Restored, selection: Selection
) -> Break | None:
    """Returns what kept more of a prompt from being found; None if that is nothing, or nobody asks."""
    if prompt.source is None:
        return None
    known = max(selection.common, selection.seen, restored.num_tokens)
    return find_break(prompt.token_ids, _recent(namespace, options), known)


def _recent(namespace: TenantNamespace, options: CacheOptions) -> tuple[TokenIds, ...]:
    """Returns the prompts of the window, newest first."""
    window = options.scope.value if options.scope.kind == "auto" else DEFAULT_WINDOW
    return namespace.history.recent(window, options.group)


def why_missed(cache: CacheResources, prompt: Prompt, restored: Restored, selection: Selection) -> MissReason:
    """Returns why nothing was restored. `diverged` only if the prompt leaves everything seen within its first block:
    from there on a block could have been restored, had it been stored."""
    if restored.refused is not None:
        return restored.refused
    if len(prompt.token_ids) < cache.settings.kv_cache_min_tokens:
        return "too_short"
    if not selection.recent or selection.common >= cache.settings.block_size:
        return "not_stored"
    return "diverged"


def note_savings(cache: CacheResources, namespace: TenantNamespace, prompt: Prompt, restored: Restored) -> None:
    """Counts a request that asked the cache."""
    num_tokens = restored.num_tokens
    prefill_s = restored.prefill_s or num_tokens * (cache.cost_model.measured_s_per_token or 0.0)
    blocks = [node.name for node in restored.blocks if node.end <= num_tokens]
    counts = Tally(
        requests=1,
        hits=int(num_tokens > 0),
        prompt_tokens=len(prompt.token_ids),
        restored_tokens=num_tokens,
        saved_s=max(0.0, prefill_s - restored.restore_ms / 1e3),
    )
    cache.writer.savings.note(namespace.root, namespace.record, counts, blocks[-1] if blocks else None)
