"""The OpenAPI document of the routes, and a page that shows it. Imported when one of them is asked for."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from diskprefix.server.guards import OPEN_PATHS
from diskprefix.server.routes import JSON, STREAMED, About, AppRoute
from diskprefix.version import __version__

_DESCRIPTION = """An OpenAI-compatible server for one local model that keeps the model's prefix (KV) cache on disk: a
prompt whose beginning was seen before is restored instead of computed, bit for bit, also after a restart of the daemon.

Every reply says what the cache did (`prefix_cache`) and where the time went (`timings`)."""
_OF_BODIES = (400, 404, 408, 413, 415, 429)
_OF_ALL_ROUTES = (403, 500, 503)
"""Another site's page, a failure, and too many connections or no model yet."""


def document_of(routes: Iterable[BaseRoute], *, with_keys: bool) -> dict[str, Any]:
    """Returns the document. With keys, all paths but `OPEN_PATHS` need one."""
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    bodies = {}
    for route in routes:
        if isinstance(route, AppRoute) and route.about is not None:
            [method] = (route.methods or set()) - {"HEAD"}
            is_open = route.path in OPEN_PATHS
            paths[route.path_format][method.lower()] = operation = _operation(route, method, route.about)
            operation["responses"] |= _errors((401,) if with_keys and not is_open else ())
            if with_keys and is_open:
                operation["security"] = [{}, {"key": []}]
            if (body := route.about.body) is not None:
                bodies[body.__name__] = body
    models = [(body, "validation") for _, body in sorted(bodies.items())]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "diskprefix", "description": _DESCRIPTION, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: AppRoute, method: str, about: About) -> dict[str, Any]:
    does, _, returns = (inspect.getdoc(route.endpoint) or "").partition("\n\n")
    returns = returns or does
    returns += " With `stream: true` server-sent events." * (about.media_types == STREAMED)
    content = {kind: {"schema": {"type": "object" if kind == JSON else "string"}} for kind in about.media_types}
    errors = {*about.errors, *_OF_ALL_ROUTES, *(_OF_BODIES if about.body else ()), *([400] if about.parameters else ())}
    operation: dict[str, Any] = {
        "tags": [about.tag],
        "summary": about.summary,
        "description": does,
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
        "responses": {"200": {"description": returns, "content": content}} | _errors(sorted(errors)),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    if about.parameters is not None:
        parameters += [
            {"name": name, "in": "header" if name.startswith("x-") else "query", "required": False, "schema": schema}
            for name, schema in about.parameters.model_json_schema()["properties"].items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if about.body is not None:
        schema = {"$ref": f"#/components/schemas/{about.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    """An error has the form of the API that the route belongs to."""
    content = {JSON: {"schema": {"type": "object"}}}
    return {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


_STYLE = "body { max-width: 50rem; margin: auto } pre { white-space: pre-wrap; overflow-wrap: anywhere }"
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page."""


def page_of(document: dict[str, Any]) -> str:
    """Returns the document as a page of HTML, which loads nothing: the routes in words, and all of it as JSON."""
    routes = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    rows = [
        f"<h2>{escape(route)}</h2><p>{escape(operation['description'])}"
        f"<p>{escape(operation['responses']['200']['description'])}"
        for route, operation in routes
    ]
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: routes</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n'
        f"<p>{escape(document['info']['description'])}\n{''.join(rows)}\n"
        f'<h2>Fields</h2><p>As in <a href="openapi.json">openapi.json</a>:\n'
        f"<pre>{escape(json.dumps(document, indent=1, ensure_ascii=False), quote=False)}</pre></body></html>\n"
    )
