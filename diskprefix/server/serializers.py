"""How the two APIs write the choices of a response."""

from __future__ import annotations

from collections import defaultdict
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


class WholeChoices:
    """Collects the choices of a response that is not streamed."""

    def __init__(self, api: Api, with_logprobs: bool) -> None:
        self._api = api
        self._with_logprobs = with_logprobs
        self._text: dict[int, list[str]] = defaultdict(list)
        self._logprobs: dict[int, list[TokenLogprob]] = defaultdict(list)
        self._finish: dict[int, str] = {}

    def add(self, event: TextEvent | FinishEvent) -> None:
        if isinstance(event, FinishEvent):
            self._finish[event.choice] = event.finish_reason
        else:
            self._text[event.choice].append(event.text)
            self._logprobs[event.choice] += event.logprobs

    def choices(self) -> list[Json]:
        return [
            {
                "index": index,
                **self._api.whole("".join(self._text[index])),
                "logprobs": self._api.logprobs(self._logprobs[index], 0) if self._with_logprobs else None,
                "finish_reason": reason,
            }
            for index, reason in sorted(self._finish.items())
        ]
