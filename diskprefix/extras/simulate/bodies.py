"""Request bodies as requests of a trace."""

from __future__ import annotations

from diskprefix.chat.renderer import PromptRenderer
from diskprefix.extras.request_bodies import DEFAULT, Body, parse_body
from diskprefix.extras.simulate.trace import TraceRequest


def read_body(renderer: PromptRenderer, body: Body) -> TraceRequest:
    """Returns the request of a body, at time 0. Raises `InvalidRequest`."""
    parsed = parse_body(body)
    options = parsed.options
    return TraceRequest(
        when=0.0,
        prompt=parsed.prompt(renderer),
        scope=None if options.scope is DEFAULT else options.scope,
        group=options.group,
        tenant=str(options.tenant),
        save=options.save,
        ttl_s=options.ttl_s,
    )
