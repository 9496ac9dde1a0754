"""The values that all packages use. Each noun has one meaning.

A request has a `Tenant`, a `Prompt`, and `CacheOptions` with a `Scope`, its answer a `Selection` and a `CacheReport`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

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
    "room",
    "no_room",
    "disk",
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
    "upgraded",
]
"""The reason for a boundary. Responses and log lines show these stable words. daemon/server/README.md explains each."""
StateSource: TypeAlias = Literal["none", "memory", "disk", "remote"]
Refused: TypeAlias = Literal["no_logits", "no_checkpoint", "damaged", "faster_to_compute", "upgraded"]
MissReason: TypeAlias = Literal[
    Refused,
    "new",
    "not_stored",
    "partial",
    "other_key",
    "other_settings",
    "diverged",
    "too_short",
    "off",
    "image",
    "unsupported",
    "error",
]
MISS_REASONS: tuple[str, ...] = get_args(MissReason)
_IN_FULL = {"too_short": "too short to be saved on the disk", "no_logits": "saved without the state to begin a reply"}
CacheOutcome: TypeAlias = Literal["hit", "miss", "short"]
LONG_PROMPT = 512
"""Prompts with fewer tokens do not count as hits or misses."""


def words_of(reason: str) -> str:
    """Returns a `MissReason` or `BoundaryReason` as people read it. `format.js` has the same words."""
    return _IN_FULL.get(reason, reason.replace("_", " "))


def outcome_of(prompt_tokens: int, restored: int) -> CacheOutcome:
    """Returns `hit` if at least half of a prompt was restored, `miss` if less, and `short` if the prompt has so few
    tokens that the beginning of the template may be half of them."""
    if prompt_tokens < LONG_PROMPT:
        return "short"
    return "hit" if 2 * restored >= prompt_tokens else "miss"


def is_miss(prompt_tokens: int, restored: int) -> bool:
    """Returns whether too little was restored: nothing, or less than half of a long prompt."""
    return not restored or outcome_of(prompt_tokens, restored) == "miss"


Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True)
class Tenant:
    """The ids of a tenant: the key's, then the salt's. Its text joins them with `/`."""

    ids: tuple[str, ...] = ()
    is_salted: bool = field(default=False, compare=False)
    """Whether a request chose the tenant by a salt, of which there may be any number. Not part of the text."""
    others: tuple[Tenant, ...] = field(default=(), compare=False, repr=False)
    """The tenants of other keys of the same user, with the same salts. A miss may name them, and nothing of theirs is
    restored. Not part of the text."""

    @classmethod
    def of_key(cls, api_key: str) -> Tenant:
        """Returns the tenant of an API key, or of the bearer that a client sends to a daemon without API keys."""
        return cls((id_of("api key", api_key),))

    @classmethod
    def of_owner(cls, secret: str) -> Tenant:
        """Returns the tenant of a daemon's own user without API keys. `secret` is never sent, and no bearer makes this
        tenant."""
        return cls((id_of("owner", secret),))

    def of_other_user(self, user: int) -> Tenant:
        """Returns the tenant of another user of the machine, at a daemon whose own user is this tenant."""
        return Tenant((id_of("user", f"{user} {self}"),))

    def of_origin(self, origin: str) -> Tenant:
        """Returns the tenant of the pages of another origin, at a daemon whose own user is this tenant."""
        return Tenant((id_of("origin", f"{origin} {self}"),))

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """Returns the tenant with this text, the inverse of `str`. Raises `ValueError` if no tenant has this text."""
        ids = tuple(text.split("/")) if text else ()
        if not all(map(TENANT_ID.fullmatch, ids)):
            raise ValueError(f"not a tenant: {text!r}")
        return cls(ids)

    def with_salt(self, salt: str) -> Tenant:
        """Returns the tenant of a salt within this tenant. For `SHARED`, the salt alone makes the tenant."""
        others = tuple(other.with_salt(salt) for other in self.others)
        return Tenant((*self.ids, id_of("salt", salt)), is_salted=True, others=others)

    def __str__(self) -> str:
        return "/".join(self.ids)


SHARED = Tenant()
"""The tenant of requests with neither key nor salt."""


class Asker(NamedTuple):
    """Whom a result in memory was made for. Only its `tenant` finds it, and its room counts for its `share`: see
    `CacheOptions`."""

    tenant: Tenant = SHARED
    share: str = ""


NO_ASKER = Asker()
"""The asker of what no client sends."""


MOST_NAME_CHARS = 200
"""The longest name of a model."""
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""Text that may begin a stop string is held back, so the length of a stop string is bounded."""


