"""The routes that show the daemon's state: `/`, `/health`, `/props` and `/metrics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from diskprefix.daemon import rooms
from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.routes import JSON, TEXT, AppRoute, Routes
from diskprefix.daemon.server.serving import Serving
from diskprefix.version import __version__

routes = Routes("daemon")


def _daemon(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


@routes.add("GET /", "Welcome")
async def welcome(_request: Request) -> JSONResponse:
    """200 as soon as the daemon listens: some clients look here first. Browsers get the dashboard instead.

    Returns the name of the program, and where to look.
    """
    return JSONResponse(rooms.welcome(), headers={"Vary": "Accept"})


async def _to_dashboard(_request: Request) -> Response:
    """The dashboard is at `/`."""
    return RedirectResponse("./")


async def _no_icon(_request: Request) -> Response:
    """Browsers ask for it at addresses that show JSON, and there is none."""
    return Response(status_code=204)


routes += AppRoute("/dashboard", _to_dashboard), AppRoute("/favicon.ico", _no_icon)


@routes.add("GET /health", "Health")
async def health(request: Request) -> JSONResponse:
    """200 when requests are served, 503 when not.

    With a `status` of `ok` or `degraded` requests are served. With `--api-keys`, only the key named `admin` gets more:
    `message` while the model loads or a prompt hangs, `model`, `cache`, `queue_depth` and `running`.
    """
    daemon = _daemon(request)
    serving = daemon.serving
    content: dict[str, Any] = {"status": daemon.status}
    content |= dict.fromkeys(("message", "model", "cache", "queue_depth", "running"))
    status_code = 200 if daemon.status in ("ok", "degraded") else 503
    if log_context(request).caller.sees_all:
        content["message"] = daemon.doing if daemon.status == "loading" else daemon.hang or None
        content["queue_depth"], content["running"] = daemon.num_arriving, 0
        if serving is not None:
            state, error = serving.engine.cache.health
            content["model"], content["cache"] = serving.model_name, {"state": state, "error": error}
            content["queue_depth"], content["running"] = serving.inbox.queue_depth, serving.inbox.num_running
    return JSONResponse(content, status_code)


@routes.add("GET /props", "Properties", errors=[401])
async def props(request: Request) -> Response:
    """The model and the daemon, for its owner.

    Returns the model, the cache with its settings and counts, all settings and the start-up times. `lost`: the
    tokens of the last day that were computed again. `gate`: whether restoring is faster than computing. `sampling`: the
    sampling of a request that does not say its own, each value with its source. `running`: the progress of each request
    that waits or runs. `ahead`: the work ahead of requests. `imports`: the imported prompts that are computed before
    they are used.
    """
    log_context(request).caller.require_owner()
    daemon = _daemon(request)
    serving = await daemon.ready()
    stats = await serving.counts.newest(0.0)
    content = {
        "version": __version__,
        "model": _model_props(serving),
        "sampling": daemon.sampling.record,
        "full_cache": {"gate": stats["gate"], "state": {name: stats[name] for name in stats if name != "gate"}},
        "queue_depth": serving.inbox.queue_depth,
        "running": [_running(activity, serving.model_name) for activity in serving.inbox.activities()],
        "ahead": {"tokens": stats["ahead_tokens"], **serving.engine.ahead.figures},
        "imports": None if daemon.imports is None else daemon.imports.figures,
        "kv_memory": serving.engine.memory_stats(),
        "settings": asdict(daemon.settings),
        "startup_s": serving.startup_s,
    }
    return Response(to_json(content), media_type=JSON)


def _running(activity: Activity, model: str) -> dict[str, Any]:
    """Returns the progress of a request, without its texts. `computed_tokens` of the prompt include restored ones."""
    return {
        "id": activity.id,
        "model": model,
        "state": activity.state,
        "since_s": round(activity.elapsed_s, 3),
        "prompt_tokens": activity.prompt_tokens,
        "restored_tokens": activity.restored_tokens,
        "computed_tokens": activity.ready_tokens,
        "tokens_per_s": activity.tokens_per_s and round(activity.tokens_per_s, 1),
        "seconds_left": activity.seconds_left and round(activity.seconds_left, 1),
        "reply_tokens": activity.reply_tokens,
    }


def _model_props(serving: Serving) -> dict[str, Any]:
    engine = serving.engine
    return {
        "name": serving.model_name,
        "loaded_at": serving.loaded_at,
        "needs_bytes": engine.fit.needed_bytes,
        "needs": dict(engine.fit.rows()),
        "max_positions": serving.engine.max_positions,
        "model_positions": serving.engine.model_positions,
        "vocab_size": serving.renderer.vocab_size,
        "device": engine.device,
        "dtype": engine.dtype,
        "has_chat_template": bool(serving.engine.tokenizer.chat_template),
        "output_format": serving.renderer.output_format.name,
        "identity": serving.engine.identity,
        "system_fingerprint": serving.fingerprint,
    }


@routes.add("GET /metrics", "Metrics", media_types=[TEXT])
async def metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format; available while loading too."""
    log_context(request).caller.require_admin()
    from prometheus_client import CONTENT_TYPE_LATEST

    daemon = _daemon(request)
    return Response(await daemon.metrics.render(daemon.serving), media_type=CONTENT_TYPE_LATEST)
