"""The values that everything speaks of. A noun has one meaning, and stands here once.

Of a request: whose it is (`Tenant`), its `Prompt`, and what it asks of the cache (`CacheOptions` with a `Scope`). Of
the answer: what the policy keeps of the prompt (`Selection`), and what the cache did (`CacheReport`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from diskprefix.errors import InvalidScope
from diskprefix.tenant_ids import TENANT_ID, id_of
from diskprefix.tokens import TokenIds

ScopeKind: TypeAlias = Literal["off", "full", "auto", "tokens"]

DEFAULT_WINDOW = 30
MAX_VALUE = 1_000_000

ACCEPTED = (
    f"accepted are off, full, auto, auto:N (N recent requests) and N (the first N prompt tokens), with N from 1 to "
    f"{MAX_VALUE}"
)

_MOST_SHOWN = 40
MAX_MARKS = 32
"""Most marks of a request that count. In a chat each takes one or two renderings."""

Reason: TypeAlias = Literal[
    "off",
    "full",
    "tokens",
    "marks",
    "continues",
    "likely_repeat",
    "learning",
    "shared_prefix",
    "best_checkpoints",
    "new_system_prompt",
    "already_saved",
    "no_history",
    "no_match",
    "no_safe_boundary",
    "below_min_tokens",
    "whole_prompt_only",
    "media",
    "unsupported",
    "read_only",
    "faster_to_compute",
    "left_out",
]
"""Why so much of a prompt is kept. Stable words: responses and log lines show them. server/README.md explains each."""
StateSource: TypeAlias = Literal["none", "memory", "disk", "remote"]
Refused: TypeAlias = Literal["no_logits", "no_checkpoint", "whole_prompt_only", "damaged", "faster_to_compute"]
MissReason: TypeAlias = Literal[Refused, "not_stored", "diverged", "too_short", "off", "media", "unsupported", "error"]
MISS_REASONS: tuple[str, ...] = get_args(MissReason)
Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True)
class Tenant:
    """The ids of a tenant: that of the API key, then that of the salt. Its text joins them with `/`."""

    ids: tuple[str, ...] = ()

    @classmethod
    def of_key(cls, api_key: str) -> Tenant:
        """Returns the tenant of an API key."""
        return cls((id_of("api key", api_key),))

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """Returns the tenant with this text, the inverse of `str`. Raises `ValueError` if no tenant has this text."""
        ids = tuple(text.split("/")) if text else ()
        if not all(map(TENANT_ID.fullmatch, ids)):
            raise ValueError(f"not a tenant: {text!r}")
        return cls(ids)

    def with_salt(self, salt: str) -> Tenant:
        """Returns the tenant of a user of this tenant. For `SHARED`, that is the tenant of the salt alone."""
        return Tenant((*self.ids, id_of("salt", salt)))

    def __str__(self) -> str:
        return "/".join(self.ids)


SHARED = Tenant()
"""The tenant of requests with neither key nor salt."""


@dataclass(frozen=True)
class Scope:
    """A valid scope. `value` is the window of `auto` in requests, or the N of `tokens`; 0 for `off` and `full`.

    Raises `InvalidScope` for a combination that the grammar cannot express, so `parse_scope(str(scope)) == scope`.
    """

    kind: ScopeKind
    value: int = 0

    def __post_init__(self) -> None:
        least, most = {"off": (0, 0), "full": (0, 0)}.get(self.kind, (1, MAX_VALUE))
        if self.kind not in get_args(ScopeKind) or not least <= self.value <= most:
            raise InvalidScope(f"scope {self.kind} cannot have the value {short_value(self.value)}; {ACCEPTED}")

    def __str__(self) -> str:
        """The canonical text: `off`, `full`, `auto:30`, `1000`."""
        if self.kind == "auto":
            return f"auto:{self.value}"
        return str(self.value) if self.kind == "tokens" else self.kind

    def with_window(self, window: int) -> Scope:
        """This `auto` scope with another window. Raises `InvalidScope` for another scope and a window out of range."""
        if self.kind != "auto":
            raise InvalidScope(
                f"prefix_cache.window: only the scope auto has a window, but the scope is {self}; leave one out",
                param="prefix_cache.window",
            )
        return Scope("auto", window)


class Mark(NamedTuple):
    """A position that the client wants kept, in tokens, and for how long after its last use, in seconds; None leaves
    that to the daemon."""

    position: int
    ttl_s: float | None = None


class Change(NamedTuple):
    """What a normaliser changed, and where in the client's body."""

    normaliser: str
    path: str


