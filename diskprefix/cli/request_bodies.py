"""Reads request bodies from a file as the daemon reads them from HTTP."""

from __future__ import annotations

import json
from typing import Any

from diskprefix.chat.template import PromptRenderer
from diskprefix.policy.scope import DEFAULT_WINDOW, Scope
from diskprefix.server.body import parse_json
from diskprefix.server.protocols.openai_chat import ChatRequest
from diskprefix.server.protocols.openai_completions import CompletionRequest
from diskprefix.server.protocols.params import cache_options
from diskprefix.simulate.trace import TraceRequest
from diskprefix.tenant import SHARED

_DEFAULT = Scope("auto", DEFAULT_WINDOW)


def read_body(renderer: PromptRenderer, body: dict[str, Any]) -> TraceRequest:
    """Returns what the body of a chat or text completion asks for, as a request at time 0.

    Raises `InvalidRequest` for a body that the daemon would refuse.
    """
    text = json.dumps(body).encode()
    parsed: ChatRequest | CompletionRequest
    if "messages" in body:
        parsed = parse_json(text, ChatRequest)
        prompt = renderer.chat(parsed.conversation)
    else:
        parsed = parse_json(text, CompletionRequest)
        prompt = renderer.completion(parsed.prompt)
    options = cache_options(parsed, scope=_DEFAULT, caller=SHARED, reuse_generated=False)
    return TraceRequest(
        when=0.0,
        prompt=prompt,
        scope=None if options.scope is _DEFAULT else options.scope,
        group=options.group,
        tenant=str(options.tenant),
        save=options.save,
        ttl_s=options.ttl_s,
    )