def require_model_name(name: str) -> None:
    """Raises `ModelNotFound` for a name that no model can have. Call it before looking up a name from outside: finding
    the nearest name of a text of megabytes takes seconds and gigabytes."""
    if len(name) > MOST_NAME_CHARS:
        problem = f"model: no model has a name of {len(name):,} characters; {MOST_NAME_CHARS} are the most"
        raise ModelNotFound(problem, param="model")


class ScopeWord(NamedTuple):
    """A kind of scopes. `text` is its canonical text, with `{}` for a value from 1 on.

    `is_limit`: at most `value` tokens of a prompt and its reply are kept. `keeps_all`: a prompt is kept even if some of
    its messages were left out, and with the positions that other conversations may share.
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


class Scope(Struct, frozen=True):
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
        """The most tokens that are kept of a prompt and its reply, None if the policy decides."""
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
    """A position in tokens up to which the client wants the prompt kept for `ttl_s` seconds (None: the daemon's time)
    after its last use."""

    position: int
    ttl_s: float | None = None


class Change(NamedTuple):
    """A change by a canonicaliser. `path` is the path in the client's body."""

    canonicaliser: str
    path: str


class LeftOut(Struct, frozen=True):
    """The parts of one type that were left out: their number, and the paths of the first and the last in the client's
    body."""

    type: str
    count: int
    first: str
    last: str


MAX_TYPES_LEFT_OUT = 32
"""The most types of parts that are named. Those of further types are counted together."""


def left_out_of(parts: Iterable[tuple[str, str]], before: Iterable[LeftOut] = ()) -> tuple[LeftOut, ...]:
    """Returns the parts that were left out by their types, with those `before`. Each comes with its type and path."""
    by_type = {each.type: each for each in before}
    for kind, path in parts:
        named = kind if kind in by_type or len(by_type) < MAX_TYPES_LEFT_OUT else "others"
        known = by_type.get(named) or LeftOut(named, 0, path, path)
        by_type[named] = LeftOut(named, known.count + 1, known.first, path)
    return tuple(by_type.values())


class Rewriting(Struct, frozen=True):
    """The differences between a prompt and the conversation that the client sent.

    `would_change` names the canonicalisers that found something but were not on. `is_shortened`: old messages were left
    out. `template_kwargs` are the variables of the chat template that the daemon set.
    """

    changes: tuple[Change, ...] = ()
    would_change: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    is_shortened: bool = False
    template_kwargs: Mapping[str, bool] = msgspec.field(default_factory=dict)


class SourceText(Struct, frozen=True, eq=False):
    """The text of a prompt. `starts` has the index of each token's first character, shape (num_tokens,). `tools` are
    the names of its tools, `results` the texts that tools returned, each with the tool's name, `dates` the texts that
    the chat template wrote for the date."""

    text: str
    starts: npt.NDArray[np.int32]
    tools: Sequence[str] = ()
    results: Sequence[tuple[str, str]] = ()
    dates: Sequence[str] = ()

    def line_at(self, token: int) -> str:
        """Returns the line of a token. For a token that begins with a line break, returns the next line."""
        start = int(self.starts[token])
        while start < len(self.text) - 1 and self.text[start] == "\n":
            start += 1
        end = self.text.find("\n", start)
        return self.text[self.text.rfind("\n", 0, start) + 1 : end if end >= 0 else None]

    def is_date_at(self, token: int) -> bool:
        """Returns whether the line of a token has all that the chat template wrote for the date. A part alone, such as
        the number of the day, may stand in any line."""
        line = self.line_at(token)
        return bool(self.dates) and all(text in line for text in self.dates)

    def tool_at(self, token: int) -> str:
        """Returns the tool whose result has the line of a token, or whose definition has the token; or ""."""
        line, start = self.line_at(token).strip(), int(self.starts[token])
        if line and (names := [name for name, text in self.results if line in text]):
            return names[0]
        before = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        at, name = max(((before.rfind(f'"{name}"'), name) for name in self.tools), default=(-1, ""))
        return name if at >= 0 else ""


class Picture(Struct, frozen=True, eq=False):
    """A picture of a prompt.

    `name` is a digest (16 bytes) of its content and of the processor's output. `text` replaces it in the prompt, with
    `num_tokens` placeholder tokens, each for a row of the encoder's output. `shape` has the model's arguments that
    positions need, tensors on the CPU such as `image_grid_thw`. `size` is the image's for people ("1920x1080"),
    `num_bytes` the file's. `prepare` decodes the image and returns the encoder's arguments, tensors on the CPU; this
    takes long, and raises `InvalidRequest` with `param`, the path of the content in the body.
    """

    name: bytes
    text: str
    num_tokens: int
    shape: Mapping[str, Any]
    size: str
    num_bytes: int
    param: str
    prepare: Callable[[], dict[str, Any]]


class Prompt(Struct, frozen=True, eq=False):
    """A tokenised prompt with its structure.

    `boundaries` are the safe cut positions, ascending, each one past a marker that the template wrote; text without
    markers has none. `system_end` is the boundary after the system message and the tools, `question_end` is the
    boundary after the user's last message, 0 if there is none: after it, a template may render the same messages
    differently once the next question follows. `text` is the preview for people. `pictures` are in the order of their
    tokens, whose ids are `tokens.picture_ids`. `marks` are the client's, ascending. `source` is None if its lines are
    not needed. `replayed` counts the replies whose sampled tokens are in the prompt.
    """

    token_ids: TokenIds
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    question_end: int = 0
    text: str = ""
    pictures: tuple[Picture, ...] = ()
    marks: tuple[Mark, ...] = ()
    rewriting: Rewriting = msgspec.field(default_factory=Rewriting)
    source: SourceText | None = None
    replayed: int = 0

    def until(self, end: int) -> Prompt:
        """Returns the first `end` tokens of a prompt of text, with the structure that they have."""
        ends = [self.system_end, self.question_end]
        system_end, question_end = (position if position <= end else 0 for position in ends)
        return replace(
            self,
            token_ids=self.token_ids[:end],
            boundaries=tuple(position for position in self.boundaries if position <= end),
            system_end=system_end,
            question_end=question_end,
            marks=tuple(mark for mark in self.marks if mark.position <= end),
        )

    def last_safe(self, limit: int) -> int:
        """Returns the last safe cut at or below `limit` (0 <= limit <= number of tokens); 0 if there is none."""
        if not self.boundaries:
            return limit
        index = bisect_right(self.boundaries, limit)
        return self.boundaries[index - 1] if index else 0


class CacheOptions(Struct, frozen=True, kw_only=True):
    """The cache's options for one request.

    `scope` limits the kept part of the prompt, `tenant` owns its state. `group` (8 bytes, see `tenant_ids.group_of`;
    empty without a key): the window has only prompts of this group. `save`: False only restores. `ttl_s`: seconds to
    keep the state after its last use, None for the daemon's time. `replay`: use the sampled tokens of earlier replies,
    and record this reply's. `computes_last`: compute the prompt's last token even if all of it is stored. `is_asked`:
    scope or time to live are the request's own. `share`: who the work and the room of the request count for, empty if
    unknown.
    """

    scope: Scope
    tenant: Tenant = SHARED
    group: bytes = b""
    save: bool = True
    ttl_s: float | None = None
    replay: bool = True
    computes_last: bool = False
    is_asked: bool = False
    share: str = ""

    @property
    def asker(self) -> Asker:
        return Asker(self.tenant, self.share)


class Break(NamedTuple):
    """A difference from an earlier prompt at token `at`. About `num_tokens` tokens after it are equal."""

    at: int
    num_tokens: int


class Selection(Struct, frozen=True, kw_only=True):
    """The policy's decision on how much of one prompt to keep. All positions and lengths are in tokens.

    The policy chooses the boundary `selected`. State is kept up to `aligned`, which is `selected` if the model is exact
    at every token, else the grid point at or below it. With `keep_tail`, `selected` is the whole prompt, and its last
    tokens and next-token logits are kept too, so an exact repeat runs no forward (`aligned` may then be 0). With
    `saves_reply`, the state of the reply is kept too where it is exact, because the prompt is kept to its end or is
    expected to continue from its last boundary. State that cannot be cut is kept at `checkpoints`, ascending; `votes`
    has the window's votes for each, if it was asked. Checkpoints at `anchors`, which other prompts may need, are not
    dropped for those of later turns.

    The longest prefix shared with one of `recent` prompts has `common` tokens, the longest whose blocks were seen has
    `seen`. `window` is the number of prompts to look at, 0 unless the scope is auto; `price` is the price of a
    checkpoint in tokens, 0 unless checkpoints are placed. `lost` is the number of tokens at the end of the most similar
    prompt that this prompt lacks. `trials` and `again` are the fields of the `Sighting`.
    """

    scope: Scope
    prompt_tokens: int
    reason: Reason
    selected: int = 0
    aligned: int = 0
    keep_tail: bool = False
    saves_reply: bool = False
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
            self, reason=reason, selected=0, aligned=0, keep_tail=False, saves_reply=False, checkpoints=(), votes=()
        )

    def shared(self, rule: str, num_tokens: int, had: int) -> int:
        """Returns how many of the first `num_tokens` tokens to upload for other machines, by the rule `--remote-write`.

        `seen-twice` uploads the `had` tokens that the store or the engine had, or the beginning of an earlier prompt.
        """
        if rule == "seen-twice":
            return min(num_tokens, max(had, self.common, self.seen))
        return num_tokens if rule == "all" else 0

    @property
    def diverged_at(self) -> int | None:
        """The index of the first token that differs from all recent prompts, None if there is none."""
        return self.common if self.recent and self.common < self.prompt_tokens else None


