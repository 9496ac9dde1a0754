"""The routes that show the daemon's state: `/health`, `/props`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends
from fastapi.exceptions import HTTPException
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.server.daemon import Daemon, Status
from diskprefix.server.errors import ErrorBody
from diskprefix.server.keys import ADMIN
from diskprefix.server.log_context import log_context
from diskprefix.server.replies import ModelCard, ModelList
from diskprefix.server.serving import Serving
from diskprefix.version import __version__

router = APIRouter(tags=["daemon"])

_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": "The model is loading."}}

_ADMIN_ONLY: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorBody, "description": f"With `--api-keys`: the key is not the one named `{ADMIN}`."}
}


class CacheHealth(BaseModel):
    """The state of the disk cache."""

    state: str = Field(
        description="`ok`; `unsupported`: the model has layers that cannot be cached; `degraded`: nothing is kept."
    )
    error: str | None = Field(description="Why it is degraded.")


class Health(BaseModel):
    """Whether requests are served. With `--api-keys`, only the key named `admin` gets more than `status`."""

    status: Status = Field(description="`ok` and `degraded` (200) serve requests; the others (503) do not.")
    message: str | None = Field(description="The current step while the model loads.")
    model: str | None
    cache: CacheHealth | None
    queue_depth: int | None
    running: bool | None


class DiskPolicy(BaseModel):
    """The settings of the cache."""

    scope: str = Field(description="Canonical scope of requests that name none.", examples=["auto:30"])
    kind: str = Field(description="`off`, `full`, `auto` or `tokens`.")
    window: int | None = Field(description="Recent requests that `auto` looks at.")
    tokens: int | None = Field(description="The N of scope N.")
    reuse_generated: bool = Field(description="Whether requests that do not say keep and restore replies.")
    dir: str
    budget_bytes: int
    min_free_bytes: int
    ttl_s: float = Field(description="0: nothing expires.")
    codec: str
    on_corruption: str
    min_tokens: int
    interval_tokens: int
    cold_max_tokens: int
    block_size: int
    write_buffer_bytes: int


class GateProps(BaseModel):
    """Whether restoring is faster than computing, from what was measured on this machine."""

    mode: str = Field(description="`--kv-cache-gate`: `auto`, or `off`, which saves and restores everything.")
    state: Literal["measuring", "open", "closed"] = Field(
        description="`measuring`: not enough is known, everything is saved and restored; `open`: what is at least "
        "`break_even_tokens` long is; `closed`: computing is always faster."
    )
    reason: str = Field(description="The state in words, with the numbers.")
    prefill_s_per_token: float | None = Field(description="Seconds to compute one more token of a prompt.")
    restore_s_per_byte: float | None = Field(
        description="Seconds to restore one more byte; 0 while restores of different sizes do not tell it from the "
        "fixed part, which then holds from the smallest of them on."
    )
    restore_fixed_s: float | None = Field(description="Seconds that a restore takes whatever its size.")
    break_even_tokens: int | None = Field(
        description="The fewest tokens that are restored faster than computed; null if there are none, or while "
        "measuring."
    )
    prefill_samples: int = Field(description="Recent prefills that this rests on.")
    restore_samples: int = Field(description="Recent restores that this rests on.")
    skipped_restores: int = Field(description="Requests that computed what they could have restored.")
    skipped_saves: int = Field(description="Requests that did not save what computing is faster for.")


class FullCache(BaseModel):
    """The disk cache: its policy, and what it has counted since the daemon started."""

    disk_policy: DiskPolicy
    gate: GateProps
    state: dict[str, Any] = Field(description="Counts and sizes, as in `/metrics`.")


class ModelProps(BaseModel):
    """The served model and what identifies its numbers."""

    name: str
    max_positions: int
    vocab_size: int
    device: str
    dtype: str
    has_chat_template: bool
    identity: dict[str, Any] = Field(description="What goes into the root of the cache's keys.")
    system_fingerprint: str


class Props(BaseModel):
    """The state of a running daemon in full."""

    version: str
    model: ModelProps
    full_cache: FullCache
    queue_depth: int
    running: bool
    settings: dict[str, Any] = Field(description="Every setting with the value it has.")
    startup_s: dict[str, float] = Field(description="Where the time to ready went, in seconds.")


async def _require_admin(request: Request) -> None:
    """Raises `HTTPException` 403 for other callers: figures over all requests show one tenant what another does."""
    if not log_context(request).caller.sees_all:
        raise HTTPException(403, f"this shows figures of everybody's requests: only the key named {ADMIN} may read it")


def _daemon(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


@router.get(
    "/health",
    summary="Health",
    response_model=Health,
    responses={
        503: {"model": Health, "description": "The model is loading, the daemon is stopping, or it has failed."}
    },
)
async def health(request: Request) -> JSONResponse:
    """200 when requests are served, 503 when not."""
    daemon = _daemon(request)
    status, serving = daemon.status, daemon.serving
    status_code = 200 if status in ("ok", "degraded") else 503
    if not log_context(request).caller.sees_all:
        public = Health(status=status, message=None, model=None, cache=None, queue_depth=None, running=None)
        return JSONResponse(public.model_dump(), status_code)
    content = Health(
        status=status,
        message=daemon.doing if status == "loading" else None,
        model=serving.model_name if serving else None,
        cache=_cache_health(serving) if serving else None,
        queue_depth=serving.scheduler.queue_depth if serving else 0,
        running=serving.scheduler.running if serving else False,
    )
    return JSONResponse(content.model_dump(), status_code)


def _cache_health(serving: Serving) -> CacheHealth:
    state, error = serving.engine.cache.health
    return CacheHealth(state=state, error=error)


@router.get("/props", summary="Properties", responses=_NOT_READY | _ADMIN_ONLY, dependencies=[Depends(_require_admin)])
async def props(request: Request) -> Props:
    """The model, the cache with its settings and counts, all settings and the start-up times."""
    daemon = _daemon(request)
    serving = daemon.require_serving()
    return Props(
        version=__version__,
        model=_model_props(serving),
        full_cache=_full_cache(daemon, serving, await serving.cache_stats()),
        queue_depth=serving.scheduler.queue_depth,
        running=serving.scheduler.running,
        settings={f.name: _plain(getattr(daemon.settings, f.name)) for f in fields(daemon.settings)},
        startup_s=serving.startup_s,
    )


def _model_props(serving: Serving) -> ModelProps:
    model = serving.engine.model
    return ModelProps(
        name=serving.model_name,
        max_positions=serving.engine.max_positions,
        vocab_size=serving.renderer.vocab_size,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        has_chat_template=bool(serving.engine.tokenizer.chat_template),
        identity=serving.engine.identity,
        system_fingerprint=serving.fingerprint,
    )


def _full_cache(daemon: Daemon, serving: Serving, stats: dict[str, Any]) -> FullCache:
    gate = GateProps(**stats["gate"])
    counts = {name: value for name, value in stats.items() if name != "gate"}
    return FullCache(disk_policy=_disk_policy(daemon, serving), gate=gate, state=counts)


def _disk_policy(daemon: Daemon, serving: Serving) -> DiskPolicy:
    settings, scope = daemon.settings, serving.scope
    return DiskPolicy(
        scope=str(scope),
        kind=scope.kind,
        window=scope.value if scope.kind == "auto" else None,
        tokens=scope.value if scope.kind == "tokens" else None,
        reuse_generated=settings.reuse_generated,
        dir=str(settings.kv_cache_dir),
        budget_bytes=settings.kv_cache_budget,
        min_free_bytes=settings.kv_cache_min_free,
        ttl_s=settings.kv_cache_ttl,
        codec=settings.kv_cache_codec,
        on_corruption=settings.kv_cache_on_corruption,
        min_tokens=settings.kv_cache_min_tokens,
        interval_tokens=settings.kv_cache_interval,
        cold_max_tokens=settings.kv_cache_cold_max,
        block_size=settings.block_size,
        write_buffer_bytes=settings.kv_cache_write_buffer,
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@router.get(
    "/metrics",
    summary="Metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."},
        **_ADMIN_ONLY,
    },
    dependencies=[Depends(_require_admin)],
)
async def metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format; available while loading too."""
    daemon = _daemon(request)
    return Response(await daemon.metrics.render(daemon.serving), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", summary="List models", responses=_NOT_READY)
async def list_models(request: Request) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[_card(_daemon(request).require_serving())])


@router.get(
    "/v1/models/{model_name:path}",
    summary="Retrieve a model",
    responses={404: {"model": ErrorBody, "description": "Not the served model."}, **_NOT_READY},
)
async def retrieve_model(model_name: str, request: Request) -> ModelCard:
    """The served model by its name."""
    serving = _daemon(request).require_serving()
    serving.require_model(model_name)
    return _card(serving)


def _card(serving: Serving) -> ModelCard:
    return ModelCard(id=serving.model_name, created=serving.loaded_at, max_model_len=serving.engine.max_positions)
