"""A line of a recording: one request of a daemon, without text and token ids.

Each prompt is cut at the positions that matter to the cache: every grid point, boundary and mark, the ends of the
system part, of the last question and of the prompt, the ends of earlier prompts that it continues, and the position
where it parts from an earlier prompt. Each cut has a hash of the prompt up to the cut. Two prompts of one root share
their first p tokens if and only if both have the same hash at p. All hashes are keyed with the store's secret: without
it, nobody can test a guess of a prompt or a tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import msgspec

from diskprefix.scope import parse_scope

VERSION = 1

MAX_TOKENS = 1 << 24
"""The maximum length of a prompt."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, a line of the file. An absent field has its default.

    `when` is in seconds since 1970. `root` identifies model and tenant, and `group` is the group of `CacheOptions`;
    both are keyed hashes of 16 hex digits, empty for none. `is_trusted`: the request had no salt. `own_scope`: it set a
    scope that differs from the daemon's. `bytes_per_token`, `state_bytes`, `logits_bytes` and `exact_at` describe the
    model's state as `kv.layout.Layout` does; the sizes are 0 if unknown. `model` is the model's name if a daemon has
    several. `marks` are the positions that the client marked, with their times to live in seconds: see `values.Mark`.
    `reply_tokens` counts the known tokens of the reply, 0 unless the model is exact at every token.

    `cuts` are ascending positions in tokens. The end of the prompt is a cut, and the end of the reply is the last cut.
    `hashes` has the hash of prompt and reply up to each cut, 16 hex digits. `parted_at` is the cut where the prompt
    parts from an earlier prompt without a cut there, and `parted_from` the hash of the earlier prompt at its next cut.

    `remembered`: the prompt was computed to its end, so any scope could have kept it. The daemon computed the tokens
    after the `restored` ones in `prefill_ms`. `is_ahead`: nobody sent the prompt; the daemon computed it while nobody
    waited.
    """

    version: int
    when: _Amount
    root: str
    scope: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    min_tokens: Count
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    cuts: list[int]
    hashes: list[str]
    parted_at: int = 0
    parted_from: str = ""
    is_trusted: bool = True
    own_scope: bool = False
    group: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")] = ""
    save: bool = True
    ttl_s: _Amount | None = None
    reply_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    boundaries: list[int] = []
    system_end: int = 0
    question_end: int = 0
    marks: list[tuple[int, _Amount | None]] = []
    remembered: bool = True
    is_ahead: bool = False
    bytes_per_token: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    state_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    logits_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    exact_at: Literal["token", "grid"] = "grid"
    model: str = ""
    restored: Count = 0
    prefill_ms: _Amount = 0.0

    def check(self) -> None:
        """Checks the rules that the types do not express. Raises `ValueError` or `InvalidScope`."""
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the recording is not known here ({VERSION} is)")
        parse_scope(self.scope, param="scope")
        positions = [0, *self.cuts]
        num_tokens = self.prompt_tokens + self.reply_tokens
        if not self.cuts or len(self.hashes) != len(self.cuts) or positions[-1] != num_tokens:
            raise ValueError("cuts: they must end with the prompt and its reply, and have a hash each")
        if self.prompt_tokens not in positions:
            raise ValueError("cuts: the prompt's end must be one")
        if any(later <= earlier for earlier, later in pairwise(positions)):
            raise ValueError("cuts: they must ascend")
        if self.parted_at and self.parted_at not in self.cuts:
            raise ValueError("parted_at: is no cut")
        marks = [position for position, _ in self.marks]
        ends = {"system_end": [self.system_end], "question_end": [self.question_end]}
        for key, places in ({"boundaries": self.boundaries, "marks": marks} | ends).items():
            if places != sorted(places) or not all(0 <= place <= self.prompt_tokens for place in places):
                raise ValueError(f"{key}: must ascend and lie within the prompt")


def joined(requests: Sequence[RecordedRequest]) -> dict[str, str]:
    """Returns, for each hash in the recording, the hash at the last known cut before it, in any prompt, or "" at the
    start.

    All prompts with the same two hashes have the same tokens between the two cuts. So a prompt can be rebuilt from its
    last hash backwards, with the cuts of all prompts that share its beginning.
    """
    before: dict[str, str] = {}
    position_of = {"": 0}
    for request in requests:
        earlier = ""
        for position, later in zip(request.cuts, request.hashes, strict=True):
            position_of[later] = position
            _link(before, position_of, earlier, later)
            earlier = later
    for request in requests:
        # The recording may lack the other prompt.
        if request.parted_at and position_of.get(request.parted_from, 0) > request.parted_at:
            parted = request.hashes[request.cuts.index(request.parted_at)]
            _link(before, position_of, parted, request.parted_from)
    return before


def _link(before: dict[str, str], position_of: dict[str, int], earlier: str, later: str) -> None:
    """Records that the prefix `earlier` is a beginning of `later`, and inserts both into the known chain."""
    while True:
        current = before.get(later)
        if current is None:
            before[later] = earlier
            return
        if position_of[current] == position_of[earlier]:
            return
        if position_of[current] > position_of[earlier]:
            later = current
        else:
            before[later] = earlier
            later, earlier = earlier, current
