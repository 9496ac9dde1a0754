"""The routes that show the daemon's state: `/`, `/health`, `/props` and `/metrics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.exceptions import HTTPException
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from diskprefix.server.daemon import Daemon, Status
from diskprefix.server.error_replies import ErrorBody
from diskprefix.server.keys import ADMIN, WITHOUT_TOKEN
from diskprefix.server.log_context import log_context
from diskprefix.server.serving import Serving
from diskprefix.version import __version__

router = APIRouter(tags=["daemon"])


class Welcome(BaseModel):
    """The name of the program."""

    name: str = "diskprefix"
    docs: str = "/docs"
    dashboard: str = "/dashboard"
    chat: str = "/chat"


class Health(BaseModel):
    """The state of the daemon. With `--api-keys`, only the key named `admin` gets more than `status`."""

    status: Status = Field(description="`ok` and `degraded` (200) serve requests; the others (503) do not.")
    message: str | None = Field(default=None, description="The current step while the model loads.")
    model: str | None = None
    cache: dict[str, str | None] | None = Field(
        default=None,
        description="`state`: `ok`, `unsupported` (layers that cannot be cached) or `degraded`; `error`: why.",
    )
    queue_depth: int | None = None
    running: int | None = None


class Props(BaseModel):
    """The state of a running daemon in full."""

    version: str
    model: dict[str, Any] = Field(description="The served model; `identity` goes into the root of the cache's keys.")
    full_cache: dict[str, dict[str, Any]] = Field(
        description="`state`: the scope, the folder, counts and sizes, as in `/metrics`. `gate`: whether restoring is "
        "faster than computing; its `state` is `measuring` (everything is saved and restored), `open` (what has "
        "`break_even_tokens` tokens or more is) or `closed` (computing is always faster); speeds are in seconds."
    )
    queue_depth: int
    running: int
    kv_memory: dict[str, int] = Field(
        description="The state of requests in memory: bytes in use and allowed, requests that run, and those that "
        "ended and may be gone on from."
    )
    prefix_breaks: list[dict[str, Any]] = Field(
        description="The lines because of which less of prompts was found, the latest first: `line` (digits are shown "
        "as 0, letters as a), `normalisers` that would change it, `requests`, and `tokens` that were computed again."
    )
    settings: dict[str, Any] = Field(description="Every setting with the value it has.")
    startup_s: dict[str, float] = Field(description="Where the time to ready went, in seconds.")


async def require_admin(request: Request) -> None:
    """Raises `HTTPException` 403 for other callers: figures over all requests show one tenant what another does."""
    if not log_context(request).caller.sees_all:
        raise HTTPException(403, f"this shows figures of everybody's requests: only the key named {ADMIN} may read it")


async def require_owner(request: Request) -> None:
    """Raises `HTTPException` for other callers, as `require_admin`; without keys 401 for those without the token."""
    await require_admin(request)
    if not log_context(request).caller.is_owner:
        raise HTTPException(401, WITHOUT_TOKEN, {"WWW-Authenticate": "Bearer"})


def _daemon(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


@router.head("/", include_in_schema=False)
@router.get("/", summary="Welcome")
async def welcome(response: Response) -> Welcome:
    """200 as soon as the daemon listens: some clients look here first. Browsers get the dashboard instead."""
    response.headers["Vary"] = "Accept"
    return Welcome()


@router.get("/dashboard", include_in_schema=False)
async def to_dashboard() -> RedirectResponse:
    """The dashboard is at `/`."""
    return RedirectResponse("./")


@router.get("/favicon.ico", include_in_schema=False)
async def no_icon() -> Response:
    """Browsers ask for it at addresses that show JSON, and there is none."""
    return Response(status_code=204)


@router.get(
    "/health",
    summary="Health",
    response_model=Health,
    responses={503: {"model": Health | ErrorBody}},
)
async def health(request: Request) -> JSONResponse:
    """200 when requests are served, 503 when not."""
    daemon = _daemon(request)
    serving = daemon.serving
    content = Health(status=daemon.status)
    status_code = 200 if content.status in ("ok", "degraded") else 503
    if log_context(request).caller.sees_all:
        content.message = daemon.doing if content.status == "loading" else None
        content.queue_depth, content.running = daemon.num_arriving, 0
        if serving is not None:
            state, error = serving.engine.cache.health
            content.model, content.cache = serving.model_name, {"state": state, "error": error}
            content.queue_depth, content.running = serving.inbox.queue_depth, serving.inbox.num_running
    return JSONResponse(content.model_dump(), status_code)


@router.get(
    "/props", summary="Properties", dependencies=[Depends(require_owner)], responses={401: {"model": ErrorBody}}
)
async def props(request: Request) -> Props:
    """The model, the cache with its settings and counts, all settings and the start-up times."""
    daemon = _daemon(request)
    serving = await daemon.ready()
    stats = await serving.cache_stats()
    return Props(
        version=__version__,
        model=_model_props(serving),
        full_cache={"gate": stats["gate"], "state": {name: stats[name] for name in stats if name != "gate"}},
        queue_depth=serving.inbox.queue_depth,
        running=serving.inbox.num_running,
        kv_memory=serving.engine.memory_stats(),
        prefix_breaks=daemon.breaks.as_list(),
        settings=asdict(daemon.settings),
        startup_s=serving.startup_s,
    )


def _model_props(serving: Serving) -> dict[str, Any]:
    model = serving.engine.model
    return {
        "name": serving.model_name,
        "max_positions": serving.engine.max_positions,
        "model_positions": serving.engine.model_positions,
        "vocab_size": serving.renderer.vocab_size,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "has_chat_template": bool(serving.engine.tokenizer.chat_template),
        "output_format": serving.renderer.output_format.name,
        "identity": serving.engine.identity,
        "system_fingerprint": serving.fingerprint,
    }


@router.get(
    "/metrics",
    summary="Metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."},
    },
    dependencies=[Depends(require_admin)],
)
async def metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format; available while loading too."""
    daemon = _daemon(request)
    return Response(await daemon.metrics.render(daemon.serving), media_type=CONTENT_TYPE_LATEST)