class Lost(NamedTuple):
    """Tokens of a prompt that were computed again, although an earlier prompt had them."""

    cause: MissReason
    num_tokens: int


class CacheReport(Struct, frozen=True, kw_only=True):
    """The cache's work for one request. The response's `prefix_cache` object shows a part, the debug log everything.

    `restored` prompt tokens were not computed; their state came from `source` in `restore_ms`. `matched` tokens were
    found in the store; if they are more, `refused` is the reason. `miss_reason` is None unless `is_miss`.
    daemon/server/README.md explains each reason. For `other_settings`, `stored_with` are the options that the stored
    prefix was made with and this start lacks, by flag.

    `saved`: `none` if there was nothing to save, `queued` if the writer has it, `stored` if it was stored before,
    `dropped` if not all could be saved, because of `dropped_because`. `broken` is a difference from an earlier prompt
    with nearly equal text after it, None without one, `broken_line` the prompt's line there, `broken_tool` the tool
    that wrote it, and `broken_date` whether the chat template wrote the date into it. `recomputed` are the tokens that
    were computed again. `rewriting` and `replayed` are the prompt's. `unverified` tokens were restored from the state
    of an imported file, or from such state, which was not computed here.
    """

    selection: Selection
    restored: int = 0
    source: StateSource = "none"
    miss_reason: MissReason | None = None
    stored_with: Mapping[str, str] = msgspec.field(default_factory=dict)
    matched: int = 0
    refused: Refused | None = None
    restore_ms: float = 0.0
    saved: Saved = "none"
    dropped_because: str | None = None
    broken: Break | None = None
    broken_line: str = ""
    broken_tool: str = ""
    broken_date: bool = False
    recomputed: tuple[Lost, ...] = ()
    rewriting: Rewriting = msgspec.field(default_factory=Rewriting)
    replayed: int = 0
    unverified: int = 0

    @property
    def diverged_at(self) -> int | None:
        """The index of the first token that differs from all recent prompts; None unless that is the miss reason."""
        return self.selection.diverged_at if self.miss_reason == "diverged" else None

    def log_line(self) -> str:
        """Returns one line with all values as `name=value`, without empty ones."""
        hidden, values = (
            ("selection", "broken_line", "broken_tool", "broken_date", "rewriting"),
            asdict(self) | asdict(self.selection),
        )
        shown = {name: value for name, value in values.items() if name not in hidden and value not in (None, (), {})}
        return " ".join(["[disk-cache]", *(f"{name}={_logged(value)}" for name, value in shown.items())])


def _logged(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(
            ":".join(map(str, element)) if isinstance(element, tuple) else str(element) for element in value
        )
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{element}" for name, element in value.items())
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
