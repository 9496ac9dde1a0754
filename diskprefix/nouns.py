"""The values that all packages use. Each noun has one meaning.

A request has a `Tenant`, a `Prompt`, and `CacheOptions` with a `Scope`, its answer a `Selection` and a `CacheReport`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from diskprefix.errors import InvalidScope, ModelNotFound
from diskprefix.tenant_ids import TENANT_ID, id_of
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ScopeKind: TypeAlias = Literal["off", "full", "auto", "tokens"]

DEFAULT_WINDOW = 30
MAX_VALUE = 1_000_000

ACCEPTED = (
    f"accepted are off, full, auto, auto:N (N recent requests) and N (the first N prompt tokens), with N from 1 to "
    f"{MAX_VALUE}"
)

_MOST_SHOWN = 40
MAX_MARKS = 32
"""The maximum number of marks in a request. In a chat, each takes one or two renderings."""

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
    "short_prompt",
    "short_prefix",
    "unsupported",
    "read_only",
    "faster_to_compute",
    "left_out",
    "write_budget",
]
"""The reason for a boundary. Responses and log lines show these stable words. server/README.md explains each."""
StateSource: TypeAlias = Literal["none", "memory", "disk", "remote"]
Refused: TypeAlias = Literal["no_logits", "no_checkpoint", "damaged", "faster_to_compute"]
MissReason: TypeAlias = Literal[
    Refused, "new", "not_stored", "diverged", "too_short", "off", "image", "unsupported", "error"
]
MISS_REASONS: tuple[str, ...] = get_args(MissReason)
CacheOutcome: TypeAlias = Literal["hit", "miss", "short"]
LONG_PROMPT = 512
"""Tokens of a prompt from which on it tells what the cache is good for."""


def outcome_of(prompt_tokens: int, restored: int) -> CacheOutcome:
    """Returns `hit` if at least half of a prompt was restored, `miss` if less, and `short` if the prompt has so few
    tokens that the beginning of the template may be half of them."""
    if prompt_tokens < LONG_PROMPT:
        return "short"
    return "hit" if 2 * restored >= prompt_tokens else "miss"


Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True)
class Tenant:
    """The ids of a tenant: that of the key, then that of the salt. Its text joins them with `/`."""

    ids: tuple[str, ...] = ()
    is_salted: bool = field(default=False, compare=False)
    """Not part of the text: whether a client has chosen the tenant for a request, of which there may be any number."""

    @classmethod
    def of_key(cls, api_key: str) -> Tenant:
        """Returns the tenant of an API key, or of the bearer that a client sends to a daemon without API keys."""
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
        return Tenant((*self.ids, id_of("salt", salt)), is_salted=True)

    def __str__(self) -> str:
        return "/".join(self.ids)


SHARED = Tenant()
"""The tenant of requests with neither key nor salt."""

MOST_NAME_CHARS = 200
"""The longest name of a model."""


def require_model_name(name: str) -> None:
    """Raises `ModelNotFound` for a name that no model can have. To be called before a name from outside is looked up:
    looking for the nearest of a name of megabytes takes seconds and gigabytes."""
    if len(name) > MOST_NAME_CHARS:
        raise ModelNotFound(
            f"model: no model has a name of {len(name):,} characters; {MOST_NAME_CHARS} are the most", param="model"
        )


class ScopeWord(NamedTuple):
    """A kind of scopes. `text` is the canonical one, with `{}` for a value from 1 on.

    `is_limit`: no more than `value` tokens of a prompt and its reply are kept. `keeps_all`: a prompt is kept even if
    messages were left out of it, and with the places that other conversations may share.
    """

    text: str
    is_limit: bool = False
    keeps_all: bool = False


SCOPE_WORDS: dict[ScopeKind, ScopeWord] = {
    "off": ScopeWord("off", is_limit=True),
    "full": ScopeWord("full", keeps_all=True),
    "auto": ScopeWord("auto:{}"),
    "tokens": ScopeWord("{}", is_limit=True),
}


@dataclass(frozen=True)
class Scope:
    """A valid scope. `value` is the window of `auto` in requests, or the N of `tokens`; 0 for `off` and `full`.

    Raises `InvalidScope` for a combination that the grammar cannot express, so `parse_scope(str(scope)) == scope`.
    """

    kind: ScopeKind
    value: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SCOPE_WORDS or not self._takes(self.value):
            raise InvalidScope(f"scope {self.kind} cannot have the value {short_value(self.value)}; {ACCEPTED}")

    def _takes(self, value: int) -> bool:
        return 1 <= value <= MAX_VALUE if "{}" in SCOPE_WORDS[self.kind].text else value == 0

    def __str__(self) -> str:
        """Returns the canonical text: `off`, `full`, `auto:30`, `1000`."""
        return SCOPE_WORDS[self.kind].text.format(self.value)

    @property
    def most(self) -> int | None:
        """The most tokens that are kept of a prompt and its reply; None if that is left to the policy."""
        return self.value if SCOPE_WORDS[self.kind].is_limit else None

    @property
    def keeps_all(self) -> bool:
        return SCOPE_WORDS[self.kind].keeps_all

    def with_window(self, window: int) -> Scope:
        """Returns this `auto` scope with another window. Raises `InvalidScope`: other scopes have no window."""
        if self.kind != "auto":
            problem = f"only the scope auto has a window, but the scope is {self}; leave one out"
            raise InvalidScope.at("prefix_cache.window", problem)
        return Scope("auto", window)


class Mark(NamedTuple):
    """A position, in tokens, that the client wants kept for `ttl_s` seconds (None: the daemon's) after its last use."""

    position: int
    ttl_s: float | None = None


class Change(NamedTuple):
    """A change by a normaliser, or `unread_content`: a note in the place of a picture. `path` is the place in the
    client's body."""

    normaliser: str
    path: str


class LeftOut(NamedTuple):
    """The number of old messages that were left out, and the places of the first and the last in the client's body."""

    messages: int
    first: str
    last: str


@dataclass(frozen=True)
class Rewriting:
    """The differences between a prompt and the conversation that the client sent.

    `would_change` names the normalisers that found something but were not on.
    """

    changes: tuple[Change, ...] = ()
    would_change: tuple[str, ...] = ()
    left_out: LeftOut | None = None


@dataclass(frozen=True, eq=False)
class SourceText:
    """The text of a prompt. `starts` has the index of each token's first character, shape (num_tokens,)."""

    text: str
    starts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, text: str, offsets: npt.NDArray[np.int32]) -> SourceText:
        """Takes the first and last character (exclusive) of each token as `offsets`, shape (num_tokens, 2)."""
        return cls(text, offsets[:, 0].copy())

    def line_at(self, token: int) -> str:
        """Returns the line of a token. For a token that begins with a line break, returns the next line."""
        start = int(self.starts[token])
        while start < len(self.text) - 1 and self.text[start] == "\n":
            start += 1
        end = self.text.find("\n", start)
        return self.text[self.text.rfind("\n", 0, start) + 1 : end if end >= 0 else None]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a prompt.

    `name` is a digest (16 bytes) of its content, and of what the processor makes of it. `text` stands for it in the
    prompt; its placeholders are `num_tokens` tokens, each a row of the encoder's output. `shape` has what positions
    need, by the name of the model's argument: tensors on the CPU such as `image_grid_thw`. `size` is that of the image
    in the file, for people: "1920x1080"; `num_bytes` is that of the file. `prepare` decodes it and returns the
    encoder's input, tensors on the CPU by the name of the argument; it takes long, and raises `InvalidRequest` with
    `param`, the path of its content in the body.
    """

    name: bytes
    text: str
    num_tokens: int
    shape: Mapping[str, Any]
    size: str
    num_bytes: int
    param: str
    prepare: Callable[[], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenised prompt with its structure.

    `boundaries` are the safe cut positions in ascending order, each one past a marker that the template wrote. They are
    empty for text without markers. `system_end` is the boundary after the system message and the tools, 0 if there is
    none. `text` is the preview for people. `pictures` are in the order of their tokens, whose ids are
    `tokens.picture_ids`. `marks` are the client's marks in ascending order. `source` is None if its lines are not
    needed. `replayed` counts the messages that are replaced by the tokens that were sampled for them.
    """

    token_ids: TokenIds
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    text: str = ""
    pictures: tuple[Picture, ...] = ()
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
    """The cache's options for one request.

    `scope` limits the kept part of the prompt, `tenant` owns its state. `group` (8 bytes, see `tenant_ids.group_of`;
    empty without a key): the window has only prompts of the same group. `save`: False only restores. `ttl_s`: seconds
    to keep the state after its last use; None leaves that to the daemon. `replay`: use the sampled tokens of earlier
    replies in the prompt, and remember those of this reply. `leaves_last`: the prompt's last token is computed, even if
    all of it is stored. `is_asked`: scope or time to live are the request's own.
    """

    scope: Scope
    tenant: Tenant = SHARED
    group: bytes = b""
    save: bool = True
    ttl_s: float | None = None
    replay: bool = True
    leaves_last: bool = False
    is_asked: bool = False


