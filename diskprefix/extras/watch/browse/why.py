"""Explains a miss: finds the stored part of a prompt, the nearest saved prompt, and the cause of the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from diskprefix.cache.matching import Matcher
from diskprefix.cache.policy.breaks import find_break
from diskprefix.cache.policy.select import StateKind
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
from diskprefix.store.written import WrittenBytes, read_written
from diskprefix.tokens import LEAST_TOKENS, TokenIds, common_prefix_length
from diskprefix.units import format_size

Decode = Callable[[TokenIds], str]
_MOST_PROMPTS = 100
_SHOWN_CHARS = 160
_ENDS_OF_LAST = 2


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
    roots = dict(snapshot.roots())
    own = used_last(roots, tenant, model, savings)
    looks = {root: _look_up(snapshot, secret, prompt.token_ids, root, record) for root, record in roots.items()}
    look = looks[own] if own is not None else None
    elsewhere = _elsewhere(roots, looks, own, tenant)
    nearest, other = _nearest(snapshot, prompt.token_ids, own, entries, look.restored if look else 0)
    parting, between = None, None
    if nearest is not None and nearest.common < min(nearest.num_tokens, len(prompt.token_ids)):
        parting, between = _parting(prompt.token_ids, other, nearest.common, decode)
    return Why(
        prompt_tokens=len(prompt.token_ids),
        stored=look.stored if look else 0,
        restored=look.restored if look else 0,
        root=own.hex() if own else "",
        model=roots[own].model if own else "",
        tenant=tenant,
        nearest=nearest,
        parting=parting,
        cause=_with_budget(_cause(prompt, look, nearest, between, elsewhere), read_written(snapshot)),
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
    layout = msgspec.json.decode(record.layout, type=LayoutText)
    is_exact = bool(_fingerprint(record).get("products"))
    if layout.states:
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
    here = looks[own].stored if own is not None else 0
    least = here + min((record.block_size for record in roots.values()), default=0)
    found = []
    for root, look in looks.items():
        if root != own and look.stored >= least:
            record = roots[root]
            found.append(
                Elsewhere(
                    root=root.hex(),
                    model=record.model,
                    tenant=record.tenant,
                    stored=look.stored,
                    differs=_differences(record, roots[own] if own else None, tenant),
                )
            )
    return tuple(sorted(found, key=lambda one: (-one.stored, one.root)))


def _differences(there: RootRecord, here: RootRecord | None, tenant: str) -> dict[str, tuple[str, str]]:
    differs = {}
    if there.tenant != tenant:
        differs["tenant"] = (there.tenant, tenant)
    if here is None:
        return differs
    for name in ("model", "block_size"):
        if (value := str(getattr(there, name))) != (mine := str(getattr(here, name))):
            differs[name] = (value, mine)
    theirs, ours = _fingerprint(there), _fingerprint(here)
    differs |= {name: (theirs.get(name, ""), ours.get(name, "")) for name in differing(theirs, ours)}
    return dict(sorted(differs.items()))


def _nearest(
    snapshot: Snapshot, token_ids: TokenIds, root: bytes | None, entries: Sequence[EntryInfo], known: int
) -> tuple[Nearest | None, TokenIds]:
    """Returns the prompt with the most tokens in common, before and after the first difference."""
    best: tuple[tuple[int, int, int], Nearest, TokenIds] | None = None
    if root is None:
        return None, token_ids[:0]
    for id_, preview, other in _prompts(snapshot, root, entries):
        common = common_prefix_length(token_ids, other)
        found = find_break(token_ids, [other], known)
        behind = found.num_tokens if found is not None else 0
        nearest = Nearest(id=id_, num_tokens=len(other), common=common, behind=behind, preview=preview)
        worth = (common + behind, common, bool(id_))
        is_like = common + behind >= min(LEAST_TOKENS, len(token_ids))
        if is_like and (best is None or worth > best[0]):
            best = worth, nearest, other
    return (best[1], best[2]) if best is not None else (None, token_ids[:0])


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


def _parting(token_ids: TokenIds, other: TokenIds, at: int, decode: Decode) -> tuple[Parting, tuple[str, str]]:
    """Returns the text around the difference of two prompts, and their whole texts."""
    here, there = decode(token_ids), decode(other)
    index = common_chars(here, there)
    parting = Parting(
        at=at,
        before=here[max(0, index - _SHOWN_CHARS) : index],
        here=here[index : index + _SHOWN_CHARS],
        there=there[index : index + _SHOWN_CHARS],
    )
    return parting, (here, there)


def _cause(
    prompt: Prompt,
    look: _Look | None,
    nearest: Nearest | None,
    between: tuple[str, str] | None,
    elsewhere: Sequence[Elsewhere],
) -> Cause:
    if look is None or nearest is None:
        return _cause_of_nothing(len(prompt.token_ids), look, elsewhere)
    if elsewhere and elsewhere[0].stored > nearest.common:
        return _cause_elsewhere(elsewhere[0])
    if between is None:
        return _cause_of_length(prompt, look, nearest)
    if look.restored + 1 >= len(prompt.token_ids):
        return Cause("nothing", "nothing is missing: all but the last token is restored")
    if nearest.common > look.stored + 1:
        return _not_kept(look, nearest)
    # The remaining boundaries are the end of the last message and the beginning of the reply.
    is_in_last = prompt.boundaries and sum(end > nearest.common for end in prompt.boundaries) <= _ENDS_OF_LAST
    if not nearest.behind and is_in_last and nearest.common >= prompt.system_end:
        return Cause("question", "the last message is another one; what comes before it is the same")
    if not nearest.behind and prompt.system_end and nearest.common >= prompt.system_end:
        return Cause("conversation", "another conversation: only system prompt and tools are the same")
    cause = cause_between(*between)
    return replace(cause, advice=LATER) if nearest.behind and not cause.advice else cause


def _cause_of_nothing(num_tokens: int, look: _Look | None, elsewhere: Sequence[Elsewhere]) -> Cause:
    if elsewhere:
        return _cause_elsewhere(elsewhere[0])
    if look is None:
        return Cause(
            "tenant",
            "nothing is saved for this tenant; other tenants have prompts of their own",
            "say whose request it is with --salt or the body's prefix_cache.salt",
        )
    least = Settings().kv_cache_min_tokens
    if num_tokens < least:
        return Cause(
            "short",
            f"a prompt of fewer than {least} tokens (--kv-cache-min-tokens) is not saved: computing it takes a moment",
        )
    return Cause(
        "unlike",
        "no saved prompt begins like this one",
        "if it was sent before: another key or salt sent it, or it was evicted or purged",
    )


def _cause_elsewhere(one: Elsewhere) -> Cause:
    if "tenant" in one.differs:
        whose = "another API key or salt" if one.tenant else "callers without key and salt"
        return Cause(
            "tenant", f"it is saved for {whose}, and tenants do not share", "send it with the same key and salt"
        )
    if "model" in one.differs:
        return Cause("model", f"it is saved for another model, {one.model}", "serve that model, or let it be computed")
    names = ", ".join(name.replace("_", " ") for name in one.differs) or "the build"
    return Cause(
        "build",
        f"it was computed by another build: {names} differ",
        "what is the same bit for bit is only found with the same libraries and settings; see --fingerprint",
    )


def _cause_of_length(prompt: Prompt, look: _Look, nearest: Nearest) -> Cause:
    """One of the two prompts begins with the other."""
    if look.restored + 1 >= nearest.common:
        if len(prompt.token_ids) <= nearest.num_tokens:
            return Cause("nothing", "nothing is missing: it is the beginning of a prompt that is stored")
        return Cause("goes-on", "nothing is missing: it goes on where the saved prompt ends")
    return _not_kept(look, nearest)


def _not_kept(look: _Look, nearest: Nearest) -> Cause:
    # Every prompt shares a few tokens with what another one left.
    is_rest = look.state != "token" or look.stored + 1 >= nearest.common
    if look.stored > look.restored + 1 and is_rest:
        return _not_restored(look)
    return Cause(
        "not-kept",
        f"{nearest.common:,} tokens are those of an earlier prompt, of which {look.stored:,} are stored: the policy "
        "kept no more, or the rest was evicted or purged",
        "the scope full keeps whole prompts; a larger --kv-cache-budget keeps them longer",
    )


def _with_budget(cause: Cause, written: WrittenBytes) -> Cause:
    """Adds that the write budget may have left the prompt out, if there is one."""
    if cause.kind != "not-kept" or not written.budget_bytes:
        return cause
    text = f"{cause.text}, or --kv-cache-write-budget ({format_size(written.budget_bytes)}/day) left it out"
    return replace(cause, text=text)


def _not_restored(look: _Look) -> Cause:
    stored = f"{look.stored:,} tokens are stored, but "
    match look.state:
        case "token_checkpoints" | "checkpoints":
            text = f"{stored}this model restores at its checkpoints only"
            return Cause("no-checkpoint", text, "a mark of cache_control keeps one where it stands")
        case "sliceable":
            return Cause("whole-blocks", f"{stored}this model restores whole blocks, and computes the last token")
        case "token":
            text = f"{stored}fewer than {LEAST_TOKENS} are computed as fast as they are restored"
            return Cause("few-tokens", text)
