"""Reads request bodies from a file as the daemon reads them from HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diskprefix.simulate.trace import TraceRequest

if TYPE_CHECKING:
    from diskprefix.chat.template import PromptRenderer


def body_reader(renderer: PromptRenderer) -> Callable[[dict[str, Any]], TraceRequest]:
    """Returns a function that turns the body of a chat or text completion into a request at time 0.

    The function raises `InvalidRequest` for a body that the daemon would refuse.
    """
    from diskprefix.policy.scope import DEFAULT_WINDOW, Scope
    from diskprefix.server.body import parse_json
    from diskprefix.server.params import cache_options
    from diskprefix.server.schemas import ChatRequest, CompletionRequest
    from diskprefix.tenant import SHARED

    def read(body: dict[str, Any]) -> TraceRequest:
        text = json.dumps(body).encode()
        parsed: ChatRequest | CompletionRequest
        if "messages" in body:
            parsed = parse_json(text, ChatRequest)
            prompt = renderer.chat(parsed.conversation)
        else:
            parsed = parse_json(text, CompletionRequest)
            prompt = renderer.completion(parsed.prompt)
        options = cache_options(parsed, scope=Scope("auto", DEFAULT_WINDOW), caller=SHARED, reuse_generated=False)
        asked = parsed.prefix_cache
        return TraceRequest(
            when=0.0,
            prompt=prompt,
            scope=options.scope if asked and not (asked.scope is None and asked.window is None) else None,
            group=options.group,
            tenant=str(options.tenant),
            save=options.save,
            ttl_s=options.ttl_s,
        )

    return read
