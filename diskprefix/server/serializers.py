"""How the two APIs write the choices of a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diskprefix.engine.request import FinishEvent, TextEvent, TokenLogprob
from diskprefix.server.replies import chat_logprobs, completion_logprobs

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Api:
    """What differs between the responses of the two APIs.

    `part` gets the text of a chunk, and whether it is the first of its choice; `logprobs` the tokens, and how many
    characters of the choice come before them.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole: Callable[[str], Json]
    part: Callable[[str, bool], Json]
    end: Json
    logprobs: Callable[[Sequence[TokenLogprob], int], Json]


CHAT = Api(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    part=lambda text, first: {"delta": ({"role": "assistant"} if first else {}) | {"content": text}},
    end={"delta": {}},
    logprobs=lambda tokens, _text_offset: chat_logprobs(tokens),
)
COMPLETIONS = Api(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole=lambda text: {"text": text},
    part=lambda text, _first: {"text": text},
    end={"text": ""},
    logprobs=completion_logprobs,
)


def whole_choice(api: Api, texts: Sequence[TextEvent], finish: FinishEvent, with_logprobs: bool) -> Json:
    """Returns a choice of a response that is not streamed, from all its events."""
    tokens = [token for event in texts for token in event.logprobs]
    return {
        "index": finish.choice,
        **api.whole("".join(event.text for event in texts)),
        "logprobs": api.logprobs(tokens, 0) if with_logprobs else None,
        "finish_reason": finish.finish_reason,
    }
