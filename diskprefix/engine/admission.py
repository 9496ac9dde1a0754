"""What a request needs before it runs: memory for its prompt, and its way through the cache and its choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from diskprefix.engine.constraint import ConstrainedReply
from diskprefix.engine.inbox import Ticket
from diskprefix.engine.job import Choice, Job
from diskprefix.engine.request import GenerateRequest, Stage
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.served_model import ServedModel
from diskprefix.kv.pool import Slot
from diskprefix.kv.uncached import TransformersState


def memory_for(
    served: ServedModel, request: GenerateRequest, running: Iterable[Job]
) -> Slot | TransformersState | Literal["later"] | None:
    """Returns the memory of a request; None if others must end first, "later" if only this one must wait.

    Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for one that exceeds the positions or the memory.
    """
    served.check_length(request)
    cache, pool, token_ids = served.cache, served.pool, request.prompt.token_ids
    if request.prompt.media or cache.layout.unsupported:
        if any(isinstance(choice.state, TransformersState) for job in running for choice in job.choices):
            return "later"
        return TransformersState(served.model, request.prompt.media)
    if request.cache.scope.kind == "off":
        return pool.take(len(token_ids))
    owner = cache.owner(request.cache.tenant)
    found = pool.find(owner, token_ids)
    if found is not None and found.is_worth_waiting_for:
        return "later"
    slot = pool.go_on(found, len(token_ids)) if found else pool.take(len(token_ids))
    if slot is not None:
        slot.owner = owner
    return slot


def new_job(served: ServedModel, ticket: Ticket, num_arrived: int) -> Job:
    """Returns the job of a request, without memory. `num_arrived` choices came before."""
    request = ticket.request
    ids = torch.from_numpy(request.prompt.token_ids).to(served.model.device, torch.long).unsqueeze(0)
    job = Job(ticket, served.cache.begin(request.prompt, request.cache), served.figures, ids)
    if (on_stage := request.on_stage) is not None:

        def on_written(began: float, ended: float, num_bytes: int) -> None:
            on_stage(Stage("save", began, ended, {"bytes": num_bytes}))

        job.cached.on_written(on_written)
    first = None if request.constraint is None else served.constraints.begin(request.constraint)
    replies = [first] + [first and first.another() for _ in range(1, request.sampling.n)]
    choices = [_choice(served, job, index, num_arrived + index + 1, reply) for index, reply in enumerate(replies)]
    job.choices, job.unforked = choices[:1], choices[1:]
    return job


def _choice(served: ServedModel, job: Job, index: int, arrived: int, constraint: ConstrainedReply | None) -> Choice:
    request, layout = job.request, served.cache.layout
    prompt_tokens = len(request.prompt.token_ids)
    in_steps = not (layout.is_one_pass or layout.unsupported or request.prompt.media)
    return Choice(
        job=job,
        index=index,
        tenant=job.turn,
        arrived=arrived,
        prompt_tokens=prompt_tokens,
        packs=served.packs and not request.prompt.media,
        grid=served.cache.settings.block_size if in_steps else prompt_tokens,
        sampler=Sampler(request.sampling, request.prompt.token_ids, served.model.device, index, constraint),
        text=served.text_stream(request),
        guesser=served.guesser(request),
    )
