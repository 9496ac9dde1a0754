"""Routes, with their descriptions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from msgspec import Struct
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
STREAMED = (JSON, EVENTS)
"""The media types of a reply, which with `stream: true` is a stream of events."""


class About(Struct, frozen=True):
    """The description of a route in the OpenAPI document, beside the docstring of its handler, whose last paragraph
    describes a successful answer."""

    tag: str
    summary: str
    made_body: type[BaseModel] | Callable[[], type[BaseModel]] | None
    parameters: type[BaseModel] | None
    errors: tuple[int, ...]
    media_types: tuple[str, ...]

    @property
    def body(self) -> type[BaseModel] | None:
        return self.made_body if self.made_body is None or isinstance(self.made_body, type) else self.made_body()


class AppRoute(Route):
    """A route that the access log finds in the scope of a request. Without `about` it is not in the document."""

    def __init__(self, path: str, handler: Handler, methods: Sequence[str] = ("GET",), about: About | None = None):
        super().__init__(path, handler, methods=methods)
        self.about = about

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class Routes(list[AppRoute]):
    """The routes of one section of the document, which `tag` names."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag

    def add(
        self,
        route: str,
        summary: str,
        body: type[BaseModel] | Callable[[], type[BaseModel]] | None = None,
        *,
        parameters: type[BaseModel] | None = None,
        errors: Sequence[int] = (),
        media_types: Sequence[str] = (JSON,),
    ) -> Callable[[Handler], Handler]:
        """Returns a decorator that adds the handler of a `route`, such as `GET /health`.

        The handler reads its `body`, a model or a function that returns one, with `Bodies.read_json`, and its
        `parameters` with `read_parameters`. `errors` are the statuses that do not follow from these.
        """
        method, _, path = route.partition(" ")
        about = About(self._tag, summary, body, parameters, tuple(errors), tuple(media_types))

        def add(handler: Handler) -> Handler:
            self.append(AppRoute(path, handler, [method], about))
            return handler

        return add
