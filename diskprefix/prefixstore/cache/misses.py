"""The reason why a prompt was not restored, and the tokens that it lost, for reports. Pure functions."""

from __future__ import annotations

from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.cache.policy.breaks import common_end, find_break
from diskprefix.prefixstore.cache.policy.seen import Sighting
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.tokens import LEAST_TOKENS
from diskprefix.values import Break, Lost, MissReason, Prompt, Selection


def find_lost_prefix(prompt: Prompt, sighting: Sighting, restored: RestoreResult, selection: Selection) -> Break | None:
    """Returns the break without which more of the prompt would have been restored; None if there is none."""
    known = max(selection.common, selection.seen, restored.num_tokens)
    earlier_prompts = (earlier.prompt for earlier in sighting.recent)
    recent = (earlier.token_ids for earlier in earlier_prompts if earlier.num_tokens > known)
    return find_break(prompt.token_ids, recent, known)


def why_missed(
    prompt: Prompt,
    sighting: Sighting,
    restored: RestoreResult,
    selection: Selection,
    broken: Break | None,
    settings: StoreOptions,
) -> MissReason:
    """Returns the reason why no more was restored: `partial` if what is stored was computed for a prompt that was not
    computed to its end; `other_key` if another key of the same user would have hit;
    `other_settings` if a start with other options has stored it;
    `not_stored` if the next block was seen before; `image` if the prompt and an earlier one differ in a picture;
    `diverged` if they differ within the system message, or if there is a `broken` place. All prompts of a template
    share a few tokens: prompts that differ right after these have diverged if they are equal again later."""
    num_tokens = len(prompt.token_ids)
    if _was_cut(restored):
        return "partial"
    if restored.refused is not None:
        return restored.refused
    if num_tokens < settings.kv_cache_min_tokens:
        return "too_short"
    if restored.with_other_key:
        return "other_key"
    if restored.otherwise.num_tokens:
        return "other_settings"
    if max(selection.common, selection.seen) >= min(restored.num_tokens + settings.block_size, num_tokens):
        return "not_stored"
    common, recent = selection.common, sighting.recent
    here = prompt.token_ids[common : common + 1]
    others = (other.prompt.token_ids[common : common + 1] for other in recent if other.common == common)
    if (here < 0).any() and any((there < 0).any() for there in others):
        # Tokens of pictures are negative.
        return "image"
    leaves_early = common < (prompt.system_end or settings.block_size)
    is_like = common >= LEAST_TOKENS or any(
        common_end(prompt.token_ids, earlier.prompt.token_ids) >= LEAST_TOKENS for earlier in recent
    )
    return "diverged" if broken is not None or (leaves_early and is_like) else "new"


def _was_cut(restored: RestoreResult) -> bool:
    """Returns whether all was restored that was written of a prompt which was not computed, or not written, to its
    end."""
    return restored.is_part and restored.num_tokens > 0 and restored.refused in (None, "no_checkpoint")


def lost_tokens(
    prompt: Prompt,
    restored: RestoreResult,
    selection: Selection,
    broken: Break | None,
    reason: MissReason | None,
    least: int,
) -> tuple[Lost, ...]:
    """Returns the tokens that are computed again: of the beginning that an earlier prompt of the same user had too,
    and after the `broken` place. `reason` is that of a miss. Fewer than `least` tokens are left out."""
    num_tokens, is_upgraded = len(prompt.token_ids), restored.refused == "upgraded"
    elsewhere = max(restored.with_other_key, restored.otherwise.num_tokens)
    known = max(selection.common, selection.seen, restored.matched, elsewhere)
    known = num_tokens if is_upgraded else known
    cause: MissReason = "partial" if _was_cut(restored) else restored.refused or "not_stored"
    if reason in ("error", "too_short", "other_key", "other_settings"):
        cause = reason
    after_break = 0 if broken is None else broken.at + broken.num_tokens - known
    lost = (
        Lost(cause, known - restored.num_tokens),
        Lost("image" if reason == "image" else "diverged", after_break),
    )
    return tuple(each for each in lost if each.num_tokens >= least)
