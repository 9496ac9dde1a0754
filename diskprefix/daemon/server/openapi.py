"""The OpenAPI document of the routes, and a page that shows it. Imported with the first request for either."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from diskprefix.daemon.server.guards import OPEN_PATHS
from diskprefix.daemon.server.routes import JSON, STREAMED, About, AppRoute
from diskprefix.version import __version__

_DESCRIPTION = """An OpenAI-compatible server for one local model that keeps the model's prefix (KV) cache on disk: a
prompt whose beginning was seen before is restored instead of computed, bit for bit, also after a restart of the daemon.

Every reply says what the cache did (`prefix_cache`) and where the time went (`timings`)."""
_OTHER_NAMES = {"stop": "stop_sequences", "repetition_penalty": "repeat_penalty"}
"""Names of sampling → those that Anthropic's API and Ollama's have for the same."""
_OF_BODIES = (400, 404, 408, 413, 415, 429)
_OF_ALL_ROUTES = (403, 500, 503)
"""Another site's page, a failure, and too many connections or no model yet."""


def document_of(routes: Iterable[BaseRoute], sampling: Mapping[str, Any], *, with_keys: bool) -> dict[str, Any]:
    """Returns the document. With keys, all paths but `OPEN_PATHS` need one. `sampling` has the values that fields about
    sampling have if a request leaves them out, as `SamplingDefaults.record` has them."""
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
    for schema in schemas["$defs"].values():
        _tell_defaults(schema.get("properties", {}), sampling)
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


def _tell_defaults(properties: dict[str, Any], sampling: Mapping[str, Any]) -> None:
    """Writes the values that are used into the fields that a body may leave out. A value that the field itself would
    not take is only told: a default must be valid."""
    for name, default in sampling.items():
        for field in (properties[own] for own in (name, _OTHER_NAMES.get(name)) if own in properties):
            value = default["value"]
            field["description"] += f" Absent: {json.dumps(value)} ({default['source']})."
            if _is_in_range(field, value):
                field["default"] = value
            else:
                field.pop("default", None)


def _is_in_range(field: dict[str, Any], value: Any) -> bool:
    bounds = [option for option in field.get("anyOf", [field]) if {"minimum", "maximum"} & option.keys()]
    return all(option.get("minimum", value) <= value <= option.get("maximum", value) for option in bounds)


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
    """Returns the error responses of a route. Errors have the form of the API that the route belongs to."""
    content = {JSON: {"schema": {"type": "object"}}}
    return {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8dde3, #343b45); --quiet: light-dark(#57606c, #a3adb9);
  --card: light-dark(#ffffff, #1c2128); }
body { max-width: 60rem; margin: auto; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
  background: light-dark(#f6f7f9, #14171c); color: light-dark(#1b2128, #e4e8ed); }
a { color: light-dark(#0b6e63, #43c7b4); }
section { border: 1px solid var(--line); border-radius: 8px; padding: 0 1rem .5rem; margin: 1rem 0;
  background: var(--card); }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; font-family: ui-monospace, monospace } h3 { font-size: 1rem }
table { width: 100%; border-collapse: collapse } td { border-top: 1px solid var(--line); padding: .3rem .5rem .3rem 0;
  vertical-align: top } td:first-child { width: 32% }
code, pre { font-family: ui-monospace, monospace; font-size: .9em } pre { white-space: pre-wrap; border-radius: 6px;
  padding: .6rem; background: light-dark(#f3f5f8, #20262e) }
small { display: block; color: var(--quiet) }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page."""


def page_of(document: dict[str, Any]) -> str:
    """Returns the document as a page of HTML that loads nothing: each route with its description, an example and its
    fields, then the objects that fields hold."""
    routes = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    bodies = {_body_name(operation) for _, operation in routes}
    title = f"{document['info']['title']} {document['info']['version']}"
    contents = "".join(
        f'<tr><td><a href="#{operation["operationId"]}"><code>{escape(route)}</code></a>'
        f"<td>{escape(operation['summary'])}"
        for route, operation in routes
    )
    sections = [_section_of_route(route, operation, schemas) for route, operation in routes]
    objects = [
        f'<section id="{name}"><h2>{name}</h2>{_prose(schema.get("description", ""))}{_table(schema)}</section>'
        for name, schema in schemas.items()
        if name not in bodies
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: routes</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n'
        f"{_prose(document['info']['description'])}"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.\n'
        f"<table>{contents}</table>\n{''.join(sections)}\n<h1>Objects in fields</h1>\n{''.join(objects)}"
        "</body></html>\n"
    )


def _section_of_route(route: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    does, returns = operation["description"], operation["responses"]["200"]["description"]
    parts = [f'<section id="{operation["operationId"]}"><h2>{escape(route)}</h2>', _prose(does)]
    if returns != does:
        parts.append(_prose(returns))
    if parameters := operation.get("parameters"):
        rows = [
            _row(named["name"], named["schema"], named["required"], f"in the {named['in']}; ") for named in parameters
        ]
        parts.append(f"<h3>Parameters</h3><table>{''.join(rows)}</table>")
    if name := _body_name(operation):
        if example := schemas[name].get("example"):
            path = route.partition(" ")[2]
            shown = f"curl http://127.0.0.1:8642{path} -d '{json.dumps(example, ensure_ascii=False)}'"
            parts.append(f"<h3>Example</h3><pre>{escape(shown, quote=False)}</pre>")
        parts.append(f"<h3>Fields</h3>{_table(schemas[name])}")
    return "".join([*parts, "</section>\n"])


def _body_name(operation: dict[str, Any]) -> str:
    """Returns the name of the schema of a route's body, "" without a body."""
    if "requestBody" not in operation:
        return ""
    reference: str = operation["requestBody"]["content"][JSON]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [_row(name, field, name in required, "") for name, field in schema.get("properties", {}).items()]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _row(name: str, schema: dict[str, Any], is_required: bool, place: str) -> str:
    needed = ", required" if is_required else ""
    described = _with_code(schema.get("description", ""))
    return f"<tr><td><code>{escape(name)}</code><small>{place}{_type(schema)}{needed}</small><td>{described}"


def _type(schema: dict[str, Any]) -> str:
    """Returns the type of a value as HTML, with links to the objects in it."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    least, most = (schema.get(name) for name in ("minimum", "maximum"))
    limits = [f"from {least}"] * (least is not None) + [f"to {most}"] * (most is not None)
    return " ".join([escape(str(schema.get("type", "any value"))), *limits])


def _prose(text: str) -> str:
    return "".join(f"<p>{_with_code(part)}" for part in text.split("\n\n") if part)


def _with_code(text: str) -> str:
    """Returns a text as HTML, with text between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
