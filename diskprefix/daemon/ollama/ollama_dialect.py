"""`POST /api/chat` and `/api/generate`, in the form of Ollama's API (`docs/openapi.yaml` of Ollama)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

from msgspec.structs import replace
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from diskprefix.daemon.api import fields
from diskprefix.daemon.api.dialect import Head, Json, JsonLine
from diskprefix.daemon.api.error_forms import error_body
from diskprefix.daemon.api.fields import (
    NotServed,
    OneOf,
    RequestBody,
    SamplingFields,
    empty_as,
    sampling_params,
    without_sampling,
)
from diskprefix.daemon.api.figures import figures_reply
from diskprefix.daemon.api.openai import Stop
from diskprefix.daemon.api.openai_messages import (
    Content,
    MessageBody,
    OptionalText,
    Tool,
    ToolAsSent,
    conversation_of,
    neutral_messages,
)
from diskprefix.daemon.api.parsed_request import ParsedRequest, TextFormat
from diskprefix.daemon.api.reply import (
    CallBegin,
    DeltaEvent,
    EndEvent,
    ReplyEvent,
    WholeChoice,
    WholeReply,
    logprob_reply,
    whole_choice,
)
from diskprefix.daemon.api.unread import OrUnread, Unread, read_or_none
from diskprefix.daemon.chat.data_uri import data_uri
from diskprefix.daemon.chat.fill_in import FillIn
from diskprefix.daemon.chat.messages import (
    ContentPart,
    Conversation,
    Ending,
    ImagePart,
    JsonObject,
    Message,
    OtherPart,
    TextPart,
)
from diskprefix.daemon.chat.output.format import ToolCallDelta
from diskprefix.daemon.embedding.embeddings import EmbeddingsRequest
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.daemon.ollama.ollama_models import keep_alive_seconds, utc
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.tokens import TokenIds

_MOST = fields.MAX_COUNT
Images: TypeAlias = Annotated[list[str], Field(max_length=fields.MAX_PARTS)]


class OllamaOptions(SamplingFields):
    """Sampling and limits. Options that are not here, such as those about how a model is loaded, are ignored."""

    num_predict: int | None = Field(default=None, ge=-_MOST, le=_MOST, description="Most tokens of the reply; -1: any.")
    num_ctx: fields.Count | None = Field(default=None, description="Most tokens of prompt and reply together.")
    stop: Stop | None = Field(default=None, description="Text that ends the reply; it is not part of it.")
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100, description="As `repetition_penalty`.")


def _without_sampling(schema: Json) -> None:
    schema["properties"] = without_sampling(schema["properties"])
    asked = {"role": "user", "content": "Hello!"}
    schema["example"] = {"messages": [asked]} if "messages" in schema["properties"] else {"prompt": "Hello!"}


class OllamaBody(RequestBody):
    """The fields of both bodies. As in Ollama, the fields of `SamplingFields` are read from `options` only."""

    model_config = ConfigDict(json_schema_extra=_without_sampling)

    stream: Annotated[bool, empty_as(True)] = Field(default=True, description="Send the reply as lines of JSON.")
    options: Annotated[OllamaOptions, empty_as({})] = Field(default=OllamaOptions(), description="Sampling and limits.")
    format: Annotated[Literal["", "json"] | JsonObject, OneOf("json or a JSON schema")] | None = Field(
        default=None, description="`json`, or a JSON schema that the text follows."
    )
    think: Annotated[bool | Literal["low", "medium", "high", "max"], OneOf("true, false or an effort")] | None = Field(
        default=None, description="Whether to think, or with which effort. Absent: as the chat template has it."
    )
    keep_alive: Annotated[
        Annotated[str | int | float, OneOf("a duration or a number of seconds")] | None,
        BeforeValidator(lambda sent: None if sent == "" else sent),
    ] = Field(default=None, description="How long the caller keeps a model that may be unloaded.")
    logprobs: bool | None = Field(default=None, description="Return the log probability of every token of the reply.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="And of its most likely alternatives.")

    @model_validator(mode="before")
    @classmethod
    def _leaves_sampling_out(cls, sent: Any) -> Any:
        return without_sampling(sent) if isinstance(sent, dict) else sent

    @model_validator(mode="after")
    def _takes_sampling_of_options(self) -> OllamaBody:
        for name in SamplingFields.model_fields:
            setattr(self, name, getattr(self.options, name))
        self.repetition_penalty = self.options.repeat_penalty or self.repetition_penalty
        # Ollama's default, which is no seed.
        self.seed = None if self.seed == -1 else self.seed
        return self

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        left_out: Sequence[OtherPart] = (),
        *,
        path: str,
        ending: Ending = "reply",
    ) -> Conversation:
        return conversation_of(
            messages,
            tools,
            left_out,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            thinking=None if self.think is None else bool(self.think),
            special_tokens_in_text=self.special_tokens_in_text or False,
            ending=ending,
            path=path,
        )


class OllamaMessage(MessageBody):
    """One message of the conversation."""

    model_config = ConfigDict(json_schema_extra=None)

    content: Content | None = Field(default=None, description="Text.")
    images: Annotated[Images | Unread | None, OrUnread(Images | None)] = Field(default=None, description="In base64.")
    thinking: OptionalText = Field(default=None, description="The reasoning of the assistant.")
    tool_name: OptionalText = Field(default=None, description="In a tool message: the tool that answers.")

    def neutral(self, path: str) -> Message:
        message = super().neutral(path)
        thinking = read_or_none(self.thinking)
        content = (*_pictures(read_or_none(self.images), f"{path}.images"), *message.content)
        name = message.name or read_or_none(self.tool_name)
        return replace(
            message, content=content, name=name, reasoning=message.reasoning if thinking is None else thinking
        )


def _pictures(images: list[str] | None, path: str) -> list[ImagePart]:
    # The type of an image is read from its content.
    paths = (f"{path}.{index}" for index in count())
    return [ImagePart(data_uri("image/png", data), at, at) for data, at in zip(images or (), paths, strict=False)]


class OllamaChatRequest(OllamaBody):
    """`POST /api/chat`."""

    messages: Annotated[
        list[Annotated[OllamaMessage | Unread, OrUnread(OllamaMessage)]],
        Field(max_length=fields.MAX_MESSAGES),
        empty_as([]),
    ] = Field(default=[], description="The conversation, oldest message first. Empty: the model is loaded.")
    tools: Annotated[list[ToolAsSent], Field(max_length=fields.MAX_TOOLS), empty_as([])] = Field(
        default=[], description="Functions offered to the model by its template."
    )

    @property
    def source(self) -> Conversation:
        messages, left_out = neutral_messages(self.messages)
        last = self.messages[-1] if self.messages else None
        is_begun = isinstance(last, OllamaMessage) and last.is_begun
        return self.conversation(
            messages, self.tools, left_out, path="messages", ending="continue" if is_begun else "reply"
        )


class OllamaGenerateRequest(OllamaBody):
    """`POST /api/generate`."""

    prompt: Annotated[str, empty_as("")] = Field(default="", description="The user's text. Empty: the model is loaded.")
    system: Annotated[str, empty_as("")] = Field(default="", description="The system prompt.")
    suffix: Annotated[str, empty_as("")] = Field(default="", description="Text behind the gap that the reply fills.")
    images: Images | None = Field(default=None, description="In base64.")
    raw: bool | None = Field(default=None, description="Continue `prompt` as it is, without the chat template.")
    template: NotServed = Field(default=None, description="Not supported: see `serve --chat-template`.")
    context: Annotated[list[int], empty_as([])] = Field(
        default=[], description="The `context` of an earlier reply, which this request continues."
    )

    @property
    def source(self) -> Conversation | str | FillIn:
        """Raises `InvalidRequest` for fields that do not go together."""
        if not (self.raw or self.suffix):
            content: list[ContentPart] = [*_pictures(self.images, "images"), TextPart(self.prompt, "prompt")]
            system = Message(role="system", content=(TextPart(self.system, "system"),), path="system")
            user = Message(role="user", content=content, path="prompt")
            conversation = self.conversation([system, user] if self.system else [user], path="prompt")
            return replace(conversation, before=self.context)
        for name in ("system", "images", "context", *(("suffix",) if self.raw else ())):
            if getattr(self, name):
                raise InvalidRequest.at(name, f"is not allowed beside {'raw' if self.raw else 'suffix'}")
        if self.raw:
            return self.prompt
        return FillIn(self.prompt, self.suffix, "suffix", special_tokens_in_text=self.special_tokens_in_text or False)


class OllamaEmbedRequest(EmbeddingsRequest):
    """`POST /api/embed`."""

    truncate: Annotated[bool, empty_as(True)] = Field(
        default=True, description="Cut inputs that are longer than the model's context, and list them as `truncated`."
    )

    @property
    def truncates(self) -> bool:
        return self.truncate


ReplyBody: TypeAlias = OllamaChatRequest | OllamaGenerateRequest


class Ollama:
    """The API of a route with this body."""

    id_prefix, call_id_prefix = "ollama-", "call_"

    def __init__(self, body: type[ReplyBody]) -> None:
        self.body = body

    def read(self, body: ReplyBody, vocab_size: int, _notes: Callable[[], TenantNotes]) -> ParsedRequest:
        num_predict = body.options.num_predict or 0
        own = TextFormat("json_object", "", "format") if body.format else None
        if isinstance(body.format, dict):
            own = TextFormat("json_schema", json.dumps(body.format), "format")
        sampling = sampling_params(
            body,
            vocab_size,
            max_tokens=num_predict if num_predict > 0 else None,
            stop=body.options.stop,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return ParsedRequest(
            prompt=body.source,
            sampling=sampling,
            num_ctx=body.options.num_ctx,
            text_format=body.text_format_beside(own),
            limit_path="options.num_predict",
        )

    def without_prompt(self, body: OllamaBody, model: str, /, *, may_unload: bool) -> Json | None:
        # The router reads `keep_alive`, too, and unloads the model.
        is_unloaded = body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0 and may_unload
        if any(getattr(body, name, None) for name in ("messages", "prompt", "suffix", "images")):
            return None
        line = _line(model, is_chat=isinstance(body, OllamaChatRequest))
        return line | {"done": True, "done_reason": "unload" if is_unloaded else "load"}

    def writer(self, body: OllamaBody, head: Head) -> OllamaWriter:
        may_go_on = isinstance(body, OllamaGenerateRequest) and not (body.raw or body.suffix)
        # The tokens of images stand for pixels, which a client cannot send back.
        prompt = head.prompt if may_go_on and head.prompt is not None and (head.prompt >= 0).all() else None
        return OllamaWriter(head, body.options.num_ctx or 0, prompt, is_chat=isinstance(body, OllamaChatRequest))


def _line(model: str, part: WholeChoice | None = None, *, is_chat: bool) -> Json:
    """Returns a line with a part of the reply, empty without `part`."""
    texts: Json = {"role": "assistant", "content": ""} if is_chat else {"response": ""}
    line: Json = {"model": model, "created_at": utc(time.time())}
    if part is not None:
        texts["content" if is_chat else "response"] = part.content
        texts |= {"thinking": part.reasoning} if part.reasoning else {}
        calls = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.parsed}}
            for index, call in enumerate(part.calls)
        ]
        texts |= {"tool_calls": calls} if calls else {}
        line |= {"logprobs": [logprob_reply(token) for token in part.tokens]} if part.tokens else {}
    return line | ({"message": texts} if is_chat else texts) | {"done": False}


class OllamaWriter:
    """Writes lines of JSON. Calls are complete, in one line at the end of the reply. The last line has the `context` to
    continue, the tokens of `prompt` and reply, unless `prompt` is None."""

    def __init__(self, head: Head, num_ctx: int, prompt: TokenIds | None = None, *, is_chat: bool) -> None:
        self._head, self._num_ctx, self._prompt = head, num_ctx, prompt
        self._line = partial(_line, head.model, is_chat=is_chat)
        self._calls: list[DeltaEvent] = []
        self._end: EndEvent

    def whole(self, reply: WholeReply) -> Json:
        [choice] = reply.choices
        return self._line(choice) | self._last(choice, reply.done)

    def begin(self) -> Sequence[JsonLine]:
        return ()

    def events(self, event: ReplyEvent) -> Sequence[JsonLine]:
        if isinstance(event, DoneEvent):
            return [JsonLine(self._line() | self._last(self._end, event))]
        if isinstance(event, EndEvent):
            self._end = event
            choice = replace(whole_choice(event, self._calls), content="", reasoning="")
            return [JsonLine(self._line(choice))] if choice.calls else ()
        if not isinstance(event, DeltaEvent):
            return ()
        if any(isinstance(delta, CallBegin | ToolCallDelta) for delta in event.deltas):
            self._calls.append(replace(event, tokens=()))
        part = replace(whole_choice(EndEvent(0, "stop"), [event]), calls=())
        return [JsonLine(self._line(part))] if part.content or part.reasoning or part.tokens else ()

    def keepalive(self) -> bytes:
        return b" "

    def failure(self, error: DiskPrefixError) -> Sequence[JsonLine]:
        return [JsonLine(error_body({"path": "/api/"}, error, ""))]

    def _last(self, end: WholeChoice | EndEvent, done: DoneEvent) -> Json:
        usage, timings, figures = done.usage, done.timings, figures_reply(done, self._head.clamped_to)
        if self._num_ctx > self._head.max_positions:
            figures["timings"]["num_ctx_clamped"] = self._head.max_positions
        times_ms = (self._head.waited_ms + timings.queue_ms, timings.ttft_ms - timings.queue_ms, timings.decode_ms)
        # Clients divide by these times.
        load, prompt, reply = (max(1, round(1e6 * time_ms)) for time_ms in times_ms)
        context = {} if self._prompt is None else {"context": [*self._prompt.tolist(), *end.token_ids]}
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            **context,
            "total_duration": load + prompt + reply,
            "load_duration": load,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": usage.completion_tokens,
            "eval_duration": reply,
            **figures,
        }
