"""The fields that several APIs share, strictly typed: sampling, the cache, marks; and the engine's options from them.

Unknown top-level fields are ignored, as other servers do. Inside `prefix_cache` nothing is ignored. Members of a union
have tags that begin with `~`, which are left out of the `param` of an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args, get_origin

from msgspec import Struct
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from diskprefix.daemon.api.body_errors import REFUSED
from diskprefix.daemon.api.parsed_request import TextFormat
from diskprefix.daemon.api.unread import OrUnread, Unread, or_unread, read_or_none
from diskprefix.daemon.chat.messages import CacheMark, JsonObject
from diskprefix.daemon.engine.request import SamplingParams
from diskprefix.errors import GOT, InvalidRequest, SettingsError
from diskprefix.printable import shown
from diskprefix.scope import parse_scope
from diskprefix.tenant_ids import group_of
from diskprefix.units import parse_duration
from diskprefix.values import MAX_STOP_CHARS, MAX_VALUE, CacheOptions, Scope, Tenant

if TYPE_CHECKING:
    from diskprefix.runtime.pictures.picture_processor import Detail

T = TypeVar("T")


def _as_json(schema: Any) -> None:
    """Makes each list and each dict in a schema of pydantic stop at its first error, and each integer accept 3.0."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        elif schema.get("type") == "int" and "strict" not in schema:
            _take_points(schema)
            return
        for part in schema.values():
            _as_json(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _as_json(part)


def _take_points(integer: Any) -> None:
    """Makes the schema of an integer also accept a float without a fraction, as JSON Schema does. Plain integers are
    tried first: a prompt may have a million of them."""
    plain = integer | {"strict": True}
    floats = core_schema.chain_schema([core_schema.float_schema(strict=True), integer | {"strict": False}])
    either = core_schema.union_schema([(plain, "~int"), (floats, "~float")], mode="left_to_right")
    integer.clear()
    integer |= either | {"metadata": {"pydantic_js_functions": [lambda _schema, handler: handler(plain)]}}


class Body(BaseModel):
    """A JSON object that is read strictly: "5" is not 5, true is not 1, and NaN is refused. 5.0 is 5.

    Lists and objects are read up to their first error: an error takes two kilobytes, and only one is reported.
    """

    # Most bodies are never read by a daemon, and making their validators takes longer than the other imports.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _as_json(schema)
        return schema


def optional(description: str, **limits: Any) -> Any:
    """Returns a field that may be absent or null."""
    return Field(default=None, description=description, **limits)


class Typed(Body):
    """An object whose `type` requires other fields. `needs` has their names by type."""

    needs: ClassVar[Mapping[str, Sequence[str]]] = {}
    type: str

    @model_validator(mode="after")
    def _has_needed_fields(self) -> Self:
        for name in self.needs.get(self.type, ()):
            if getattr(self, name) is None:
                raise PydanticCustomError(REFUSED, f"of type {self.type} needs the field {name.rstrip('_')}")
        return self


def require_content(content: T, info: ValidationInfo) -> T:
    """Raises a validation error for a message without content, unless it is an assistant's or the result of a call."""
    role = info.data.get("role", "assistant")
    if content is None and role not in ("assistant", "tool", "function"):
        raise PydanticCustomError(REFUSED, f"is required in a message of role {role}")
    return content


def _if_asked(value: object) -> object:
    return None if value in ("", [], "none", "auto") else value


NotServed: TypeAlias = Annotated[None, BeforeValidator(_if_asked)]
"""An unsupported field. A value that asks for nothing is accepted."""


def empty_as(nothing: object) -> BeforeValidator:
    """Reads null, an empty text and an empty list as `nothing`."""
    return BeforeValidator(lambda value: nothing if value in (None, "", []) else value)


def _as_sent(value: JsonObject, check: ValidatorFunctionWrapHandler) -> JsonObject:
    check(value)
    return value


AS_SENT = WrapValidator(_as_sent)
"""Checks an object, but returns the client's dict, because the order of its keys is part of the prompt."""


_MOST_LISTED = 8
"""The most types that an error lists."""


class OneOf(Struct, frozen=True):
    """Chooses the member of a union by the JSON type of the value, and among objects by their field `type`.

    `expected` completes the error for a value without a member: "must be ...". `other` is the member for objects of any
    other type. `default` returns the type of an object without a type. With `or_unread`, a value that no member reads
    is `Unread`.
    """

    expected: str
    other: type[BaseModel] | None = None
    default: Callable[[JsonObject], str | None] = lambda _value: None
    or_unread: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = [member for member in get_args(source) if member is not Unread]
        members = {f"~{number}": member for number, member in enumerate(kinds)}
        tags = {kind: tag for tag, member in members.items() for kind in self._kinds(member)}

        def tag_of(value: Any) -> str | None:
            if not isinstance(value, dict):
                return tags.get(type(value))
            kind = value.get("type")
            kind = self.default(value) if kind is None else kind
            return (tags.get(kind) if isinstance(kind, str) else None) or tags.get(dict)

        def problem_of(value: Any) -> str | None:
            if not isinstance(value, dict) or tag_of(value) is not None:
                return None
            kind = value.get("type")
            if not isinstance(kind, str):
                return "is required" if kind is None else f"must be a valid string{GOT}{type(kind).__name__})"
            names = [repr(name) for name in tags if isinstance(name, str)]
            listed = ", ".join(names) if len(names) <= _MOST_LISTED else "a type that /docs lists"
            return f"must be {listed}{GOT}{shown(kind)!r})"

        union = core_schema.tagged_union_schema(
            {tag: handler.generate_schema(member) for tag, member in members.items()},
            tag_of,
            custom_error_type="type",
            custom_error_message=f"Input should be {self.expected}",
        )
        return or_unread(union, problem_of) if self.or_unread else union

    def _kinds(self, member: Any) -> Sequence[Any]:
        """Returns the types of objects that a member accepts, or the JSON type of its values."""
        plain = get_args(member)[0] if get_origin(member) is Annotated else member
        if plain is self.other:
            return (dict,)
        if isinstance(plain, type) and issubclass(plain, BaseModel):
            kind = plain.model_fields["type"].annotation
            return [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
        return (str,) if get_origin(plain) is Literal else (get_origin(plain) or plain,)


TextOrObject: TypeAlias = Annotated[str | JsonObject, OneOf("JSON text or an object")]


NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]


class StructuredOutputs(Body, extra="forbid"):
    """The format of the text, as in vLLM. Exactly one field must be given. Other fields of vLLM are refused."""

    json_: TextOrObject | None = optional("A JSON schema, or its text.", alias="json")
    json_object: Literal[True] | None = optional("Any JSON object.")
    choice: list[NonEmpty] | None = optional("One of these texts.", min_length=1)

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.json_object, self.choice)) != 1:
            raise PydanticCustomError(REFUSED, "needs exactly one of json, json_object and choice")
        return self

    @property
    def text_format(self) -> TextFormat:
        path = "structured_outputs"
        if self.json_ is not None:
            source = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return TextFormat("json_schema", source, f"{path}.json")
        if self.choice is not None:
            return TextFormat("choice", json.dumps(self.choice), f"{path}.choice")
        return TextFormat("json_object", "", f"{path}.json_object")


