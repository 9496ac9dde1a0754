"""A request that asks for its prompt ahead, and gets no reply: the daemon keeps the prompt, and computes it later."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from diskprefix.daemon.chat.conversation_opening import encode_opening
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.engine.idle.ahead import prompt_to_compute
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.server.kept_opening import KeptOpening
from diskprefix.daemon.server.openings import job_of
from diskprefix.daemon.server.prepare import Arrival, Rendered
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.values import Prompt

_LASTS_S = 7 * 86400.0
"""How long the prompt is kept after the last request that asks for it, in seconds."""


class AskedOpening(NamedTuple):
    """The opening of a conversation that a client asks for: its note, and its job, which has `prompt`."""

    arrival: Arrival
    id: str
    content: bytes
    prompt: Prompt
    job: AheadJob


def render_opening(rendered: Rendered, label: str) -> AskedOpening:
    """Renders the opening of a conversation, under a client's name for it. May take long. Raises `InvalidRequest` for
    other requests."""
    arrival, asked = rendered.arrival, rendered.parsed.prompt
    options = arrival.cache
    opening = encode_opening(asked) if isinstance(asked, Conversation) else None
    if options.scope.most is not None or not options.save:
        raise InvalidRequest.at("prefix_cache.ahead", "needs the scope full or auto, and not save: false")
    if opening is None:
        problem = "is only for the first request of a conversation, without replies and pictures"
        raise InvalidRequest.at("prefix_cache.ahead", problem)
    assert isinstance(asked, Conversation)
    id_, content = opening
    job = job_of(arrival.serving, options, asked, content, label, turns=arrival.turns)
    if (prompt := job.make()) is None:
        raise InvalidRequest.at("prefix_cache.ahead", "needs a system message or tools: nothing else comes again")
    job.make = lambda: prompt
    return AskedOpening(arrival, id_, content, prompt, job)


def ask_ahead(asked: AskedOpening) -> dict[str, Any]:
    """Keeps an opening, and adds it to the work ahead. Returns how much of it is computed. Waits for the disk."""
    arrival, job, prompt = asked.arrival, asked.job, asked.prompt
    serving, options = arrival.serving, arrival.cache
    if prompt_to_compute(job, arrival.patience) is not None:
        serving.engine.ahead.add_job(job)
    lasts_s = min(serving.engine.cache.lasts_s(options.ttl_s), _LASTS_S)
    notes = replace(arrival.notes(), ttl_s=lasts_s)
    kept = KeptOpening.of(asked.content, options, job.label)
    notes.put(NoteKind.ASKED_OPENING, asked.id, kept.encode(), prompt.token_ids)
    return {
        "object": "prefix_cache.ahead",
        "model": serving.model_name,
        "prompt_tokens": len(prompt.token_ids),
        "ready_tokens": job.num_ready,
        "waits": serving.engine.ahead.has(job),
        "paused": serving.engine.ahead.why_paused(),
    }
