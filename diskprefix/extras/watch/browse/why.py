"""Explains a miss: finds the stored part of a prompt, the nearest saved prompt, and the cause of the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from diskprefix.cache.matching import Matcher
from diskprefix.cache.policy.breaks import find_break, same_behind
from diskprefix.cache.policy.select import AT_CHECKPOINTS, StateKind
from diskprefix.cache.tiers.local import DiskView
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.chat.template_input import common_chars
from diskprefix.extras.watch.browse.causes import LATER, Cause, cause_between
from diskprefix.identity import differing
from diskprefix.nouns import Prompt
from diskprefix.settings import Settings
from diskprefix.store.ghosts import recent_prompts
from diskprefix.store.note_record import NoteKind
from diskprefix.store.notes import ReadOnlyNotes
from diskprefix.store.pieces import LayoutText, PayloadLayout
from diskprefix.store.savings import Savings
from diskprefix.store.schema import RootRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo, PrefixTree
from diskprefix.store.written import read_written
from diskprefix.tokens import LEAST_TOKENS, TokenIds, common_prefix_length
from diskprefix.units import format_size

Decode = Callable[[TokenIds], str]
_MOST_PROMPTS = 100
_SHOWN_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The most similar prompt: a saved one, or a recent one that was not saved (`id` is empty).

    The first `common` tokens are the same, and so are about `behind` tokens after the difference.
    """

    id: str
    num_tokens: int
    common: int
    behind: int
    preview: str


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Another model, build or tenant that has more of the prompt. `differs` has the values there and here by name."""

    root: str
    model: str
    tenant: str
    stored: int
    differs: dict[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The text around the first different token: before it, and after it in each prompt."""

    at: int
    before: str
    here: str
    there: str


@dataclass(frozen=True, kw_only=True)
class Why:
    """The answer for one prompt: `restored` of `prompt_tokens` tokens would be restored, `stored` are in the store.

    `root`, `model` and `tenant` are those of the lookup, empty if the store has nothing of that tenant.
    """

    prompt_tokens: int
    stored: int
    restored: int
    root: str
    model: str
    tenant: str
    nearest: Nearest | None
    parting: Parting | None
    cause: Cause
    elsewhere: tuple[Elsewhere, ...]


def explain(
    snapshot: Snapshot,
    secret: int,
    prompt: Prompt,
    *,
    tenant: str,
    entries: Sequence[EntryInfo],
    savings: Mapping[bytes, Savings],
    decode: Decode,
    model: str | None = None,
) -> Why:
    """Returns the number of tokens that would be restored for a prompt, and the reason why it is not larger.

    `secret` is the store's. `tenant` is the text of the caller's `Tenant`. `entries` is the result of `list_entries`
    for this snapshot, `savings` that of `read_savings`. The lookup uses the root of `model`, or the last used root.
    Ignores `--kv-cache-gate`.
    """
    token_ids, roots = prompt.token_ids, dict(snapshot.roots())
    own = used_last(roots, tenant, model, savings)
    looks = {root: _look_up(snapshot, secret, token_ids, root, record) for root, record in roots.items()}
    look = looks[own] if own is not None else None
    elsewhere = _elsewhere(roots, looks, own, tenant)
    near = _nearest(snapshot, token_ids, own, entries, look.restored) if own is not None and look else None
    nearest = near[0] if near is not None else None
    texts = parting = None
    if near is not None and near[0].common < min(len(near[1]), len(token_ids)):
        texts = decode(token_ids), decode(near[1])
        parting = _parting(*texts, near[0].common)
    cause = _cause(prompt, look, nearest, texts, elsewhere)
    if cause.kind == "not-kept" and (limit := read_written(snapshot).budget_bytes):
        text = f"{cause.text}, or --kv-cache-write-budget ({format_size(limit)}/day) left it out"
        cause = replace(cause, text=text)
    return Why(
        prompt_tokens=len(token_ids),
        stored=look.stored if look else 0,
        restored=look.restored if look else 0,
        root=own.hex() if own else "",
        model=roots[own].model if own else "",
        tenant=tenant,
        nearest=nearest,
        parting=parting,
        cause=cause,
        elsewhere=elsewhere,
    )


def not_asked(why: Why) -> Why:
    """Returns the answer for a request that does not ask the cache."""
    cause = Cause("off", "the request has the scope off: nothing is restored, and nothing is saved", "send no scope")
    return replace(why, restored=0, parting=None, cause=cause)