MIN_TTL_S, MAX_TTL_S = 1, 2**31 - 1
"""The longest time to live that the store can record."""


def _in_seconds(value: object) -> float:
    seconds: float | None = None
    if isinstance(value, str):
        with suppress(SettingsError):
            seconds = parse_duration(value, param="ttl")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    # Compared before the conversion, because JSON may hold integers that exceed every float.
    if seconds is None or not MIN_TTL_S <= seconds <= MAX_TTL_S:
        text = "must be a number of seconds or a time such as 90s, 15m, 12h or 7d, from 1 second to 68 years"
        raise PydanticCustomError(REFUSED, text)
    return float(seconds)


Ttl: TypeAlias = Annotated[
    Any,
    AfterValidator(_in_seconds),
    Field(description="`90s`, `15m`, `12h`, `7d`, `2w` or seconds, up to 68 years."),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S}]}),
]
"""A time to live in seconds. Absent is None, but null is refused."""


class CacheControl(Body):
    """A mark in the form of Anthropic's API."""

    type: Literal["ephemeral"] = Field(description="`ephemeral`.")
    ttl: Literal["5m", "1h"] | None = optional("Time to live after the last use.")

    @property
    def mark(self) -> CacheMark:
        return CacheMark(None if self.ttl is None else {"5m": 300.0, "1h": 3600.0}[self.ttl])


class CacheBreakpoint(Body):
    """A mark in the form of OpenAI's APIs."""

    mode: Literal["explicit"] = Field(description="`explicit`.")
    ttl: Ttl = optional("Time to live after the last use, as in `prompt_cache_options`.")

    @property
    def mark(self) -> CacheMark:
        return CacheMark(self.ttl)


_MARK = "Asks the disk cache to save the prompt up to here."
_BREAKPOINT = "OpenAI's name for `cache_control`."