class LeftOut(NamedTuple):
    """How many aged messages were left out, and where the first and the last of them stood in the client's body."""

    messages: int
    first: str
    last: str


@dataclass(frozen=True)
class Rewriting:
    """In what a prompt differs from the conversation that the client sent.

    `would_change` are the normalisers that found something and were not on.
    """

    changes: tuple[Change, ...] = ()
    would_change: tuple[str, ...] = ()
    left_out: LeftOut | None = None


@dataclass(frozen=True, eq=False)
class SourceText:
    """The text that a prompt was encoded from. `starts` says where each token begins in it, shape (num_tokens,)."""

    text: str
    starts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, text: str, offsets: npt.NDArray[np.int32]) -> SourceText:
        """`offsets` are the first and last character (exclusive) of each token, shape (num_tokens, 2)."""
        return cls(text, offsets[:, 0].copy())

    def line_at(self, token: int) -> str:
        """Returns the line in which a token stands. Of a token that begins with the end of a line, the next one."""
        start = int(self.starts[token])
        while start < len(self.text) - 1 and self.text[start] == "\n":
            start += 1
        end = self.text.find("\n", start)
        return self.text[self.text.rfind("\n", 0, start) + 1 : end if end >= 0 else None]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenised prompt and what is known of its structure.

    `boundaries` are the safe cut positions in ascending order (each one past a marker that the template wrote); empty
    for text without markers, where every position is as good as another. `system_end` is the boundary that ends the
    system message and the tools, 0 if there is none. `text` is what a person reads in `inspect`. `media` holds
    what the model is given beside the tokens, images for example: with it, equal tokens are not equal prompts. `marks`
    are the positions that the client marked, in ascending order. `source` is None if nobody asks what its lines are.
    `replayed` is the number of messages in whose place the tokens stand that were sampled for them.
    """

    token_ids: TokenIds
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    text: str = ""
    media: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    rewriting: Rewriting = field(default_factory=Rewriting)
    source: SourceText | None = None
    replayed: int = 0

    def last_safe(self, limit: int) -> int:
        """Returns the last safe cut at or below `limit` (0 <= limit <= number of tokens); 0 if there is none."""
        if not self.boundaries:
            return limit
        index = bisect_right(self.boundaries, limit)
        return self.boundaries[index - 1] if index else 0


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """`scope` says what of the prompt to keep, `tenant` whose state it is.

    `group`: only prompts of the same group are in the window of this one (8 bytes, see `tenant_ids.group_of`; empty for
    those without a key); what was seen before the window counts whatever its group. `save`: whether anything is kept,
    or only restored. `ttl_s`: how long it is kept after its last use, in seconds; None leaves that to the daemon.
    `reuse_generated`: keep the state of the first choice's reply, and restore that of earlier replies. `replay`:
    earlier replies stand in the prompt as the tokens that were sampled, and this reply is remembered for that.
    """

    scope: Scope
    tenant: Tenant = SHARED
    group: bytes = b""
    save: bool = True
    ttl_s: float | None = None
    reuse_generated: bool = False
    replay: bool = True


class Break(NamedTuple):
    """`at` is the first token that differs. About `num_tokens` behind it are the earlier prompt's too."""

    at: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to keep of one prompt. All positions and lengths are in tokens.

    `selected` is the policy's boundary; `aligned` is up to where state is kept for it: the same position where prompts
    restore to the token, elsewhere the grid point at or below it. `keep_tail`: `selected` is the whole prompt, so its
    last tokens and its next-token logits are kept too and an exact repeat runs no forward; `aligned` may then be 0.
    `keeps_reply`: the prompt is kept to its end, or to its last boundary because it is expected to go on from there, so
    the state of its reply is kept with it where that is exact. `checkpoints` are the grid points, ascending, at which
    state that cannot be cut is kept; `votes` the votes of the window for each, where it was asked. `common` is the
    longest prefix shared with one of the `recent` prompts looked at, `seen` the longest whose blocks were seen before.
    `window` (the most prompts that would have been looked at) and `safe` (the last safe boundary in what was seen) are
    0 unless the scope is auto; `price` (of a checkpoint, in tokens) unless it places checkpoints. `lost` is what this
    prompt lacks of the one that it shares most with, at that one's end, in tokens; `continues`, `trials` and `again`
    are those of the `Sighting`.
    """

    scope: Scope
    prompt_tokens: int
    reason: Reason
    selected: int = 0
    aligned: int = 0
    keep_tail: bool = False
    keeps_reply: bool = False
    checkpoints: tuple[int, ...] = ()
    votes: tuple[int, ...] = ()
    window: int = 0
    recent: int = 0
    common: int = 0
    seen: int = 0
    safe: int = 0
    price: int = 0
    lost: int = 0
    continues: bool = False
    trials: int = 0
    again: int = 0

    @property
    def kept(self) -> int:
        """Tokens that a later request can restore of what is kept."""
        return self.prompt_tokens if self.keep_tail else self.aligned

    def keeping_nothing(self, reason: Reason) -> Selection:
        """The same prompt and window, but nothing is kept."""
        return replace(
            self, reason=reason, selected=0, aligned=0, keep_tail=False, keeps_reply=False, checkpoints=(), votes=()
        )

    def shared(self, rule: str, num_tokens: int, had: int) -> int:
        """Returns how many of the first `num_tokens` tokens are left for other machines. `rule` is `--remote-write`:
        `all`, `off`, or what came before (`seen-twice`), which is worth sharing. Of that, the store or the engine
        `had` so many tokens, or another prompt begins with them."""
        if rule == "seen-twice":
            return min(num_tokens, max(had, self.common, self.seen))
        return num_tokens if rule == "all" else 0

    @property
    def diverged_at(self) -> int | None:
        """Index of the first token that leaves every prompt looked at; None without any, or if nothing leaves them."""
        return self.common if self.recent and self.common < self.prompt_tokens else None


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What the cache did for one request. The response's `prefix_cache` object shows a part of it, the debug log all.

    `selection` is what the policy keeps of the prompt, and what it looked at. `restored` is the number of prompt tokens
    that were not computed, `source` where their state came from. `saved`: `none` there was nothing to save, `queued`
    the writer has it, `stored` it is stored already, `dropped` there was no room for it.

    `miss_reason` says why nothing was restored; it is None if something was. server/README.md explains each reason.

    `matched` is the number of prompt tokens found in the store. If not all that is stored was restored, `refused` says
    why, in the words of `miss_reason`. `exact`: the restored state is, bit for bit, what a prefill computes; False only
    for the state of a reply that was decoded. `restore_ms`: reading, verifying and copying the state.

    `broken` is where the prompt leaves an earlier one although most of what follows is the same, `broken_line` the line
    of the prompt there; None and empty if there is no such place, or nobody asks. `rewriting` and
    `replayed` are the prompt's.
    """

    selection: Selection
    restored: int = 0
    source: StateSource = "none"
    miss_reason: MissReason | None = None
    matched: int = 0
    refused: Refused | None = None
    exact: bool = True
    restore_ms: float = 0.0
    saved: Saved = "none"
    broken: Break | None = None
    broken_line: str = ""
    rewriting: Rewriting = field(default_factory=Rewriting)
    replayed: int = 0

    @property
    def diverged_at(self) -> int | None:
        """Index of the first token that differs from every recent prompt; None unless that is the miss reason."""
        return self.selection.diverged_at if self.miss_reason == "diverged" else None

    def log_line(self) -> str:
        """One line with all figures, `name=value` each; what is empty or None is left out."""
        values = vars(self) | vars(self.selection)
        for name in ("selection", "broken_line", "rewriting"):
            del values[name]
        said = (f"{name}={_logged(value)}" for name, value in values.items() if value not in (None, ()))
        return f"[disk-cache] {' '.join(said)}"


def _logged(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def short_value(value: object) -> str:
    """Returns a text that is short and on one line whatever a client sent; numbers of thousands of digits have none."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_SHOWN else value[:_MOST_SHOWN] + "…")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() <= 64 else "a number that large"
    return "what is neither a text nor an integer"
