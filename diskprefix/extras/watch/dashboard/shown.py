"""The JSON that the dashboard and `diskprefix top` show, as models for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from diskprefix.api.fields import Body
from diskprefix.engine.gauges import Activity
from diskprefix.extras.watch.browse.flat import FlatTree
from diskprefix.server.daemon import Status
from diskprefix.server.recent import EndedRequest
from diskprefix.store.tree import EntryInfo

Level: TypeAlias = Literal["error", "warning", "hint"]


@dataclass(frozen=True, kw_only=True)
class Running(Activity):
    """A request that waits or runs."""

    scope: str  # type: ignore[assignment]


class Problem(BaseModel):
    """A problem for the daemon's owner."""

    level: Level
    what: str
    todo: str = Field(description="Advice.")
    count: int = 1
    last_at: float | None = Field(default=None, description="When the last of the failed requests ended.")


class ShownSlot(BaseModel):
    """The memory of one sequence."""

    tokens: int
    num_bytes: int
    busy: bool = Field(description="A request runs in it. Otherwise it waits for the next turn of its conversation.")
    used_at: float = Field(description="The last use in seconds since 1970. For a busy one, the start of its request.")


class Model(BaseModel):
    """The served model."""

    name: str
    device: str
    dtype: str
    max_positions: int
    exact_at: str | None


class Memory(BaseModel):
    """The memory for the state of requests: running ones, and `entries` finished ones with `entry_tokens` tokens, which
    the next turn may continue."""

    limit_bytes: int
    used_bytes: int
    running: int
    max_running: int
    entries: int
    max_entries: int
    entry_tokens: int
    process_bytes: int | None = Field(description="The resident memory of the process, null where it is not known.")
    slots: list[ShownSlot]


class State(BaseModel):
    """The daemon now. Values that are unknown while the model loads are null or empty."""

    now: float = Field(description="Seconds since 1970.")
    version: str
    status: Status
    message: str | None = Field(description="The current step while the model loads.")
    started_at: float | None = Field(description="When the model was ready, in seconds since 1970.")
    model: Model | None
    scope: str
    arriving: int = Field(description="The number of requests that are being read.")
    requests: list[Running] = Field(
        description="The requests in the engine and its queue, in order of arrival. Times are in seconds, `elapsed_s` "
        "since the arrival. `ready_tokens` of the prompt are restored or computed. Unknown values are null."
    )
    ended: list[EndedRequest] = Field(description="The remembered requests that have ended, oldest first.")
    memory: Memory | None
    cache: dict[str, Any] | None = Field(
        description="`full_cache.state` and `gate` of `/props`: the store, its write buffer, `savings`."
    )
    problems: list[Problem] = Field(description="The worst first.")
    command: str = Field(description="The command that started this daemon, and starts it again.")
    recording: bool = Field(description="The daemon records its workload (`--record`).")
    may_delete: bool = Field(description="The caller may delete prompts and see their texts.")


@dataclass(frozen=True, kw_only=True)
class Entry(EntryInfo):
    """A saved prompt. `preview` is None if the caller may not see texts."""

    preview: str | None  # type: ignore[assignment]


class Entries(BaseModel):
    """The saved prompts, the most recently used first, and the trees of their blocks."""

    total: int = Field(description="The number of saved prompts. `entries` has the most recently used ones.")
    entries: list[Entry] = Field(
        description="The fields are those of `diskprefix inspect --json`. `preview` is null if the caller may not see "
        "texts."
    )
    trees: list[FlatTree] = Field(
        description="A tree for each tenant of each model. Its `nodes` are runs of blocks without a branch, from token "
        "`start` to `end`, each after its parent. `entries` are the ids of the saved prompts that end at `end`; "
        "`num_entries` counts these and all that continue them."
    )
    age_s: float = Field(description="Seconds since these values were read from the store.")
    again_s: float = Field(description="Seconds until the store is read again. Earlier answers have the same values.")


class DeletedEntry(BaseModel):
    """The result of a deletion. `left_blocks` stay because other blocks continue them or they are damaged."""

    id: str
    deleted: Literal[True] = True
    entries: int
    blocks: int
    prompts: int
    notes: int
    roots: int
    stored_bytes: int
    left_blocks: int
    remote_objects: int | None = Field(description="The number of objects removed from the shared bucket.")
    remote_error: str | None = Field(description="The reason why no object was removed.")


class SimulationBody(Body):
    """The settings of a simulation."""

    hours: float = Field(default=24.0, gt=0, le=24 * 365, description="The number of last hours of the recording.")


class SimulatedScope(BaseModel):
    """The simulated result of a scope. No scope can exceed `upper-bound`."""

    scope: str
    requests: int
    hits: int
    prompt_tokens: int
    restored_tokens: int
    restored_share: float
    written_bytes: int
    evictions: int
    seconds_saved: float


class Simulated(BaseModel):
    """The results of other scopes for the last `hours` of the recording, with the daemon's budget."""

    hours: float
    scopes: list[SimulatedScope]


class ClientSettings(BaseModel):
    """The settings of one client, as text."""

    name: str
    title: str
    text: str