class Markable(Body):
    """A message, or an object in one, that may carry a mark. A mark that cannot be read takes nothing else along."""

    cache_control: Annotated[CacheControl | Unread | None, OrUnread(CacheControl | None)] = optional(_MARK)
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | Unread | None, OrUnread(CacheBreakpoint | None)] = optional(
        _BREAKPOINT
    )

    @property
    def mark(self) -> CacheMark | None:
        mark = read_or_none(self.cache_control) or read_or_none(self.prompt_cache_breakpoint)
        return None if mark is None else mark.mark


class MarkableStrictly(Markable):
    """An object outside the messages that may carry a mark. A mark that cannot be read is refused."""

    cache_control: CacheControl | None = optional(_MARK)
    prompt_cache_breakpoint: CacheBreakpoint | None = optional(_BREAKPOINT)


def mark_beside_text(parts: Iterable[object]) -> CacheMark | None:
    """Returns the last mark on a content part that is not text. It counts as a mark on the message."""
    marks = (part.mark for part in parts if isinstance(part, Markable) and "text" not in str(getattr(part, "type", "")))
    return next((mark for mark in reversed([*marks]) if mark is not None), None)


def _no_mark(value: object) -> object:
    if value is not None:
        raise PydanticCustomError(REFUSED, "is not allowed here; mark a message, a content part or a tool")
    return value


NoMark: TypeAlias = Annotated[None, BeforeValidator(_no_mark)]


class Unmarkable(Body):
    """An object that cannot carry a mark. A mark on it is refused, because it would have no effect."""

    cache_control: NoMark = optional("Not allowed here.")


class UnmarkableInMessage(Body):
    """An object in a message that cannot carry a mark. A mark takes nothing else along."""

    cache_control: Annotated[Unread | None, OrUnread(NoMark)] = optional("Not allowed here.")


ImageDetail: TypeAlias = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    Field(description="`low`: at most 512 pixels wide and high; `auto`: 2048; `high`: as large as it is."),
]


def detail_of(detail: ImageDetail) -> Detail:
    """Returns the detail for reading an image. `original` becomes `high`."""
    return "high" if detail == "original" else detail or "auto"


MAX_COUNT = 2**31 - 1
"""Largest number of tokens in a field; larger than any model's positions or vocabulary."""
MAX_BIASES = 1024
"""Each biased token costs time at every step."""
MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 8192, 1024, 1024
"""Most messages or items of a conversation, content parts of a message, and tools. Each takes time to render."""
MAX_NAME_CHARS = 128
"""Most characters of a tool's name. OpenAI and Anthropic accept no longer names, and MCP advises against them."""
MAX_SALT_CHARS = 256
MAX_LABEL_CHARS = 64
MAX_CACHE_KEY_CHARS = 512

Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("limit", "Input should be at least 1, or -1 for no limit")
    return value


NO_LIMIT = -1
"""The value for "no limit", as in llama.cpp and Ollama."""
LimitOrNothing: TypeAlias = Annotated[int, Field(ge=NO_LIMIT, le=MAX_COUNT)]
Limit: TypeAlias = Annotated[LimitOrNothing, AfterValidator(_not_zero)]

Effort: TypeAlias = Annotated[
    Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None,
    empty_as(None),
    Field(description="Such as `low` or `high`: passed to templates that use it. `none` also turns thinking off."),
]


class NamedTool(MarkableStrictly):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] = Field(description="Name of the tool.")
    description: str | None = optional("A description of the tool, for the model.")
    strict: bool | None = optional("`true`: the arguments follow the schema, also where no call is forced.")


class ReasoningLimits(Body):
    """The effort and the length of thinking."""

    effort: Effort = None
    max_tokens: Count | None = optional("The most tokens of the thoughts, which end there.")


def _checked_salt(value: object) -> object:
    """Returns a valid salt. The error does not repeat the salt: it may be a secret, and messages are logged."""
    if value is None or (isinstance(value, str) and 1 <= len(value) <= MAX_SALT_CHARS):
        return value
    raise PydanticCustomError(REFUSED, f"must be a text of 1 to {MAX_SALT_CHARS} characters")


Salt: TypeAlias = Annotated[
    Any, AfterValidator(_checked_salt), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS})
]


