"""The JSON that the dashboard and `diskprefix top` show, as models for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from diskprefix.api.fields import Body
from diskprefix.engine.gauges import ActivityState
from diskprefix.server.daemon import Status
from diskprefix.server.recent import EndedRequest

Level: TypeAlias = Literal["error", "warning", "hint"]


class Running(BaseModel):
    """A request that waits or runs. Times are in seconds, `elapsed_s` since its arrival; null is not known yet."""

    id: str
    state: ActivityState
    scope: str
    prompt_tokens: int
    restored_tokens: int
    ready_tokens: int = Field(description="Of the prompt: restored or computed.")
    reply_tokens: int
    elapsed_s: float
    queue_s: float | None
    ttft_s: float | None
    tokens_per_s: float | None


class Problem(BaseModel):
    """A problem that the daemon's owner should know."""

    level: Level
    what: str
    todo: str = Field(description="What to do about it.")
    count: int = 1
    last_at: float | None = Field(default=None, description="Of requests: when the last of them ended.")


class ShownSlot(BaseModel):
    """The memory of one sequence."""

    tokens: int
    num_bytes: int
    busy: bool = Field(description="Whether a request runs in it; otherwise its next turn may go on from it.")
    used_at: float = Field(description="Seconds since 1970; of a busy one, when it began.")


class Model(BaseModel):
    """The served model."""

    name: str
    device: str
    dtype: str
    max_positions: int
    exact_at: str | None


class Memory(BaseModel):
    """The memory for the state of requests: of running ones, and of `entries` finished ones with `entry_tokens`
    tokens, which the next turn may continue."""

    limit_bytes: int
    used_bytes: int
    running: int
    max_running: int
    entries: int
    max_entries: int
    entry_tokens: int
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
    arriving: int = Field(description="Requests that are being read.")
    requests: list[Running] = Field(description="Those in the engine and its queue, in order of arrival.")
    ended: list[EndedRequest] = Field(description="Those that ended, oldest first, as many as are remembered.")
    memory: Memory | None
    cache: dict[str, Any] | None = Field(
        description="`full_cache.state` and `gate` of `/props`: the store, what waits to be written, `savings`."
    )
    problems: list[Problem] = Field(description="The worst first.")
    recording: bool = Field(description="Whether the daemon records its workload (`--record`).")
    may_delete: bool = Field(description="Whether the caller may delete, and is shown texts of prompts.")


class Entry(BaseModel):
    """A saved prompt, as in `diskprefix inspect --json`. `preview` is null if the caller may not see texts."""

    id: str
    model: str
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    shared_bytes: int
    checkpoints: list[int]
    checkpoint_bytes: int
    generated_tokens: int
    hits: int
    created_at: float
    last_used_at: float
    ttl_s: int | None
    default_ttl: bool
    scope: str
    tenant: str
    preview: str | None


class TreeNode(BaseModel):
    """Blocks of the tokens from `start` to `end` without a branch. `entries` are the ids of the saved prompts that end
    at `end`, `num_entries` counts these and all that continue them."""

    id: str
    parent: str | None
    start: int
    end: int
    num_blocks: int
    stored_bytes: int
    generated: bool
    hits: int
    last_used_at: float
    prefill_s: float
    entries: list[str]
    num_entries: int


class Tree(BaseModel):
    """The stored prefixes of one tenant of one model. A node comes after its parent."""

    root: str
    model: str
    tenant: str
    stored_bytes: int
    num_entries: int
    nodes: list[TreeNode]


class Entries(BaseModel):
    """The saved prompts, the most recently used first, and the trees of their blocks."""

    total: int = Field(description="Saved prompts; `entries` has those that were used last.")
    entries: list[Entry]
    trees: list[Tree]
    age_s: float = Field(description="Seconds since they were read from the store; 0: for this answer.")
    again_s: float = Field(description="Seconds until they are read anew; an answer before that has the same ones.")


class DeletedEntry(BaseModel):
    """The result of a deletion. `left_blocks` stay because others continue them or they are damaged. `is_wiped`: the
    bytes are overwritten in the file; if not, the daemon tries again."""

    id: str
    deleted: Literal[True] = True
    entries: int
    blocks: int
    prompts: int
    notes: int
    roots: int
    stored_bytes: int
    left_blocks: int
    is_wiped: bool
    remote_objects: int | None = Field(description="Removed from the bucket that machines share.")
    remote_error: str | None = Field(description="Why nothing was removed there.")


class SimulationBody(Body):
    """The settings of a simulation."""

    hours: float = Field(default=24.0, gt=0, le=24 * 365, description="The last so many hours of the recording.")


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