class _Look(NamedTuple):
    """The number of a prompt's tokens that are stored under one root, and that can be restored."""

    stored: int
    restored: int
    state: StateKind


def _look_up(snapshot: Snapshot, secret: int, token_ids: TokenIds, root: bytes, record: RootRecord) -> _Look:
    nodes = PromptNodes(secret, root, token_ids, record.block_size, PayloadLayout.parse(record.layout))
    notes = ReadOnlyNotes(snapshot, root)
    state = _state_kind(record)
    matcher = Matcher(
        nodes,
        [DiskView(snapshot, on_damaged=lambda _node, _error: None)],
        state,
        has_logits=lambda: notes.get(NoteKind.LOGITS, nodes.end_id) is not None,
    )
    matcher.match()
    _, end = matcher.restorable()
    found = (matcher.deepest, matcher.partial_match)
    return _Look(max(end, *(node.end for node in found if node is not None), 0), end, state)


def _state_kind(record: RootRecord) -> StateKind:
    is_exact = bool(_fingerprint(record).get("products"))
    if msgspec.json.decode(record.layout, type=LayoutText).states:
        return "token_checkpoints" if is_exact else "checkpoints"
    return "token" if is_exact else "sliceable"


def _fingerprint(record: RootRecord) -> dict[str, str]:
    """Returns the fields of a fingerprint, none if they cannot be read."""
    try:
        fields = json.loads(record.identity)["fingerprint"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: str(value) for name, value in fields.items()} if isinstance(fields, dict) else {}


def used_last(
    roots: Mapping[bytes, RootRecord], tenant: str, model: str | None, savings: Mapping[bytes, Savings]
) -> bytes | None:
    """Returns the root of the tenant that was used last, of the model if the tenant has one of it."""
    mine = [root for root, record in roots.items() if record.tenant == tenant]
    named = [root for root in mine if roots[root].model == model]

    def last_use(root: bytes) -> tuple[float, bytes]:
        hits = savings[root].hits if root in savings else []
        return max([roots[root].created_at, *(hit.when for hit in hits)]), root

    return max(named or mine, key=last_use, default=None)


def _elsewhere(
    roots: Mapping[bytes, RootRecord], looks: Mapping[bytes, _Look], own: bytes | None, tenant: str
) -> tuple[Elsewhere, ...]:
    """Returns the roots that have at least a block more of the prompt, the most first."""
    least = min((record.block_size for record in roots.values()), default=0)
    least += looks[own].stored if own is not None else 0
    found = [
        Elsewhere(
            root=root.hex(),
            model=roots[root].model,
            tenant=roots[root].tenant,
            stored=look.stored,
            differs=_differences(roots[root], roots[own] if own else None, tenant),
        )
        for root, look in looks.items()
        if root != own and look.stored >= least
    ]
    return tuple(sorted(found, key=lambda one: (-one.stored, one.root)))


def _differences(there: RootRecord, here: RootRecord | None, tenant: str) -> dict[str, tuple[str, str]]:
    differs = {"tenant": (there.tenant, tenant)} if there.tenant != tenant else {}
    if here is not None:
        pairs = {name: (str(getattr(there, name)), str(getattr(here, name))) for name in ("model", "block_size")}
        differs |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        theirs, ours = _fingerprint(there), _fingerprint(here)
        differs |= {name: (theirs.get(name, ""), ours.get(name, "")) for name in differing(theirs, ours)}
    return dict(sorted(differs.items()))


def _nearest(
    snapshot: Snapshot, token_ids: TokenIds, root: bytes, entries: Sequence[EntryInfo], known: int
) -> tuple[Nearest, TokenIds] | None:
    """Returns the prompt with the most tokens in common, before and after the first difference, and its tokens."""

    def compared(id_: str, preview: str, other: TokenIds) -> tuple[Nearest, TokenIds]:
        common = common_prefix_length(token_ids, other)
        found = find_break(token_ids, [other], known)
        behind = found.num_tokens if found is not None else 0
        if common < LEAST_TOKENS:
            behind = max(behind, same_behind(token_ids, other))
        return Nearest(id=id_, num_tokens=len(other), common=common, behind=behind, preview=preview), other

    found = (compared(*one) for one in _prompts(snapshot, root, entries))
    least = min(LEAST_TOKENS, len(token_ids))
    return max(
        (one for one in found if one[0].common + one[0].behind >= least),
        key=lambda one: (one[0].common + one[0].behind, one[0].common, bool(one[0].id)),
        default=None,
    )