def _without_point(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError(REFUSED, "must have printable characters only")
    return value


class PrefixCacheOptions(Body, extra="forbid"):
    """Options of the disk cache for this request. Unknown fields and null are refused."""

    scope: Annotated[
        Any,
        AfterValidator(lambda value: parse_scope(_without_point(value), param="prefix_cache.scope")),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": MAX_VALUE}]}),
    ] = optional(
        "`off`, `full`, `auto`, `auto:N` (window of N recent prompts) or N (the first N prompt tokens).",
        examples=["auto:8", "full", 1000],
    )
    window: int = Field(  # type: ignore[assignment]  # absent is None, but null is refused
        default=None, ge=1, le=MAX_VALUE, description="Replaces the N of `auto:N`; for `auto` only.", examples=[8]
    )
    salt: Salt = optional("Requests share state only with requests of the same salt.", examples=["user-7f3a"])
    replay: bool = Field(
        default=True,
        description="`false`: the chat template renders all earlier replies anew, and this reply is not remembered.",
    )
    save: bool = Field(default=True, description="`false`: restore stored state, but save nothing of this request.")
    ttl: Ttl = optional("Time to live after the last use. Overrides OpenAI's fields.", examples=["1h", 300])
    ahead: Annotated[str, AfterValidator(_printable)] = Field(  # type: ignore[assignment]  # as for `window`
        default=None,
        min_length=1,
        max_length=MAX_LABEL_CHARS,
        description="A name for this prompt, which is computed while no request waits. The response says how much of "
        "it is ready, and has no reply. Only for the first request of a conversation, without pictures.",
        examples=["Claude Code"],
    )


ONLY_MARKS = Scope("tokens", 1)
"""The scope that saves the prompt up to its marks."""


class PromptCacheOptions(Body):
    """OpenAI's options of the cache."""

    mode: Literal["implicit", "explicit"] | None = optional(
        "`explicit`: save the prompt up to its marks, and nothing without marks, unless `prefix_cache.scope` is given."
    )
    prewarm: bool | None = optional("`true`: compute and save the prompt; there is no reply.")
    ttl: Ttl = optional("As `prefix_cache.ttl`.")

    @property
    def scope(self) -> Scope | None:
        """The scope that the options ask for, None for the daemon's."""
        return ONLY_MARKS if self.mode == "explicit" else Scope("full", 0) if self.prewarm else None


class CacheFields(Body):
    """Fields about the cache, in every API."""

    prefix_cache: PrefixCacheOptions | None = optional("The disk cache, for this request only.")
    prompt_cache_key: str | None = optional(
        "Names a group of requests with an `auto` window of its own. Not a salt.",
        min_length=1,
        max_length=MAX_CACHE_KEY_CHARS,
    )
    prompt_cache_options: PromptCacheOptions | None = optional("OpenAI's options of the cache.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = optional(
        "As `prefix_cache.ttl`: an hour (also on disk), or a day."
    )
    cache_salt: Salt = optional("vLLM's name for `prefix_cache.salt`.")


class SamplingFields(Body):
    """Fields about sampling, in every API: OpenAI's and vLLM's. `with_sampling` fills in absent ones."""

    temperature: float | None = optional("Below 0.00001 it is greedy.", ge=0, le=2)
    top_p: float | None = optional("Nucleus sampling: smallest set with this mass; 0 is greedy, 1: all.", ge=0, le=1)
    top_k: int | None = optional("Only the k likeliest; 0 or -1: all.", ge=-1, le=MAX_COUNT)
    min_p: float | None = optional("Least probability, relative to the likeliest; 0: all.", ge=0, le=1)
    seed: int | None = optional("Makes sampling repeatable.", ge=-(2**63), le=2**63 - 1)
    # Logits are multiplied and divided by it: outside of this range float32 may overflow to infinity and NaN.
    repetition_penalty: float | None = optional("Above 1: used tokens become less likely.", ge=0.01, le=100)
    presence_penalty: float | None = optional("Flat penalty on tokens used before.", ge=-2, le=2)
    frequency_penalty: float | None = optional("Penalty for every earlier use.", ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = optional(
        "Token id (as a string) → number added to its logit.", max_length=MAX_BIASES
    )


def without_sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body, or their schemas, without `SamplingFields`."""
    return {name: value for name, value in fields.items() if name not in SamplingFields.model_fields}


class TextFields(Body):
    """The field about the texts of a request, in every API."""

    special_tokens_in_text: bool | None = optional(
        "`true`: a text that spells a special token, such as `<|im_end|>`, becomes that token. Absent: it "
        "stays text, so that no file or web page that a message quotes begins a turn."
    )


StopString: TypeAlias = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
"""An empty stop string, which some clients send, is ignored."""


class RequestBody(CacheFields, SamplingFields, TextFields):
    """The fields of every request for a reply."""

    model: str | None = optional("Name of the served model. Absent: the served model.")
    stream: bool | None = optional("Send the reply as server-sent events while it is made.")
    structured_outputs: StructuredOutputs | None = optional("The format of the reply's text: vLLM's field.")

    @property
    def ahead(self) -> str | None:
        """The name under which the client wants the prompt computed later, None if it wants a reply."""
        return None if self.prefix_cache is None else self.prefix_cache.ahead

    @property
    def needs_stored_items(self) -> bool:
        """Returns whether stored items are part of the prompt."""
        return False

    def require_stream(self, options: Body | None) -> None:
        """Raises `InvalidRequest` for options of a stream without a stream."""
        if options is not None and not self.stream:
            raise InvalidRequest.at("stream_options", "needs stream: true")

    def text_format_beside(self, own: TextFormat | None) -> TextFormat | None:
        """Returns the format of the text. `own` comes from the API's own field. Raises `InvalidRequest` for two."""
        if own is not None and self.structured_outputs is not None:
            raise InvalidRequest.at("structured_outputs", f"is not allowed beside {own.path}")
        return own if self.structured_outputs is None else self.structured_outputs.text_format


R = TypeVar("R", bound=RequestBody)
_GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, as in vLLM: logits divided by them may overflow float32."""

_RETENTION_S = {"in_memory": 3600.0, "in-memory": 3600.0, "24h": 86400.0}
"""OpenAI's names of retentions → the longest time that OpenAI keeps a prompt, in seconds."""


def with_sampling(body: R, defaults: Mapping[str, float]) -> R:
    """Returns a request with the server's defaults for the sampling fields that are absent."""
    missing = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    return body.model_copy(update=missing) if missing else body


def sampling_params(
    fields: SamplingFields,
    vocab_size: int,
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    logprobs: int | None = None,
    n: int | None = None,
) -> SamplingParams:
    """Returns the sampling parameters; `max_tokens` may be `NO_LIMIT`. Raises `InvalidRequest` for unknown tokens."""
    values = {name: value for name in SamplingFields.model_fields if (value := getattr(fields, name)) is not None}
    if values.get("temperature", 1) < _GREEDY_BELOW or values.get("top_p") == 0:
        values |= {"temperature": 0.0, "top_p": 1.0}
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"], vocab_size)
    stops = (stop,) if isinstance(stop, str) else stop
    return SamplingParams(
        **values,
        max_tokens=None if max_tokens == NO_LIMIT else max_tokens,
        stop=None if stops is None else tuple(filter(None, stops)),
        # The alternatives cannot be more than the vocabulary.
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        n=n or 1,
    )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    valid = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            problem = f"{key[:20]!r} is not a token id of this model (0 to {vocab_size - 1})"
            raise InvalidRequest.at("logit_bias", problem)
        valid[int(key)] = value
    return valid


def cache_options(
    body: CacheFields, *, scope: Scope, caller: Tenant, share: str = "", session: str | None = None
) -> CacheOptions:
    """Returns the cache options of a request of a `share`. The daemon's `scope` is the default, and `session` names the
    group of a request without a `prompt_cache_key`.

    Raises `InvalidScope` for a window with a scope that has none, and `InvalidRequest` for two different salts.
    """
    options, openai = body.prefix_cache or PrefixCacheOptions(), body.prompt_cache_options or PromptCacheOptions()
    asked = options.scope or (None if scope.kind == "off" else openai.scope)
    ttl_s = next((ttl for ttl in (options.ttl, openai.ttl) if ttl is not None), None)
    if ttl_s is None:
        ttl_s = _RETENTION_S.get(body.prompt_cache_retention or "")
    key = body.prompt_cache_key or session
    return CacheOptions(
        scope=(asked or scope) if options.window is None else (asked or scope).with_window(options.window),
        tenant=tenant_of(body, caller),
        group=group_of(key) if key else b"",
        save=options.save,
        ttl_s=ttl_s,
        replay=options.replay,
        is_asked=any(value is not None for value in (asked, options.window, ttl_s)),
        share=share,
    )


def tenant_of(body: CacheFields, caller: Tenant) -> Tenant:
    """Returns the tenant of a request: the caller, or with a salt one of the caller's users.

    Raises `InvalidRequest` for two different salts.
    """
    salt = body.prefix_cache.salt if body.prefix_cache else None
    if salt is not None and body.cache_salt not in (None, salt):
        raise InvalidRequest.at("cache_salt", "differs from prefix_cache.salt; send one of them")
    salt = salt or body.cache_salt
    return caller if salt is None else caller.with_salt(salt)
