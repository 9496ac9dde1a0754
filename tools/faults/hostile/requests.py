"""The kinds of bad clients by name: what each does again and again. The single requests are a table of the tests."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Callable
from functools import partial

from tests.daemon.server.hostile_requests import CHAT, MIB, REQUESTS, RESPONSES, Hostile, chat, respond, text_of
from tools.faults.hostile.bad_clients import BadManners, Behaviour, Caller, End

_STREAM_TOKENS = 24
_PARALLEL = 8

Kind = Callable[[Caller], Behaviour]


_AT_ONCE = {"1 MB to tokenize": 20, "5 200 messages to count": 8, "unloads the model": 12}
"""The number of requests that a client sends at once, by kind; they are small."""


def _asking(hostile: Hostile, number: int, caller: Caller) -> Behaviour:
    request = caller.request(hostile.path, hostile.make(), host=hostile.host)

    async def run() -> End:
        ends = await gather(*(caller.ask(request, patience_s=hostile.patience_s) for _ in range(number)))
        return max(ends, key=lambda end: end.how)

    return run


def _stored(caller: Caller) -> Behaviour:
    """Stores responses that are small on disk and large in an answer, and reads eight of them at a time."""
    function = {"type": "function", "name": "f", "description": "d" * (3 * MIB), "parameters": {"type": "object"}}
    keep = caller.request(RESPONSES, respond(tools=[function], tool_choice="none"))
    ids: list[str] = []

    async def run() -> End:
        if len(ids) < _PARALLEL:
            end = await caller.ask(keep)
            if b'"id":"resp_' in end.answer:
                ids.append("resp_" + end.answer.partition(b'"id":"resp_')[2].partition(b'"')[0].decode())
            return end
        heads = [caller.head(f"{RESPONSES}/{response_id}", method="GET") for response_id in ids[:_PARALLEL]]
        ends = await gather(*(caller.ask(head) for head in heads))
        return max(ends, key=lambda end: end.how)

    return run


def _mannered(behave: Callable[[BadManners], Behaviour], caller: Caller) -> Behaviour:
    content = [{"role": "user", "content": "Tell me of a river. " * 4}]
    # No end before the last token.
    fields = {"max_tokens": _STREAM_TOKENS, "temperature": 0, "logit_bias": {"2": -100}}
    stream = chat(messages=content, stream=True, logprobs=True, top_logprobs=20, **fields)
    large = caller.request(CHAT, text_of("hello there ", MIB))
    return behave(BadManners(caller, caller.request(CHAT, stream), large))


SLOW_READER = "slow reader"
"""The slowest client that is allowed: its streams must not be cut off."""
_MANNERS: dict[str, Callable[[BadManners], Behaviour]] = {
    SLOW_READER: lambda client: client.slow_reader,
    "reader of single bytes": lambda client: client.reader_of_bytes,
    "reader that stops": lambda client: client.stopped_reader,
    "slow writer of a head": lambda client: client.slow_head,
    "slow writer of a body": lambda client: client.slow_body,
    "silent connection": lambda client: client.silent,
    "half a head": lambda client: client.half_a_head,
    "half a body": lambda client: client.half_a_body,
    "256 unfinished bodies": lambda client: client.unfinished_bodies,
    "opens and closes": lambda client: client.open_and_close,
    "hangs up in a stream": lambda client: client.hang_up,
}
KINDS: dict[str, Kind] = {
    **{name: partial(_asking, hostile, _AT_ONCE.get(name, 1)) for name, hostile in REQUESTS.items()},
    "stored responses": _stored,
    **{name: partial(_mannered, behave) for name, behave in _MANNERS.items()},
}
"""The kinds by name. Clients get them in this order."""
