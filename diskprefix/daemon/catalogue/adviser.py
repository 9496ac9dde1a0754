"""Advises a model of the hub: `list`, `doctor`, `launch`, `show` and `run` all ask here, and so does the test of the
front page."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from diskprefix.memo import PREFILL_SPEEDS
from diskprefix.native.compute_threads import num_cores
from diskprefix.runtime.fetch.proposals import Q4_K_M_BITS, ShortName, short_name, short_names
from diskprefix.runtime.files.fit import ModelNeeds, TokenState, fitted
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.units import format_size, rough_duration

AGENT_TOKENS, LEAST_CONTEXT, TOLD_CONTEXT = 19_000, 16_384, 32_000
"""The first prompt of the agent with the longest one, the least context for agents, and the one for which memory is
counted: a first prompt and some hours of work."""
_USABLE = 0.75
"""The part of the free memory that a model may take: other programs grow, too."""
_QUERIES = 4
"""The usual number of queries that share a head of keys and values."""
_PLAIN_BYTES_S, _OTHER_BYTES_S, _AVX2 = 1e11, 6e10, 0.45
"""Bytes of weights that a core multiplies by a token of a long prompt in a second, with AVX-512 and VNNI: dense models
with attention alone (measured: 3B), and mixtures or models with recurrent layers (measured: Qwen3.5-4B, gpt-oss-20b).
The last number is the part of it with AVX2."""


def prefill_s_per_token(row: ShortName) -> tuple[float, bool]:
    """Returns the seconds that a token of a long prompt takes on this machine, and whether they were measured: for this
    model by a daemon, or else guessed from its size."""
    for name in (row.source, row.name):
        if isinstance(noted := PREFILL_SPEEDS.get(name), float) and noted > 0:
            return noted, True
    return _guess(row), False


def _guess(row: ShortName) -> float:
    num_bytes = row.used_bytes + row.attended_bytes(AGENT_TOKENS)
    return guessed_s_per_token(num_bytes, is_plain=row.is_plain)


def guessed_s_per_token(used_bytes: int, *, is_plain: bool) -> float:
    """Returns a guess, within a factor of two, of the seconds per token of a long prompt, for a model that reads
    `used_bytes` of weights for each token."""
    bytes_s = _PLAIN_BYTES_S if is_plain else _OTHER_BYTES_S
    return used_bytes / num_cores() / (bytes_s if _has_vnni() else bytes_s * _AVX2)


@cache
def _has_vnni() -> bool:
    with suppress(OSError):
        return "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    return False


def attention_bytes(kv_bytes: float, num_tokens: int) -> int:
    """Returns an estimate of `ShortName.attended_bytes`, the cost of attention, from the bytes of a token's keys and
    values."""
    return int(kv_bytes / 2 * num_tokens / 2 * _QUERIES * Q4_K_M_BITS / 8)


def needs_of(row: ShortName) -> ModelNeeds:
    """Returns the memory that a model will need, from its shape: nothing has to be fetched."""
    weights = {row.quant: row.weights_bytes + row.widened_bytes}
    if row.encoder_bytes:
        weights["bfloat16"] = row.encoder_bytes
    state = TokenState(2 * row.kv, 2 * row.windowed, row.window, positions=row.positions)
    return ModelNeeds(name=row.name, weights=weights, state=state, takes_pictures=bool(row.encoder_bytes))


def memory_bytes(row: ShortName, context: int = TOLD_CONTEXT) -> int:
    """Returns the memory that a model needs for a `context` of tokens."""
    needs = needs_of(row)
    kv_bytes = needs.state.num_bytes(min(context, row.positions))
    return fitted(needs, 0, kv_bytes).needed_bytes


def advised(free_bytes: int) -> ShortName:
    """Returns the model to fetch: the fastest model, with an agent's first prompt, that is good enough for agents and
    leaves a quarter of the memory free. If none is small enough, returns the good model that needs the least memory."""
    suitable = [row for row in short_names().values() if row.suits_agents]
    small = [row for row in suitable if leaves_room(row, free_bytes)]
    # Only guesses are compared: a measured time among them would favour or spoil its model.
    soonest = min(small, key=_guess, default=None)
    return soonest or min(suitable, key=memory_bytes)


def preference(name: str, file_bytes: int) -> tuple[bool, float]:
    """Returns the sort key of a fetched model that calls tools and fits. A model that could be `advised` is preferred,
    the fastest first, then the largest model."""
    row = short_name(name)
    if row is not None and row.suits_agents and leaves_room(row, available_ram_bytes()):
        return True, -_guess(row)
    return False, float(file_bytes)


def leaves_room(row: ShortName, free_bytes: int) -> bool:
    """Returns whether a model leaves a quarter of the free memory to other programs."""
    return memory_bytes(row) <= _USABLE * free_bytes


def offers(free_bytes: int) -> list[dict[str, Any]]:
    """Returns the models of the table for JSON: the advised one first, then the others that suit agents, each part by
    memory. `first_prompt_s` is the time of an agent's first prompt, None if the model's context is too short for it.
    `is_advised` is true for a model of which `proposed` does not say that memory must be freed."""
    best = advised(free_bytes)
    made = []
    for row in short_names().values():
        s_per_token, is_measured = prefill_s_per_token(row)
        made.append(
            {
                "name": row.name,
                "source": row.source,
                "download_bytes": row.download_bytes,
                "memory_bytes": memory_bytes(row),
                "fits": memory_bytes(row) <= free_bytes,
                "first_prompt_s": s_per_token * AGENT_TOKENS if row.positions > AGENT_TOKENS else None,
                "is_measured": is_measured,
                "suits_agents": row.suits_agents,
                "is_advised": row is best and leaves_room(row, free_bytes),
            }
        )
    return sorted(
        made, key=lambda offer: (offer["name"] != best.name, not offer["suits_agents"], offer["memory_bytes"])
    )


def proposed(free_bytes: int | None = None) -> str:
    """Returns the command that fetches the advised model, with its sizes. None: the memory that is free now."""
    free_bytes = available_ram_bytes() if free_bytes is None else free_bytes
    row = advised(free_bytes)
    sizes = f"{format_size(row.download_bytes)}, {format_size(memory_bytes(row))} of memory"
    if not leaves_room(row, free_bytes):
        sizes += f" of {format_size(free_bytes)}, the smallest that is good enough for agents: free some memory first"
    return f"`diskprefix pull {row.name}` ({sizes})"


def advice_lines() -> tuple[str, str]:
    """Returns which model to fetch, and how long an agent's first prompt takes with it, as two lines for people."""
    lasts = first_prompt_text(advised(available_ram_bytes()))
    return f"for agents here: {proposed()}", f"{lasts}; other models: `diskprefix list --available`"


def cost_text(row: ShortName) -> str:
    """Returns the download, the memory and the time of an agent's first prompt, for people."""
    lasts = "too few for an agent's first prompt" if row.positions <= AGENT_TOKENS else first_prompt_text(row)
    memory = f"{format_size(memory_bytes(row))} of memory with {min(TOLD_CONTEXT, row.positions):,} tokens"
    return f"{format_size(row.download_bytes)} to fetch, {memory}, {lasts}"


def first_prompt_text(row: ShortName) -> str:
    """Returns the time of an agent's first prompt, for people."""
    seconds, is_measured = prefill_s_per_token(row)
    how = "measured here" if is_measured else "a rough guess"
    return f"an agent's first prompt takes {rough_duration(seconds * AGENT_TOKENS)}, {how}"


def none_known() -> str:
    """Returns a message that no model is known, and what to do."""
    fetching = f"fetch one with {proposed()}, or put a .gguf file below --models-dir"
    return f"no model is known: {fetching}; the daemon looks again at SIGHUP and at its next start"