def _prompts(snapshot: Snapshot, root: bytes, entries: Sequence[EntryInfo]) -> Iterator[tuple[str, str, TokenIds]]:
    """Yields id, preview and token ids of the saved prompts, then of recent ones that were not saved, newest first."""
    tree = PrefixTree(snapshot)
    for info in entries:
        name = bytes.fromhex(info.id)
        entry = snapshot.entry(name)
        if entry is not None and entry.root == root:
            yield info.id, info.preview, np.concatenate([node.token_ids for node in tree.path(name).values()])
    for _, token_ids in reversed(recent_prompts(snapshot, root, _MOST_PROMPTS)):
        yield "", "", token_ids


def _parting(here: str, there: str, at: int) -> Parting:
    index = common_chars(here, there)
    behind = slice(index, index + _SHOWN_CHARS)
    return Parting(at=at, before=here[max(0, index - _SHOWN_CHARS) : index], here=here[behind], there=there[behind])


def _cause(
    prompt: Prompt,
    look: _Look | None,
    nearest: Nearest | None,
    texts: tuple[str, str] | None,
    elsewhere: Sequence[Elsewhere],
) -> Cause:
    """Returns the cause. `texts` are those of the prompt and of the nearest one, None if one begins with the other."""
    if elsewhere and (look is None or nearest is None or elsewhere[0].stored > nearest.common):
        return _cause_elsewhere(elsewhere[0])
    if look is None:
        return Cause(
            "tenant",
            "nothing is saved for this tenant; other tenants have prompts of their own",
            "say whose request it is with --salt or the body's prefix_cache.salt",
        )
    if nearest is None:
        return _cause_of_nothing(len(prompt.token_ids))
    if look.restored + 1 >= len(prompt.token_ids):
        return Cause("nothing", "nothing is missing: at most the last token is computed")
    if texts is None and look.restored + 1 >= nearest.common:
        return Cause("goes-on", "nothing is missing: it goes on where the saved prompt ends")
    if texts is None or nearest.common > look.stored + 1:
        return _not_kept(look, nearest)
    if not nearest.behind and prompt.system_end and nearest.common >= prompt.system_end:
        return Cause("question", "another question or conversation; what comes before it is the same")
    cause = cause_between(*texts)
    return replace(cause, advice=LATER) if nearest.behind and not cause.advice else cause


def _cause_of_nothing(num_tokens: int) -> Cause:
    if num_tokens < (least := Settings().kv_cache_min_tokens):
        few = f"a prompt of fewer than {least} tokens (--kv-cache-min-tokens)"
        return Cause("short", f"{few} is not saved: computing it takes a moment")
    advice = "if it was sent before: another key or salt sent it, or it was evicted or purged"
    return Cause("unlike", "no saved prompt begins like this one", advice)


def _cause_elsewhere(one: Elsewhere) -> Cause:
    if "tenant" in one.differs:
        whose = "another API key or salt" if one.tenant else "callers without key and salt"
        text = f"it is saved for {whose}, and tenants do not share"
        return Cause("tenant", text, "send it with the same key and salt")
    if "model" in one.differs:
        return Cause("model", f"it is saved for another model, {one.model}", "serve that model, or let it be computed")
    names = ", ".join(name.replace("_", " ") for name in one.differs) or "the build"
    advice = "what is the same bit for bit is only found with the same libraries and settings; see --fingerprint"
    return Cause("build", f"it was computed by another build: {names} differ", advice)


def _not_kept(look: _Look, nearest: Nearest) -> Cause:
    """Returns the cause for tokens of an earlier prompt that are not restored."""
    # Every prompt shares a few tokens with what another one left.
    is_rest = look.state != "token" or look.stored + 1 >= nearest.common
    if look.stored > look.restored + 1 and is_rest:
        stored = f"{look.stored:,} tokens are stored, but"
        if look.state in AT_CHECKPOINTS:
            advice = "a mark of cache_control keeps one where it stands"
            return Cause("no-checkpoint", f"{stored} this model restores at its checkpoints only", advice)
        if look.state == "sliceable":
            return Cause("whole-blocks", f"{stored} this model restores whole blocks, and computes the last token")
        return Cause("few-tokens", f"{stored} fewer than {LEAST_TOKENS} are computed as fast as they are restored")
    return Cause(
        "not-kept",
        f"{nearest.common:,} tokens are those of an earlier prompt, of which {look.stored:,} are stored: the policy "
        "kept no more, or the rest was evicted or purged",
        "the scope full keeps whole prompts; a larger --kv-cache-budget keeps them longer",
    )
