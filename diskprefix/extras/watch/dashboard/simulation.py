"""Simulates other scopes for the last recorded hours: runs `diskprefix simulate` in a process of lowest priority."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from diskprefix.api.fields import Body
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.printable import shown
from diskprefix.server.serving import Serving
from diskprefix.settings import Settings

_SCOPES = ("off", "auto:8", "auto:30", "auto:100", "full")
_LIMIT_S = 120.0
_FIGURES = (
    *("scope", "requests", "hits", "prompt_tokens", "restored_tokens", "restored_share", "written_bytes"),
    *("evictions", "seconds_saved"),
)
_RUN = """import contextlib, os
with contextlib.suppress(OSError):  # where a service may not
    os.nice(19)
from diskprefix.cli import main
main()
"""


class SimulationBody(Body):
    """The settings of a simulation."""

    hours: float = Field(default=24.0, gt=0, le=24 * 365, description="The number of last hours of the recording.")


class Simulation:
    """Runs one simulation at a time. For the event loop."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def run(self, settings: Settings, serving: Serving, hours: float) -> list[dict[str, Any]]:
        """Returns the rows of `diskprefix simulate --json` for the last `hours` of the recording.

        Raises `InvalidRequest` if the daemon does not record or the recording is empty, and `DiskPrefixError` if the
        simulation takes too long.
        """
        if settings.record is None:
            raise InvalidRequest("the daemon does not record; start it with --record FILE", code="not_recording")
        scopes = dict.fromkeys((str(serving.scope), *_SCOPES))
        flags = [part for scope in scopes for part in ("--scope", scope)]
        flags += ["--regime", _regime(serving), "--budget", str(settings.kv_cache_budget), "--last", f"{hours:g}h"]
        flags += ["--kv-cache-write-budget", settings.kv_cache_write_budget]
        memory = serving.engine.memory_stats()
        flags += ["--kv-memory", str(memory["limit_bytes"]), "--kv-memory-entries", str(memory["max_entries"])]
        async with self._running:
            rows = await _output(["simulate", str(settings.record), "--json", *flags])
        # Of several models, each has rows of its own.
        name, model = settings.record.stem, settings.served_model_name or ""
        own = [row for row in rows if row["trace"] in (name, f"{name}: {model}")]
        if rows and not own:
            raise InvalidRequest(f"no request for {model or 'this model'} is recorded yet", code="not_recording")
        return [{name: row[name] for name in _FIGURES} for row in own if row["scope"] != "whole-snapshots"]


def _regime(serving: Serving) -> str:
    layout = serving.engine.cache.layout
    return "checkpoints" if layout.state_bytes else "token" if layout.exact_at == "token" else "sliceable"


async def _output(arguments: Sequence[str]) -> Any:
    """Returns the JSON that a command prints. Kills it if it takes too long or the caller is cancelled."""
    pipe = asyncio.subprocess.PIPE
    program = (sys.executable, "-P", "-c", _RUN)
    command = await asyncio.create_subprocess_exec(*program, *arguments, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_LIMIT_S):
            printed, said = await command.communicate()
    except TimeoutError as error:
        raise DiskPrefixError(f"the simulation takes longer than {_LIMIT_S:.0f} s; ask for fewer hours") from error
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    if command.returncode:
        raise InvalidRequest(shown(said.decode(errors="replace").strip().removeprefix("error: "), 300))
    return json.loads(printed)