class Break(NamedTuple):
    """A difference from an earlier prompt at token `at`. About `num_tokens` after it are the same again."""

    at: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The policy's decision on what to keep of one prompt. All positions and lengths are in tokens.

    `selected` is the policy's boundary; `aligned` is up to where state is kept for it: the same position if the model
    is exact at every token, elsewhere the grid point at or below it. `keep_tail`: `selected` is the whole prompt, so
    its last tokens and its next-token logits are kept too and an exact repeat runs no forward; `aligned` may then be 0.
    `keeps_reply`: the prompt is kept to its end, or to its last boundary because it is expected to go on from there, so
    the state of its reply is kept with it where that is exact. `checkpoints` are the positions, ascending, at which
    state that cannot be cut is kept; `votes` the votes of the window for each, where it was asked. `anchors` are
    positions whose checkpoints are not dropped for those of later turns: other prompts may need them. `common` is the
    longest prefix shared with one of the `recent` prompts looked at, `seen` the longest whose blocks were seen before.
    `window` (the most prompts that would have been looked at) is 0 unless the scope is auto; `price` (of a checkpoint,
    in tokens) unless it places checkpoints. `lost` is what this prompt lacks of the one that it shares most with, at
    that one's end, in tokens; `trials` and `again` are those of the `Sighting`.
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
    anchors: tuple[int, ...] = ()
    window: int = 0
    recent: int = 0
    common: int = 0
    seen: int = 0
    price: int = 0
    lost: int = 0
    trials: int = 0
    again: int = 0

    @property
    def kept(self) -> int:
        """The number of tokens that a later request can restore."""
        return self.prompt_tokens if self.keep_tail else self.aligned

    def keeping_nothing(self, reason: Reason) -> Selection:
        """Returns a selection of the same prompt and window that keeps nothing."""
        return replace(
            self, reason=reason, selected=0, aligned=0, keep_tail=False, keeps_reply=False, checkpoints=(), votes=()
        )

    def shared(self, rule: str, num_tokens: int, had: int) -> int:
        """Returns how many of the first `num_tokens` tokens to upload for other machines, by the rule `--remote-write`.

        `seen-twice` uploads the `had` tokens of the store or the engine, or those that an earlier prompt begins with.
        """
        if rule == "seen-twice":
            return min(num_tokens, max(had, self.common, self.seen))
        return num_tokens if rule == "all" else 0

    @property
    def diverged_at(self) -> int | None:
        """The index of the first token that differs from all recent prompts, None if there is none."""
        return self.common if self.recent and self.common < self.prompt_tokens else None


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """The cache's work for one request. The response's `prefix_cache` object shows a part of it, the debug log all.

    `restored` prompt tokens were not computed; their state came from `source`. `saved`: `none` there was nothing to
    save, `queued` the writer has it, `stored` it was stored before, `dropped` not all of it could be saved; then
    `dropped_because` says why. `miss_reason` is None if something was restored of a short prompt, or half of a long
    one. server/README.md explains each reason.

    `matched` prompt tokens were found in the store. If more were found than restored, `refused` is the reason.
    `restore_ms`: the time to read, verify and copy the state.

    `broken` is a difference from an earlier prompt with much the same text after it, `broken_line` the prompt's line
    there; None and empty without one. `rewriting` and `replayed` are the prompt's.
    """

    selection: Selection
    restored: int = 0
    source: StateSource = "none"
    miss_reason: MissReason | None = None
    matched: int = 0
    refused: Refused | None = None
    restore_ms: float = 0.0
    saved: Saved = "none"
    dropped_because: str | None = None
    broken: Break | None = None
    broken_line: str = ""
    rewriting: Rewriting = field(default_factory=Rewriting)
    replayed: int = 0

    @property
    def diverged_at(self) -> int | None:
        """The index of the first token that differs from all recent prompts; None unless that is the miss reason."""
        return self.selection.diverged_at if self.miss_reason == "diverged" else None

    def log_line(self) -> str:
        """Returns one line with all values as `name=value`, without empty ones."""
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
    """Returns a short text on one line for any value that a client sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_SHOWN else value[:_MOST_SHOWN] + "…")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() <= 64 else "a number that large"
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    return "an array" if isinstance(value, list) else "an object"
