"""The routes below `/api/`."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.daemon.api.dialect import json_text
from diskprefix.daemon.api.fields import Body
from diskprefix.daemon.embedding.embeddings import read_vectors, vector
from diskprefix.daemon.ollama.ollama_dialect import Ollama, OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from diskprefix.daemon.ollama.ollama_models import INSTEAD, VERSION, facts_of, require_served, running, shown_model, tag
from diskprefix.daemon.server.answer import answer
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.model_routes import card
from diskprefix.daemon.server.routes import AppRoute, Routes
from diskprefix.daemon.server.serving import Serving

routes = Routes("ollama")


class ShowRequest(Body, json_schema_extra={"example": {"model": "SmolLM2-135M-Instruct"}}):
    """`POST /api/show`."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")


@routes.add("POST /api/chat", "Ollama: chat", OllamaChatRequest)
async def chat(request: Request) -> Response:
    """Reply to a conversation. Without messages the model is loaded.

    Returns lines of JSON unless `stream` is `false`.
    """
    return await answer(request, Ollama(OllamaChatRequest))


@routes.add("POST /api/generate", "Ollama: generate", OllamaGenerateRequest)
async def generate(request: Request) -> Response:
    """Reply to a text, or continue it. Without a prompt the model is loaded.

    Returns lines of JSON unless `stream` is `false`.
    """
    return await answer(request, Ollama(OllamaGenerateRequest))


@routes.add("POST /api/embed", "Ollama: embeddings", OllamaEmbedRequest)
async def embed(request: Request) -> Response:
    """The vectors of `/v1/embeddings`, as `embeddings`.

    `truncated` lists the indices of the inputs that were cut, if there are any.
    """
    body, serving, vectors, usage, truncated = await read_vectors(request, OllamaEmbedRequest)
    took_ns = round(1e9 * (time.perf_counter() - log_context(request).began_at))
    head: dict[str, Any] = {
        "model": serving.model_name,
        "total_duration": took_ns,
        "prompt_eval_count": usage["prompt_tokens"],
    }
    if truncated:
        head["truncated"] = truncated
    content = await request.app.state.daemon.threads.run_for(
        request, "writing", lambda: json_text(head | {"embeddings": [vector(row, body) for row in vectors]})
    )
    return Response(content, media_type="application/json")


async def _facts(request: Request, serving: Serving) -> dict[str, Any]:
    """Returns what the files of the model say, which are read once."""
    state = request.app.state
    if state.file_facts is None:
        state.file_facts = await state.daemon.threads.run("inspecting", facts_of, serving.engine.origin)
    facts: dict[str, Any] = state.file_facts
    return facts


@routes.add("POST /api/show", "Ollama: show a model", ShowRequest)
async def show(request: Request) -> JSONResponse:
    """The capabilities and sizes of the served model."""
    daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, ShowRequest, held)
    serving = await daemon.ready()
    serving.require_model(body.model)
    return JSONResponse(shown_model(card(serving, daemon.sampling), await _facts(request, serving)))


@routes.add("GET /api/tags", "Ollama: list models")
async def tags(request: Request) -> JSONResponse:
    """`models` has the served model."""
    daemon = request.app.state.daemon
    serving = await daemon.ready()
    return JSONResponse({"models": [tag(card(serving, daemon.sampling), await _facts(request, serving))]})


@routes.add("GET /api/ps", "Ollama: models in memory")
async def loaded(request: Request) -> JSONResponse:
    """`models` has the served model once it is loaded, with the memory that it needs, as `diskprefix ps` shows it."""
    daemon = request.app.state.daemon
    if (serving := daemon.serving) is None:
        return JSONResponse({"models": []})
    needed_bytes, shown = serving.engine.fit.needed_bytes, card(serving, daemon.sampling)
    return JSONResponse({"models": [running(shown, await _facts(request, serving), needed_bytes)]})


@routes.add("GET /api/version", "Ollama: version")
async def version(_request: Request) -> JSONResponse:
    """`version` is the release of Ollama with this API."""
    return JSONResponse(VERSION)


async def refused(request: Request) -> Response:
    require_served(request.url.path)
    raise AssertionError


for _route in INSTEAD:
    _path = f"/api/{_route}" + "/{digest}" * (_route == "blobs")
    routes.append(AppRoute(_path, refused, ["GET", "POST", "DELETE"]))


def add_routes(app: Starlette) -> None:
    """Adds the routes below `/api/`."""
    app.state.file_facts = None
    app.routes.extend(routes)
