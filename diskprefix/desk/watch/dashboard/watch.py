"""Reads the daemon's state for the dashboard, on request only. The engine is read without a lock, in the event loop."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.guards import is_loopback
from diskprefix.daemon.server.serving import Serving
from diskprefix.desk.watch.dashboard.problems import problems
from diskprefix.desk.watch.lost_advice import advised, settings_in_effect
from diskprefix.runtime.memory import resident_bytes
from diskprefix.version import __version__

if TYPE_CHECKING:
    from diskprefix.daemon.engine.loop import Engine


class Watch:
    """The state of the daemon for callers who may see everything. For the event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.is_private = daemon.settings.api_keys is not None or is_loopback(daemon.settings.host)
        """Callers may see texts and delete prompts: there are keys, or only this machine reaches the address."""

    async def state(self) -> dict[str, Any]:
        """Returns what `/dashboard/state` shows, without `ended`."""
        daemon, serving = self._daemon, self._daemon.serving
        cache = None if serving is None else await serving.counts.newest()
        texts = daemon.broken_lines.texts if self.is_private else {}
        lost = advised(cache["lost"], texts, settings_in_effect(Path(cache["dir"]))) if cache else []
        return {
            "now": round(time.time(), 3),
            "version": __version__,
            "status": daemon.status,
            "message": daemon.doing if daemon.status == "loading" else None,
            "model": serving and _model(serving),
            "scope": daemon.settings.disk_prefix_cache,
            "arriving": daemon.num_arriving,
            "requests": [] if serving is None else [_running(activity) for activity in serving.inbox.activities()],
            "ahead": serving and serving.engine.ahead.figures,
            "memory": serving and _memory(serving.engine),
            "cache": cache,
            "lost": lost,
            "problems": [asdict(problem) for problem in problems(cache, lost, daemon.recent.failures)],
            "command": shlex.join(["diskprefix", *sys.argv[1:]]),
            "may_delete": self.is_private,
        }

    def ended(self, since: int) -> list[dict[str, Any]]:
        """Returns the remembered requests that ended after request number `since`."""
        return [asdict(ended) for ended in self._daemon.recent.since(since)]


def _running(activity: Activity) -> dict[str, Any]:
    values = asdict(activity) | {"scope": str(activity.scope)}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def _model(serving: Serving) -> dict[str, Any]:
    engine = serving.engine
    return {
        "name": serving.model_name,
        "device": engine.device,
        "dtype": engine.dtype,
        "max_positions": engine.max_positions,
        "exact_at": engine.identity.get("exact_at"),
    }


def _memory(engine: Engine) -> dict[str, Any]:
    return {
        **engine.memory_stats(),
        "max_running": engine.max_sequences,
        "process_bytes": resident_bytes(),
        "slots": engine.pages.sequences(),
    }
